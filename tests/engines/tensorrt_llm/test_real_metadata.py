"""Upstream's own attention metadata: found, tried out, driven, or left for the suite's with a reason."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial

import pytest

from engines import SEAMS, TORCH, run
from engines.tensorrt_llm import TensorrtLlmEngine, doctor
from engines.tensorrt_llm.backend import attention_metadata_class
from fuzz.events import BatchFinished, FindingFound, HarnessError, Tally, UnitRefused
from fuzz.unit import Unit
from fuzz.work import run_unit
from invariants import verify
from scenarios import Config, Generation, UsageError, dumps, loads
from tests.engines.tensorrt_llm.cases import life, lives, replayed
from tests.engines.tensorrt_llm.test_findings import findings
from tests.fixtures.tensorrt_llm_tree import LAYOUTS, build

DRAFT_TARGET = "DraftTargetOneModelWorker"
PLACE = "tensorrt_llm/_torch/attention/backends"


def on_dsa(scenario):
    # One page per request, as the table of pages ends with the target's lengths.
    return replace(
        scenario, config=replace(scenario.config, attention_backend="DSA", index_topk=2, tokens_per_block=64)
    )


class Engine(TensorrtLlmEngine):
    """On the CPU; runs each scenario once, however much is asked about it."""

    def __init__(self, root):
        super().__init__(root, device="cpu")
        self.run = cache(partial(run, self))


def violated(engine, scenario, **how):
    return {v.invariant for v in verify(scenario, engine.run, **how).violations}


@pytest.mark.exhaustive(every=2, first=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_dense_class_lives_as_the_suites_does(tree, layout, part_of):
    own, suites = Engine(tree(layout=layout, metadata="dense")), Engine(tree(layout=layout))
    session = own.open(Config(worker=DRAFT_TARGET, max_draft_len=1))
    (real,) = type(session.attn_metadata).__bases__
    assert real is own.upstream.interface.TrtllmAttentionMetadata
    assert own.upstream.files[real.__module__].endswith("trtllm.py")
    session.close()
    for scenario in part_of([*lives(DRAFT_TARGET)], every=3):
        assert violated(own, scenario) == set()
        assert own.run(scenario).steps == suites.run(scenario).steps


@pytest.mark.exhaustive(every=2, first=1)
@pytest.mark.parametrize("worker", [DRAFT_TARGET, "MTPEagleWorker"])
def test_the_stale_map_is_found_by_state_and_by_acceptance_alone(tree, worker):
    stale, fixed = Engine(tree(metadata="stale")), Engine(tree(metadata="fixed"))
    scenario = on_dsa(life(worker))
    for invariant in ("req-idx-matches-layout", "acceptance-follows-agreement", "oracle-drafter-accepts-all"):
        assert violated(stale, scenario, only=[invariant]) == {invariant}
        assert violated(fixed, scenario, only=[invariant]) == set()


def test_the_fixed_class_departs_in_what_prepare_leaves_alone_only(tree):
    fixed = Engine(tree(metadata="fixed"))
    assert violated(fixed, on_dsa(life(DRAFT_TARGET)), relations=False) == {
        "gen-kv-lens-in-every-column",
        "sparse-maps-equal-reference",
    }


@pytest.mark.parametrize("finding", [f.values for f in findings() if "before PR #16925" in f.values[0]])
def test_what_the_page_says_of_the_stale_class_is_not_so_of_the_fixed_one(tree, finding):
    facts, scenario = finding
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", facts))
    assert not named & violated(Engine(tree("post-fix", metadata="fixed")), loads(scenario))


def test_a_replayed_step_shows_the_stale_map_by_acceptance(tree):
    scenario = on_dsa(replayed(DRAFT_TARGET))
    stale, fixed = Engine(tree(metadata="stale")), Engine(tree(metadata="fixed"))
    found = verify(scenario, stale.run, only=["acceptance-follows-agreement"]).violations
    assert {violation.step for violation in found} == {3}
    assert violated(fixed, scenario, only=["acceptance-follows-agreement"]) == set()


def test_tables_that_a_process_makes_once_are_made_in_each_run(tree):
    engine = Engine(tree(metadata="dense"))
    first, again = (run(engine, life(DRAFT_TARGET), record=[TORCH]).steps[0].sites for _ in range(2))
    assert first["torch.repeat"] > 0
    assert first == again


def campaign(monkeypatch, root, **options):
    monkeypatch.setenv("SPECFUZZ_TRTLLM_SOURCE", str(root))
    unit = Unit(engine="tensorrt_llm", device="cpu", worker=DRAFT_TARGET, **options)
    events = list(run_unit(unit))
    assert not [event for event in events if isinstance(event, (HarnessError, UnitRefused))]
    tally = sum((event.tally for event in events if isinstance(event, BatchFinished)), Tally())
    return tally, [event.finding for event in events if isinstance(event, FindingFound)]


@pytest.mark.exhaustive
def test_a_campaign_draws_both_backends_and_each_fault_fires(monkeypatch, tree):
    drawn, open_session = set(), TensorrtLlmEngine.open

    def noted(engine, config, *rest, **options):
        drawn.add(config.attention_backend)
        return open_session(engine, config, *rest, **options)

    monkeypatch.setattr(TensorrtLlmEngine, "open", noted)
    options = {"seed": 1, "max_cases": 20, "faults": (SEAMS, TORCH), "invariants": ("saved-state-empty",)}
    tally, findings = campaign(monkeypatch, tree(metadata="fixed"), **options)
    assert (tally.cases, findings) == (20, [])
    assert tally.fired == tally.planned > 5
    assert drawn == {"TRTLLM", "DSA"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("invariant", ["req-idx-matches-layout", "acceptance-follows-agreement"])
def test_a_campaign_finds_the_stale_map_either_way_and_shrinks_it(monkeypatch, tree, invariant):
    options = {"seed": 3, "max_cases": 120, "faults": (), "invariants": (invariant,), "first": True}
    _, (finding,) = campaign(monkeypatch, tree(metadata="stale"), **options)
    assert finding.scenario.config.attention_backend == "DSA"
    assert max(len(step.contexts) + len(step.generations) for step in finding.scenario.steps) == 2
    assert violated(Engine(tree(metadata="fixed")), finding.scenario, only=[invariant]) == set()


def test_one_request_at_a_time_never_meets_the_stale_map(tree):
    scenario = on_dsa(life(DRAFT_TARGET))
    alone = tuple(
        replace(step, contexts=step.contexts[:1], generations=(), finish=())
        if step.contexts
        else replace(step, generations=(Generation(request=0, agree=3),), finish=())
        for step in (scenario.steps[2], *scenario.steps[5:])
    )
    scenario = loads(dumps(replace(scenario, requests=scenario.requests[:1], steps=alone)))
    assert violated(Engine(tree(metadata="stale")), scenario) == set()


def test_the_doctor_says_what_is_driven_and_what_was_added_to_it(tree):
    verdicts = {v.name: v for v in doctor(tree(metadata="stale"))}
    assert verdicts["TrtllmAttentionMetadata"][1:3] == (True, "as it is")
    assert verdicts["DSAtrtllmAttentionMetadata"][1:3] == (True, "as it is; the suite adds is_dsa_cache_manager")
    fixed = {v.name: v for v in doctor(tree(metadata="fixed"))}["DSAtrtllmAttentionMetadata"]
    assert fixed[1:3] == (True, "as it is")
    assert fixed.where.endswith("sparse/dsa/metadata.py")


def test_a_dense_class_that_cannot_be_made_takes_the_sparse_one_with_it(tmp_path):
    file = build(tmp_path, metadata="fixed") / PLACE / "trtllm.py"
    file.write_text(file.read_text().replace("assert not self.mapping", "assert self.mapping"))
    engine = Engine(tmp_path)
    assert engine.backends == ("TRTLLM",)
    made = engine.open(Config(worker=DRAFT_TARGET, max_draft_len=1)).attn_metadata
    assert type(made).__qualname__ == attention_metadata_class(engine.upstream.attention.AttentionMetadata).__qualname__
    assert isinstance(made, engine.upstream.interface.TrtllmAttentionMetadata)
    reasons = {v.name: v.reason for v in doctor(tmp_path) if not v.drivable and "no driver" not in v.reason}
    assert reasons == {
        "TrtllmAttentionMetadata": "AssertionError: ; the suite's own, below the real AttentionMetadata, is driven "
        "instead",
        "DSAtrtllmAttentionMetadata": "TrtllmAttentionMetadata, which it is below, cannot be driven",
    }
    assert violated(engine, life(DRAFT_TARGET)) == set()


def test_a_class_that_fills_its_buffers_otherwise_is_not_driven(tmp_path):
    file = build(tmp_path, metadata="fixed") / PLACE / "sparse/dsa/metadata.py"
    file.write_text(file.read_text().replace("right=True", "right=False"))
    engine = Engine(tmp_path)
    assert engine.backends == ("TRTLLM",)
    expected = (
        r"DSAtrtllmAttentionMetadata of 'DSA' cannot be driven .ValueError: req_idx_per_token is .*write 'TRTLLM'"
    )
    with pytest.raises(UsageError, match=expected):
        engine.open(on_dsa(life(DRAFT_TARGET)).config)
