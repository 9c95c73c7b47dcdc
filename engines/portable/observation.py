"""Reads the engine's objects at the sub-steps of a step. Called by listeners of seams; the engine knows none of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

from torch import Tensor

from engines.portable import cache_observation, compressed_observation
from engines.portable._utils import is_current_stream_capturing
from engines.portable.attention.backends.interface import AttentionMetadata
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from engines.portable.cache_observation import CacheObserver, Committed
from engines.portable.compressed_observation import CompressedObserver
from engines.portable.context_observation import DraftContext
from engines.portable.copies import HostCopies
from engines.portable.layout_observation import planned_widths, prepared_lens, published_widths
from engines.portable.ownership_observation import held_for_nobody
from engines.portable.page_observation import device_page_fields, host_page_fields
from engines.portable.pyexecutor.llm_request import ScheduledRequests
from engines.portable.pyexecutor.py_executor import PyExecutor, is_cuda_error
from engines.portable.reuse_observation import reusable_fields
from engines.portable.row_observation import RowObserver
from engines.portable.sparse_observation import DEVICE_TENSORS, SparseObserver
from engines.portable.spec_observation import (
    collectives,
    enhancer_buffers,
    enhancer_fields,
    force_accept_counter,
    matcher_rows,
    matchers,
    prepared_fields,
    relaxed_deltas,
    relaxed_deltas_left,
    slot_fields,
    spec_fields,
)
from engines.portable.speculative.spec_tree_manager import SpecTreeManager
from engines.portable.tree_observation import TreeObserver, linear_fields
from faults import is_injected, raised_at
from scenarios import BACKENDS, Config, Phase, Step, Substep
from scenarios.trace import ENTERED, FAILED, PREPARED, RESTORED, SAVED, UNREADABLE, UPDATED, VERIFIED, draft

Fields = dict[str, Any]

_IDENTITY = ("_seq_lens", "_seq_lens_cuda", "kv_lens_cuda", "host_request_types", *cache_observation.IDENTITY)
_WORKER_STATE = ("_spec_dec_attn_metadata", "_kv_rewind_pending", "_ctx_len_restore_pending")
"""Worker attributes that say whether something is still to be put back."""

_PREVIOUS: Final = ("previous_kv_lens_offsets_cuda", "previous_pos_id_offsets_cuda")
"""Buffers of the overlap scheduler whose addresses are part of graphs."""

_PLAIN: Final = (type(None), bool, int, str, tuple)
"""Values, which objects share without having anything in common."""


class Labels:
    """Names objects: the same object has the same label for as long as it lives."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Any], str]] = {}
        self._count = 0

    def __call__(self, value: Any) -> str:
        """Its label; one that nobody else has had where it is new."""
        known = self._known.get(id(value))
        if known is None or known[0]() is not value:
            self._count += 1
            known = self._known[id(value)] = ref(value), f"tensor-{self._count}"
        return known[1]


def _sparse_observer(config: Config, executor: PyExecutor) -> tuple[SparseObserver | None, tuple[str, ...]]:
    """Who reads what a sparse backend has beside a dense one, and its tensors whose identity matters."""
    backend, managers = BACKENDS[config.attention_backend], executor.kv_cache_managers
    if backend.compressed:
        return CompressedObserver(managers), compressed_observation.DEVICE_TENSORS
    if backend.sparse:
        return SparseObserver(managers), DEVICE_TENSORS
    return None, ()


def _cut(rows: Tensor, lens: Iterable[int]) -> list[list[int]]:
    return [row[:n] for row, n in zip(rows.tolist(), lens)]


@dataclass(frozen=True)
class _InFlight:
    """With overlap: what is to be said of a step once it is processed, and what its forward left in the pools."""

    batch: ScheduledRequests
    phase: str
    content: Fields


class Observer:
    """Collects the sub-steps of one step after the other.

    With the overlap scheduler the last sub-step of a step is only seen during the next one: ``take_landed`` has it.

    While a CUDA graph is being captured nothing on the device can be read, and what is recorded has not run yet:
    device fields of that forward are read at its start and once the graph has run.

    ``context`` reads what a drafter with a context of its own keeps; ``copies`` watches copies to the device.
    """

    def __init__(
        self,
        config: Config,
        executor: PyExecutor,
        worker: Any,
        context: DraftContext | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._on_cuda = executor.kv_cache_manager.device.type == "cuda"
        self._caches = CacheObserver(config, executor)
        self._worker = worker
        self._label = Labels()
        self._sparse, sparse_tensors = _sparse_observer(config, executor)
        self._context = context
        self.copies = copies
        self._rows = RowObserver(config, executor)
        self._objects = (*_IDENTITY, *sparse_tensors)
        trees = executor.spec_resource_manager
        self._tree = TreeObserver(trees) if isinstance(trees, SpecTreeManager) else None
        self._substeps: list[Substep] = []
        self._batch = ScheduledRequests()
        self._phase = Phase.EAGER
        self._run = 0
        self._drafts = 0
        self._attn_metadata: Any = None
        self._spec_metadata: Any = None
        self._position_ids: Any = None
        self._in_flight: _InFlight | None = None
        self._landed: Substep | None = None
        self._graph_key: list[int] | None = None
        self._left_open: list[str] = []

    def begin(self, step: Step, batch: ScheduledRequests) -> None:
        """A step is about to start."""
        self._batch, self._phase = batch, step.phase
        self._substeps, self._run, self._attn_metadata, self._graph_key = [], -1, None, None

    def substeps(self) -> tuple[Substep, ...]:
        """Sub-steps of the step so far."""
        return tuple(self._substeps)

    def launched(self, batch: ScheduledRequests, committed: Sequence[Committed]) -> None:
        """A step has been launched that is to be processed with the next: remember what its forward left."""
        self._in_flight = _InFlight(batch, self._phase_of(0), self._content(committed))

    def take_landed(self) -> Substep | None:
        """The last sub-step of the step that was in flight, once."""
        landed, self._landed = self._landed, None
        return landed

    def prepared(self, result: Any, args: Any, kwargs: Any) -> None:
        """After the inputs were prepared."""
        attn, spec = result["attn_metadata"], result["spec_metadata"]
        self._attn_metadata, self._spec_metadata = attn, spec
        n = attn.num_seqs
        self._rows.begin(self._batch)
        caches = self._caches.begin(self._batch.all_requests())
        if self._sparse is not None:
            self._sparse.begin(self._batch.all_requests(), attn.kv_lens_runtime.tolist())
        fields = self._forward_metadata(attn)
        fields.update(
            **prepared_lens(attn),
            **planned_widths(attn),
            **published_widths(attn),
            request_ids=[None if r.is_dummy else r.py_request_id for r in self._batch.all_requests()],
            gather_ids=spec.gather_ids.tolist(),
            draft_tokens=spec.draft_tokens.tolist(),
            runtime_draft_len=spec.runtime_draft_len,
            runtime_tokens_per_gen_step=spec.runtime_tokens_per_gen_step,
            input_ids=result["input_ids"].tolist(),
            position_ids=result["position_ids"].flatten().tolist(),
            **prepared_fields(spec, n),
            **caches,
            **self._caches.tables(attn),
            **self._previous(),
            **self._rows.slots(attn, spec),
        )
        if self._sparse is not None:
            fields.update(self._sparse.prepared_fields(attn), **self._sparse.full_fields(attn))
        fields.update(self._chain_fields())
        self._add(PREPARED, fields)

    def entered(self, args: Any, kwargs: Any) -> None:
        """Before a forward of the model; that of a capture was entered when the capture began."""
        if not is_current_stream_capturing():
            self._enter(kwargs["position_ids"])

    def capture_begins(self, args: Any, kwargs: Any) -> None:
        """Before a graph is captured: the last moment at which a device could be read."""
        self._graph_key = list(args[0])
        self._enter(args[2]["position_ids"])

    def replay_begins(self, args: Any, kwargs: Any) -> None:
        """Before a graph is replayed."""
        self._graph_key = list(args[0])
        given = args[1]["position_ids"]
        self._enter(given)
        static = self._executor.model_engine.cuda_graph_runner.static_inputs["position_ids"]
        self._position_ids = static[..., : given.shape[-1]]

    def verified(self, result: Any, args: Any, kwargs: Any) -> None:
        """After the worker accepted drafts."""
        fields = self._metadata(self._attn_metadata)
        if not self._cuda_capture():
            accepted, counts = result[0], result[1].tolist()
            fields.update(num_accepted_tokens=counts, accepted_tokens=_cut(accepted, counts), **self._matchers())
            fields.update(self._rows.verified(self._attn_metadata, self._spec_metadata))
        self._add(VERIFIED, fields)

    def promoting(self, args: Any, kwargs: Any) -> None:
        """Before recurrent states become live."""
        self._rows.promotions += 1

    def saved(self, result: Any, args: Any, kwargs: Any) -> None:
        """After ``prepare_for_spec_dec``."""
        self._add(SAVED, self._metadata(self._attn_metadata))

    def drafting(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Before a call of the draft model."""
        # A view of it, where drafters have one.
        attn = kwargs.get("attn_metadata", self._attn_metadata)
        fields = self._forward_metadata(attn, of_target=False)
        if not self._cuda_capture():
            fields.update(self._draft_inputs(kwargs), **self._matchers())
            fields.update(self._caches.tables(attn, drafting=True))
            if self._sparse is not None:
                fields.update(self._sparse.full_fields(attn))
        if "all_rank_num_tokens" in kwargs:
            fields["draft_all_rank_num_tokens"] = kwargs["all_rank_num_tokens"]
        self._add(draft(self._drafts), fields)
        self._drafts += 1

    def _draft_inputs(self, kwargs: Mapping[str, Any]) -> Fields:
        if self._context is not None:
            return self._context.draft_inputs(kwargs)
        fields = {"input_ids": kwargs["input_ids"].tolist(), "position_ids": kwargs["position_ids"].tolist()}
        if "hidden_states" in kwargs:
            fields["hidden_states"] = kwargs["hidden_states"][:, 0].tolist()
        if "recurrent_hidden_states" in kwargs:
            fields["hidden_states"] = kwargs["recurrent_hidden_states"].tolist()
        return fields

    def cleaning_up(self, args: Any, kwargs: Any) -> None:
        """Before the worker cleans up after its forward, which has nothing to do if that succeeded."""
        open_states = [name for name in _WORKER_STATE if getattr(self._worker, name, None)]
        self._left_open = [*open_states, *self._attn_metadata._saved_tensors]

    def worker_returned(self, result: Any, args: Any, kwargs: Any) -> None:
        """After the worker's forward."""
        if not self._cuda_capture():
            self._restored(result)

    def captured(self, result: Any, args: Any, kwargs: Any) -> None:
        """After a graph was captured and has run once."""
        if self._on_cuda:
            self._restored(self._executor.model_engine.cuda_graph_runner.graphs[args[0]].outputs)

    def replayed(self, result: Any, args: Any, kwargs: Any) -> None:
        """After a graph was replayed."""
        self._restored(result)

    def updated(self, args: Any, kwargs: Any) -> None:
        """Before the requests that are finished end."""
        requests, flight = self._executor.active_requests, self._in_flight
        batch = self._batch if flight is None else flight.batch
        generations = [r for r in batch.generation_requests if not (r.is_dummy or r.is_finished)]
        fields = self._caches.ledger()
        fields.update(
            emitted={i: list(r.generated) for i, r in requests.items()},
            py_rewind_len={r.py_request_id: r.py_rewind_len for r in generations},
            py_num_accepted_draft_tokens={r.py_request_id: r.py_num_accepted_draft_tokens for r in generations},
            **self._caches.connector(),
            **reusable_fields(self._executor),
            **(self._content(requests.values()) if flight is None else flight.content),
            **slot_fields(self._executor.spec_resource_manager),
            **relaxed_deltas_left(self._executor.spec_resource_manager),
            **self._rows.taken(),
            **self._rows.left(),
            **self._racing_copies(),
            held_for_nobody=held_for_nobody(self._executor),
        )
        if flight is None:
            self._add(UPDATED, fields, run=0)
        else:
            self._landed, self._in_flight = Substep(UPDATED, 0, flight.phase, fields), None

    def failed(self, error: Exception) -> None:
        """After the executor has handled a failure, which took along what was in flight.

        Of a device that is lost nothing is read.
        """
        self._in_flight = None
        fields: Fields = {}
        lost = self._on_cuda and is_cuda_error(error) and not is_injected(error)
        if self._attn_metadata is not None:
            fields = self._metadata(self._attn_metadata, device=not lost)
            if not lost:
                fields.update(self._context_lengths(), **self._tree_fields(), **self._counter(), **self._tables())
                fields.update(self._rows.slots(self._attn_metadata, self._spec_metadata))
        fields.update(slot_fields(self._executor.spec_resource_manager), **self._caches.ledger(), **self._rows.taken())
        if not lost:
            fields.update(self._rows.left())
            fields.update(
                **matchers(self._executor.guided_decoder),
                **relaxed_deltas_left(self._executor.spec_resource_manager),
                **reusable_fields(self._executor),
            )
        fields.update(self._racing_copies(), held_for_nobody=held_for_nobody(self._executor))
        fields.update(exception=type(error).__name__, message=str(error), raised_at=raised_at(error))
        self._add(FAILED, fields, run=0)

    def unreadable(self, where: str, error: Exception) -> None:
        """What was to be read at ``where`` could not be."""
        self._add(UNREADABLE, {"exception": type(error).__name__, "message": f"{where}: {error}"})

    def _cuda_capture(self) -> bool:
        return self._on_cuda and is_current_stream_capturing()

    def _enter(self, position_ids: Tensor) -> None:
        self._run += 1
        self._drafts = 0
        self._position_ids = position_ids
        fields = {
            **self._forward_metadata(self._attn_metadata),
            **self._context_lengths(),
            **self._chain_fields(),
            **self._counter(),
            **self._positions(),
            **self._rows.slots(self._attn_metadata, self._spec_metadata),
            **self._rows.entered(self._attn_metadata),
            **published_widths(self._attn_metadata),
        }
        # Upstream's copies share what they save in, which a leak alone turns into a fault.
        if self._attn_metadata.is_cuda_graph and isinstance(self._attn_metadata, AttentionMetadata):
            fields["shared_with_eager"] = self._shared_with_eager()
        self._add(ENTERED, {**fields, **self._matchers()})

    def _restored(self, outputs: Mapping[str, Tensor]) -> None:
        fields = {**self._metadata(self._attn_metadata), **self._context_lengths(), **self._tree_fields()}
        fields.update({**self._chain_fields(), **self._counter(), **self._tables(), **self._matchers()})
        fields.update(self._positions())
        lens = outputs["new_tokens_lens"].tolist()
        state = {name: getattr(self._worker, name, None) for name in _WORKER_STATE}
        fields.update(
            new_tokens=_cut(outputs["new_tokens"], lens),
            new_tokens_lens=lens,
            next_draft_tokens=outputs["next_draft_tokens"].tolist(),
            next_new_tokens=outputs["next_new_tokens"].tolist(),
            worker_state={name: bool(value) for name, value in state.items()},
            **enhancer_fields(self._worker, self._spec_metadata),
            **self._rows.slots(self._attn_metadata, self._spec_metadata),
            **self._rows.restored(self._attn_metadata, self._spec_metadata, replay=self._phase is Phase.REPLAY),
            **self._racing_copies(),
        )
        if self._phase is not Phase.REPLAY:
            fields["left_open"] = self._left_open
        self._add(RESTORED, fields)

    def _forward_metadata(self, attn: Any, *, of_target: bool = True) -> Fields:
        """The metadata where a forward of the target or of the drafter is about to read it."""
        fields = self._metadata(attn)
        if not self._cuda_capture():
            fields.update(device_page_fields(attn))
        if self._sparse is not None:
            fields.update(self._sparse.host_fields(attn))
            if not self._cuda_capture():
                fields.update(self._sparse.device_fields(attn))
                fields.update(self._sparse.expanded_fields(attn, of_target=of_target))
                if of_target or not self._drafts:
                    fields.update(self._sparse.verify_row_fields(attn))
        return fields | self._tree_fields()

    def _tables(self) -> Fields:
        """What names pages, once a forward has ended: of the target again."""
        fields = self._caches.tables(self._attn_metadata)
        return fields if self._sparse is None else fields | self._sparse.tables(self._attn_metadata)

    def _content(self, requests: Iterable[Committed]) -> Fields:
        """What caches and the worker keep of these requests, and what the ranks have told each other for the step."""
        requests = list(requests)
        ids = [request.py_request_id for request in requests]
        kept = self._executor.spec_resource_manager
        fields = {**self._caches.content(requests), **spec_fields(kept, ids), **relaxed_deltas(kept, ids)}
        fields.update(matchers(self._executor.guided_decoder))
        if self._context is not None:
            fields.update(self._context.content(requests))
        fields.update(self._rows.content(ids), **collectives(self._executor.model_engine.dist, self._graph_key))
        if self._tree is not None:
            fields["draft_tree"] = self._tree.draft_trees(requests)
        return fields

    def _racing_copies(self) -> Fields:
        return {} if self.copies is None else {"racing_copies": self.copies.take_racing()}

    def _previous(self) -> Fields:
        """What the device is told of the step in flight, of each generation and each of its rows."""
        overlap, attn = self._executor.model_engine.overlap, self._attn_metadata
        if overlap is None:
            return {}
        gens, rows = attn.num_generations, attn.num_tokens - attn.num_ctx_tokens
        return {
            "previous_batch_indices": overlap.previous_batch_indices_cuda[:gens].tolist(),
            "previous_kv_lens_offsets_cuda": overlap.previous_kv_lens_offsets_cuda[:gens].tolist(),
            "previous_pos_id_offsets_cuda": overlap.previous_pos_id_offsets_cuda[:rows].tolist(),
        }

    def _positions(self) -> Fields:
        """Positions that the target reads; without overlap they are those that were prepared."""
        if not self._config.overlap or self._cuda_capture():
            return {}
        return {"position_ids": self._position_ids.flatten().tolist()}

    def _context_lengths(self) -> Fields:
        if self._context is None or self._cuda_capture():
            return {}
        return self._context.lengths(self._attn_metadata, self._spec_metadata)

    def _counter(self) -> Fields:
        return {} if self._cuda_capture() else force_accept_counter(self._worker)

    def _matchers(self) -> Fields:
        return {} if self._cuda_capture() else matcher_rows(self._executor.guided_decoder, self._batch.all_requests())

    def _tree_fields(self) -> Fields:
        if self._tree is None or self._cuda_capture():
            return {}
        return self._tree.device_fields(self._attn_metadata)

    def _chain_fields(self) -> Fields:
        """What the kernels are told of drafts that are chains."""
        attn = self._attn_metadata
        drafts = self._tree is None and attn.num_generations > 0 and self._spec_metadata.runtime_draft_len > 0
        # Of this engine's metadata alone: what upstream's has in its place is not looked into.
        if not drafts or not isinstance(attn, TrtllmAttentionMetadata) or self._cuda_capture():
            return {}
        return linear_fields(attn)

    def _shared_with_eager(self) -> list[str]:
        """Which objects the metadata of a graph has in common with the one that it was copied from."""
        eager = vars(self._executor.model_engine.attn_metadata)
        shared = {name: value for name, value in vars(self._attn_metadata).items() if value is eager.get(name)}
        # A callable is the wrapper of a seam.
        return sorted(n for n, value in shared.items() if not isinstance(value, _PLAIN) and not callable(value))

    def _metadata(self, attn: Any, device: bool = True) -> Fields:
        n = attn.num_seqs
        fields: Fields = {
            "num_contexts": attn.num_contexts,
            "num_generations": attn.num_generations,
            "num_ctx_tokens": attn.num_ctx_tokens,
            "num_tokens": attn.num_tokens,
            "_seq_lens": attn._seq_lens.tolist(),
            "use_spec_decoding": attn.use_spec_decoding,
            "all_rank_num_tokens": attn.all_rank_num_tokens,
            "_saved_tensors": list(attn._saved_tensors),
            # A version of upstream may lack one of them, or compute it.
            "identity": {name: self._label(tensor) for name, tensor in self._tensors(attn).items()},
            **self._caches.referred(attn),
            **host_page_fields(attn),
        }
        if hasattr(attn, "host_request_types"):
            fields["host_request_types"] = attn.host_request_types.tolist()[:n]
        if device and not self._cuda_capture():
            fields["_seq_lens_cuda"] = attn._seq_lens_cuda.tolist()
            if hasattr(attn, "kv_lens_cuda"):
                fields["kv_lens_cuda"] = attn.kv_lens_cuda.tolist()[:n]
        return fields

    def _tensors(self, attn: Any) -> dict[str, Tensor]:
        """Tensors whose identity matters, by name."""
        namespace = vars(attn)
        held = {name: namespace[name] for name in self._objects if namespace.get(name) is not None}
        if self._config.overlap:
            held |= {name: vars(self._executor.model_engine.overlap)[name] for name in _PREVIOUS}
        return held | enhancer_buffers(self._worker)

    def _add(self, name: str, fields: Fields, run: int | None = None) -> None:
        number = max(self._run, 0) if run is None else run
        self._substeps.append(Substep(name, number, self._phase_of(number), fields))

    def _phase_of(self, run: int) -> str:
        if self._phase is Phase.CAPTURE:
            return "graph_warmup" if run < self._config.graph_warmup_runs else "capture"
        return "replay" if self._phase is Phase.REPLAY else "eager"
