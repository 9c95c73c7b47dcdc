"""Each interesting situation is generated within so many scenarios: one row of a table per situation.

What has found bugs: most need two dimensions at once and two or three steps. All rows share one run of the strategy;
a row fails when its situation comes too late or never.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Part

from scenarios import FaultKind, Phase, Scenario
from strategies import faulted_scenarios, scenarios
from tests.left_out import PartOf
from tests.strategies.stories import Moment, Situation, both, in_a_row, reordered, served, some, startup, together

EXAMPLES = 1000
SOON = 250
"""Examples of a plain run, which leaves out what may take longer to occur."""
generation = settings(
    max_examples=EXAMPLES,
    phases=[Part.generate],
    suppress_health_check=list(HealthCheck),
    deadline=None,
    derandomize=True,
    database=None,
)


def mixed(m: Moment) -> bool:
    return len(set(m.accepted)) > 1


def at_boundary(m: Moment, offset: int) -> bool:
    """Whether a prompt begins that ends so many tokens from a page boundary."""
    return any((length - offset) % m.config.tokens_per_block == 0 for length in m.new if m.config.tokens_per_block > 2)


def rejects_across_pages(m: Moment) -> bool:
    """Whether a row loses tokens on another page than those it keeps."""
    block = m.config.tokens_per_block
    return any(
        (row.past + row.accepted - 1) // block < (row.past + row.query - 1) // block
        for row in m.rows
        if not row.is_context and block > 1
    )


def shared(*moments: Moment) -> set[int]:
    """Requests that take part in all of these steps."""
    return set.intersection(*(set(m.ids) for m in moments))


def is_replay(m: Moment) -> bool:
    return m.step.phase is Phase.REPLAY


def is_eager_generation(m: Moment) -> bool:
    return m.step.phase is Phase.EAGER and m.shape[1] > 0


def verifies(k: int) -> Situation:
    return some(lambda m: m.k == k and m.shape[1])


def replays(size: int) -> Situation:
    return some(lambda m: is_replay(m) and m.shape[1] >= size)


def some_drafts_are_missing(_: Scenario, moments: list[Moment]) -> bool:
    """Whether a row has made fewer drafts than it is to verify, beside one that has made as many."""
    made: dict[int, int] = {}
    for m in moments:
        drafts = [made[r.request] for r in m.rows if not r.is_context and r.request in made]
        if drafts and min(drafts) < m.k <= max(drafts):
            return True
        made |= dict.fromkeys(m.ids, m.k)
    return False


SITUATIONS: dict[str, tuple[int, Situation]] = {
    # Batches.
    "(0, 1)": (50, some(lambda m: m.shape == (0, 1))),
    "(0, 2)": (250, some(lambda m: m.shape == (0, 2))),
    "(0, 3)": (1000, some(lambda m: m.shape == (0, 3))),
    "(1, 0)": (50, some(lambda m: m.shape == (1, 0))),
    "(1, 1)": (250, some(lambda m: m.shape == (1, 1))),
    "(1, 2)": (500, some(lambda m: m.shape == (1, 2))),
    "(2, 3) or more": (1000, some(lambda m: m.shape[0] >= 2 and m.shape[1] >= 3)),
    "a batch of max_num_requests, 4 or more": (500, some(lambda m: sum(m.shape) == m.config.max_num_requests >= 4)),
    "a batch of 8": (1000, some(lambda m: sum(m.shape) == 8)),
    # Who is in it.
    "a request sits a step out": (50, some(lambda m: m.absent)),
    "a request comes back": (250, together(lambda a, b: set(a.absent) & set(b.ids))),
    "rows change places": (250, together(lambda a, b: reordered(a.ids, b.ids))),
    "one ends, another goes on": (
        100,
        together(lambda a, b: a.step.finish and set(b.before) - set(a.step.finish) and b.ids),
    ),
    "one enters after one ended": (100, some(lambda m: m.finished and m.new)),
    # Draft lengths.
    **{f"K={k}": (1000, verifies(k)) for k in (0, 1, 2, 3, 4, 7)},
    "K, 0, K": (250, in_a_row(lambda m: m.k, lambda m: m.k == 0, lambda m: m.k)),
    "K, 0, K of one request": (1000, together(lambda a, b, c: a.k and not b.k and c.k and shared(a, b, c), 3)),
    "K shrinks": (250, together(lambda a, b: a.k > b.k > 0 and shared(a, b))),
    "K grows": (250, together(lambda a, b: 0 < a.k < b.k and shared(a, b))),
    "K grows for one row of two": (250, some_drafts_are_missing),
    "K, L, K": (1000, in_a_row(lambda m: m.k == 1, lambda m: m.k > 1, lambda m: m.k == 1)),
    # Acceptance.
    "two rows accept nothing": (250, some(lambda m: m.k and len(m.accepted) > 1 and set(m.accepted) == {1})),
    "two rows accept everything": (1000, some(lambda m: m.k and len(m.accepted) > 1 and set(m.accepted) == {m.k + 1})),
    "rows accept differently": (500, some(mixed)),
    "rows accept differently, K >= 2": (1000, some(lambda m: mixed(m) and m.k >= 2)),
    "rows accept differently beside a context": (1000, some(lambda m: mixed(m) and m.shape[0])),
    "a rejection across a page boundary": (100, some(rejects_across_pages)),
    # Lengths.
    "a prompt ends at a page boundary": (100, some(lambda m: at_boundary(m, 0))),
    "a prompt ends one before it": (100, some(lambda m: at_boundary(m, -1))),
    "a prompt ends one after it": (50, some(lambda m: at_boundary(m, 1))),
    "a prompt ends Kmax + 1 before it": (100, some(lambda m: at_boundary(m, -m.config.max_draft_len - 1))),
    "a row reaches max_seq_len": (
        250,
        some(lambda m: m.config.max_seq_len in (r.past + r.query + m.config.num_extra_kv_tokens for r in m.rows)),
    ),
    "a batch of max_num_tokens": (250, some(lambda m: sum(r.query for r in m.rows) == m.config.max_num_tokens)),
    "the pool is exhausted": (100, some(lambda m: m.pages_left == 0)),
    "the pool is exhausted by three requests": (250, some(lambda m: m.pages_left == 0 and len(m.ids + m.absent) > 2)),
    # Chunks.
    "a prompt goes on": (100, some(lambda m: any(r.is_context and r.past for r in m.rows))),
    "a tail of one token": (100, some(lambda m: any(r.is_context and r.past and r.query == 1 for r in m.rows))),
    "final and other chunks in one batch": (100, some(lambda m: len(set(m.finality)) == 2)),
    "the same beside a generation": (500, some(lambda m: len(set(m.finality)) == 2 and m.shape[1])),
    "a prompt in three chunks": (500, in_a_row(*[lambda m: False in m.finality] * 3)),
    # Start-up and graphs.
    "warm-up, then capture": (500, lambda s, _: startup(Phase.WARMUP, Phase.CAPTURE)(s)),
    "two captures": (250, lambda s, _: startup(Phase.CAPTURE, Phase.CAPTURE)(s)),
    "a replay": (250, replays(1)),
    "a replay of two": (1000, replays(2)),
    "a replay after warm-up and capture": (1000, both(startup(Phase.WARMUP, Phase.CAPTURE), replays(1))),
    "a replay after two captures": (1000, both(startup(Phase.CAPTURE, Phase.CAPTURE), replays(1))),
    "a replay of K >= 2": (500, some(lambda m: is_replay(m) and m.k >= 2)),
    "replay, then eager": (1000, in_a_row(is_replay, is_eager_generation)),
    "eager, then replay": (1000, in_a_row(is_eager_generation, is_replay)),
    "a replay twice": (1000, in_a_row(is_replay, is_replay)),
}

FAULTED: dict[str, tuple[int, Situation]] = {
    "warm-up fails and is survived": (250, lambda s, _: s.steps[0].fault is not None and len(s.steps) > 1),
    "capture fails": (250, lambda s, _: s.steps[-1].fault is not None and s.steps[-1].phase is Phase.CAPTURE),
    "capture fails by a CUDA error": (
        500,
        lambda s, _: (
            s.steps[-1].phase is Phase.CAPTURE and s.steps[-1].fault and s.steps[-1].fault.kind is FaultKind.CUDA
        ),
    ),
    "a batch with contexts and generations fails": (500, some(lambda m: m.step.fault and min(m.shape) > 0)),
    "a replay fails": (500, some(lambda m: m.step.fault and is_replay(m))),
    "K grows after the failure": (250, together(lambda a, b: a.step.fault and a.k < b.k)),
    "a failure in the middle of a prompt": (100, some(lambda m: m.step.fault and False in m.finality)),
    "two steps follow a served failure": (250, in_a_row(lambda m: m.step.fault, lambda m: True, lambda m: True)),
    "a CUDA error while serving": (500, some(lambda m: m.step.fault and m.step.fault.kind is FaultKind.CUDA)),
    "a failure above the error budget": (
        250,
        lambda s, _: s.config.error_budget == 0 and s.steps[-1].fault is not None and not s.steps[-1].phase.is_startup,
    ),
    "the failure that is one too many is not the first": (
        500,
        lambda s, _: (
            0 < s.config.error_budget < 8 and sum(t.fault is not None for t in s.steps) > s.config.error_budget
        ),
    ),
    "the 100th occurrence or later": (100, lambda s, _: any(t.fault and t.fault.occurrence >= 100 for t in s.steps)),
}


@pytest.fixture(scope="module")
def clean(part_of: PartOf) -> Mapping[str, int]:
    """Situation -> number of the first scenario in which it occurs."""
    first: dict[str, int] = {}
    count = 0

    @settings(generation, max_examples=len(part_of(range(EXAMPLES), every=EXAMPLES // SOON)))
    @given(scenarios())
    def look(scenario: Scenario) -> None:
        nonlocal count
        count += 1
        _note(first, count, SITUATIONS, scenario)

    look()
    return first


@cache
def faulted() -> Mapping[str, int]:
    """The same of scenarios with a fault, whose steps have one rare and one frequent site."""
    first: dict[str, int] = {}
    count = 0

    @settings(generation, max_examples=500)
    @given(faulted_scenarios(record=lambda _: {"model_engine.prepare_inputs": 1, "torch.add": 300}))
    def look(scenario: Scenario) -> None:
        nonlocal count
        count += 1
        _note(first, count, FAULTED, scenario)

    look()
    return first


def _note(
    first: dict[str, int], count: int, situations: Mapping[str, tuple[int, Situation]], scenario: Scenario
) -> None:
    moments = list(served(scenario))
    for name, (_, situation) in situations.items():
        if name not in first and situation(scenario, moments):
            first[name] = count


@pytest.mark.exhaustive(shows=lambda name: {name} if SITUATIONS[name][0] <= SOON else ())
@pytest.mark.parametrize("name", SITUATIONS)
def test_occurs(name: str, clean: Mapping[str, int]) -> None:
    assert clean.get(name, EXAMPLES + 1) <= SITUATIONS[name][0]


@pytest.mark.exhaustive(every=4, first=2)
@pytest.mark.parametrize("name", FAULTED)
def test_occurs_with_a_fault(name: str) -> None:
    assert faulted().get(name, EXAMPLES + 1) <= FAULTED[name][0]
