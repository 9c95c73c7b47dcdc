"""Slots: who has which, and what becomes of them when requests start, end and fail."""

from __future__ import annotations

import pytest

from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.resource_manager import SlotManager, SpecResourceManager
from scenarios import Fault, FaultKind, Step
from tests.engines.portable.scripts import ENGINE, context, generations, scenario


def test_the_slot_freed_last_is_granted_first() -> None:
    slots = SlotManager(3)
    assert [slots.add_slot(i) for i in (7, 8, 9)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="request 5 needs a slot and none is free"):
        slots.add_slot(5)
    slots.remove_slot(7), slots.remove_slot(8), slots.remove_slot(8)
    assert [slots.add_slot(i) for i in (5, 6)] == [1, 0]
    assert slots.get_slots([9, 6, 5]) == [2, 0, 1]
    with pytest.raises(ValueError, match="request 9 already has a slot"):
        slots.add_slot(9)
    with pytest.raises(KeyError):
        slots.get_slots([8])


def test_a_request_has_its_slot_from_its_first_chunk_to_its_end() -> None:
    manager = SpecResourceManager(4)
    first = LlmRequest(0, [1] * 5, context_chunk_size=3)
    manager.prepare_resources(ScheduledRequests((first,)))
    first.context_current_position = 3
    manager.prepare_resources(ScheduledRequests((first,)))
    dummies = [LlmRequest(1, [1], is_dummy=True, generated=[1]), LlmRequest(2, [1], is_dummy=True)]
    manager.add_dummy_requests(dummies)
    manager.prepare_resources(ScheduledRequests(tuple(dummies[1:]), tuple(dummies[:1])))
    assert manager.slot_manager.get_slots([0, 1, 2]) == [0, 1, 2]
    manager.free_resources(first), manager.free_resources(first)
    assert manager.slot_manager.add_slot(3) == 0


@pytest.mark.parametrize("worker", ["MTPWorker", "SAWorker"])
def test_a_request_that_sits_steps_out_keeps_its_slot_and_a_failure_frees_all(worker: str) -> None:
    fault = Fault(site="target_model.forward", occurrence=1, kind=FaultKind.ERROR)
    case = scenario(
        worker,
        (5, 4, 6),
        Step(draft_len=3, contexts=(context(worker, 0, 5), context(worker, 1, 4))),
        Step(draft_len=3, generations=generations([1], 3)),
        Step(draft_len=3, generations=generations([1, 0], 3), finish=(1,)),
        Step(draft_len=3, contexts=(context(worker, 2, 6),), generations=generations([0], 3)),
        Step(draft_len=3, generations=generations([2, 0]), fault=fault),
    )
    session = ENGINE.open(case.config, case.requests)
    slots = session._executor.spec_resource_manager.slot_manager  # type: ignore[union-attr]
    owned = [session.step(step) and dict(slots._slots) for step in case.steps]
    assert owned == [{0: 0, 1: 1}, {0: 0, 1: 1}, {0: 0}, {0: 0, 2: 1}, {}]
    assert len(slots._free_slots) == case.config.num_blocks


@pytest.mark.parametrize(("worker", "field"), [("SAWorker", "automaton"), ("MTPWorker", "mtp_past_tokens")])
def test_a_request_that_has_lost_its_slot_has_nothing_to_show(
    worker: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that loses a slot is what the suite is to find; looking at it must not fail."""
    free = SpecResourceManager.prepare_resources

    def prepare_resources(self: SpecResourceManager, batch: ScheduledRequests) -> None:
        free(self, batch)
        self.slot_manager.remove_slot(0)

    steps = (
        Step(draft_len=3, contexts=(context(worker, 0, 5), context(worker, 1, 4))),
        Step(draft_len=3, generations=generations([1], 3)),
    )
    case = scenario(worker, (5, 4), *steps)
    session = ENGINE.open(case.config, case.requests)
    session.step(steps[0])
    monkeypatch.setattr(SpecResourceManager, "prepare_resources", prepare_resources)
    updated = session.step(steps[1]).find("updated")
    assert updated is not None
    assert set(updated[field]) == {1}
