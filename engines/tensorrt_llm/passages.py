"""Where inside a worker's forward a fault at a torch call strikes.

A scenario counts the calls of a torch function from the start of its step, those of the suite's executor and models
included. For a reader who has only upstream's classes this module counts them anew: calls that their modules make
while the worker's forward runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engines.tensorrt_llm import TensorrtLlmEngine
from faults import InjectedFault
from faults.sites import torch_site
from scenarios import Scenario


class _Calls(TorchFunctionMode):
    """Counts the calls of ``site`` by modules whose names begin so; ``struck`` is the one in which a fault came."""

    def __init__(self, site: str, modules: tuple[str, ...]) -> None:
        super().__init__()
        self.site = site
        self.modules = modules
        self.count = 0
        self.struck: int | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch_site(func.__name__) != self.site or not _caller().startswith(self.modules):
            return func(*args, **(kwargs or {}))
        self.count += 1
        try:
            return func(*args, **(kwargs or {}))
        except InjectedFault:
            self.struck = self.count
            raise


def _caller() -> str:
    """Name of the module that called the torch function."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("torch."):
        frame = frame.f_back
    name: str = frame.f_globals["__name__"]
    return name


def struck_call(engine: TensorrtLlmEngine, scenario: Scenario, step: int, modules: tuple[str, ...]) -> int | None:
    """Which call of its torch function the fault of ``steps[step]`` strikes, from 1, counted as said above.

    modules  how the names of the modules begin whose calls count

    None if it strikes elsewhere: ahead of or after the forward, or in another module.
    """
    fault = scenario.steps[step].fault
    assert fault is not None
    calls = _Calls(fault.site, modules)
    session = engine.open(scenario.config, scenario.requests, observe=False)
    try:
        for earlier in scenario.steps[:step]:
            session.step(earlier)
        worker: torch.nn.Module = session.worker
        forward = worker.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            with calls:
                return forward(*args, **kwargs)

        worker.forward = counted
        session.step(scenario.steps[step])
    finally:
        session.close()
    return calls.struck
