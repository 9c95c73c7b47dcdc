"""Sessions of the portable engine: driven step by step, watched at the engine's seams, and made to fail there."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines import kernels
from engines.portable.context_observation import ContextObserver, DraftContext
from engines.portable.copies import HostCopies, LatestReads
from engines.portable.device_checks import DeviceChecks, Expect
from engines.portable.distributed import PeerBatch
from engines.portable.graphs import unrecorded
from engines.portable.legible import Legible
from engines.portable.mismatches import Mismatches
from engines.portable.observation import Observer
from engines.portable.plan import Plan
from engines.portable.pyexecutor.attention_dp import dummy_context, dummy_generation
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.py_executor import BatchState, Iteration, PyExecutor
from engines.portable.pyexecutor.py_executor_creator import create_py_executor
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from engines.portable.seams import collective_seams, draft_cache_seams, draft_seams, guided_seams, state_seams
from faults import TORCH, Bracket, Seam, SiteClass, Sites, family, is_injected
from scenarios import (
    Config,
    Context,
    Generation,
    Phase,
    Request,
    Step,
    StepTrace,
    Substep,
    Trace,
    UsageError,
    batches,
)

_FOLDER = Path(__file__).parent
_LINE_SITES = [
    _FOLDER / name
    for name in (
        "attention",
        "speculative",
        "pyexecutor",
        "models.py",
        "mamba_mixer.py",
        "memory_buffer_utils.py",
        "_utils.py",
    )
]
"""Engine code proper: what surrounds it here is the suite's."""


class PortableSession:
    """One portable engine living through a scenario; see ``engines.base.Session``.

    model_engine   what prepares batches and runs them
    attn_metadata  the long-lived metadata of steps that Python runs
    """

    def __init__(
        self,
        config: Config,
        requests: tuple[Request, ...],
        device: torch.device,
        *,
        observe: bool,
        record: Collection[str],
        expect: Expect | None = None,
        mismatches: Mismatches | None = None,
        check_caches: bool = False,
    ) -> None:
        self._config = config
        self._given = requests
        self._plan = Plan(config, requests)
        self._record = record
        self._device = device
        self._kernels = self._kernel_forms(device)
        if self._kernels == "triton":
            kernels.warm_up(device.type)
        self._executor = self._create_executor(config, device)
        self._model: Any = self._executor.model_engine.model
        self.model_engine = self._executor.model_engine
        self.attn_metadata: Any = self.model_engine.attn_metadata
        self._copies = self._watch_copies() if observe else None
        self._observer = self._watcher(observe, expect, mismatches, check_caches)
        self._watch = _listening(self._observer)
        self._requests = {request.id: self._llm_request(request) for request in requests}
        self._steps: list[StepTrace] = []
        self._in_flight: int | None = None
        self._step: Step | None = None
        self._bracket = Bracket(None)
        self._over = False
        roots, base = self._line_sites()
        seams = self._seams()
        if isinstance(self._observer, Observer):
            # What checks on the device do is part of graphs; what is read from the host is not.
            seams = [_unrecorded(seam) for seam in seams]
        self._sites = Sites(seams, roots=roots, base=base)
        self._shelter_restore_code()
        self._open_brackets()

    def add(self, request: Request) -> None:
        """Queue a request; it runs when a step names it."""
        self._plan.add(request)
        self._requests[request.id] = self._llm_request(request)

    def foresee(self, steps: Collection[Step]) -> None:
        """Check all steps to come, and prepare for them.

        A graph that none of them replays is not recorded. One of fewer rows than planned is: when requests have failed,
        a replay has fewer. If copies are to stall, another session runs the steps first, to see what late copies read.
        """
        self._plan.foresee(steps, len(self._steps))
        largest: dict[int, int] = {}
        for step in steps:
            if step.phase is Phase.REPLAY:
                width = self._config.tokens_per_gen_step(step.draft_len) - 1
                largest[width] = max(len(step.rows), largest.get(width, 0))
        self._executor.model_engine.cuda_graph_runner.replays = lambda key: key[0] <= largest.get(key[1], 0)
        if self._config.stall_copies and self._observer is not None and self._watch_copies() is not None:
            self._copies = HostCopies(self._latest_reads(steps))
            if isinstance(self._observer, Observer):
                self._observer.copies = self._copies

    def _latest_reads(self, steps: Collection[Step]) -> dict[int, Tensor]:
        """What copies would read at the last moment that the host leaves them in these steps, by their numbers."""
        ahead = type(self)(self._config, self._given, self._device, observe=False, record=())
        reads = ahead._copies = LatestReads()
        try:
            for step in steps:
                if ahead.step(step).outcome == "fatal":
                    break
            ahead.trace()
        finally:
            ahead.close()
        return reads.finish()

    def step(self, step: Step) -> StepTrace:
        """Execute one iteration; raises ``ScenarioError`` for a step that could not come next.

        Rows of requests that an unplanned failure has ended are left out.
        """
        index = len(self._steps)
        if self._over:
            raise UsageError("session: a fatal failure has ended the run; open a new session")
        self._plan.take(step, index)
        self._step, self._bracket = step, Bracket(None)
        self._tell_ranks(step)
        iteration, rows = self._iteration(step)
        if self._observer is not None:
            self._observer.begin(step, iteration.batch)
        outcome, error = "ok", None
        if iteration.batch.all_requests() or self._in_flight is not None:
            self._steer(rows, step.draft_len)
            outcome, error = self._execute(iteration)
        self._land(index)
        self._follow(step, iteration, error)
        self._over = outcome == "fatal"
        if self._observer is not None and error is not None:
            self._watch.failed(error)
        trace = StepTrace(
            index=index,
            phase=step.phase,
            outcome=outcome,
            substeps=self._observer.substeps() if self._observer is not None else (),
            fired=self._bracket.fired,
            injected=is_injected(error),
            sites=dict(self._bracket.counts),
        )
        self._steps.append(trace)
        return trace

    def trace(self) -> Trace:
        """Everything so far, once what is in flight has been processed."""
        self._drain()
        # nn.Module's own forward is a placeholder, no class of the worker's.
        classes = [c for c in type(self._model.spec_worker).__mro__ if not issubclass(torch.nn.Module, c)]
        owners = [c.__name__ for c in classes if "forward" in vars(c)]
        return Trace("portable", self._device.type, tuple(self._steps), {"forward_defined_in": owners})

    def close(self) -> None:
        """Take every wrapper off again and drop the graphs."""
        self._sites.close()
        self._executor.model_engine.cuda_graph_runner.clear()

    def _execute(self, iteration: Iteration) -> tuple[str, Exception | None]:
        with nullcontext() if self._copies is None else self._copies.watched():
            return self._executor.step(iteration)

    def _land(self, index: int | None) -> None:
        """The step in flight has been processed, or was lost; the one with this index may be in flight now."""
        launched = self._executor.previous_batch
        if isinstance(self._observer, Observer):
            landed = self._observer.take_landed()
            if landed is not None:
                assert self._in_flight is not None
                trace = self._steps[self._in_flight]
                self._steps[self._in_flight] = replace(trace, substeps=(*trace.substeps, landed))
            if launched is not None:
                self._watch.launched(launched.iteration.batch, self._committed(launched))
        elif isinstance(self._observer, DeviceChecks) and launched is not None:
            self._observer.launched()
        self._in_flight = None if launched is None else index

    def _drain(self) -> None:
        """Process the step in flight, as an iteration without a batch does."""
        if self._in_flight is None or self._over:
            return
        last, step = self._in_flight, Step(draft_len=self._config.max_draft_len)
        self._step, self._bracket = step, Bracket(None)
        if isinstance(self._observer, Observer):
            self._observer.begin(step, ScheduledRequests())
        outcome, error = self._execute(Iteration(ScheduledRequests(), step.phase, step.draft_len))
        self._land(None)
        if error is not None:
            failed: tuple[Substep, ...] = ()
            if self._observer is not None:
                self._watch.failed(error)
                failed = self._observer.substeps()
            trace = self._steps[last]
            self._steps[last] = replace(trace, outcome=outcome, substeps=(*trace.substeps, *failed))
            self._over = outcome == "fatal"

    def _committed(self, launched: BatchState) -> list[_Committed]:
        """What the device has cached of every request that runs, the step in flight included."""
        batch, state = launched.iteration.batch, launched.sample_state
        state.synchronize()
        cached = {i: request.num_cached_tokens for i, request in self._executor.active_requests.items()}
        new_tokens_lens = state.new_tokens_lens if self._copies is None else self._copies.peek(state.new_tokens_lens)
        lens = new_tokens_lens.tolist()[len(batch.context_requests) :]
        running = [r for r in batch.context_requests if not r.is_finished]
        cached.update({r.py_request_id: r.context_current_position for r in running})
        for request, accepted in zip(batch.generation_requests, lens):
            if not (request.is_finished or request.is_dummy):
                cached[request.py_request_id] = request.num_cached_tokens + accepted
        return [_Committed(request, tokens) for request, tokens in cached.items()]

    def _create_executor(self, config: Config, device: torch.device) -> PyExecutor:
        """The engine; a session of one with the same rooms overrides this and ``_line_sites``."""
        return create_py_executor(config, device)

    def _kernel_forms(self, device: torch.device) -> str:
        """Which forms of the kernels it uses; to be overridden likewise."""
        return kernels.default(device.type)

    def _watch_copies(self) -> HostCopies | None:
        """What remembers copies to the device, None if they do not all go through it; to be overridden likewise."""
        return HostCopies()

    def _watcher(
        self, observe: bool, expect: Expect | None, mismatches: Mismatches | None, caches: bool
    ) -> Observer | DeviceChecks | None:
        config, executor, worker = self._config, self._executor, self._model.spec_worker
        if expect is not None and mismatches is not None:
            return DeviceChecks(config, executor, worker, expect=expect, mismatches=mismatches, caches=caches)
        return Observer(config, executor, worker, self._draft_context(), self._copies) if observe else None

    def _draft_context(self) -> DraftContext | None:
        """Where a drafter keeps its context, None for one without; to be overridden likewise."""
        slots = self._executor.spec_resource_manager
        return ContextObserver(self._model.spec_worker, slots) if isinstance(slots, SeqSlotManager) else None

    def _line_sites(self) -> tuple[list[Path], Path]:
        """Folders and files whose lines are fault sites, and what their paths are relative to."""
        return _LINE_SITES, _FOLDER.parent.parent

    def _llm_request(self, request: Request) -> LlmRequest:
        return LlmRequest(request.id, request.prompt(self._config.seed))

    def _iteration(self, step: Step) -> tuple[Iteration, list[Context | Generation]]:
        """The step as the executor runs it, and its rows."""
        rows = [row for row in step.rows if row.request is None or row.request in self._requests]
        contexts = [self._context(i, row) for i, row in enumerate(step.contexts)]
        generations = [self._generation(step, len(contexts) + i, row) for i, row in enumerate(step.generations)]
        batch = ScheduledRequests(
            tuple(r for r in contexts if r is not None), tuple(r for r in generations if r is not None)
        )
        finished = tuple(self._requests[i] for i in step.finish if i in self._requests)
        iteration = self._executor.schedule(Iteration(batch, step.phase, step.draft_len, finished))
        return iteration, rows

    def _tell_ranks(self, step: Step) -> None:
        """What the other ranks do in this step."""
        own = self._config.attention_dp_rank
        running = [peer for rank, peer in enumerate(batches(self._config, step)) if rank != own]
        self._executor.model_engine.dist.begin(
            [PeerBatch(peer.contexts, peer.generations) for peer in step.peers],
            [PeerBatch(peer.contexts, peer.generations) for peer in running],
        )

    def _steer(self, rows: list[Context | Generation], draft_len: int) -> None:
        """Tell the drafter how good it is to be; where a suffix automaton takes over, that one is as good."""
        steering, threshold = self._model.draft_model.steering, self._config.sa_threshold
        if not threshold:
            agree = [row.agree for row in rows]
            steering.steer(agree, [row.near for row in rows])
            if not self._config.traits.draft_model:
                steering.steer_automata(agree, agree)
            return
        takes_over = [isinstance(row, Generation) and row.match >= threshold for row in rows]
        # Layers keep what they drafted, right or wrong, once it is accepted.
        overridden = draft_len if self._config.traits.feeds_history else 0
        agree = [overridden if takes else row.agree for takes, row in zip(takes_over, rows)]
        steering.steer(agree, [0] * len(rows))
        gens = [(row.match, takes * row.agree) for takes, row in zip(takes_over, rows) if isinstance(row, Generation)]
        steering.steer_automata([agree for _, agree in gens], [match for match, _ in gens])

    def _context(self, index: int, row: Context) -> LlmRequest | None:
        if row.request is None:
            request = dummy_context(index, row.chunk)
        elif row.request in self._requests:
            request = self._requests[row.request]
        else:
            return None
        request.context_chunk_size = row.chunk
        return request

    def _generation(self, step: Step, index: int, row: Generation) -> LlmRequest | None:
        if row.request is not None:
            request = self._requests.get(row.request)
            if request is not None:
                request.py_verify_len = row.verify
            return request
        if not step.phase.is_startup:
            # The executor finds out itself which dummies keep the ranks in step.
            return None
        return dummy_generation(self._config, index, step.draft_len, row.past, row.accept, row.verify)

    def _follow(self, step: Step, iteration: Iteration, error: Exception | None) -> None:
        """Forget the requests that ended, and leave the plan where the run has."""
        planned = error is None if step.fault is None else is_injected(error)
        if not planned:
            self._plan.leave()
        ended = [request for request in self._requests.values() if request.is_finished]
        if error is not None:
            started = [r for r in self._requests.values() if r.context_current_position or r.generated]
            ended = [*started, *iteration.batch.all_requests()]
        for request in ended:
            self._requests.pop(request.py_request_id, None)

    def _seams(self) -> list[Seam]:
        engine, model = self._executor.model_engine, self._model
        attn, spec, runner = engine.attn_metadata, engine.spec_metadata, engine.cuda_graph_runner
        worker, manager = model.spec_worker, self._executor.kv_cache_manager
        watch, launch, hook = self._watch, SiteClass.LAUNCH, SiteClass.HOOK
        return [
            Seam("kv_cache_manager.prepare_resources", manager, "prepare_resources", SiteClass.ALLOC),
            Seam("model_engine.prepare_inputs", engine, "_prepare_inputs", launch, after=watch.prepared),
            *draft_cache_seams(attn, self._executor.draft_kv_cache_manager),
            *self._view_seams(),
            Seam("attn_metadata.prepare", attn, "prepare", launch),
            Seam("spec_metadata.prepare", spec, "prepare", launch),
            Seam("model.forward", model, "forward", None, before=watch.entered),
            Seam("target_model.forward", model.model, "forward", launch),
            Seam("worker.forward", worker, "forward", None, after=watch.worker_returned),
            Seam("worker.cleanup", worker, "_ensure_spec_dec_state_restored", None, before=watch.cleaning_up),
            Seam(
                "worker.sample_and_accept_draft_tokens", worker, "sample_and_accept_draft_tokens", launch,
                after=watch.verified,
            ),
            Seam(
                "attn_metadata.prepare_for_spec_dec", attn, "prepare_for_spec_dec", SiteClass.ALLOC, after=watch.saved
            ),
            Seam("attn_metadata.on_update", attn, "on_update", hook),
            Seam("attn_metadata.update_for_spec_dec", attn, "update_for_spec_dec", hook),
            *draft_seams(self._config, model.draft_model, self._executor.spec_resource_manager, watch),
            *guided_seams(self._executor.guided_decoder),
            *state_seams(self._config, manager, watch),
            *collective_seams(engine.dist, worker),
            Seam("worker.sample_draft_tokens", worker, "sample_draft_tokens", launch),
            Seam("attn_metadata.restore_from_spec_dec", attn, "restore_from_spec_dec", SiteClass.RESTORE),
            Seam("sampler.update_requests", self._executor.sampler, "update_requests", launch),
            Seam(
                "cuda_graph.capture", runner, "capture_graph", SiteClass.CAPTURE,
                before=watch.capture_begins, after=watch.captured,
            ),
            Seam("cuda_graph.replay", runner, "replay", None, before=watch.replay_begins, after=watch.replayed),
            Seam("executor.terminate", self._executor, "_terminate_requests", None, before=watch.updated),
            Seam("attn_metadata.copy", attn, "create_cuda_graph_metadata", None, after=self._adopt(attn)),
            Seam("spec_metadata.copy", spec, "create_cuda_graph_metadata", None, after=self._adopt(spec)),
        ]  # fmt: skip

    def _view_seams(self) -> list[Seam]:
        """Seams of the views that drafters have of metadata."""
        attn = self._executor.model_engine.attn_metadata
        if not hasattr(attn, "get_draft_metadata"):
            return []
        return [
            Seam("attn_metadata.get_draft_metadata", attn, "get_draft_metadata", SiteClass.HOOK),
            Seam("attn_metadata.view", attn, "_create_draft_view", None, after=self._adopt_view),
        ]

    def _adopt(self, original: Any) -> Callable[..., None]:
        """A listener that gives the metadata of a graph wrappers of its own instead of the copied ones."""

        def adopt(copy: Any, args: Any, kwargs: Any) -> None:
            self._sites.adopt(copy, original)

        return adopt

    def _adopt_view(self, view: Any, args: Any, kwargs: Any) -> None:
        """The same for a view, which may be one of the metadata of a graph."""
        engine = self._executor.model_engine
        owners = [engine.attn_metadata, *(graph.attn_metadata for graph in engine.cuda_graph_runner.graphs.values())]
        self._sites.adopt(view, next(owner for owner in owners if vars(owner)["prepare"] is vars(view)["prepare"]))

    def _shelter_restore_code(self) -> None:
        """Restore code is assumed not to fail: within it no torch call or line is a site."""
        worker: Any = self._model.spec_worker
        for name in ("_restore_attn_metadata_from_spec_dec", "_ensure_spec_dec_state_restored"):
            # A worker from before PR #16382 has no cleanup.
            if hasattr(worker, name):
                setattr(worker, name, self._sheltered(getattr(worker, name)))

    def _sheltered(self, restore: Callable[..., None]) -> Callable[..., None]:
        def sheltered(*args: Any) -> None:
            with self._sites.shelter():
                restore(*args)

        return sheltered

    def _open_brackets(self) -> None:
        """Faults strike while the executor runs a batch, not while it handles a failure."""
        executor: Any = self._executor
        forward_step = executor._forward_step

        def bracketed(iteration: Iteration) -> Exception | None:
            assert self._step is not None
            # What torch functions are called is the same on each device where they are sites.
            fault = self._step.fault
            counted = TORCH in self._record or (fault is not None and family(fault.site) == TORCH)
            with kernels.using("torch" if counted else self._kernels):
                with self._sites.bracket(fault, self._record) as self._bracket:
                    error: Exception | None = forward_step(iteration)
            return error

        executor._forward_step = bracketed


@dataclass(frozen=True)
class _Committed:
    """A request, and how many of its tokens the device has cached."""

    py_request_id: int
    num_cached_tokens: int


def _unrecorded(seam: Seam) -> Seam:
    """The seam, with listeners that leave no trace in graphs."""
    if seam.before is None and seam.after is None:
        return seam
    return replace(seam, before=unrecorded(seam.before), after=unrecorded(seam.after))


def _listening(observer: Observer | DeviceChecks | None) -> Any:
    """Who is called at the sub-steps."""
    if observer is None:
        return _Nobody()
    return Legible(observer) if isinstance(observer, Observer) else observer


class _Nobody:
    """Watches nothing."""

    def __getattr__(self, name: str) -> None:
        return None
