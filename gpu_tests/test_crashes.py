"""Failures after which a device is lost, each in a process of its own.

What is verified:

1. A device-side assertion and an illegal access, in a kernel of the draft head, end the run: the outcome is ``fatal``,
   the exception is reported, and nothing is read of the device. It is so when every launch is waited for and when the
   error comes late, to whoever waits for the device first: the sampler, or an observer.
2. What the host has to put back after a failure it has put back: no saved tensors, no requests that are active.
3. In that process the device computes no more. In this one it does, and in each that starts after it: all of them
   serve four steps before they lose it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_tests.crashing import CRASHES
from gpu_tests.processes import ended


def process(*arguments: str, **environment: str) -> str:
    """What a process prints in which a device may be lost."""
    done = ended(*arguments, **environment)
    assert done.stdout, done.stderr[:3000]
    return done.stdout


def crashed(kind: str, **environment: str) -> dict[str, Any]:
    """What a process in which this crash happens says of itself."""
    seen: dict[str, Any] = json.loads(process("-m", "gpu_tests.crashing", kind, **environment).splitlines()[-1])
    return seen


@pytest.mark.parametrize("blocking", ["1", "0"], ids=["at-once", "late"])
@pytest.mark.parametrize("kind", CRASHES)
def test_a_lost_device_ends_the_run(kind: str, blocking: str) -> None:
    seen = crashed(kind, CUDA_LAUNCH_BLOCKING=blocking)
    assert (seen["outcome"], seen["injected"]) == ("fatal", False)
    assert "CUDA error" in seen["message"]
    assert seen["read_of_the_device"] == []
    assert (seen["saved"], seen["left"]) == ([], [])
    assert "CUDA error" in seen["device"]
