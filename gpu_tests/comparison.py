"""Traces of upstream's classes on CUDA and on the CPU emulation, value by value."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engines.portable.sparse_observation import DEVICE_TENSORS
from engines.tensorrt_llm import TensorrtLlmEngine
from gpu_tests.driving import OWN
from scenarios import Phase, Scenario, StepTrace, Trace

RECORDED: Final = {"kv_lens_cuda", "ctx_len", *DEVICE_TENSORS, "slot_owners"}
"""What a capture that fails has recorded and not done, and its emulation has done."""

OF_DUMMIES: Final = {"ctx_len", "next_draft_tokens", "next_new_tokens", "position_ids", "num_ctx_per_req"}
"""Fields in which the dummies of DFlash show their spare slot: which of its rows wins is not defined on a GPU."""


def values(step: StepTrace) -> list[tuple[tuple[str, int], str, dict[str, object]]]:
    """Fields of a step's sub-steps that do not depend on the run."""
    shares_slot = step.phase.is_startup and any("ctx_len" in s.fields for s in step.substeps)
    left_out = OWN | OF_DUMMIES if shares_slot else OWN
    lost = left_out | RECORDED if step.phase is Phase.CAPTURE else left_out
    return [
        (s.key, s.phase, {k: v for k, v in s.fields.items() if k not in (lost if s.name == "failed" else left_out)})
        for s in step.substeps
    ]


def assert_same(on_cuda: Trace, on_cpu: Trace) -> None:
    """Equal outcomes and sub-steps; every field that was observed on CUDA has the emulation's value."""
    assert (on_cuda.device, on_cpu.device) == ("cuda", "cpu (emulated)")
    assert [step.outcome for step in on_cuda.steps] == [step.outcome for step in on_cpu.steps]
    for seen, expected in zip(on_cuda.steps, on_cpu.steps, strict=True):
        names, wanted = ([s.key for s in step.substeps] for step in (seen, expected))
        assert names == wanted
        for (key, phase, fields), (_, _, other) in zip(values(seen), values(expected), strict=True):
            assert fields == {name: other[name] for name in fields}, f"step {seen.index}, {key}"
            if phase != "capture":
                assert fields.keys() == other.keys()


def drivable(engine: TensorrtLlmEngine, scenario: Scenario) -> bool:
    """Whether this version of the worker can run the scenario: some draft ``max_draft_len`` tokens in each step."""
    longest = scenario.config.max_draft_len
    session = engine.open(scenario.config)
    dynamic = session.features.dynamic_draft_len
    session.close()
    return dynamic or all(step.draft_len == longest for step in scenario.steps)


def on_dsa(scenario: Scenario) -> Scenario:
    """The scenario with sparse attention, in one page per request, as the table of pages ends with the target's."""
    config = replace(scenario.config, attention_backend="DSA", index_topk=2, tokens_per_block=64)
    return replace(scenario, config=config)
