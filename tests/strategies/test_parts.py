"""Parts of a scenario: what is drawn is valid, covers its range and shrinks to the simplest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import Phase as Part
from hypothesis import find, given, settings
from hypothesis import strategies as st

from fuzz.draws import from_the_seed_alone
from scenarios import BACKENDS, WORKERS, Config, Context, Fault, FaultKind, Generation, Phase, Request, Schedule, Step
from scenarios.backends import runs_on
from scenarios.limits import check_config
from strategies import (
    KINDS,
    Layout,
    agreements,
    configs,
    draft_lengths,
    faults,
    layouts,
    phases,
    requests,
)
from strategies.layout import Room
from strategies.phase import phase_table

T = TypeVar("T")
CONFIG = Config(worker="Eagle3OneModelWorker", max_draft_len=4, num_blocks=100, max_num_requests=8)


def all_of(strategy: st.SearchStrategy[T], examples: int = 300) -> list[T]:
    """What a strategy draws, whichever modules are loaded: Hypothesis looks for constants in them."""
    seen: list[T] = []

    @settings(max_examples=examples, phases=[Part.generate], derandomize=True, database=None)
    @given(strategy)
    def look(value: T) -> None:
        seen.append(value)

    with from_the_seed_alone():
        look()
    return seen


def simplest(strategy: st.SearchStrategy[T], condition: Callable[[T], bool] = lambda _: True) -> T:
    return find(strategy, condition, settings=settings(max_examples=1000, database=None, derandomize=True))


def generating(config: Config, prompts: tuple[int, ...], draft_len: int = 2) -> Schedule:
    """A schedule in which requests with these prompts have computed them."""
    schedule = Schedule(config, tuple(Request(id=i, prompt_len=n) for i, n in enumerate(prompts)))
    contexts = tuple(Context(request=i, chunk=n, agree=1) for i, n in enumerate(prompts))
    schedule.advance(Step(draft_len=draft_len, contexts=contexts))
    return schedule


# Configurations.


@given(configs(backends=["TRTLLM", "DSA"], max_draft_len=9, max_batch=6))
def test_configurations_are_valid_and_hold_a_request(config: Config) -> None:
    check_config(config)
    assert Room(Schedule(config), config.max_draft_len).longest_prompt >= 1
    assert config.max_draft_len <= 9
    assert config.max_num_requests <= 6
    assert 1 <= config.tokens_per_block <= 8


def test_configurations_cover_every_worker_limit_and_page_size() -> None:
    seen = all_of(configs(backends=["TRTLLM", "DSA"]))
    assert {c.worker for c in seen} == set(WORKERS)
    sparse = [c for c in seen if c.attention_backend == "DSA"]
    assert 0.3 < len(sparse) / sum(c.traits.sparse for c in seen) < 0.7
    assert {1, 2, 3} < {c.index_topk for c in sparse}
    assert any(c.index_topk >= c.max_seq_len for c in sparse)
    assert {c.tokens_per_block for c in seen} == set(range(1, 9))
    assert {c.max_draft_len for c in seen} == {1, 2, 3, 4, 7}
    able = [c for c in seen if c.traits.separate_draft_kv_cache]
    separate = [c for c in able if c.use_separate_draft_kv_cache]
    assert 0.25 < len(separate) / len(able) < 0.55
    assert {(c.kv_cache_manager, c.host_offload) for c in separate} == {(v, o) for v in ("V1", "V2") for o in (0, 1)}
    assert any(c.draft_tokens_per_block != c.tokens_per_block for c in separate)
    assert any(c.draft_num_blocks * c.draft_tokens_per_block < c.num_blocks * c.tokens_per_block for c in separate)
    for limit in ("num_blocks", "max_num_tokens", "max_seq_len"):
        roomy = getattr(CONFIG, limit) if limit != "num_blocks" else 64
        assert 0.2 < sum(getattr(c, limit) != roomy for c in seen) / len(seen) < 0.8


def test_every_backend_is_drawn_for_the_workers_that_run_on_it() -> None:
    seen = all_of(configs(workers=["Eagle3OneModelWorker", "SAWorker", "MTPWorker"], backends=tuple(BACKENDS)))
    drawn = Counter(c.attention_backend for c in seen)
    assert all(drawn[backend] > len(seen) / 40 for backend in BACKENDS)
    assert all(runs_on(c.worker, c.attention_backend) for c in seen)
    compressed = [c for c in seen if c.compress_ratios]
    assert {len(c.compress_ratios) for c in compressed} == {2, 3}
    assert {1, 2, 3} < {c.window_size for c in compressed}
    views = [c for c in seen if c.attention_backend == "FLASHINFER" and c.traits.draft_model]
    assert {c.shares_target_kv for c in views} == {True, False}
    assert any(c.max_seq_len < 64 for c in seen if c.attention_backend == "VANILLA")


def test_no_graph_is_captured_where_lengths_are_the_hosts() -> None:
    config = Config(worker="SAWorker", max_draft_len=1, attention_backend="VANILLA", tokens_per_block=129)
    assert set(phase_table(Schedule(config))) == {Phase.EAGER, Phase.WARMUP}


def test_only_what_is_asked_for() -> None:
    assert {(c.worker, c.attention_backend) for c in all_of(configs(workers=["PARDWorker"]))} == {
        ("PARDWorker", "TRTLLM")
    }


def test_the_simplest_configuration_says_little() -> None:
    assert simplest(configs()) == Config(worker="Eagle3OneModelWorker", max_draft_len=1)


# Requests.


@given(st.data())
def test_each_request_could_start_in_the_empty_pool(data: st.DataObject) -> None:
    config = data.draw(configs())
    drawn = data.draw(requests(config, min_size=2, max_size=3, first_id=5))
    assert [r.id for r in drawn] in ([5, 6], [5, 6, 7])
    for request in drawn:
        schedule = Schedule(config, (request,))
        chunk = min(request.prompt_len, config.max_num_tokens)
        schedule.advance(Step(draft_len=config.min_draft_len, contexts=(Context(request=request.id, chunk=chunk),)))


def test_prompts_end_around_page_boundaries_and_near_limits() -> None:
    config = Config(
        worker="Eagle3OneModelWorker", max_draft_len=3, tokens_per_block=8, max_seq_len=60, max_num_tokens=20
    )
    lengths = {r.prompt_len for drawn in all_of(requests(config)) for r in drawn}
    assert {1, 4, 5, 6, 7, 8, 9, 12, 16, 17} <= lengths
    longest = 60 - config.num_extra_kv_tokens
    assert {longest, longest - 1, longest - 4} <= lengths
    assert {19, 20, 21, 41} <= lengths
    assert max(lengths) == longest


def test_the_simplest_requests() -> None:
    assert simplest(requests(CONFIG, min_size=2)) == (Request(id=0, prompt_len=1), Request(id=1, prompt_len=1))


# Draft lengths and agreements.


@pytest.mark.parametrize(
    ("worker", "expected"), [("MTPEagleWorker", {0, 1, 2, 3, 4, 5}), ("PARDWorker", {1, 2, 3, 4, 5})]
)
def test_draft_lengths_go_from_the_least_to_the_most(worker: str, expected: set[int]) -> None:
    assert set(all_of(draft_lengths(Config(worker=worker, max_draft_len=5)))) == expected


def test_the_simplest_draft_length_is_1() -> None:
    assert simplest(draft_lengths(CONFIG)) == 1


def test_agreements_are_none_all_or_each_for_itself() -> None:
    seen = all_of(agreements(3, rows=3))
    assert {(0, 0, 0), (3, 3, 3)} <= set(seen)
    assert sum(len(set(row)) > 1 for row in seen) > len(seen) / 4
    assert {a for row in seen for a in row} == {0, 1, 2, 3}
    assert {row[0] for row in all_of(agreements(3, rows=1))} == {0, 1, 2, 3}


@pytest.mark.parametrize(("draft_len", "rows", "expected"), [(0, 2, (0, 0)), (3, 0, ()), (7, 16, (0,) * 16)])
def test_simplest_agreements(draft_len: int, rows: int, expected: tuple[int, ...]) -> None:
    assert simplest(agreements(draft_len, rows=rows)) == expected


def test_agreements_shrink_row_by_row() -> None:
    assert simplest(agreements(4, rows=3), lambda a: a[0] < a[1] >= 2) == (0, 2, 0)


# Layouts.


@given(st.data())
def test_layouts_are_what_the_schedule_allows(data: st.DataObject) -> None:
    config = data.draw(configs())
    k = config.max_draft_len
    schedule = Schedule(config, data.draw(requests(config, max_size=5)))
    for _ in range(3):
        try:
            layout = data.draw(layouts(schedule, draft_len=k))
        except ValueError:
            return
        schedule.advance(Step(draft_len=k, contexts=layout.contexts, generations=layout.generations))


def test_a_schedule_is_only_read() -> None:
    schedule = generating(CONFIG, (3, 3))
    before = vars(schedule.requests[0]).copy()
    all_of(layouts(schedule, draft_len=4), 20)
    assert vars(schedule.requests[0]) == before
    assert schedule.blocks_in_use == generating(CONFIG, (3, 3)).blocks_in_use


def test_layouts_leave_requests_out_and_reorder_them() -> None:
    schedule = generating(CONFIG, (3, 4, 5))
    schedule.add(Request(id=9, prompt_len=8))
    seen = all_of(layouts(schedule, draft_len=2))
    orders = {tuple(g.request for g in layout.generations) for layout in seen}
    assert {(), (0,), (2,), (0, 1), (1, 0), (2, 0), (0, 1, 2), (2, 1, 0)} <= orders
    assert {c.chunk for layout in seen for c in layout.contexts} == {8, 7, 1}
    assert all(layout.contexts or layout.generations for layout in seen)


def test_the_simplest_layout() -> None:
    assert simplest(layouts(generating(CONFIG, (3, 4)), draft_len=2)) == Layout((), (Generation(request=0),))


def test_layouts_of_full_budgets_take_what_fits() -> None:
    # Two generations of 5 tokens fill max_num_tokens, so the third and the context never join them.
    config = Config(worker="Eagle3OneModelWorker", max_draft_len=4, max_num_tokens=10)
    schedule = generating(config, (3, 3, 3))
    schedule.add(Request(id=9, prompt_len=8))
    seen = all_of(layouts(schedule, draft_len=4))
    assert max(len(layout.generations) for layout in seen) == 2
    assert all(sum(c.chunk for c in layout.contexts) + 5 * len(layout.generations) <= 10 for layout in seen)


def test_layouts_without_a_free_page_leave_new_requests_out() -> None:
    config = Config(worker="Eagle3OneModelWorker", max_draft_len=1, tokens_per_block=1, num_blocks=6)
    schedule = generating(config, (3,), draft_len=1)
    schedule.add(Request(id=9, prompt_len=2))
    assert {layout.contexts for layout in all_of(layouts(schedule, draft_len=1))} == {()}


# Phases and faults.


def phases_of(schedule: Schedule, **options: Any) -> set[Phase]:
    return set(all_of(phases(schedule, **options), 50))


def test_phases_follow_start_up_and_capture() -> None:
    schedule = Schedule(CONFIG)
    assert phases_of(schedule) == {Phase.EAGER, Phase.WARMUP, Phase.CAPTURE}
    assert phases_of(schedule, with_startup=False) == {Phase.EAGER}
    schedule.advance(Step(phase=Phase.CAPTURE, draft_len=1, generations=(Generation(request=None),)))
    schedule.add(Request(id=0, prompt_len=1))
    schedule.advance(Step(draft_len=1, contexts=(Context(request=0, chunk=1),)))
    assert phases_of(schedule) == {Phase.EAGER, Phase.REPLAY}
    assert phases_of(generating(CONFIG, (3,))) == {Phase.EAGER}
    assert simplest(phases(schedule)) is Phase.EAGER


def test_a_rare_site_is_as_likely_as_a_frequent_one() -> None:
    seen = all_of(faults({"a.rare": 20, "b.frequent": 1000}))
    assert 0.3 < sum(f.site == "a.rare" for f in seen) / len(seen) < 0.7
    occurrences = {f.occurrence for f in seen if f.site == "b.frequent"}
    assert min(occurrences) >= 1
    assert 800 < max(occurrences) <= 1000
    assert {f.kind for f in seen} == {FaultKind.ERROR, FaultKind.OOM, FaultKind.CUDA}


def test_what_is_passed_again_is_struck_more_often_and_most_of_all_what_several_ranks_pass() -> None:
    seen = all_of(faults({"a.once": 1, "b.hook": 2, "dist.allgather": 2}))
    once, hook, together = (sum(f.site == site for f in seen) for site in ("a.once", "b.hook", "dist.allgather"))
    assert once < hook < together
    assert sum(f.occurrence == 2 for f in seen) > len(seen) / 2


@pytest.mark.parametrize(
    ("phase", "kind"), [(Phase.WARMUP, FaultKind.OOM), (Phase.CAPTURE, FaultKind.OOM), (Phase.EAGER, FaultKind.ERROR)]
)
def test_the_simplest_fault(phase: Phase, kind: FaultKind) -> None:
    sites = {"target_model.forward": 2, "worker.sample_draft_tokens": 3}
    expected = Fault(site="target_model.forward", occurrence=1, kind=kind)
    assert simplest(faults(sites, kinds=KINDS[phase])) == expected
