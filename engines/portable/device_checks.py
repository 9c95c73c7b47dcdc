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
from scenarios import Config, Phase, Step, StepTrace, Substep
from scenarios.trace import ENTERED, PREPARED, RESTORED, SAVED, UPDATED, VERIFIED, draft

Expect = Callable[[Step], StepTrace]
"""What a step is expected to show, replays included: asked once per step, in order."""

_IN_GRAPH: Final = 1 << 23
"""Places from here on are those inside a graph; the ends of its forward are before and behind them."""
_BEHIND: Final = 2 * _IN_GRAPH
_INSIDE: Final = "inside"
"""All sub-steps inside a graph, where sub-steps are named."""


@dataclass
class _Graph:
    """What is compared of a graph's replays: inside, over a buffer for what is expected, and at the ends.

    regions  where which field's values are in the buffer, of which ``size`` are used
    ends     what was compared at each sub-step outside of the graph in the last replay
    """

    expected: Tensor
    regions: list[Region] = field(default_factory=list)
    size: int = 0
    ends: dict[str, list[Region]] = field(default_factory=dict)


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
        self._compared: dict[int, _Graph] = {}
        self._said: dict[tuple[str, int], Mapping[str, Any]] = {}
        self._attn: Any = None
        self._spec: Any = None
        self._replays = False
        self._uploaded: dict[str, Tensor] = {}
        self._begin = 0
        self._run = -1
        self._drafts = 0

    def begin(self, step: Step, batch: ScheduledRequests) -> None:
        """A step is about to start; whoever drives the session has told ``mismatches`` which."""
        self._said = {substep.key: substep.fields for substep in self._expect(step).substeps}
        self._begin, self._run = 0, -1
        self._replays = step.phase is Phase.REPLAY
        self._uploaded = {}

    def substeps(self) -> tuple[Substep, ...]:
        """None: nothing is read."""
        return ()

    def prepared(self, result: Any, args: Any, kwargs: Any) -> None:
        """After the inputs were prepared."""
        self._attn, self._spec = result["attn_metadata"], result["spec_metadata"]
        if self._replays:
            self._foresee(self._compared[id(self._attn)])
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
        self._compared[id(self._attn)] = _Graph(expected)

    def replay_begins(self, args: Any, kwargs: Any) -> None:
        """Before a graph is replayed."""
        self._enter()
        graph = self._compared[id(self._attn)]
        if graph.size:
            with _unseen():
                uploaded = self._uploaded.get(_INSIDE)
                expected = self._upload(self._expected(graph.regions)) if uploaded is None else uploaded
                graph.expected[: graph.size].copy_(expected)
        self._mismatches.add_regions(graph.regions)
        self._begin = _BEHIND

    def verified(self, result: Any, args: Any, kwargs: Any) -> None:
        """After the worker accepted drafts."""
        self._check(VERIFIED, result)

    def promoting(self, args: Any, kwargs: Any) -> None:
        """Before recurrent states become live: nothing that is compared has changed since ``verified``."""

    def cleaning_up(self, args: Any, kwargs: Any) -> None:
        """Before the worker cleans up after its forward: what it has yet to put back is on the host."""

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
        return sum(graph.size for graph in self._compared.values())

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
        named = {name: tensor for name, tensor in values.items() if name in said}
        uploaded = self._uploaded.get(substep)
        if uploaded is not None:
            regions = self._compared[id(self._attn)].ends[substep]
            same = [(name, tensor.shape) for name, tensor in named.items()] == [(r.field, r.shape) for r in regions]
            if same and regions[0].begin == self._begin:
                self._launch(list(named.values()), uploaded, regions)
                return
        regions = self._compare_all(
            substep, run, [(name, tensor, laid_out(name, said[name], tensor.shape)) for name, tensor in named.items()]
        )
        if self._replays:
            self._compared[id(self._attn)].ends[substep] = regions

    def _compare_all(
        self, substep: str, run: int, parts: Sequence[tuple[str, Tensor, Sequence[int] | None]]
    ) -> list[Region]:
        """Compare fields with what is expected of each; None where that has another form."""
        flat: list[int] = []
        regions, tensors = [], []
        for name, tensor, expected in parts:
            if expected is None:
                self._mismatches.misfit(substep, run, name)
                continue
            regions.append(Region(self._begin + len(flat), tensor.shape, substep, run, name))
            flat += expected
            tensors.append(tensor)
        if flat:
            self._launch(tensors, self._upload(flat), regions)
        return regions

    def _launch(self, tensors: Sequence[Tensor], expected: Tensor, regions: Sequence[Region]) -> None:
        self._mismatches.add_regions(regions)
        self._mismatches.compare(torch.cat([tensor.flatten() for tensor in tensors]), expected, self._begin)
        self._begin += len(expected)

    def _foresee(self, graph: _Graph) -> None:
        """Upload what is expected of a replay in one piece, if it has the form of the replay before it."""
        if graph.ends.keys() != {PREPARED, ENTERED, RESTORED}:
            return
        flat: list[int] = []
        spans = {}
        for substep, regions in (*graph.ends.items(), (_INSIDE, graph.regions)):
            begin = len(flat)
            for region in regions:
                said = self._said.get((region.substep, 0), {})
                if region.field not in said:
                    if substep != _INSIDE:
                        return
                    flat += [ANYTHING] * prod(region.shape)
                    continue
                expected = laid_out(region.field, said[region.field], region.shape)
                if expected is None:
                    return
                flat += expected
            spans[substep] = slice(begin, len(flat))
        with _unseen():
            uploaded = self._upload(flat)
        self._uploaded = {substep: uploaded[span] for substep, span in spans.items()}

    def _expected(self, regions: Sequence[Region]) -> list[int]:
        """What is expected inside a graph; anything where nothing is, or where it has another form, which is noted."""
        flat: list[int] = []
        for region in regions:
            anything = [ANYTHING] * prod(region.shape)
            said = self._said.get((region.substep, 0), {})
            expected = laid_out(region.field, said[region.field], region.shape) if region.field in said else anything
            if expected is None:
                self._mismatches.misfit(region.substep, 0, region.field)
            flat += expected or anything
        return flat

    def _record(self, substep: str, values: Mapping[str, Tensor]) -> None:
        """Make comparing a part of the graph, with whatever is expected when it is replayed."""
        inside = self._compared[id(self._attn)]
        begin = inside.size
        for name, tensor in values.items():
            inside.regions.append(Region(_IN_GRAPH + inside.size, tensor.shape, substep, 0, name))
            inside.size += tensor.numel()
        actual = torch.cat([tensor.flatten() for tensor in values.values()])
        self._mismatches.compare(actual, inside.expected[begin : inside.size], _IN_GRAPH + begin)

    def _upload(self, flat: list[int]) -> Tensor:
        values = torch.frombuffer(array("q", flat), dtype=torch.int64)
        device = self._mismatches.device
        return maybe_pin_memory(values, device).to(device, non_blocking=True)

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
