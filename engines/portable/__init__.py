"""The portable engine: one-model speculative decoding in torch, with upstream's rooms and names, on the tracer model.

It needs nothing but torch and runs on CPU and CUDA by the same code; on CPU its graphs are emulated.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection

with warnings.catch_warnings():
    # torch says so on import; nothing here hands tensors to NumPy.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch

from engines.portable.device_checks import Expect
from engines.portable.mismatches import Mismatches
from engines.portable.pipeline_session import PipelineSession
from engines.portable.session import PortableSession
from scenarios import BACKENDS, Config, Request, UsageError
from scenarios.acceptance import VARIANTS

__all__ = ["Mismatches", "PortableEngine", "PortableSession"]

# Failures are part of the day's work here; who wants to read of them adds a handler.
logging.getLogger("specfuzz.portable").addHandler(logging.NullHandler())


class PortableEngine:
    """See ``engines.base.Engine``. ``device`` is "cpu" or "cuda"; ``UsageError`` when this machine has none such."""

    name = "portable"
    backends = tuple(BACKENDS)
    variants = VARIANTS

    def __init__(self, device: str = "cpu") -> None:
        if device not in ("cpu", "cuda"):
            raise UsageError(f"device: {device!r} is not known; write 'cpu' or 'cuda'")
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError(f"device: torch {torch.__version__} finds no CUDA device; write 'cpu'")
        self.device = device

    def open(
        self,
        config: Config,
        requests: tuple[Request, ...] = (),
        *,
        observe: bool = True,
        record: Collection[str] = (),
    ) -> PortableSession | PipelineSession:
        """Start a session; ``ScenarioError`` for a configuration that is not valid."""
        device = torch.device(self.device)
        if config.pp_size == 1:
            return PortableSession(config, requests, device, observe=observe, record=record)
        last, other = (PortableSession(config, requests, device, observe=observe, record=record) for _ in range(2))
        return PipelineSession(last, other)

    def open_checked(
        self,
        config: Config,
        requests: tuple[Request, ...],
        expect: Expect,
        mismatches: Mismatches,
        *,
        caches: bool = False,
    ) -> PortableSession:
        """Start a session whose sub-steps are not read but compared on the device: see ``DeviceChecks``.

        caches  whether what the caches hold after each step is compared, too

        Raises ``ScenarioError`` for a configuration that is not valid.
        """
        if config.pp_size > 1:
            raise UsageError("config.pp_size: checks on the device follow one rank; leave it out")
        return PortableSession(
            config,
            requests,
            torch.device(self.device),
            observe=False,
            record=(),
            expect=expect,
            mismatches=mismatches,
            check_caches=caches,
        )
