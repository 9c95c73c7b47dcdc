"""VLL-18: drafts are verified by proposals that are not theirs, or by none."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, DRAFT_TARGET, EAGLE3, MTP, MTP_EAGLE, PARD, Patch, bug

_REFERENCE = "vLLM #40269, #40149"
_PROPOSALS = ("proposals-belong-to-their-drafts", "proposals-equal-reference")


@bug(
    "VLL-18",
    kind="K14",
    workers=(EAGLE3, DFLASH),
    title="Proposals never reach verification, which goes by the target's choice alone",
    reference=_REFERENCE,
    caught_by=("rejection-sampling-takes-place", "proposals-equal-reference"),
)
def never_reach(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    patch(SpecWorkerBase, "_can_use_rejection_sampling", lambda self, logits, draft_tokens, attn, spec: False)


@bug(
    "VLL-18",
    kind="K14",
    workers=(EAGLE3, MTP, PARD),
    variant="rows",
    title="Proposals are kept by row of the batch, whoever has that row in the next step",
    reference=_REFERENCE,
    caught_by=(
        *_PROPOSALS,
        "slots-belong-to-requests",
        "proposals-of-others-stay",
        "rejection-sampling-accepts-the-same",
        "acceptance-follows-agreement",
    ),
)
def by_row(patch: Patch) -> None:
    from engines.portable.speculative.rejection import ProposalRows

    prepare = ProposalRows._prepare_proposals

    def _prepare_proposals(self: Any, request_ids: Any) -> None:
        prepare(self, request_ids)
        self.batch_slot_ids[: len(request_ids)].copy_(self.batch_indices_cuda[: len(request_ids)])

    patch(ProposalRows, "_prepare_proposals", _prepare_proposals)


@bug(
    "VLL-18",
    kind="K14",
    workers=(MTP_EAGLE, DRAFT_TARGET, MTP),
    variant="depth",
    title="Each draft step proposes for the first draft",
    reference=_REFERENCE,
    caught_by=("proposals-equal-reference", "acceptance-follows-agreement"),
)
def first_depth(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    scatter = SpecWorkerBase._scatter_draft_probs

    def _scatter_draft_probs(self: Any, logits: Any, spec_metadata: Any, draft_step: Any) -> None:
        scatter(self, logits, spec_metadata, draft_step and 0)

    patch(SpecWorkerBase, "_scatter_draft_probs", _scatter_draft_probs)


@bug(
    "VLL-18",
    kind="K14",
    workers=(EAGLE3, DFLASH, PARD),
    variant="contexts",
    title="Proposals of generations are looked for in the first rows of the batch, which are contexts",
    reference=_REFERENCE,
    caught_by=("acceptance-follows-agreement",),
)
def rows_of_contexts(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase
    from engines.process import replaced

    hold = SpecWorkerBase._proposals_hold

    def _proposals_hold(self: Any, logits: Any, draft_tokens: Any, attn: Any, spec: Any) -> Any:
        with replaced(spec, "batch_slot_ids", spec.batch_slot_ids.roll(attn.num_contexts)):
            return hold(self, logits, draft_tokens, attn, spec)

    patch(SpecWorkerBase, "_proposals_hold", _proposals_hold)
