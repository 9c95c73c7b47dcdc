"""Arguments that make no sense are refused at once, in one line that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scenarios import Config, Context, Fault, FaultKind, Request, Schedule, Step, UsageError
from strategies import (
    agreements,
    configs,
    draft_lengths,
    faulted_scenarios,
    faults,
    layouts,
    make_machine,
    phases,
    requests,
    scenarios,
)

CONFIG = Config(worker="MTPEagleWorker", max_draft_len=3)
TINY = Config(worker="MTPEagleWorker", max_draft_len=3, tokens_per_block=1, num_blocks=2)
SHORT = Config(worker="PARDWorker", max_draft_len=3, max_seq_len=2)


def schedule_over() -> Schedule:
    schedule = Schedule(CONFIG, (Request(id=0, prompt_len=1),))
    fault = Fault(site="target_model.forward", occurrence=1, kind=FaultKind.CUDA)
    schedule.advance(Step(draft_len=1, contexts=(Context(request=0, chunk=1),), fault=fault))
    return schedule


def machine(**options: Any) -> type:
    never: Any = None
    return make_machine(open_session=never, open_reference=never, check_step=never, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: configs(workers=["MTPEagel"]),
            "configs(): workers names 'MTPEagel', which does not exist; did you mean 'MTPEagleWorker'?",
        ),
        (lambda: configs(workers=[]), "configs(): workers is not a collection of names; write one or more of "),
        (lambda: configs(workers="PARDWorker"), "configs(): workers is not a collection of names; "),
        (
            lambda: configs(backends=["dsa"]),
            "configs(): backends names 'dsa', which does not exist; did you mean 'DSA'?",
        ),
        (lambda: configs(max_draft_len=0), "configs(): max_draft_len is 0; write a whole number in 1..31"),
        (lambda: configs(max_draft_len=32), "configs(): max_draft_len is 32; write a whole number in 1..31"),
        (lambda: configs(max_batch=257), "configs(): max_batch is 257; write a whole number in 1..256"),
        (lambda: requests(CONFIG, min_size=-1), "requests(): min_size is -1; write a whole number of 0 or more"),
        (
            lambda: requests(CONFIG, min_size=3, max_size=2),
            "requests(): max_size is 2; write a whole number of 3 or more",
        ),
        (lambda: requests(CONFIG, first_id=-1), "requests(): first_id is -1; write a whole number of 0 or more"),
        (
            lambda: requests(TINY),
            "requests(): config holds no request; write num_blocks of 3 or more and max_seq_len of 3 or more",
        ),
        (
            lambda: scenarios(config=SHORT),
            "scenarios(): config holds no request; write num_blocks of 1 or more and max_seq_len of 3 or more",
        ),
        (lambda: draft_lengths(Config(worker="PARD", max_draft_len=1)), "config.worker: no worker is called 'PARD'; "),
        (lambda: agreements(-1, rows=1), "agreements(): draft_len is -1; write a whole number of 0 or more"),
        (lambda: agreements(1, rows=-1), "agreements(): rows is -1; write a whole number of 0 or more"),
        (
            lambda: layouts(Schedule(CONFIG), draft_len=1),
            "layouts(): no request of schedule can run now; add one with schedule.add(...)",
        ),
        (
            lambda: layouts(Schedule(CONFIG), draft_len=4),
            "layouts(): draft_len is 4; write a whole number in 0..3",
        ),
        (lambda: phases(schedule_over()), "phases(): the run of schedule is over; start a new one"),
        (lambda: faults({}), "faults(): sites is empty; record a clean run of the step first"),
        (lambda: faults({"a.b": 0}), "faults(): sites['a.b'] is 0; write a whole number of 1 or more"),
        (lambda: faults({"a.b": 1}, kinds=()), "faults(): kinds is empty; write one or more of the members of "),
        (lambda: scenarios(max_steps=0), "scenarios(): max_steps is 0; write a whole number of 1 or more"),
        (lambda: scenarios(max_steps=True), "scenarios(): max_steps is True; write a whole number of 1 or more"),
        (lambda: scenarios(config=3), "scenarios(): config is 3; write a Config or a strategy for one"),  # type: ignore[arg-type]
        (
            lambda: faulted_scenarios(record=lambda _: {}, max_steps=1),
            "faulted_scenarios(): max_steps is 1; write a whole number of 2 or more",
        ),
        (lambda: machine(max_startup=-1), "make_machine(): max_startup is -1; write a whole number of 0 or more"),
    ],
)
def test_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        call()
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_a_strategy_for_an_impossible_configuration_is_refused_when_drawn() -> None:
    @given(scenarios(config=st.just(TINY)))
    def draw(scenario: object) -> None:
        raise AssertionError

    with pytest.raises(UsageError, match="config holds no request"):
        draw()
