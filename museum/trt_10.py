"""TRT-10: a flag that says whether what is stored may be used is cleared too late.

Upstream's flag was that of draft probabilities. Draft trees have one, too, and what a slot holds with it.
"""

from __future__ import annotations

from typing import Any

from museum.bug import (
    DFLASH,
    DRAFT_TARGET,
    DSPARK,
    EAGLE3,
    EAGLE3_TREE,
    MTP,
    MTP_EAGLE,
    MTP_EAGLE_TREE,
    PARD,
    Patch,
    baked,
    bug,
)

_REFERENCE = "TensorRT-LLM #15775"
_PROPOSALS = ("proposals-belong-to-their-drafts", "proposals-equal-reference")


@bug(
    "TRT-10",
    kind="K2",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    title="A slot still holds the tree of its last owner when a request is granted it",
    reference=_REFERENCE,
    caught_by=("draft-tree-well-formed", "inputs-equal-reference"),
)
def tree_outlives_its_owner(patch: Patch) -> None:
    from engines.portable.speculative.spec_tree_manager import DynamicTreeSlotStorage

    def mark_invalid(self: Any, slots: Any) -> None:
        pass

    patch(DynamicTreeSlotStorage, "mark_invalid", mark_invalid)


@bug(
    "TRT-10",
    kind="K8",
    workers=(EAGLE3, DRAFT_TARGET, PARD),
    variant="shorter",
    title="Proposals count as complete with the longest draft length alone, and a shorter step is verified without",
    reference=_REFERENCE,
    caught_by=("rejection-sampling-takes-place", "proposals-equal-reference"),
)
def complete_when_longest(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    can_use = SpecWorkerBase._can_use_rejection_sampling

    def _can_use_rejection_sampling(self: Any, logits: Any, draft_tokens: Any, attn: Any, spec: Any) -> bool:
        complete = draft_tokens.shape[1] == self.max_draft_len
        return complete and can_use(self, logits, draft_tokens, attn, spec)

    patch(SpecWorkerBase, "_can_use_rejection_sampling", _can_use_rejection_sampling)


@bug(
    "TRT-10",
    kind="K14",
    workers=(EAGLE3, MTP_EAGLE, DFLASH),
    variant="padding",
    title="A draft slot that is padding keeps the proposal of an older draft",
    reference=_REFERENCE,
    caught_by=_PROPOSALS,
)
def padding_keeps_older(patch: Patch) -> None:
    from engines.portable.speculative.rejection import ProposalRows

    patch(ProposalRows, "write_padding_draft_probs", lambda self, num_contexts, num_drafts, draft_len: None)


@bug(
    "TRT-10",
    kind="K14",
    workers=(PARD, DFLASH, DSPARK),
    variant="contexts",
    title="A context, for which nothing is drafted, keeps the proposals that its slot has held before",
    reference=_REFERENCE,
    caught_by=("proposals-equal-reference",),
)
def contexts_keep_older(patch: Patch) -> None:
    from engines.portable.speculative.rejection import ProposalRows

    patch(ProposalRows, "write_context_draft_probs", lambda self, num_contexts, draft_len: None)


@bug(
    "TRT-10",
    kind="K10",
    workers=(EAGLE3, MTP, DSPARK),
    variant="scratch",
    title="A graph keeps proposing for the dummies that it was captured with",
    reference=_REFERENCE,
    caught_by=("proposals-equal-reference", "replay-equals-eager"),
)
def into_the_scratch_row(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase
    from engines.process import replaced

    scatter = SpecWorkerBase._scatter_draft_probs

    def _scatter_draft_probs(self: Any, logits: Any, spec_metadata: Any, draft_step: Any) -> None:
        of_now = spec_metadata.proposal_slots.get_slots(spec_metadata.request_ids)
        with replaced(spec_metadata, "batch_slot_ids", baked(of_now, spec_metadata.device)):
            scatter(self, logits, spec_metadata, draft_step)

    patch(SpecWorkerBase, "_scatter_draft_probs", _scatter_draft_probs)
