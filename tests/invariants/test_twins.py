"""Twins: what each edit makes of a scenario."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings

import strategies
from invariants import Relation, all_invariants, drafting_twins, rank_twins, startup_twins, twins, verify
from scenarios import (
    Config,
    Context,
    Generation,
    Peer,
    Phase,
    Request,
    Scenario,
    Step,
    Trace,
    check,
    kept_in_step,
)
from tests.invariants.cases import (
    EAGLE,
    MTP_TREE,
    PARD,
    failing,
    forced,
    hybrid,
    overlapped,
    overlapping,
    ragged,
    ranked,
    relaxed,
    served,
    sharing,
    started_up,
)
from tests.invariants.synthetic import dressed

MIXED, STARTED, FAILING = served(EAGLE), started_up(EAGLE), failing(EAGLE)
PARALLEL_CONFIG = served(PARD).config


def _applying(scenario: Scenario) -> list[str]:
    return [r.slug for r in all_invariants() if isinstance(r, Relation) and r.twin(scenario) is not None]


def test_relations_apply_only_where_they_have_something_to_say() -> None:
    assert _applying(FAILING) == ["next-step-equals-never-failed-twin"]
    assert _applying(STARTED) == [
        "replay-equals-eager",
        "startup-leaves-no-trace",
        "captured-values-do-not-matter",
        "warm-up-forward-is-a-fixed-point",
        "batch-equals-requests-alone",
        "row-order-does-not-matter",
        "draft-lengths-do-not-matter",
        "pipeline-ranks-prepare-the-same",
    ]
    assert _applying(MIXED) == [
        "batch-equals-requests-alone",
        "row-order-does-not-matter",
        "chunked-equals-one-shot",
        "draft-lengths-do-not-matter",
        "pipeline-ranks-prepare-the-same",
    ]
    single = Scenario(
        config=MIXED.config,
        requests=(Request(id=0, prompt_len=2),),
        steps=(Step(draft_len=1, contexts=(Context(request=0, chunk=2),)),),
    )
    assert _applying(check(single)) == []


def test_random_numbers_are_drawn_alike_only_by_the_same_forwards() -> None:
    drawing = replace(forced(EAGLE), steps=forced(EAGLE).steps[:-1])
    assert _applying(drawing) == ["replay-equals-eager", "pipeline-ranks-prepare-the-same"]
    whole = replace(drawing, config=replace(drawing.config, force_num_accepted_tokens=2.0))
    assert "batch-equals-requests-alone" in _applying(check(whole))


def test_what_changes_nothing_is_turned_off_one_by_one() -> None:
    both = hybrid(MIXED)
    assert _applying(both) == [
        *_applying(MIXED)[:-1],
        "recurrent-layers-change-nothing",
        "rejection-sampling-accepts-the-same",
        "pipeline-ranks-prepare-the-same",
    ]
    plain, pairs = twins.plain(both, "recurrent") or (None, ())
    assert plain == replace(both, config=replace(both.config, recurrent=False))
    assert pairs == tuple((i, i) for i in range(len(both.steps)))


def test_where_widths_differ_all_drafts_are_verified_in_the_twin_and_graphs_have_other_widths() -> None:
    scenario = ragged(EAGLE)
    edited = drafting_twins.all_verified(scenario)
    assert edited is not None
    twin, pairs = edited
    assert not twin.config.ragged_verify
    assert {row.verify for step in twin.steps for row in step.generations} == {None}
    assert pairs == tuple((i, i) for i in range(1, 7))
    assert drafting_twins.all_verified(twin) is None
    assert "verify-widths-do-not-matter" in _applying(scenario)
    captured = startup_twins.other_values(scenario)
    assert captured is not None
    assert [row.verify for row in captured[0].steps[0].generations] == [2, 1]
    shorter = drafting_twins.other_draft_lengths(scenario)
    assert shorter is not None
    assert all((row.verify or 0) <= step.draft_len for step in shorter[0].steps for row in step.generations)


def test_a_rank_of_a_pipeline_comes_before_whoever_has_something_to_be_told() -> None:
    twin, pairs = rank_twins.next_stage(MIXED) or (MIXED, ())
    assert twin == replace(MIXED, config=replace(MIXED.config, pp_size=2))
    assert pairs == tuple((i, i) for i in range(len(MIXED.steps)))
    prompt = replace(MIXED, steps=MIXED.steps[:1])
    assert [rank_twins.next_stage(of) for of in (twin, check(prompt), served(MTP_TREE))] == [None] * 3


def test_verify_runs_one_more_scenario_per_relation_that_applies() -> None:
    runs: list[Scenario] = []

    def run(scenario: Scenario) -> Trace:
        runs.append(scenario)
        return dressed(scenario)

    verify(MIXED, run)
    assert len(runs) == 6
    assert runs[0] is MIXED
    runs.clear()
    verify(MIXED, run, relations=False)
    assert runs == [MIXED]


def test_in_the_twin_that_never_failed_requests_finish_before_the_failure() -> None:
    edited = twins.never_failed(FAILING)
    assert edited is not None
    twin, pairs = edited
    assert pairs == ((1, 0), (3, 1), (4, 2))
    assert [step.finish for step in twin.steps] == [(0,), (), ()]
    assert all(step.fault is None for step in twin.steps)


def test_without_the_overlap_scheduler_nothing_is_wasted_and_nothing_waits() -> None:
    scenario = overlapped(EAGLE)
    edited = twins.landing(scenario)
    assert edited is not None
    twin, pairs = edited
    assert not twin.config.overlap
    assert pairs == (*((i, i) for i in range(7)), (8, 7))
    assert [row.request for row in twin.steps[4].rows] == [1]
    assert twin.steps[4].phase is Phase.EAGER
    assert "overlap-equals-no-overlap" in _applying(scenario)
    assert twins.landing(MIXED) is None


def test_the_last_chunk_of_a_request_that_has_ended_is_wasted() -> None:
    chunks = (Step(draft_len=1, contexts=(Context(request=0, chunk=n),)) for n in (3, 2))
    first, last = chunks
    more = Step(draft_len=1, contexts=(Context(request=1, chunk=1),))
    scenario = overlapping(_chunks(first, replace(more, contexts=(Context(request=1, chunk=4),)), prompts=(5, 4)))
    scenario = check(replace(scenario, steps=(replace(first, finish=(0,)), last, more)))
    assert twins.one_shot(scenario) is None
    edited = twins.landing(scenario)
    assert edited is not None
    assert edited[1] == ((0, 0), (2, 1))
    assert verify(scenario, dressed).violations == ()


def test_what_has_ended_in_flight_does_not_end_again_before_a_failure() -> None:
    first = Step(draft_len=3, contexts=(Context(request=0, chunk=5), Context(request=1, chunk=3)), finish=(0,))
    wasted = Step(draft_len=3, generations=(Generation(request=0), Generation(request=1)))
    fails = replace(wasted, generations=wasted.generations[1:], fault=FAILING.steps[2].fault)
    steps = (first, wasted, fails, FAILING.steps[3])
    edited = twins.never_failed(check(replace(overlapping(FAILING), steps=steps)))
    assert edited is not None
    assert [step.finish for step in edited[0].steps] == [(0,), (1,), ()]


def test_a_failure_that_nothing_follows_has_no_twin() -> None:
    assert twins.never_failed(replace(FAILING, steps=FAILING.steps[:1])) is None
    assert twins.never_failed(MIXED) is None


def test_without_block_reuse_the_same_chunks_are_computed_whole() -> None:
    shared = sharing(EAGLE)
    edited = twins.computing_all(shared)
    assert edited is not None
    twin, pairs = edited
    assert twin == replace(shared, config=replace(shared.config, enable_block_reuse=False))
    assert pairs == tuple((i, i) for i in range(len(shared.steps)))
    assert twins.computing_all(twin) is None
    # Two tokens of ten fit where eight are known; without, they do not.
    short = replace(shared, config=replace(shared.config, max_num_tokens=9))
    assert twins.computing_all(check(short)) is None


def test_a_failure_that_makes_a_later_prompt_longer_has_no_twin() -> None:
    shared = sharing(EAGLE)
    fault = FAILING.steps[2].fault
    failed = check(replace(shared, steps=(*shared.steps[:2], replace(shared.steps[3], generations=(), fault=fault))))
    alone = replace(shared.steps[6], contexts=(Context(request=3, chunk=3),))
    assert twins.never_failed(check(replace(failed, steps=(*failed.steps, alone)))) is not None
    late = Request(id=4, prompt_len=10, prefix_of=0, prefix_len=9)
    again = Step(draft_len=3, contexts=(Context(request=4, chunk=10),))
    longer = replace(failed, requests=(*failed.requests, late), steps=(*failed.steps, again))
    assert twins.never_failed(check(longer)) is None


def test_a_replay_is_run_by_python_and_the_capture_stays() -> None:
    edited = twins.eager(STARTED)
    assert edited is not None
    twin, pairs = edited
    assert [s.phase for s in twin.steps[1:4]] == [Phase.CAPTURE, Phase.EAGER, Phase.EAGER]
    assert pairs == ((3, 3),)


def test_pages_that_a_dummy_alone_takes_stay_known_without_it_and_nothing_is_compared_from_there_on() -> None:
    config = Config(
        worker=EAGLE, max_draft_len=1, tokens_per_block=8, num_blocks=3, enable_block_reuse=True, attention_dp_size=2
    )

    def captured(size: int) -> Step:
        return Step(phase=Phase.CAPTURE, draft_len=1, generations=(Generation(request=None),) * size)

    def prompt(request: int, length: int, *, finish: tuple[int, ...] = ()) -> Step:
        row = Context(request=request, chunk=length)
        return Step(draft_len=1, contexts=(row,), finish=finish, peers=(Peer(generations=1),))

    def replayed(size: int) -> Step:
        step = Step(phase=Phase.REPLAY, draft_len=1, generations=(Generation(request=1),))
        return kept_in_step(config, replace(step, peers=(Peer(generations=size),)))

    requests = Request(id=0, prompt_len=17), Request(id=1, prompt_len=1)
    begun = captured(1), captured(2), prompt(0, 17, finish=(0,)), prompt(1, 1)
    padded = Scenario(config=config, requests=requests, steps=(*begun, replayed(1), replayed(2), replayed(1)))
    edited = twins.eager(check(padded))
    assert edited is not None
    assert edited[1] == ((4, 4),)
    overlapped_steps = (*padded.steps[:3], Step(draft_len=1), *padded.steps[3:])
    # The replay before it is over when the dummy has its page.
    assert twins.eager(check(replace(padded, config=replace(config, overlap=True), steps=overlapped_steps))) is None
    roomy = twins.eager(check(replace(padded, config=replace(config, num_blocks=4))))
    assert roomy is not None
    assert roomy[1] == ((4, 4), (6, 6))


def test_a_failure_that_may_have_drawn_leaves_the_counter_open() -> None:
    relation = next(r for r in all_invariants() if r.slug == "next-step-equals-never-failed-twin")
    assert isinstance(relation, Relation)
    config = replace(FAILING.config, max_draft_len=3, force_num_accepted_tokens=1.5)
    fault = FAILING.steps[2].fault
    requests = Request(id=0, prompt_len=3), Request(id=1, prompt_len=3)

    def failing_at(draft_len: int) -> Scenario:
        first = Step(draft_len=3, contexts=(Context(request=0, chunk=3, agree=3),))
        fails = Step(draft_len=draft_len, generations=(Generation(request=0, agree=draft_len),), fault=fault)
        after = Step(draft_len=1, contexts=(Context(request=1, chunk=3, agree=1),))
        return check(Scenario(config=config, requests=requests, steps=(first, fails, after)))

    drawing, other = relation.twin(failing_at(3)), relation.twin(failing_at(1))
    assert drawing is not None
    assert other is not None
    assert drawing.ignore - other.ignore == {"force_accept_counter"}


def test_the_next_rank_reuses_nothing_and_accepts_what_is_forced() -> None:
    config = Config(worker=EAGLE, max_draft_len=3, enable_block_reuse=True, attention_dp_size=2)
    forcing = replace(config, force_num_accepted_tokens=1.5)
    step = Step(draft_len=3, contexts=(Context(request=0, chunk=3),), peers=(Peer(generations=2),))
    edited = rank_twins.next_rank(
        check(Scenario(config=forcing, requests=(Request(id=0, prompt_len=3),), steps=(step,)))
    )
    assert edited is not None
    twin, pairs = edited
    assert not twin.config.enable_block_reuse
    assert [row.agree for row in twin.steps[0].contexts] == [2, 2]
    assert pairs == ((0, 1),)


def test_startup_is_dropped_but_for_the_graphs_that_are_replayed() -> None:
    relation = next(r for r in all_invariants() if r.slug == "startup-leaves-no-trace")
    assert isinstance(relation, Relation)
    with_replay = relation.twin(STARTED)
    assert with_replay is not None
    assert with_replay.scenario.steps == STARTED.steps[1:]
    no_replay = replace(STARTED, steps=STARTED.steps[:3])
    without_replay = relation.twin(no_replay)
    assert without_replay is not None
    assert without_replay.scenario.steps == STARTED.steps[2:3]


def test_each_row_is_served_alone_and_the_last_part_is_compared() -> None:
    edited = twins.served_alone(STARTED)
    assert edited is not None
    twin, pairs = edited
    assert [len(step.rows) for step in twin.steps] == [1] * 6
    assert {step.phase for step in twin.steps} == {Phase.EAGER}
    assert pairs == ((2, 1), (3, 3), (4, 5))
    finishing = twins.served_alone(MIXED)
    assert finishing is not None
    assert [i for i, step in enumerate(finishing[0].steps) if step.finish] == [9]


def test_rows_are_reversed_within_contexts_and_within_generations() -> None:
    edited = twins.reversed_rows(MIXED)
    assert edited is not None
    twin, pairs = edited
    assert [row.request for row in twin.steps[0].rows] == [1, 0]
    assert [row.request for row in twin.steps[1].rows] == [1, 0]
    assert pairs == ((0, 0), (2, 2), (3, 3), (4, 4), (6, 6))


def test_a_chunked_prompt_is_computed_with_its_last_chunk() -> None:
    edited = twins.one_shot(MIXED)
    assert edited is not None
    twin, pairs = edited
    assert [row.request for row in twin.steps[0].rows] == [0]
    assert twin.steps[1].contexts == (Context(request=1, chunk=7, agree=2),)
    assert pairs == tuple((i, i) for i in range(1, 7))


def _chunks(*steps: Step, prompts: tuple[int, ...], max_num_tokens: int = 256) -> Scenario:
    requests = tuple(Request(id=i, prompt_len=n) for i, n in enumerate(prompts))
    return check(Scenario(config=replace(MIXED.config, max_num_tokens=max_num_tokens), requests=requests, steps=steps))


def test_a_step_of_chunks_alone_is_dropped_and_what_it_finishes_finishes_before() -> None:
    scenario = _chunks(
        Step(draft_len=1, contexts=(Context(request=0, chunk=2),)),
        Step(draft_len=1, contexts=(Context(request=1, chunk=1),), finish=(0,)),
        Step(draft_len=1, contexts=(Context(request=1, chunk=1),)),
        Step(draft_len=1, contexts=(Context(request=1, chunk=2),)),
        Step(draft_len=1, generations=(Generation(request=1),)),
        prompts=(2, 4),
    )
    edited = twins.one_shot(scenario)
    assert edited is not None
    twin, pairs = edited
    assert [step.finish for step in twin.steps] == [(0,), (), ()]
    assert twin.steps[1].contexts == (Context(request=1, chunk=4),)
    assert pairs == ((3, 1), (4, 2))


def test_a_prompt_that_is_never_finished_or_never_fits_stays_in_chunks() -> None:
    first = Step(draft_len=1, contexts=(Context(request=0, chunk=3),))
    last = Step(draft_len=1, contexts=(Context(request=0, chunk=2),))
    assert twins.one_shot(_chunks(first, prompts=(5,))) is None
    assert twins.one_shot(_chunks(first, last, prompts=(5,), max_num_tokens=4)) is None
    assert twins.one_shot(_chunks(first, last, prompts=(5,))) is not None


def test_dummies_have_no_prompt_to_merge() -> None:
    warmup = Step(phase=Phase.WARMUP, draft_len=1, contexts=(Context(request=None, chunk=3),))
    first = Step(draft_len=1, contexts=(Context(request=0, chunk=3),))
    last = Step(draft_len=1, contexts=(Context(request=0, chunk=2),))
    edited = twins.one_shot(_chunks(warmup, first, last, prompts=(5,)))
    assert edited is not None
    assert edited[0].steps[0] == warmup


def test_a_graph_is_captured_with_other_numbers_and_the_rest_stays() -> None:
    edited = startup_twins.other_values(STARTED)
    assert edited is not None
    twin, pairs = edited
    assert pairs == ((2, 2), (3, 3), (4, 4))
    assert twin.steps[2:] == STARTED.steps[2:]
    changed = zip(STARTED.steps[1].generations, twin.steps[1].generations, strict=True)
    assert all(old.past != new.past and old.accept != new.accept and old.agree != new.agree for old, new in changed)
    assert startup_twins.other_values(MIXED) is None


def test_a_capture_is_compared_with_one_that_nothing_ran_before() -> None:
    edited = startup_twins.other_warmup_runs(STARTED)
    assert edited is not None
    assert edited[0].config.graph_warmup_runs == 0
    again = startup_twins.other_warmup_runs(edited[0])
    assert again is not None
    assert again[0].config.graph_warmup_runs == 4
    assert verify(edited[0], dressed, only=["warm-up-forward-is-a-fixed-point"]).violations == ()


def test_a_padded_batch_gets_a_graph_of_its_size() -> None:
    scenario = ranked(EAGLE)
    edited = startup_twins.exact_size(scenario)
    assert edited is not None
    twin, pairs = edited
    assert [len(step.generations) for step in twin.steps if step.phase is Phase.CAPTURE] == [3, 2]
    assert pairs == ((3, 4), (4, 5), (5, 6))
    assert [row.request for row in twin.steps[4].generations] == [0, 1]
    assert [peer.generations for peer in twin.steps[4].peers] == [2, 1]
    assert startup_twins.exact_size(STARTED) is None


def test_each_step_drafts_another_number_and_agrees_as_far_as_there_are_drafts() -> None:
    edited = drafting_twins.other_draft_lengths(MIXED)
    assert edited is not None
    twin, pairs = edited
    assert pairs == tuple((i, i) for i in range(7))
    assert all(a.draft_len != b.draft_len for a, b in zip(twin.steps, MIXED.steps, strict=True))
    assert drafting_twins.other_draft_lengths(relaxed(EAGLE)) is None
    one = replace(served(PARD), config=replace(PARALLEL_CONFIG, max_draft_len=1))
    assert drafting_twins.other_draft_lengths(one) is None


@settings(suppress_health_check=list(HealthCheck))
@given(strategies.scenarios(max_steps=6))
def test_a_right_engine_violates_nothing(scenario: Scenario) -> None:
    verdict = verify(scenario, dressed)
    assert verdict.violations == ()
