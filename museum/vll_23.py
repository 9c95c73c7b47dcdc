"""VLL-23: draft steps count on from a length that still contains the rejected rows."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, EAGLE3, MTP_EAGLE, Patch, bug


@bug(
    "VLL-23",
    kind="K1",
    workers=(EAGLE3, MTP_EAGLE),
    title="Rejected tokens stay in the KV lengths of the later draft steps",
    reference="vllm-ascend #14883",
    caught_by=("kv-lens-balanced", "draft-position-is-kv-minus-one", "drafts-equal-reference"),
)
def rejected_stay(patch: Patch) -> None:
    from engines.portable.speculative.linear import LinearSpecWorker

    collapse = LinearSpecWorker._collapse_to_one_row

    def _collapse_to_one_row(
        self: Any, attn_metadata: Any, num_accepted: Any, num_contexts: int, draft_len: int
    ) -> None:
        collapse(self, attn_metadata, num_accepted.new_full(num_accepted.shape, draft_len + 1), num_contexts, draft_len)

    patch(LinearSpecWorker, "_collapse_to_one_row", _collapse_to_one_row)


@bug(
    "VLL-23",
    kind="K1",
    workers=(DFLASH,),
    title="Rejected tokens stay in the drafter's context",
    reference="vllm-ascend #14883",
    caught_by=("ctx-len-counts-committed", "draft-block-follows-context", "draft-context-equals-cache"),
)
def rejected_stay_in_context(patch: Patch) -> None:
    from engines.portable.speculative.dflash import DFlashWorker

    append = DFlashWorker._append_to_context

    def _append_to_context(
        self: Any, position_ids: Any, num_accepted: Any, attn_metadata: Any, spec_metadata: Any, draft_model: Any
    ) -> None:
        append(self, position_ids, attn_metadata.seq_lens_cuda, attn_metadata, spec_metadata, draft_model)

    patch(DFlashWorker, "_append_to_context", _append_to_context)
