"""Upstream's real worker and metadata classes, from an installed package or a source checkout, as an engine.

No upstream code is inside. ``doctor`` says what can be driven here, and why the rest cannot.
"""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

from engines.tensorrt_llm.cpu import EMULATED_DEVICE
from engines.tensorrt_llm.executor import CALLS, KEYWORD, POSITIONAL, Options
from engines.tensorrt_llm.loader import Upstream, raised_by_guard
from engines.tensorrt_llm.probe import Verdict, doctor
from engines.tensorrt_llm.session import TensorrtLlmSession
from engines.tensorrt_llm.source import UNGUARDED_VARIABLE, find
from engines.upstream import DRIVEN
from scenarios import BACKENDS, Config, Request, UsageError, closest
from scenarios.acceptance import VARIANTS

__all__ = ["KEYWORD", "POSITIONAL", "TensorrtLlmEngine", "TensorrtLlmSession", "Verdict", "doctor"]


class TensorrtLlmEngine:
    """See ``engines.base.Engine``.

    source     directory of a checkout; default: the environment's, else the installed package
    device     "cuda", or "cpu", on which device arguments and graphs are emulated; default: what this machine has
    unguarded  drive a worker that the base's guard rejects, with the guard off while its class is created; default:
               whether SPECFUZZ_TRTLLM_UNGUARDED is set
    metadata, separate_draft_kv_cache  see ``executor.Options``

    Raises ``UsageError`` when there is nothing to drive.
    """

    name = "tensorrt_llm"

    def __init__(
        self,
        source: str | os.PathLike[str] | None = None,
        device: str | None = None,
        *,
        unguarded: bool | None = None,
        metadata: str = KEYWORD,
        separate_draft_kv_cache: bool = True,
    ) -> None:
        has_cuda = torch.cuda.is_available()
        if device not in (None, "cpu", "cuda"):
            raise UsageError(f"device: {device!r} is not known; write 'cpu' or 'cuda'")
        if device == "cuda" and not has_cuda:
            raise UsageError(f"device: torch {torch.__version__} finds no CUDA device; write 'cpu'")
        if metadata not in CALLS:
            raise UsageError(f"metadata: {metadata!r} is not known; {closest(metadata, CALLS)}")
        if unguarded is None:
            unguarded = bool(os.environ.get(UNGUARDED_VARIABLE))
        emulated = device == "cpu" or not has_cuda
        self.device = EMULATED_DEVICE if emulated else "cuda"
        self.upstream = Upstream(find(source), emulated=emulated, unguarded=unguarded)
        self.backends = tuple(self.upstream.metadata)
        self.plain_caches = True
        self._options = Options(metadata, separate_draft_kv_cache)

    def open(
        self,
        config: Config,
        requests: tuple[Request, ...] = (),
        *,
        observe: bool = True,
        record: Collection[str] = (),
    ) -> TensorrtLlmSession:
        """Start a session; ``UsageError`` when the source has no such worker or it cannot be driven."""
        if config.attention_backend not in self.backends:
            raise UsageError(f"config.attention_backend: {self._no_metadata(config.attention_backend)}")
        for variant in VARIANTS:
            if getattr(config, variant) != getattr(Config, variant):
                raise UsageError(
                    f"config.{variant}: the suite does not drive upstream's classes this way; leave it out"
                )
        if config.worker not in DRIVEN:
            raise UsageError(
                f"config.worker: the suite has no driver for {config.worker}; write one of {', '.join(DRIVEN)}"
            )
        for field in ("use_separate_draft_kv_cache", "kv_cache_manager", "host_offload"):
            if getattr(config, field) != getattr(Config, field):
                raise UsageError(f"config.{field}: upstream's classes are driven over one plain KV cache; leave it out")
        if config.stall_copies:
            raise UsageError("config.stall_copies: upstream's copies do not go through the suite; leave it out")
        if config.pp_size > 1:
            raise UsageError("config.pp_size: upstream's classes are driven on one rank; leave it out")
        worker = self.upstream.load(config.worker)
        if worker is None:
            raise UsageError(f"config.worker: {self._why_not(config.worker)}")
        return TensorrtLlmSession(
            self.upstream, worker, config, requests, observe=observe, record=record, options=self._options
        )

    def _no_metadata(self, backend: str) -> str:
        name, root = BACKENDS[backend].metadata, self.upstream.source.root
        reason = self.upstream.fallbacks.get(name, f"no file of {root} defines it")
        return f"{name} of {backend!r} cannot be driven ({reason}); write {' or '.join(map(repr, self.backends))}"

    def _why_not(self, worker: str) -> str:
        root, error = self.upstream.source.root, self.upstream.rejected.get(worker)
        if error is None:
            return f"no file of {root} defines {worker}; name a worker that `specfuzz doctor` lists"
        if raised_by_guard(error):
            return f"{worker} is rejected by the guard of its base ({error}); set {UNGUARDED_VARIABLE}=1 to drive it so"
        return f"the module of {worker} does not load ({type(error).__name__}: {error}); see `specfuzz doctor`"
