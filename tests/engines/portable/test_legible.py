"""What of a broken engine cannot be read is in the trace, and found like anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from engines.portable.legible import Legible
from invariants import verify
from tests.engines.portable.scripts import go, mixed

EAGLE = "Eagle3OneModelWorker"


def test_a_missing_tensor_is_a_violation_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = TrtllmAttentionMetadata.prepare

    def without_types(self: Any) -> None:
        prepare(self)
        self.host_request_types = None

    monkeypatch.setattr(TrtllmAttentionMetadata, "prepare", without_types)
    found = verify(mixed(EAGLE, 2), go, only=["state-can-be-read"]).violations
    assert found[0].message.endswith("AttributeError: prepared: 'NoneType' object has no attribute 'tolist'")


class Lost:
    """An observer of a device that is lost."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.noted: list[str] = []

    def saved(self) -> None:
        raise self.error

    def unreadable(self, where: str, error: Exception) -> None:
        self.noted.append(f"{where}: {error}")


def test_only_a_lost_device_is_still_an_error() -> None:
    lost: Any = Lost(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(torch.AcceleratorError):
        Legible(lost).saved()
    assert lost.noted == []
    short: Any = Lost(IndexError("index 4 is out of bounds"))
    Legible(short).saved()
    assert short.noted == ["saved: index 4 is out of bounds"]
