"""Steps that are launched before the last one is processed, and copies to the device that have not run yet."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the portable engine needs torch")

import torch

import engines.portable
from engines.portable import PortableEngine
from engines.portable.copies import NOT_YET, HostCopies, LatestReads, copy_to_device, copy_to_host, to_device
from scenarios import Config, Context, Generation, Request, Step
from scenarios.trace import UPDATED

CONFIG = Config(worker="Eagle3OneModelWorker", max_draft_len=2, overlap=True)
PROMPT = Step(draft_len=2, contexts=(Context(request=0, chunk=5, agree=1),))
NEXT = Step(draft_len=2, generations=(Generation(request=0, agree=2),))


def test_a_step_is_complete_once_the_next_one_runs_or_the_trace_is_asked_for() -> None:
    session = PortableEngine().open(CONFIG, (Request(id=0, prompt_len=5),))
    first = session.step(PROMPT)
    assert first.find(UPDATED) is None
    session.step(NEXT)
    session.step(Step(draft_len=0))
    session.step(NEXT)
    trace = session.trace()
    assert session.trace() == trace
    assert [step.find(UPDATED) is not None for step in trace.steps] == [True, True, False, True]
    assert [len(step.find(UPDATED)["emitted"][0]) for step in trace.steps if step.substeps] == [1, 3, 6]
    # With the third step's grant while it is launched, and without any while nothing is.
    assert [step.find(UPDATED)["kv_tokens"][0] for step in trace.steps if step.substeps] == [11, 10, 13]
    session.close()


@pytest.mark.parametrize("inference", [False, True])
def test_a_source_that_is_written_before_its_copy_has_run_is_told_once(inference: bool) -> None:
    copies, target = HostCopies(), torch.zeros(2)
    with torch.inference_mode(inference):
        early, late = torch.ones(2), torch.ones(2)
        with copies.watched():
            copy_to_device("early", target, early)
            event = copies.record_event()
            to_device("late", late, torch.device("cpu"))
        copies.synchronize(event)
        # The one has run, the other may still read its source.
        early.fill_(2)
        assert copies.take_racing() == []
        late.fill_(2)
    assert copies.take_racing() == ["late"]
    assert copies.take_racing() == []


def test_a_source_that_is_written_with_the_same_values_is_told_too() -> None:
    copies, source = HostCopies(), torch.ones(2)
    with copies.watched():
        copy_to_device("same", torch.zeros(2), source)
    source.fill_(1)
    assert copies.take_racing() == ["same"]


def test_a_copy_that_stalls_reads_what_its_source_holds_when_the_host_has_waited() -> None:
    latest, source, kept = LatestReads(), torch.tensor([1, 2]), torch.tensor([3])

    def queue_all(watching: HostCopies) -> list[list[int]]:
        copied = torch.zeros_like(source)
        with watching.watched():
            copy_to_device("lens", copied, source)
            brought = to_device("kept", kept, torch.device("cpu"), copy=True)
        return [copied.tolist(), brought.tolist()]

    assert queue_all(latest) == [[1, 2], [3]]
    source[1] = 5
    source[1] = 7
    assert {number: read.tolist() for number, read in latest.finish().items()} == {0: [1, 7]}
    source[1] = 2
    assert queue_all(HostCopies(latest.read)) == [[1, 7], [3]]
    latest.read[0] = torch.zeros(3)
    assert queue_all(HostCopies(latest.read)) == [[1, 2], [3]], "of another run"


def test_a_copy_to_the_host_arrives_when_the_host_has_waited() -> None:
    copies, first, second = HostCopies(), torch.zeros(2), torch.zeros(1)
    with copies.watched():
        copy_to_host(first, torch.ones(2))
        event = copies.record_event()
        copy_to_host(second, torch.ones(1))
    assert (first.tolist(), second.tolist()) == ([NOT_YET] * 2, [NOT_YET])
    assert copies.peek(first).tolist() == [1, 1]
    copies.synchronize(event)
    assert (first.tolist(), second.tolist()) == ([1, 1], [NOT_YET])
    assert copies.peek(first) is first


def test_no_copy_is_queued_out_of_sight() -> None:
    """Two modules compare what the engine has on the device."""
    root = Path(engines.portable.__file__).parent
    queued = {path.name for path in root.rglob("*.py") if "non_blocking=True" in path.read_text()}
    assert queued == {"copies.py", "cache_values.py", "device_checks.py"}
