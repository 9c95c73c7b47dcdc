"""The values that a scenario is made of."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from scenarios import WORKERS, Config, Context, Fault, FaultKind, Generation, Phase, Step


@pytest.mark.parametrize(
    ("worker", "fed"),
    [
        ("Eagle3OneModelWorker", [1, 2, 5]),
        ("MTPEagleWorker", [1, 2, 5]),
        ("DraftTargetOneModelWorker", [1, 2, 5]),
        ("PARDWorker", [0, 2, 8]),
    ],
)
def test_rows_per_generation(worker: str, fed: list[int]) -> None:
    assert [Config(worker=worker, max_draft_len=8).tokens_per_gen_step(k) for k in (0, 1, 4)] == fed


def test_a_worker_is_known_by_its_class_name() -> None:
    assert all(name == traits.name for name, traits in WORKERS.items())


@pytest.mark.parametrize(
    ("worker", "max_draft_len", "extra"),
    [
        ("Eagle3OneModelWorker", 1, 0),
        ("Eagle3OneModelWorker", 4, 3),
        ("PARDWorker", 1, 1),
        ("PARDWorker", 4, 3),
    ],
)
def test_extra_tokens_are_room_for_the_draft_loop(worker: str, max_draft_len: int, extra: int) -> None:
    assert Config(worker=worker, max_draft_len=max_draft_len).num_extra_kv_tokens == extra


@pytest.mark.parametrize(("worker", "least"), [("Eagle3OneModelWorker", 0), ("MTPWorker", 3)])
def test_a_drafter_that_is_fed_the_last_tokens_again_needs_them(worker: str, least: int) -> None:
    assert Config(worker=worker, max_draft_len=3).least_history == least


@pytest.mark.parametrize("phase", Phase)
def test_start_up_is_warmup_and_capture(phase: Phase) -> None:
    assert phase.is_startup == (phase in (Phase.WARMUP, Phase.CAPTURE))


def test_a_fault_is_written_as_site_occurrence_kind() -> None:
    fault = Fault(site="draft_model.forward", occurrence=2, kind=FaultKind.OOM)
    assert str(fault) == "draft_model.forward@2:oom"


def test_rows_are_contexts_then_generations() -> None:
    context, generation = Context(request=0, chunk=3), Generation(request=1)
    assert Step(draft_len=1, contexts=(context,), generations=(generation,)).rows == (context, generation)


def test_values_are_frozen_and_hashable() -> None:
    step = Step(draft_len=1, contexts=(Context(request=0, chunk=3),))
    with pytest.raises(FrozenInstanceError):
        step.draft_len = 2  # type: ignore[misc]
    assert len({step, Step(draft_len=1, contexts=(Context(request=0, chunk=3),))}) == 1
