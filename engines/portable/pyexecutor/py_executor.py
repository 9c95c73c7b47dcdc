"""The executor loop: one step at a time, and what becomes of requests when a step fails."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engines.portable.pyexecutor.attention_dp import AttentionDPPadding
from engines.portable.pyexecutor.block_reuse import find_reused_tokens
from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder
from engines.portable.pyexecutor.kv_cache_connector import KvCacheConnector
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.model_engine import PyTorchModelEngine
from engines.portable.pyexecutor.overlap import SampleStateTensors
from engines.portable.pyexecutor.resource_manager import KVCacheManager, SpecResourceManager
from engines.portable.pyexecutor.sampler import SampleState, SpecSampler
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from scenarios import Phase
from scenarios.tracer import PAD_TOKEN

logger = logging.getLogger("specfuzz.portable")


@dataclass(frozen=True)
class Iteration:
    """What the executor does in one step: the batch, its draft length, and the requests that end with it."""

    batch: ScheduledRequests
    phase: Phase
    draft_len: int
    finished: tuple[LlmRequest, ...] = ()


@dataclass(frozen=True)
class BatchState:
    """A step that was launched: its iteration, and its outputs on the host, once they are there, and on the device."""

    iteration: Iteration
    sample_state: SampleState
    device: SampleStateTensors


class PyExecutor:
    """Runs iterations on one model engine, which survives what is tolerated.

    With the overlap scheduler a served step is launched before the one before it is processed, that is, before its
    tokens reach the requests, what they did not use of the KV cache is taken back, and those that are finished end.

    active_requests    requests that have run and not ended, by id; of the step in flight only those known before
    previous_batch     the step in flight, None without
    kv_connector       what is told of the target's pages to whoever transfers them
    seq_slot_manager   slots of what is kept per request for verification; None without rejection sampling
    kv_cache_managers  the target's, then that of a separate draft KV cache: whatever one is told the other is too
    """

    def __init__(
        self,
        model_engine: PyTorchModelEngine,
        kv_cache_manager: KVCacheManager,
        sampler: SpecSampler,
        error_budget: int,
        spec_resource_manager: SpecResourceManager | None = None,
        draft_kv_cache_manager: KVCacheManager | None = None,
        attention_dp: AttentionDPPadding | None = None,
        guided_decoder: CapturableGuidedDecoder | None = None,
        seq_slot_manager: SeqSlotManager | None = None,
        *,
        disable_overlap_scheduler: bool = True,
    ) -> None:
        self.model_engine = model_engine
        self.kv_cache_manager = kv_cache_manager
        self.draft_kv_cache_manager = draft_kv_cache_manager
        self.kv_connector = KvCacheConnector(kv_cache_manager)
        self.kv_cache_managers = [m for m in (kv_cache_manager, draft_kv_cache_manager) if m is not None]
        self.spec_resource_manager = spec_resource_manager
        self.guided_decoder = guided_decoder
        self.seq_slot_manager = seq_slot_manager
        self.sampler = sampler
        self.attention_dp = attention_dp
        self.disable_overlap_scheduler = disable_overlap_scheduler
        self.active_requests: dict[int, LlmRequest] = {}
        self.previous_batch: BatchState | None = None
        self._launched: BatchState | None = None
        self._updated: BatchState | None = None
        self._errors_left = error_budget

    def schedule(self, iteration: Iteration) -> Iteration:
        """The iteration as it is to run: with the dummies that keep several ranks in step."""
        if self.attention_dp is None or iteration.phase.is_startup or self._all_idle(iteration):
            return iteration
        replay = iteration.phase is Phase.REPLAY
        batch = self.attention_dp.pad(iteration.batch, iteration.draft_len, use_cuda_graph=replay)
        return replace(iteration, batch=batch)

    def _all_idle(self, iteration: Iteration) -> bool:
        """Whether no rank runs anything, as they only do to process what is in flight."""
        peers = self.model_engine.dist.scheduled
        return not iteration.batch.all_requests() and not any(peer.num_seqs for peer in peers)

    def step(self, iteration: Iteration) -> tuple[str, Exception | None]:
        """Run one iteration; one without a batch only processes the step in flight.

        Returns "ok", "tolerated" (the batch failed, the executor goes on) or "fatal" (it does not), and the
        exception of a failure.
        """
        error = self._forward_step(iteration)
        if error is not None:
            return self._handle_errors(iteration, error), error
        try:
            self._process_batches()
        except Exception as error:
            # Past the forward upstream's loop handles nothing: it ends.
            return "fatal", error
        return "ok", None

    @property
    def held_requests(self) -> list[int]:
        """Ids of requests that own something: active ones, and those of the step in flight."""
        launched = [] if self.previous_batch is None else self._served(self.previous_batch.iteration.batch)
        return list(dict.fromkeys((*self.active_requests, *(request.py_request_id for request in launched))))

    def _process_batches(self) -> None:
        """Process the step whose tokens ``_run_batch`` handed out; what it has launched is in flight from now on."""
        done, self.previous_batch, self._launched = self._updated, self._launched, None
        if self.previous_batch is not None:
            # Whoever gets their pages writes behind what was launched, and nobody reads what dummies wrote.
            self._free(r for r in self.previous_batch.iteration.batch.generation_requests if r.is_dummy)
        if done is not None:
            self._store_prompts(done.sample_state)
            self._process_batch(done.iteration)

    def _store_prompts(self, state: SampleState) -> None:
        """Prompts that a step has completed may be reused; of those that it has not, nothing."""
        for request, is_last in zip(state.scheduled_requests.context_requests, state.is_last_chunk):
            if is_last and not (request.is_dummy or request.is_finished):
                for manager in self.kv_cache_managers:
                    manager.store_blocks_for_reuse(request)

    def _process_batch(self, iteration: Iteration) -> None:
        """Do what is left of a step once its tokens have reached the requests; for wasted rows there is nothing."""
        served = self._served(iteration.batch)
        for manager in self.kv_cache_managers:
            manager.update_resources(iteration.batch)
        launched = [] if self.previous_batch is None else self._served(self.previous_batch.iteration.batch)
        # What was granted for the step that runs by now is theirs, too.
        self.kv_connector.update([*served, *launched])
        self._free(request for request in iteration.batch.all_requests() if request.is_dummy)
        self.active_requests.update((request.py_request_id, request) for request in served)
        self._terminate_requests(iteration.finished)

    @staticmethod
    def _served(batch: ScheduledRequests) -> list[LlmRequest]:
        """Users' requests of a batch that have not ended since it was launched."""
        return [request for request in batch.all_requests() if not (request.is_finished or request.is_dummy)]

    def _forward_step(self, iteration: Iteration) -> Exception | None:
        """Everything of an iteration that can fail; returns the exception."""
        try:
            self._run_batch(iteration)
        except Exception as error:
            logger.warning("a %s step failed: %s", iteration.phase.value, error)
            return error
        return None

    def _run_batch(self, iteration: Iteration) -> None:
        """Launch the batch, and update the requests from the step before it; without overlap, from the batch itself."""
        self._updated = self._launched = None
        outputs = self._launch(iteration) if iteration.batch.all_requests() else None
        overlaps = not (self.disable_overlap_scheduler or iteration.phase.is_startup)
        if overlaps:
            self._update_requests(self.previous_batch)
        if outputs is None:
            return
        launched = self._sample(iteration, outputs)
        if overlaps:
            self._launched = launched
        else:
            self._update_requests(launched)

    def _update_requests(self, launched: BatchState | None) -> None:
        """Wait for a step, if there is one, and update its requests."""
        self._updated = launched
        if launched is not None:
            for request in launched.iteration.batch.all_requests():
                request.py_batch_idx = None
            self.sampler.update_requests(launched.sample_state)

    def _launch(self, iteration: Iteration) -> dict[str, Tensor]:
        batch, phase = iteration.batch, iteration.phase
        self._pad_draft_tokens(iteration)
        self._prepare_resources(batch)
        if self.guided_decoder is not None:
            self.guided_decoder.add_batch(batch, iteration.draft_len)
        return self.model_engine.forward(
            batch,
            iteration.draft_len,
            use_cuda_graph=phase is Phase.REPLAY,
            capture=phase is Phase.CAPTURE,
            new_tensors_device=None if self.previous_batch is None else self.previous_batch.device,
        )

    def _sample(self, iteration: Iteration, outputs: dict[str, Tensor]) -> BatchState:
        """Send the outputs to the host, and move the requests on as far as that is known already."""
        spec_config, batch = self.model_engine.spec_config, iteration.batch
        drafts = spec_config.get_runtime_drafts(iteration.draft_len)
        width = spec_config.get_runtime_tokens_per_gen_step(iteration.draft_len)
        # Not by their drafts: with overlap those are by now the ones of the step that was processed meanwhile.
        verified = (request.py_verify_len for request in batch.generation_requests)
        slots = tuple(width - 1 if count is None else count for count in verified)
        state = self.sampler.sample_async(batch, outputs, drafts, slots)
        for request in batch.context_requests:
            request.move_to_next_context_chunk()
        for row, request in enumerate(batch.all_requests()):
            request.py_batch_idx = row
        counted = (*(width for _ in batch.context_requests), *(1 + count for count in slots))
        device = SampleStateTensors(
            outputs["next_new_tokens"], outputs["new_tokens_lens"], outputs["next_draft_tokens"], drafts, counted
        )
        return BatchState(iteration, state, device)

    def _prepare_resources(self, batch: ScheduledRequests) -> None:
        """Grant what the batch needs of each KV cache, then of what the worker keeps."""
        dummies = [r for r in batch.all_requests() if r.is_dummy]
        self._reuse_prompts(batch)
        for manager in self.kv_cache_managers:
            manager.add_dummy_requests(dummies)
            manager.prepare_resources(batch)
        for slots in self._slot_managers:
            slots.add_dummy_requests(dummies)
            slots.prepare_resources(batch)

    def _reuse_prompts(self, batch: ScheduledRequests) -> None:
        """Let prompts begin behind what every cache has of them: a drafter must know what the target skips."""
        pools = [m.reusable_blocks for m in self.kv_cache_managers if m.reusable_blocks is not None]
        if not pools:
            return
        for request in batch.context_requests:
            if request.is_first_context_chunk and not request.is_dummy:
                request.set_prepopulated_prompt_len(find_reused_tokens(pools, request))

    def _pad_draft_tokens(self, iteration: Iteration) -> None:
        """Give each request the draft slots of this step: its drafts, cut to what it verifies, then padding."""
        spec_config = self.model_engine.spec_config
        width = spec_config.get_runtime_tokens_per_gen_step(iteration.draft_len) - 1
        made = spec_config.get_runtime_drafts(iteration.draft_len)
        for request in iteration.batch.all_requests():
            slots, most = (width, made) if request.py_verify_len is None else (request.py_verify_len,) * 2
            drafts = [] if request.is_context else request.py_draft_tokens[:most]
            request.py_draft_tokens = drafts + [PAD_TOKEN] * (slots - len(drafts))
            in_flight = self.previous_batch is not None and request.previous_row is not None
            request.py_num_drafts = min(self._drafts_in_flight(), most) if in_flight else len(drafts)

    def _drafts_in_flight(self) -> int:
        """Drafts of each row of the step in flight, which the host has yet to see."""
        return 0 if self.previous_batch is None else self.previous_batch.device.runtime_draft_len

    def _handle_errors(self, iteration: Iteration, error: Exception) -> str:
        """Fail every active request and those of the batch, and say whether the executor goes on."""
        batch = iteration.batch.all_requests()
        lost = () if self.previous_batch is None else self.previous_batch.iteration.batch.all_requests()
        self._free([*self.active_requests.values(), *lost, *batch])
        self.active_requests.clear()
        self.previous_batch = None
        # Which pages the step has taken before it failed nobody knows.
        for manager in self.kv_cache_managers:
            manager.reset_reuse_state()
        if not self._tolerates(iteration.phase, error):
            return "fatal"
        if iteration.phase is not Phase.WARMUP:
            self._errors_left -= 1
        return "tolerated"

    def _tolerates(self, phase: Phase, error: Exception) -> bool:
        """General warm-up survives being out of memory, serving all but CUDA errors while the budget lasts."""
        if phase is Phase.WARMUP:
            return isinstance(error, torch.OutOfMemoryError)
        if phase is Phase.CAPTURE or is_cuda_error(error):
            return False
        return self._errors_left > 0

    def _terminate_requests(self, requests: Iterable[LlmRequest]) -> None:
        """End requests that are finished."""
        for request in requests:
            del self.active_requests[request.py_request_id]
            request.is_finished = True
            self._free([request])

    def _free(self, requests: Iterable[LlmRequest]) -> None:
        for request in requests:
            for manager in self.kv_cache_managers:
                manager.free_resources(request)
            self.kv_connector.request_finished(request)
            for slots in self._slot_managers:
                slots.free_resources(request)

    @property
    def _slot_managers(self) -> list[SpecResourceManager]:
        """Who keeps something per request beside the KV cache."""
        managers = self.spec_resource_manager, self.guided_decoder, self.seq_slot_manager
        return [manager for manager in managers if manager is not None]


def is_cuda_error(error: BaseException) -> bool:
    """Whether the CUDA context is lost: nothing can run on it any more."""
    return "CUDA error" in str(error) and not isinstance(error, torch.OutOfMemoryError)
