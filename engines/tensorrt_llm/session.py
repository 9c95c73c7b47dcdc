"""Sessions on upstream's classes: stepped, watched and made to fail as those of the portable engine are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from engines.portable.context_observation import DraftContext
from engines.portable.pyexecutor.py_executor import PyExecutor
from engines.portable.session import PortableSession
from engines.tensorrt_llm.cpu import EMULATED_DEVICE
from engines.tensorrt_llm.executor import Options, create_py_executor
from engines.tensorrt_llm.loader import Upstream
from engines.tensorrt_llm.probe import NO_VERIFICATION, capabilities
from engines.tensorrt_llm.worker_state import WorkerContextObserver
from faults import Seam
from scenarios import Config, Request, Step, StepTrace, Trace, UsageError


class TensorrtLlmSession(PortableSession):
    """One worker of upstream living through a scenario; see ``engines.base.Session``.

    attn_metadata  the real, long-lived metadata of eager steps
    worker         the real worker
    features       what its worker class is capable of
    """

    def __init__(
        self,
        upstream: Upstream,
        worker: type,
        config: Config,
        requests: tuple[Request, ...],
        *,
        observe: bool,
        record: Collection[str],
        options: Options,
    ) -> None:
        self._upstream = upstream
        self._worker_class = worker
        self._options = options
        self.features = capabilities(worker, upstream.interface.SpecWorkerBase, upstream.attention.AttentionMetadata)
        if not self.features.acceptance:
            raise UsageError(f"config.worker: {config.worker} cannot be driven, {NO_VERIFICATION}; name another worker")
        device = torch.device("cpu" if upstream.emulated else "cuda")
        upstream.forget()
        with upstream.active():
            super().__init__(config, requests, device, observe=observe, record=record)
        self.worker = self._model.spec_worker

    def step(self, step: Step) -> StepTrace:
        """Execute one iteration; ``UsageError`` for a draft length that this worker's version cannot run."""
        longest = self._config.max_draft_len
        if step.draft_len != longest and not self.features.dynamic_draft_len:
            name = self._config.worker
            raise UsageError(
                f"steps[{len(self._steps)}].draft_len: {name} of this source always drafts max_draft_len tokens; "
                f"write {longest}"
            )
        with self._upstream.active():
            return super().step(step)

    def trace(self) -> Trace:
        """Everything so far; ``classes`` says which files were driven, and what of them is not upstream's."""
        upstream = self._upstream
        module = self._worker_class.__module__
        classes = {
            "forward_defined_in": list(self.features.forward_defined_in),
            "guard_off": self._config.worker in upstream.unguarded,
            "supplements": list(upstream.supplements.get(module, ())),
        }
        device = EMULATED_DEVICE if upstream.emulated else "cuda"
        return Trace("tensorrt_llm", device, tuple(self._steps), classes)

    def _create_executor(self, config: Config, device: torch.device) -> PyExecutor:
        return create_py_executor(self._upstream, self._worker_class, config, device, self._options)

    def _draft_context(self) -> DraftContext | None:
        return WorkerContextObserver(self._model.spec_worker) if self._config.traits.keeps_context else None

    def _kernel_forms(self, device: torch.device) -> str:
        """Torch: while upstream's classes are active, ``triton`` may be a stand-in."""
        return "torch"

    def _watch_copies(self) -> None:
        """Upstream's classes queue copies of their own."""

    def _line_sites(self) -> tuple[list[Path], Path]:
        return [Path(file) for file in self._upstream.files.values()], self._upstream.source.root

    def _seams(self) -> list[Seam]:
        names = {"worker.sample_and_accept_draft_tokens": self.features.acceptance[0]}
        if self._config.traits.tree:
            names["worker.sample_draft_tokens"] = "sample"
        seams = [replace(s, attribute=names[s.site]) if s.site in names else s for s in super()._seams()]
        # Workers from before PR #16382 clean up nothing.
        return [s for s in seams if s.site != "worker.cleanup" or hasattr(s.owner, s.attribute)]
