"""A process whose device is lost in the middle of a step: ``python -m gpu_tests.crashing KIND`` prints what it saw.

KIND is a key of ``CRASHES``. The first line printed is JSON; how the process ends afterwards is the driver's business.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from gpu_tests.driving import executor, life, opened
from scenarios.trace import FAILED


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


def lose(kind: str) -> dict[str, Any]:
    """Serve a prompt, lose the device in the draft head of a generation, and say what is left."""
    scenario = life("Eagle3OneModelWorker", "TRTLLM")
    with opened(scenario) as session:
        head = executor(session).model_engine.model.draft_model.logits_processor
        call, calls = head.forward, 0

        def crashing(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                CRASHES[kind]()
            return call(*args, **kwargs)

        for step in scenario.steps[:4]:
            session.step(step)
        vars(head)["forward"] = crashing
        trace = session.step(scenario.steps[4])
        failed = trace.substeps[-1]
        left = sorted(executor(session).active_requests)
        assert failed.name == FAILED
        try:
            torch.zeros(1, device="cuda").item()
        except RuntimeError as error:
            computes = str(error).splitlines()[0]
        else:
            computes = "as before"
        return {
            "outcome": trace.outcome,
            "injected": trace.injected,
            "exception": failed["exception"],
            "message": failed["message"],
            "read_of_the_device": sorted(f for f in failed.fields if f.endswith("_cuda")),
            "saved": failed["_saved_tensors"],
            "left": left,
            "device": computes,
        }


if __name__ == "__main__":
    print(json.dumps(lose(sys.argv[1])), flush=True)
    # Whatever is taken down from here on is taken down with a device that is lost.
    os._exit(0)
