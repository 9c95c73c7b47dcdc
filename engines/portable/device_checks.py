"""Compares the device with what is expected, at each sub-step and without waiting for it.

In a captured graph kernels compare too: what a replay finds before each draft call is held to what is expected there,
though none of the host's code runs. What is expected of a step is uploaded once per sub-step, for the inside of a
graph once per replay, to a buffer whose address the graph knows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from engines.portable._utils import is_current_stream_capturing, maybe_pin_memory
from engines.portable.cache_values import committed
from engines.portable.device_values import DeviceValues, laid_out
from engines.portable.mismatches import ANYTHING, Mismatches, Region
from engines.portable.pyexecutor.llm_request import ScheduledRequests
from engines.portable.pyexecutor.py_executor import PyExecutor
from scenarios import Config, Step, StepTrace, Substep
from scenarios.trace import ENTERED, PREPARED, RESTORED, SAVED, UPDATED, VERIFIED, draft

Expect = Callable[[Step], StepTrace]
"""What a step is expected to show, replays included: asked once per step, in order."""

_IN_GRAPH: Final = 1 << 23
"""Places from here on are those inside a graph; the ends of its forward are before and behind them."""
_BEHIND: Final = 2 * _IN_GRAPH


@dataclass
class _Inside:
    """What is compared inside a graph: a buffer for what is expected, and where which field's is in it."""

    expected: Tensor
    regions: list[Region] = field(default_factory=list)
    size: int = 0


class DeviceChecks:
    """Watches one session as an ``Observer`` does, and gives what differs to ``mismatches``. It has no sub-steps.

    Fields that are not expected are not compared, nor is a failure (``failed``). The run of a graph that its capture
    ends with is compared at its ends only: what lies between them is recorded before it is known.

    caches  whether what the KV caches hold is compared after each step, too
    """

    def __init__(
        self,
        config: Config,
        executor: PyExecutor,
        worker: Any,
        *,
        expect: Expect,
        mismatches: Mismatches,
        caches: bool,
    ) -> None:
        self._config = config
        self._executor = executor
        self._caches = caches
        self._graphs = executor.model_engine.cuda_graph_runner.graphs
        self._expect = expect
        self._mismatches = mismatches
        self._values = DeviceValues(config, executor.spec_resource_manager, worker)
        self._inside: dict[int, _Inside] = {}
        self._said: dict[tuple[str, int], Mapping[str, Any]] = {}
        self._attn: Any = None
        self._spec: Any = None
        self._begin = 0
        self._run = -1
        self._drafts = 0

    def begin(self, step: Step, batch: ScheduledRequests) -> None:
        """A step is about to start; whoever drives the session has told ``mismatches`` which."""
        self._said = {substep.key: substep.fields for substep in self._expect(step).substeps}
        self._begin, self._run = 0, -1

    def substeps(self) -> tuple[Substep, ...]:
        """None: nothing is read."""
        return ()

    def prepared(self, result: Any, args: Any, kwargs: Any) -> None:
        """After the inputs were prepared."""
        self._attn, self._spec = result["attn_metadata"], result["spec_metadata"]
        self._check(PREPARED, result)

    def entered(self, args: Any, kwargs: Any) -> None:
        """Before a forward of the model; that of a capture was entered when the capture began."""
        if not is_current_stream_capturing():
            self._enter()

    def capture_begins(self, args: Any, kwargs: Any) -> None:
        """Before a graph is captured: the last moment at which something can be allocated outside of it."""
        self._enter()
        with _unseen():
            expected = torch.full((self._most_inside(),), ANYTHING, dtype=torch.int64, device=self._mismatches.device)
        self._inside[id(self._attn)] = _Inside(expected)

    def replay_begins(self, args: Any, kwargs: Any) -> None:
        """Before a graph is replayed."""
        self._enter()
        inside = self._inside[id(self._attn)]
        flat: list[int] = []
        for region in inside.regions:
            said = self._said.get((region.substep, 0), {})
            anything = [ANYTHING] * prod(region.shape)
            expected = laid_out(region.field, said[region.field], region.shape) if region.field in said else anything
            if expected is None:
                self._mismatches.misfit(region.substep, 0, region.field)
            flat += expected or anything
        if flat:
            with _unseen():
                inside.expected[: inside.size].copy_(self._uploadable(flat), non_blocking=True)
        self._mismatches.add_regions(inside.regions)
        self._begin = _BEHIND

    def verified(self, result: Any, args: Any, kwargs: Any) -> None:
        """After the worker accepted drafts."""
        self._check(VERIFIED, result)

    def saved(self, result: Any, args: Any, kwargs: Any) -> None:
        """After ``prepare_for_spec_dec``."""
        self._check(SAVED, None)

    def drafting(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Before a call of the draft model."""
        self._check(draft(self._drafts), kwargs)
        self._drafts += 1

    def worker_returned(self, result: Any, args: Any, kwargs: Any) -> None:
        """After the worker's forward."""
        if not is_current_stream_capturing():
            self._check(RESTORED, result)

    def captured(self, result: Any, args: Any, kwargs: Any) -> None:
        """After a graph was captured and has run once."""
        self._check(RESTORED, self._graphs[args[0]].outputs)

    def replayed(self, result: Any, args: Any, kwargs: Any) -> None:
        """After a graph was replayed."""
        self._check(RESTORED, result)

    def updated(self, args: Any, kwargs: Any) -> None:
        """Before the requests that are finished end: what the caches hold of all that are active."""
        said = self._said.get((UPDATED, 0), {})
        with torch.inference_mode(), _unseen():
            parts = list(committed(self._config, self._executor, said)) if self._caches else []
            self._compare_all(UPDATED, 0, parts)

    def failed(self, error: Exception) -> None:
        """After a failure nothing is compared."""

    def values_inside(self) -> int:
        """Values that one replay of each graph compares between the ends of its forward."""
        return sum(inside.size for inside in self._inside.values())

    def _enter(self) -> None:
        self._run += 1
        self._drafts = 0
        self._check(ENTERED, None)

    def _check(self, substep: str, arguments: Any) -> None:
        with _unseen():
            values = self._values.at(substep, self._attn, self._spec, arguments)
            if is_current_stream_capturing():
                self._record(substep, values)
            else:
                self._compare(substep, values)

    def _compare(self, substep: str, values: Mapping[str, Tensor]) -> None:
        """Compare what is expected now."""
        run = max(self._run, 0)
        said = self._said.get((substep, run), {})
        parts = [(name, v, laid_out(name, said[name], v.shape)) for name, v in values.items() if name in said]
        self._compare_all(substep, run, parts)

    def _compare_all(self, substep: str, run: int, parts: Sequence[tuple[str, Tensor, Sequence[int] | None]]) -> None:
        """Compare fields with what is expected of each; None where that has another form."""
        flat: list[int] = []
        regions, tensors = [], []
        for name, tensor, expected in parts:
            if expected is None:
                self._mismatches.misfit(substep, run, name)
                continue
            regions.append(Region(self._begin + len(flat), tensor.shape, substep, run, name))
            flat += expected
            tensors.append(tensor.flatten())
        if flat:
            uploaded = self._uploadable(flat).to(self._mismatches.device, non_blocking=True)
            self._mismatches.add_regions(regions)
            self._mismatches.compare(torch.cat(tensors), uploaded, self._begin)
            self._begin += len(flat)

    def _record(self, substep: str, values: Mapping[str, Tensor]) -> None:
        """Make comparing a part of the graph, with whatever is expected when it is replayed."""
        inside = self._inside[id(self._attn)]
        begin = inside.size
        for name, tensor in values.items():
            inside.regions.append(Region(_IN_GRAPH + inside.size, tensor.shape, substep, 0, name))
            inside.size += tensor.numel()
        actual = torch.cat([tensor.flatten() for tensor in values.values()])
        self._mismatches.compare(actual, inside.expected[begin : inside.size], _IN_GRAPH + begin)

    def _uploadable(self, flat: list[int]) -> Tensor:
        values = torch.frombuffer(array("q", flat), dtype=torch.int64)
        return maybe_pin_memory(values, self._mismatches.device)

    def _most_inside(self) -> int:
        """Values that a graph of this batch compares at most."""
        config, attn = self._config, self._attn
        width = config.tokens_per_gen_step(config.max_draft_len)
        nodes = max(width, config.max_draft_len * config.dynamic_tree_max_topK)
        of_token = 6 + config.index_topk
        of_row = 12 + 2 * (1 + config.max_draft_len) + nodes * (3 + nodes // 32)
        return (config.max_draft_len + 3) * attn.num_seqs * (nodes * of_token + of_row)


@contextmanager
def _unseen() -> Iterator[None]:
    """Out of sight of torch function modes: what compares is no part of the engine."""
    with torch._C.DisableTorchFunction():
        yield
