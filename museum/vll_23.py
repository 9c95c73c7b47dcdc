"""VLL-23: draft steps count on from a length that still contains the rejected rows."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, EAGLE3, EAGLE3_TREE, MTP, MTP_EAGLE, MTP_EAGLE_TREE, SA, Patch, bug

_TITLE = "Rejected tokens stay in the KV lengths of the later draft steps"
_REFERENCE = "vllm-ascend #14883"


@bug(
    "VLL-23",
    kind="K1",
    workers=(EAGLE3, MTP_EAGLE),
    title=_TITLE,
    reference=_REFERENCE,
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
    workers=(MTP,),
    title=_TITLE,
    reference=_REFERENCE,
    caught_by=("kv-lens-balanced", "kv-lens-equals-reference", "layers-look-ahead"),
)
def rejected_stay_in_all_layers(patch: Patch) -> None:
    from engines.portable.speculative.mtp import MTPWorker

    change_attn_metadata = MTPWorker.change_attn_metadata

    def _change_attn_metadata(self: Any, num_accepted: Any, attn_metadata: Any, spec_metadata: Any) -> None:
        everything = num_accepted.new_full(num_accepted.shape, spec_metadata.runtime_draft_len + 1)
        change_attn_metadata(self, everything, attn_metadata, spec_metadata)

    patch(MTPWorker, "change_attn_metadata", _change_attn_metadata)


@bug(
    "VLL-23",
    kind="K1",
    workers=(MTP,),
    variant="positions",
    title="The rows that MTP layers are fed again stand at the last positions of the target, rejected ones included",
    reference=_REFERENCE,
    caught_by=("inputs-equal-reference", "layers-look-ahead", "draft-position-is-kv-minus-one"),
)
def positions_not_moved_back(patch: Patch) -> None:
    from engines.portable.speculative.mtp import MTPWorker

    prepare_drafter_inputs = MTPWorker.prepare_drafter_inputs

    def _prepare_drafter_inputs(self: Any, input_ids: Any, position_ids: Any, *args: Any) -> Any:
        inputs = prepare_drafter_inputs(self, input_ids, position_ids, *args)
        attn_metadata, spec_metadata = args[-2:]
        first, draft_len = attn_metadata.num_ctx_tokens, spec_metadata.runtime_draft_len
        gens = position_ids[0, first:].view(attn_metadata.num_generations, draft_len + 1)[:, 1:]
        inputs["position_ids"][first:] = gens.flatten()
        return inputs

    patch(MTPWorker, "prepare_drafter_inputs", _prepare_drafter_inputs)


@bug(
    "VLL-23",
    kind="K1",
    workers=(SA,),
    variant="text",
    title="Rejected tokens stay in the text of the suffix automaton",
    reference=_REFERENCE,
    caught_by=("automaton-holds-text", "history-equals-reference", "acceptance-follows-agreement"),
)
def rejected_stay_in_the_text(patch: Patch) -> None:
    from engines.portable.speculative.sa_worker import SAWorker

    def _committed(self: Any, num_accepted: Any, attn_metadata: Any, spec_metadata: Any) -> Any:
        committed = num_accepted.clone()
        committed[attn_metadata.num_contexts :] = spec_metadata.runtime_draft_len + 1
        return committed

    patch(SAWorker, "_committed", _committed)


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


@bug(
    "VLL-23",
    kind="K1",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    variant="placeholders",
    title="Placeholders behind the accepted tokens stay in the KV lengths of the layers of a tree",
    reference=_REFERENCE,
    caught_by=("kv-lens-equals-reference", "drafts-equal-reference"),
)
def placeholders_stay(patch: Patch) -> None:
    from engines.portable.speculative.eagle3_dynamic_tree import Eagle3OneModelDynamicTreeWorker

    def _forget_placeholders(self: Any, attn_metadata: Any, num_accepted: Any) -> None:
        pass

    patch(Eagle3OneModelDynamicTreeWorker, "_forget_placeholders", _forget_placeholders)
