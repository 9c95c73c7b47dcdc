"""A process whose device is lost in the middle of a step: ``python -m gpu_tests.crashing KIND`` prints what it saw.

KIND is a key of ``CRASHES``. What it prints last is a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from engines.portable import PortableSession
from gpu_tests.driving import executor, life, opened
from scenarios import Scenario
from scenarios.trace import FAILED

MIXED: Final = 4
"""The step of ``life`` that mixes a prompt with generations."""


def device_assert() -> None:
    """An index that a kernel finds out of range."""
    torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")] = 1.0


def illegal_access() -> None:
    """A kernel that writes where nothing is."""
    source = 'extern "C" __global__ void stray(float* p) { p[1ll << 40] = 1.0f; }'
    kernel = torch.cuda._compile_kernel(source, "stray")
    kernel((1, 1, 1), (1, 1, 1), (torch.zeros(1, device="cuda"),))


CRASHES: Final[dict[str, Callable[[], None]]] = {
    "device-assert": device_assert,
    "illegal-access": illegal_access,
}
"""Ways to lose a device, by name."""


def lose(session: PortableSession, scenario: Scenario, kind: str) -> dict[str, Any]:
    """Serve prompts and replays, lose the device in the draft head of a mixed batch, and say what is left."""
    head = executor(session).model_engine.model.draft_model.logits_processor
    call, calls = head.forward, 0

    def crashing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            CRASHES[kind]()
        return call(*args, **kwargs)

    for step in scenario.steps[:MIXED]:
        session.step(step)
    vars(head)["forward"] = crashing
    trace = session.step(scenario.steps[MIXED])
    failed = trace.substeps[-1]
    assert failed.name == FAILED, failed.name
    return {
        "outcome": trace.outcome,
        "injected": trace.injected,
        "exception": failed["exception"],
        "message": failed["message"],
        "read_of_the_device": sorted(field for field in failed.fields if field.endswith("_cuda")),
        "saved": failed["_saved_tensors"],
        "left": sorted(executor(session).active_requests),
        "device": what_the_device_says(),
    }


def what_the_device_says() -> str:
    """The error of a computation; empty if there is none."""
    try:
        torch.zeros(1, device="cuda").item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def main(kind: str) -> None:
    """The whole process. It ends without taking anything down, as that would be done with a device that is lost."""
    scenario = life("Eagle3OneModelWorker", "TRTLLM")
    with opened(scenario) as session:
        print(json.dumps(lose(session, scenario, kind)), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
