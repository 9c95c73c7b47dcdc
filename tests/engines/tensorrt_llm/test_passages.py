"""Faults at torch calls, counted inside the worker's forward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from engines.base import TORCH, run
from engines.tensorrt_llm import TensorrtLlmEngine
from engines.tensorrt_llm.passages import struck_call
from scenarios import Config, Context, Fault, FaultKind, Generation, Phase, Scenario, Step

MODULES = ("tensorrt_llm._torch.speculative.",)
STEP = Step(
    phase=Phase.WARMUP,
    draft_len=2,
    contexts=(Context(request=None, chunk=5),),
    generations=(Generation(request=None, past=10, accept=2),),
)


class Tree(Protocol):
    def __call__(self, era: str) -> Path: ...


def test_calls_of_the_executor_and_of_models_do_not_count(tree: Tree) -> None:
    engine = TensorrtLlmEngine(tree("post-fix"), device="cpu")
    config = Config(worker="MTPEagleWorker", max_draft_len=2)
    clean = run(engine, Scenario(config=config, steps=(STEP,)), record=(TORCH,))

    def struck(occurrence: int) -> int | None:
        fault = Fault(site="torch.add", occurrence=occurrence, kind=FaultKind.OOM)
        return struck_call(engine, Scenario(config=config, steps=(replace(STEP, fault=fault),)), 0, MODULES)

    # Two calls prepare the batch. The head of the draft model makes one per draft, its worker two in the first.
    passages = [struck(n) for n in range(1, clean.steps[0].sites["torch.add"] + 1)]
    assert passages == [None, None, 1, 2, None, 3, None, 4]


def test_earlier_steps_do_not_count(tree: Tree) -> None:
    engine = TensorrtLlmEngine(tree("post-fix"), device="cpu")
    fault = Fault(site="torch.add", occurrence=3, kind=FaultKind.OOM)
    steps = (STEP, replace(STEP, fault=fault))
    scenario = Scenario(config=Config(worker="MTPEagleWorker", max_draft_len=2), steps=steps)
    assert struck_call(engine, scenario, 1, MODULES) == 1
