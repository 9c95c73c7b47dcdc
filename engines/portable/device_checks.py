"""Compares the device with what is expected, at each sub-step and without waiting for it.

A captured graph, too, notes what is there before each draft call, although none of the host's code runs in a replay.
What is expected of a step is uploaded sub-step by sub-step. What is expected of a replay is uploaded in one piece while
the graph runs, and compared behind it.
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
from engines.portable.cache_values import committed, known
from engines.portable.device_values import OUTPUTS, DeviceValues, laid_out
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


@dataclass
class _Graph:
    """What is compared of a graph's replays, but for what is ahead of them.

    actual   int64, device: what the last replay has found inside, at an address that the graph knows
    regions  where which field's values are in it, of which ``size`` are used
    outputs  of the forward that was captured, which are among them
    """

    actual: Tensor
    regions: list[Region] = field(default_factory=list)
    size: int = 0
    outputs: Mapping[str, Tensor] = field(default_factory=dict)


class DeviceChecks:
    """Watches one session as an ``Observer`` does, and gives what differs to ``mismatches``. It has no sub-steps.

    Fields that are not expected are not compared, nor is a failure (``failed``). The run of a graph that its capture
    ends with is compared at its ends only: what lies between them is recorded before it is known.

    With the overlap scheduler what a step leaves in caches is compared when it is launched (``launched``): what runs
    next is behind that on the device. How much of it is committed the host does not know by then, but what is expected
    says. So what is expected of a step must include what follows when it is processed (``updated``), if it is.

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
        self._values = DeviceValues(config, executor, worker)
        self._compared: dict[int, _Graph] = {}
        self._said: dict[tuple[str, int], Mapping[str, Any]] = {}
        self._in_flight: Mapping[str, Any] | None = None
        self._batch = ScheduledRequests()
        self._position_ids: Tensor | None = None
        self._attn: Any = None
        self._spec: Any = None
        self._replays = False
        self._prepared: Mapping[str, Tensor] = {}
        self._ahead: tuple[Tensor, list[Region]] | None = None
        self._begin = 0
        self._run = -1
        self._drafts = 0

    def begin(self, step: Step, batch: ScheduledRequests) -> None:
        """A step is about to start; the driver of the session has called ``Mismatches.begin_step`` for it."""
        self._said = {substep.key: substep.fields for substep in self._expect(step).substeps}
        self._begin, self._run, self._batch = 0, -1, batch
        self._replays = step.phase is Phase.REPLAY

    def substeps(self) -> tuple[Substep, ...]:
        """None: nothing is read."""
        return ()

    def prepared(self, result: Any, args: Any, kwargs: Any) -> None:
        """After the inputs were prepared."""
        self._attn, self._spec = result["attn_metadata"], result["spec_metadata"]
        with _unseen():
            self._values.begin(self._batch)
            if self._replays:
                # Looked at when the replay begins: until then nothing happens on the device.
                self._prepared = self._values.at(PREPARED, self._attn, self._spec, result)
                return
        self._check(PREPARED, result)

    def entered(self, args: Any, kwargs: Any) -> None:
        """Before a forward of the model; that of a capture was entered when the capture began."""
        if not is_current_stream_capturing():
            self._enter(kwargs["position_ids"])

    def capture_begins(self, args: Any, kwargs: Any) -> None:
        """Before a graph is captured: the last moment at which something can be allocated outside of it."""
        self._enter(args[2]["position_ids"])
        with _unseen():
            actual = torch.zeros(self._most_inside(), dtype=torch.int64, device=self._mismatches.device)
        self._compared[id(self._attn)] = _Graph(actual)

    def replay_begins(self, args: Any, kwargs: Any) -> None:
        """Before a graph is replayed, which will write over what is there now."""
        self._run += 1
        with _unseen():
            entered = self._values.at(ENTERED, self._attn, self._spec, None, args[1]["position_ids"])
            tensors, regions = self._ahead_of_replay(entered)
            self._ahead = torch.cat([tensor.flatten() for tensor in tensors]), regions

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
        self._check(RESTORED, result)
        if is_current_stream_capturing():
            self._compared[id(self._attn)].outputs = result

    def captured(self, result: Any, args: Any, kwargs: Any) -> None:
        """After a graph was captured and has run once."""
        self._check(RESTORED, self._graphs[args[0]].outputs)

    def replayed(self, result: Any, args: Any, kwargs: Any) -> None:
        """After a graph was launched. It has noted its own outputs; others would be given out unseen."""
        assert self._ahead is not None
        graph, (ahead, regions) = self._compared[id(self._attn)], self._ahead
        with _unseen():
            uploaded = self._upload(self._expected([*regions, *graph.regions]))
            self._mismatches.add_regions([*regions, *graph.regions])
            self._mismatches.compare(ahead, uploaded[: len(ahead)], self._begin)
            self._mismatches.compare(graph.actual[: graph.size], uploaded[len(ahead) :], _IN_GRAPH)
        self._begin = _BEHIND
        if any(result[name] is not graph.outputs[name] for name in OUTPUTS):
            self._check(RESTORED, result)

    def updated(self, args: Any, kwargs: Any) -> None:
        """Before the requests that are finished end: what the caches hold of all that are active.

        With overlap this may be a step launched before, of which only the pages that are known by now are new.
        """
        said, self._in_flight = self._in_flight, None
        if said is None:
            said = self._said.get((UPDATED, 0), {})
            self._compare_kept(said)
        if self._caches:
            with torch.inference_mode(), _unseen():
                self._compare_all(UPDATED, 0, list(known(self._executor, said)))

    def launched(self) -> None:
        """The step is to be processed with the next one, with overlap."""
        self._in_flight = self._said.get((UPDATED, 0), {})
        self._compare_kept(self._in_flight)

    def failed(self, error: Exception) -> None:
        """After a failure nothing is compared; it took along what was in flight."""
        self._in_flight = None

    def values_inside(self) -> int:
        """Values that one replay of each graph notes inside."""
        return sum(graph.size for graph in self._compared.values())

    def _enter(self, position_ids: Tensor) -> None:
        self._run += 1
        self._drafts = 0
        self._position_ids = position_ids
        self._check(ENTERED, None)

    def _check(self, substep: str, arguments: Any) -> None:
        with _unseen():
            values = self._values.at(substep, self._attn, self._spec, arguments, self._position_ids)
            if is_current_stream_capturing():
                self._record(substep, values)
            else:
                self._compare(substep, values)

    def _compare_kept(self, said: Mapping[str, Any]) -> None:
        """Compare what caches and slots hold of all requests that run."""
        if not self._caches:
            return
        with torch.inference_mode(), _unseen():
            parts: list[tuple[str, Tensor, Sequence[int] | None]] = [*committed(self._config, self._executor, said)]
            parts += [
                (name, tensor, None if rows is None else laid_out(name, rows, tensor.shape))
                for name, tensor, rows in self._values.rows.kept(said)
            ]
            self._compare_all(UPDATED, 0, parts)

    def _compare(self, substep: str, values: Mapping[str, Tensor]) -> None:
        """Compare what is expected now."""
        run = max(self._run, 0)
        said = self._said.get((substep, run), {})
        named = {name: tensor for name, tensor in values.items() if name in said}
        self._compare_all(
            substep, run, [(name, tensor, laid_out(name, said[name], tensor.shape)) for name, tensor in named.items()]
        )

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
            tensors.append(tensor)
        if flat:
            self._launch(tensors, self._upload(flat), regions)

    def _launch(self, tensors: Sequence[Tensor], expected: Tensor, regions: Sequence[Region]) -> None:
        self._mismatches.add_regions(regions)
        self._mismatches.compare(torch.cat([tensor.flatten() for tensor in tensors]), expected, self._begin)
        self._begin += len(expected)

    def _ahead_of_replay(self, entered: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Region]]:
        """What is compared of the time before a replay: as it was prepared, and what else is said of its beginning."""
        said, begun = (self._said.get((substep, 0), {}) for substep in (PREPARED, ENTERED))
        found = [(PREPARED, name, tensor) for name, tensor in self._prepared.items() if name in said]
        found += [
            (ENTERED, name, tensor)
            for name, tensor in entered.items()
            if name in begun and not (name in self._prepared and begun[name] == said.get(name))
        ]
        tensors, regions, begin = [], [], self._begin
        for substep, name, tensor in found:
            tensors.append(tensor)
            regions.append(Region(begin, tensor.shape, substep, 0, name))
            begin += tensor.numel()
        return tensors, regions

    def _expected(self, regions: Sequence[Region]) -> list[int]:
        """What is expected in these places; anything where nothing is, or where it has another form, which is noted."""
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
        """Make it a part of the graph to note these values."""
        inside = self._compared[id(self._attn)]
        begin = inside.size
        for name, tensor in values.items():
            inside.regions.append(Region(_IN_GRAPH + inside.size, tensor.shape, substep, 0, name))
            inside.size += tensor.numel()
        inside.actual[begin : inside.size].copy_(torch.cat([tensor.flatten() for tensor in values.values()]))

    def _upload(self, flat: list[int]) -> Tensor:
        values = torch.frombuffer(array("q", flat), dtype=torch.int64)
        device = self._mismatches.device
        return maybe_pin_memory(values, device).to(device, non_blocking=True)

    def _most_inside(self) -> int:
        """Values that a graph of this batch notes at most."""
        config, attn = self._config, self._attn
        width = config.tokens_per_gen_step(config.max_draft_len)
        nodes = max(width, config.max_draft_len * config.dynamic_tree_max_topK)
        of_token = 6 + config.index_topk
        of_row = 14 + 3 * (1 + config.max_draft_len) + nodes * (4 + nodes // 32)
        return (config.max_draft_len + 4) * attn.num_seqs * (nodes * of_token + of_row)


@contextmanager
def _unseen() -> Iterator[None]:
    """Out of sight of torch function modes: what compares is no part of the engine."""
    with torch._C.DisableTorchFunction():
        yield
