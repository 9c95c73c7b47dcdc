"""TRT-130: a matcher is told each token once, in order, and forgets what was not accepted or was only a draft.

Upstream tells it from several places of a worker and takes back in others: PR #19296 added one that was missing.
"""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, DRAFT_TARGET, DSPARK, EAGLE3, MTP, MTP_EAGLE, PARD, SA, Patch, bug

_REFERENCE = "TensorRT-LLM #19296"
_NO_NUMBER = "TensorRT-LLM, no public number"
_NOTICED = ("matchers-follow-tokens", "matchers-equal-reference")


@bug(
    "TRT-130",
    kind="K6",
    workers=(EAGLE3, MTP, PARD, DFLASH, SA),
    title="A matcher keeps the drafts that were not accepted",
    reference=_REFERENCE,
    caught_by=_NOTICED,
)
def rejected_kept(patch: Patch) -> None:
    from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder

    patch(CapturableGuidedDecoder, "_rollback_rejected_tokens", lambda self: None)


@bug(
    "TRT-130",
    kind="K6",
    workers=(MTP_EAGLE, DRAFT_TARGET, MTP),
    variant="drafts",
    title="A matcher keeps what it is told while drafting",
    reference=_NO_NUMBER,
    caught_by=_NOTICED,
)
def drafts_kept(patch: Patch) -> None:
    from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder

    rollback = CapturableGuidedDecoder._rollback

    def _rollback(self: Any, slots: Any, count: Any) -> None:
        if not isinstance(count, int):
            rollback(self, slots, count)

    patch(CapturableGuidedDecoder, "_rollback", _rollback)


@bug(
    "TRT-130",
    kind="K8",
    workers=(EAGLE3, DRAFT_TARGET),
    variant="last-step",
    title="Drafts are taken back in the last draft step of the largest draft length, which a shorter one never reaches",
    reference=_NO_NUMBER,
    caught_by=_NOTICED,
)
def last_step_of_the_largest(patch: Patch) -> None:
    from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder

    add_batch = CapturableGuidedDecoder.add_batch

    def _add_batch(self: Any, scheduled_requests: Any, draft_len: int) -> None:
        add_batch(self, scheduled_requests, self._tokens.shape[1] - 1)

    patch(CapturableGuidedDecoder, "add_batch", _add_batch)


@bug(
    "TRT-130",
    kind="K10",
    workers=(MTP_EAGLE, DSPARK),
    variant="twice",
    title="A matcher is told the tokens of a step twice",
    reference=_NO_NUMBER,
    caught_by=_NOTICED,
)
def executed_twice(patch: Patch) -> None:
    from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder

    execute = CapturableGuidedDecoder.execute

    def _execute(self: Any, logits: Any) -> None:
        execute(self, logits.clone())
        execute(self, logits)

    patch(CapturableGuidedDecoder, "execute", _execute)


@bug(
    "TRT-130",
    kind="K10",
    workers=(EAGLE3, SA),
    variant="late",
    title="The target's logits are masked when its tokens have been chosen",
    reference=_NO_NUMBER,
    caught_by=("acceptance-equals-reference",),
)
def masked_too_late(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    execute = SpecWorkerBase._execute_guided_decoder_if_present

    def _execute(self: Any, logits: Any) -> None:
        execute(self, logits.clone())

    patch(SpecWorkerBase, "_execute_guided_decoder_if_present", _execute)


@bug(
    "TRT-130",
    kind="K8",
    workers=(EAGLE3, DRAFT_TARGET),
    variant="no-drafts",
    title="A step without drafts passes the grammar by",
    reference=_NO_NUMBER,
    caught_by=_NOTICED,
)
def step_without_drafts(patch: Patch) -> None:
    from engines.portable.speculative.linear import LinearSpecWorker
    from engines.process import replaced

    skip_drafting = LinearSpecWorker.skip_drafting

    def _skip_drafting(self: Any, *args: Any) -> Any:
        with replaced(self, "guided_decoder", None):
            return skip_drafting(self, *args)

    patch(LinearSpecWorker, "skip_drafting", _skip_drafting)


@bug(
    "TRT-130",
    kind="K14",
    workers=(EAGLE3, DRAFT_TARGET),
    variant="d2t",
    title="Logits of a head with a vocabulary of its own are masked as if they were the target's",
    reference=_NO_NUMBER,
    caught_by=("drafts-equal-reference",),
)
def mask_not_mapped(patch: Patch) -> None:
    from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder

    execute = CapturableGuidedDecoder.execute_draft_batch

    def _execute(self: Any, logits: Any, d2t: Any = None, draft_step: int = 0) -> None:
        execute(self, logits, draft_step=draft_step)

    patch(CapturableGuidedDecoder, "execute_draft_batch", _execute)


@bug(
    "TRT-130",
    kind="K3",
    workers=(EAGLE3, DRAFT_TARGET),
    variant="chunks",
    title="A chunk that more of the prompt follows is guided as if the text began behind it",
    reference=_NO_NUMBER,
    caught_by=_NOTICED,
)
def guided_before_the_text(patch: Patch) -> None:
    from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder

    def row_slots(self: Any, requests: Any) -> list[int]:
        slots: list[int] = self.get_slots([request.py_request_id for request in requests])
        return slots

    patch(CapturableGuidedDecoder, "row_slots", row_slots)


@bug(
    "TRT-130",
    kind="K2",
    workers=(EAGLE3, PARD, DFLASH),
    variant="replay",
    title="What a step feeds is handed over in a new tensor, and replays read that of their capture",
    reference=_NO_NUMBER,
    caught_by=_NOTICED,
)
def handed_over_in_a_new_tensor(patch: Patch) -> None:
    from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder

    add_batch = CapturableGuidedDecoder.add_batch

    def _add_batch(self: Any, scheduled_requests: Any, draft_len: int) -> None:
        self._tokens = self._tokens.clone()
        add_batch(self, scheduled_requests, draft_len)

    patch(CapturableGuidedDecoder, "add_batch", _add_batch)


@bug(
    "TRT-130",
    kind="K5",
    workers=(MTP, SA),
    variant="kept",
    title="The matcher of a request that has ended is never given back",
    reference=_NO_NUMBER,
    caught_by=_NOTICED,
)
def never_given_back(patch: Patch) -> None:
    from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder

    patch(CapturableGuidedDecoder, "free_resources", lambda self, request: None)


@bug(
    "TRT-130",
    kind="K5",
    workers=(MTP_EAGLE, DSPARK),
    variant="stale",
    title="A request gets a matcher that has been told what another one emitted",
    reference=_NO_NUMBER,
    caught_by=_NOTICED,
)
def as_its_last_owner_left_it(patch: Patch) -> None:
    from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder
    from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager

    patch(CapturableGuidedDecoder, "_add_slot", SeqSlotManager._add_slot)
