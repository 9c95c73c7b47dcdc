"""Variants of acceptance are drawn where they are asked for, and what is drawn with them is valid."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios import WORKERS, Config, Phase, UsageError, check
from scenarios import forced_acceptance as forced
from scenarios.acceptance import VARIANTS, relaxes
from strategies import configs, faulted_scenarios, scenarios
from strategies.composer import Composer
from tests.strategies.test_parts import all_of, simplest

SITES = {"model_engine.prepare_inputs": 1}
FORCED = [name for name, traits in WORKERS.items() if traits.drafts_for_contexts]


@pytest.mark.exhaustive
def test_a_fair_share_has_a_variant() -> None:
    seen = all_of(configs(variants=VARIANTS), 1200)
    assert {c.worker for c in seen if c.force_num_accepted_tokens} == set(FORCED)
    assert {c.worker for c in seen if c.draft_vocab_map} == {n for n, t in WORKERS.items() if t.draft_vocab}
    assert {c.worker for c in seen if c.guided_decoding} == {n for n, t in WORKERS.items() if not t.tree}
    relaxed = [c for c in seen if c.use_relaxed_acceptance_for_thinking]
    assert {c.worker for c in relaxed} == {n for n, t in WORKERS.items() if t.relaxed_acceptance}
    assert {relaxes(c) for c in relaxed} == {True, False}
    share = sum(c.force_num_accepted_tokens > 0 for c in seen) / sum(c.worker in FORCED for c in seen)
    assert 0.1 < share < 0.6
    assert {c.worker for c in seen if c.overlap} == set(WORKERS)
    assert 0.15 < sum(c.overlap for c in seen) / len(seen) < 0.4
    assert any(forced.draws(c.force_num_accepted_tokens, c.max_draft_len) for c in seen)
    enhanced = {n for n, t in WORKERS.items() if t.sa_enhancer}
    assert {c.worker for c in seen if c.sa_threshold} == enhanced
    assert 0.15 < sum(c.sa_threshold > 0 for c in seen) / sum(c.worker in enhanced for c in seen) < 0.7
    for variant in ("recurrent", "rejection_sampling"):
        assert {c.worker for c in seen if getattr(c, variant)} == {n for n, t in WORKERS.items() if getattr(t, variant)}
        assert 0.1 < sum(getattr(c, variant) for c in seen) / len(seen) < 0.4
    assert any(c.recurrent and c.rejection_sampling and c.overlap for c in seen)
    beside = [c for c in seen if c.overlap]
    for variant in (
        "attention_dp_rank",
        "force_num_accepted_tokens",
        "guided_decoding",
        "relaxed_topk",
        "sa_threshold",
    ):
        assert any(getattr(c, variant) for c in beside), variant
    ragged = [c for c in seen if c.ragged_verify]
    assert {c.worker for c in ragged} == {n for n, t in WORKERS.items() if t.ragged_verify}
    assert 0.1 < len(ragged) / sum(WORKERS[c.worker].ragged_verify for c in seen) < 0.4
    assert 0.3 < sum(c.overlap for c in ragged) / len(ragged) < 0.9
    assert simplest(configs(variants=VARIANTS)) == Config(worker="Eagle3OneModelWorker", max_draft_len=1)


@pytest.mark.exhaustive
def test_widths_differ_and_graphs_meet_others_than_they_were_captured_with() -> None:
    config = Config(worker="MTPEagleWorker", max_draft_len=3, ragged_verify=True)
    seen = all_of(scenarios(config=config, max_steps=8), 120)
    served = [s for case in seen for s in check(case).steps if not s.phase.is_startup and len(s.generations) > 1]
    differing = [s for s in served if len({g.verify for g in s.generations}) > 1]
    assert len(differing) > len(served) / 4
    captured = {tuple(g.verify for g in s.generations) for case in seen for s in case.steps if s.phase is Phase.CAPTURE}
    assert any(len(set(widths)) > 1 for widths in captured)
    assert any(s.phase is Phase.REPLAY for s in differing)
    assert all(g.verify is None for s in simplest(scenarios(config=config)).steps for g in s.generations)


def test_none_is_drawn_unasked() -> None:
    plain = Config(worker="PARDWorker", max_draft_len=1)
    assert all(getattr(c, v) == getattr(plain, v) for c in all_of(configs(), 50) for v in VARIANTS)


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(UsageError, match=r"configs\(\): variants names 'draft_vocab', .* 'draft_vocab_map'\?"):
        configs(variants=["draft_vocab"])


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("force", [0.5, 1.5, 2.0, 32.0])
def test_forced_scenarios_are_valid_and_reach_generations(force: float) -> None:
    config = Config(worker="Eagle3OneModelWorker", max_draft_len=3, force_num_accepted_tokens=force)
    seen = all_of(scenarios(config=config, max_steps=5), 40)
    for case in seen:
        check(case)
    assert any(step.generations and step.phase is Phase.EAGER for case in seen for step in case.steps)


def test_requests_think_and_drafts_come_close_where_it_counts() -> None:
    config = Config(
        worker="MTPEagleWorker",
        max_draft_len=3,
        use_relaxed_acceptance_for_thinking=True,
        relaxed_topk=2,
        relaxed_delta=0.5,
    )
    seen = all_of(scenarios(config=config, max_steps=5), 60)
    assert {r.thinking for case in seen for r in case.requests} == {True, False}
    near = [g.near for case in seen for step in case.steps for g in step.generations]
    assert {0, 1, 3} <= set(near)


def test_workers_whose_drafts_are_not_guided_never_agree() -> None:
    config = Config(worker="PARDWorker", max_draft_len=3, guided_decoding=True)
    seen = all_of(scenarios(config=config, max_steps=4), 20)
    assert not any(row.agree for case in seen for step in case.steps for row in step.rows)


@pytest.mark.exhaustive
def test_matches_lie_around_the_threshold() -> None:
    config = Config(worker="MTPWorker", max_draft_len=3, sa_threshold=3)
    seen = [g for case in all_of(scenarios(config=config), 60) for step in case.steps for g in step.generations]
    assert {g.match for g in seen if g.request is None} == {0}
    assert {g.match for g in seen} == {0, 2, 3, 12}


def test_a_failure_that_leaves_the_counter_open_is_the_end() -> None:
    config = Config(worker="MTPEagleWorker", max_draft_len=3, force_num_accepted_tokens=1.5)
    seen = all_of(faulted_scenarios(record=lambda _: SITES, config=config, max_steps=4), 60)
    for case in seen:
        check(case)
        (fails,) = (i for i, step in enumerate(case.steps) if step.fault)
        drew = forced.draws(1.5, case.steps[fails].draft_len)
        assert fails == len(case.steps) - 1 if drew else case.steps[fails].phase is Phase.WARMUP
    assert any(case.steps[-1].fault and case.steps[-1].phase is Phase.EAGER for case in seen)


def test_a_machine_goes_on_after_a_failure() -> None:
    config = Config(worker="MTPEagleWorker", max_draft_len=3, force_num_accepted_tokens=1.5)

    @settings(max_examples=30, derandomize=True, database=None)
    @given(st.data())
    def story(data: st.DataObject) -> None:
        composer = Composer(config, startup=0)
        composer.draw_failure(data.draw, lambda _: SITES, phase=Phase.EAGER, last=False)
        assert not composer.steps[-1].fault

    story()
