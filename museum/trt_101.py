"""TRT-101: drafts of a head with a vocabulary of its own are to be mapped to the target's, once, and then fed back."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, DRAFT_TARGET, DSPARK, EAGLE3, EAGLE3_TREE, PARD, Patch, bug

_REFERENCE = "TensorRT-LLM, no public number"
_NOTICED = ("drafts-equal-reference", "acceptance-follows-agreement")


@bug(
    "TRT-101",
    kind="K14",
    workers=(EAGLE3, PARD, DSPARK, EAGLE3_TREE),
    title="Drafts stay in the draft vocabulary",
    reference=_REFERENCE,
    caught_by=_NOTICED,
)
def left_out(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    patch(SpecWorkerBase, "set_draft_model", lambda self, draft_model: None)


@bug(
    "TRT-101",
    kind="K14",
    workers=(DRAFT_TARGET, DFLASH, EAGLE3_TREE),
    variant="twice",
    title="Drafts are mapped from the draft vocabulary twice",
    reference=_REFERENCE,
    caught_by=_NOTICED,
)
def twice(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    mapped = SpecWorkerBase._map_draft_tokens

    def _map_draft_tokens(self: Any, draft_ids: Any) -> Any:
        return mapped(self, mapped(self, draft_ids).long())

    patch(SpecWorkerBase, "_map_draft_tokens", _map_draft_tokens)


@bug(
    "TRT-101",
    kind="K14",
    workers=(EAGLE3, DRAFT_TARGET),
    variant="fed-back",
    title="Drafts are mapped when all are made, and fed back in the draft vocabulary",
    reference=_REFERENCE,
    caught_by=("inputs-equal-reference", "drafts-equal-reference"),
)
def mapped_at_the_end(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase
    from engines.portable.speculative.linear import LinearSpecWorker

    mapped, draft_loop = SpecWorkerBase._map_draft_tokens, LinearSpecWorker._forward_draft_loop

    def _forward_draft_loop(self: Any, *args: Any) -> Any:
        return mapped(self, draft_loop(self, *args).long())

    patch(LinearSpecWorker, "_map_draft_tokens", lambda self, draft_ids: draft_ids.int())
    patch(LinearSpecWorker, "_forward_draft_loop", _forward_draft_loop)
