"""TRT-97: a guard that asks for too many rows turns rejection sampling off, and nobody notices."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, DSPARK, EAGLE3, MTP, MTP_EAGLE, PARD, Patch, bug

_REFERENCE = "TensorRT-LLM, no public number"
_DEAD = ("rejection-sampling-takes-place", "proposals-equal-reference")


@bug(
    "TRT-97",
    kind="K14",
    workers=(PARD, DRAFT_TARGET, MTP_EAGLE),
    title="The guard asks for the rows of the longest drafts, and shorter steps take the strict path",
    reference=_REFERENCE,
    caught_by=_DEAD,
)
def rows_of_the_longest(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    def _can_use_rejection_sampling(self: Any, logits: Any, draft_tokens: Any, attn: Any, spec: Any) -> bool:
        rows = attn.num_contexts + len(draft_tokens) * (1 + self.max_draft_len)
        return bool(spec.use_rejection_sampling and draft_tokens.numel() and len(logits) >= rows)

    patch(SpecWorkerBase, "_can_use_rejection_sampling", _can_use_rejection_sampling)


@bug(
    "TRT-97",
    kind="K14",
    workers=(MTP, DSPARK, PARD),
    variant="contexts",
    title="The guard forgets that contexts have rows, and mixed batches take the strict path",
    reference=_REFERENCE,
    caught_by=_DEAD,
)
def rows_of_generations(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    can_use = SpecWorkerBase._can_use_rejection_sampling

    def _can_use_rejection_sampling(self: Any, logits: Any, draft_tokens: Any, attn: Any, spec: Any) -> bool:
        exact = len(logits) == len(draft_tokens) * (1 + draft_tokens.shape[1])
        return exact and can_use(self, logits, draft_tokens, attn, spec)

    patch(SpecWorkerBase, "_can_use_rejection_sampling", _can_use_rejection_sampling)


@bug(
    "TRT-97",
    kind="K14",
    workers=(EAGLE3, DRAFT_TARGET),
    variant="widths",
    title="The guard asks for the rows of all drafts, and a batch that verifies fewer takes the strict path",
    reference=_REFERENCE,
    caught_by=_DEAD,
)
def rows_of_all_drafts(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    can_use = SpecWorkerBase._can_use_rejection_sampling

    def _can_use_rejection_sampling(self: Any, logits: Any, draft_tokens: Any, attn: Any, spec: Any) -> bool:
        gens, draft_len = draft_tokens.shape
        enough = len(spec.gather_ids) >= attn.num_contexts + gens * (1 + draft_len)
        return enough and can_use(self, logits, draft_tokens, attn, spec)

    patch(SpecWorkerBase, "_can_use_rejection_sampling", _can_use_rejection_sampling)
