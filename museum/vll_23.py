"""VLL-23: draft steps count on from a length that still contains the rejected rows."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, EAGLE3_TREE, MTP_EAGLE, MTP_EAGLE_TREE, Patch, bug


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
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    variant="placeholders",
    title="Placeholders behind the accepted tokens stay in the KV lengths of the layers of a tree",
    reference="vllm-ascend #14883",
    caught_by=("kv-lens-equals-reference", "drafts-equal-reference"),
)
def placeholders_stay(patch: Patch) -> None:
    from engines.portable.speculative.eagle3_dynamic_tree import Eagle3OneModelDynamicTreeWorker

    def _forget_placeholders(self: Any, attn_metadata: Any, num_accepted: Any) -> None:
        pass

    patch(Eagle3OneModelDynamicTreeWorker, "_forget_placeholders", _forget_placeholders)
