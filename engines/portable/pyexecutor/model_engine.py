"""Turns a batch into the inputs of one forward, and runs it: by Python, or as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engines.portable._utils import host_tensor
from engines.portable.attention.backends.interface import KVCacheParams
from engines.portable.attention.backends.ragged import first_rows
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from engines.portable.copies import copy_to_device
from engines.portable.distributed import Distributed
from engines.portable.pyexecutor.cuda_graph_runner import CUDAGraphRunner, GraphKey
from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder
from engines.portable.pyexecutor.llm_request import ScheduledRequests
from engines.portable.pyexecutor.overlap import OverlapInputs, SampleStateTensors
from engines.portable.pyexecutor.resource_manager import KVCacheManager
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.interface import SpecMetadata


@dataclass(frozen=True)
class _Rows:
    """Flattened inputs of a batch; one entry per sequence in all but the first four."""

    input_ids: list[int]
    position_ids: list[int]
    gather_ids: list[int]
    draft_tokens: list[int]
    sequence_lengths: list[int]
    num_cached_tokens: list[int]
    prompt_lengths: list[int]
    request_ids: list[int]


class PyTorchModelEngine:
    """The model with the long-lived objects that each step rewrites: metadata, input buffers, graphs."""

    def __init__(
        self,
        model: nn.Module,
        spec_config: DecodingConfig,
        spec_metadata: SpecMetadata,
        kv_cache_manager: KVCacheManager,
        cuda_graph_runner: CUDAGraphRunner,
        max_num_requests: int,
        max_num_tokens: int,
        device: torch.device,
        attn_metadata_class: Callable[..., Any] = TrtllmAttentionMetadata,
        dist: Distributed | None = None,
        *,
        enable_overlap: bool = False,
        guided_decoder: CapturableGuidedDecoder | None = None,
    ) -> None:
        self.model = model
        self.dist = dist or Distributed()
        self.spec_config = spec_config
        self.spec_metadata = spec_metadata
        self.kv_cache_manager = kv_cache_manager
        self.cuda_graph_runner = cuda_graph_runner
        self.device = device
        self.attn_metadata = attn_metadata_class(
            max_num_requests=max_num_requests,
            max_num_tokens=max_num_tokens,
            device=device,
            kv_cache_manager=kv_cache_manager,
        )
        self.input_ids_cuda = self._buffer(max_num_tokens)
        self.position_ids_cuda = self._buffer(max_num_tokens)
        self.gather_ids_cuda = self._buffer(max_num_tokens)
        self.draft_tokens_cuda = self._buffer(max_num_tokens)
        self.overlap = OverlapInputs(max_num_requests, max_num_tokens, device) if enable_overlap else None
        self.guided_decoder = guided_decoder

    def _buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self.device)

    @torch.inference_mode()
    def forward(
        self,
        scheduled_requests: ScheduledRequests,
        runtime_draft_len: int,
        *,
        use_cuda_graph: bool = False,
        capture: bool = False,
        new_tensors_device: SampleStateTensors | None = None,
    ) -> dict[str, Tensor]:
        """Prepare the batch and run it.

        new_tensors_device  outputs of the step in flight, to which ``previous_row`` of requests refers
        use_cuda_graph  replay the graph of its shape
        capture         capture that graph, again if there is one
        """
        attn_metadata: Any = self.attn_metadata
        spec_metadata = self.spec_metadata
        spec_metadata.runtime_draft_len = runtime_draft_len
        width = self.spec_config.get_runtime_tokens_per_gen_step(runtime_draft_len)
        spec_metadata.runtime_tokens_per_gen_step = width
        attn_metadata.update_spec_dec_param(
            True, spec_metadata, len(scheduled_requests.all_requests()), len(scheduled_requests.context_requests)
        )
        generations = scheduled_requests.generation_requests
        num_rows = sum(1 + len(request.py_draft_tokens) for request in generations)
        key: GraphKey = (len(generations), width - 1, num_rows)
        if use_cuda_graph or capture:
            attn_metadata, spec_metadata = self.cuda_graph_runner.get_graph_metadata(key, attn_metadata, spec_metadata)
        inputs = self._prepare_inputs(scheduled_requests, attn_metadata, spec_metadata, new_tensors_device)
        if capture:
            return self.cuda_graph_runner.capture(key, self._forward_step, inputs, self._postprocess_inputs)
        if use_cuda_graph:
            return self.cuda_graph_runner.replay(key, inputs)
        return self._forward_step(inputs)

    def _forward_step(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """One forward; in a graph, all of it is captured."""
        self._preprocess_inputs(inputs)
        outputs: dict[str, Tensor] = self.model(**inputs)
        return outputs

    def _preprocess_inputs(self, inputs: dict[str, Any]) -> None:
        attn_metadata = inputs["attn_metadata"]
        attn_metadata.on_update_kv_lens()
        if self.overlap is not None:
            self.overlap.correct(inputs)
            attn_metadata.on_update_kv_lens()

    def _postprocess_inputs(self, inputs: dict[str, Any]) -> None:
        """Leave the inputs of a forward as they were, for another one on them."""
        if self.overlap is not None:
            self.overlap.take_back(inputs)

    def _prepare_inputs(
        self,
        scheduled_requests: ScheduledRequests,
        attn_metadata: Any,
        spec_metadata: SpecMetadata,
        new_tensors_device: SampleStateTensors | None = None,
    ) -> dict[str, Any]:
        """Fill input buffers and both metadata objects: the keyword arguments of the model's forward."""
        rows = self._flatten(scheduled_requests, new_tensors_device)
        ragged = self.spec_config.ragged_verify
        if ragged or not attn_metadata.is_cuda_graph:
            attn_metadata.seq_lens = torch.tensor(rows.sequence_lengths, dtype=torch.int32)
        contexts = len(scheduled_requests.context_requests)
        if ragged:
            # First: what is derived from it is derived while the rest is prepared.
            attn_metadata.ragged_verify_lens = rows.sequence_lengths[contexts:]
        attn_metadata.request_ids = rows.request_ids
        attn_metadata.prompt_lens = rows.prompt_lengths
        attn_metadata.num_contexts = contexts
        attn_metadata.kv_cache_params = KVCacheParams(
            use_cache=True,
            num_cached_tokens_per_seq=rows.num_cached_tokens,
            num_extra_kv_tokens=self.spec_config.num_extra_kv_tokens,
        )
        attn_metadata.kv_cache_manager = self.kv_cache_manager
        attn_metadata.prepare()
        attn_metadata.all_rank_num_tokens = self._gather_num_tokens(attn_metadata)

        spec_metadata.verify_widths = attn_metadata.verify_widths if ragged else None
        draft_tokens = spec_metadata.draft_tokens = self._upload("draft_tokens_cuda", rows.draft_tokens)
        self._prepare_spec_metadata(spec_metadata, scheduled_requests, rows)
        self._gather_spec_counts(attn_metadata, spec_metadata)

        position_ids = self._upload("position_ids_cuda", rows.position_ids)
        if self.spec_config.use_dynamic_tree:
            # Only the device knows how deep a node is; the host has put all of them at the root's position.
            in_trees = position_ids[attn_metadata.num_ctx_tokens :]
            in_trees.add_(attn_metadata.spec_decoding_position_offsets[: len(in_trees)])
        input_ids = self._upload("input_ids_cuda", rows.input_ids)
        in_generations = input_ids[attn_metadata.num_ctx_tokens :]
        if self.overlap is not None:
            self.overlap.prepare(
                scheduled_requests.generation_requests,
                spec_metadata.runtime_tokens_per_gen_step,
                self.spec_config.get_runtime_drafts(spec_metadata.runtime_draft_len),
                new_tensors_device,
                spec_metadata.verify_widths,
                in_generations,
                draft_tokens,
            )
        self._tell_tokens(in_generations, spec_metadata)
        return {
            "input_ids": input_ids,
            "position_ids": position_ids.unsqueeze(0),
            "attn_metadata": attn_metadata,
            "spec_metadata": spec_metadata,
        }

    def _tell_tokens(self, fed: Tensor, spec_metadata: SpecMetadata) -> None:
        """Tell what generations feed, int32 [rows], to those whom the host could not always tell."""
        width, widths = spec_metadata.runtime_tokens_per_gen_step, spec_metadata.verify_widths
        if self.guided_decoder is not None:
            self.guided_decoder.feed(fed.view(-1, width))
        # Metadata of upstream's own may know of none.
        automata = getattr(spec_metadata, "sa_manager", None)
        if automata is not None:
            first = fed[::width] if widths is None else fed.index_select(0, first_rows(widths))
            automata.append_first_tokens(first)

    def _prepare_spec_metadata(
        self, spec_metadata: SpecMetadata, scheduled_requests: ScheduledRequests, rows: _Rows
    ) -> None:
        spec_metadata.gather_ids = self._upload("gather_ids_cuda", rows.gather_ids)
        spec_metadata.request_ids = rows.request_ids
        spec_metadata.seq_lens = rows.sequence_lengths
        spec_metadata.num_generations = len(scheduled_requests.generation_requests)
        spec_metadata.num_tokens = len(rows.input_ids)
        spec_metadata.runtime_draft_len = self.spec_metadata.runtime_draft_len
        spec_metadata.runtime_tokens_per_gen_step = self.spec_metadata.runtime_tokens_per_gen_step
        spec_metadata.populate_context_prompt_lookahead(scheduled_requests.context_requests)
        spec_metadata.prepare()
        spec_metadata.write_padding_draft_probs(
            len(scheduled_requests.context_requests),
            [request.py_num_drafts for request in scheduled_requests.generation_requests],
            spec_metadata.runtime_draft_len,
        )

    def _gather_num_tokens(self, attn_metadata: Any) -> list[int] | None:
        """Tokens that each rank feeds to the target; None for a single one."""
        if not self.dist.enable_attention_dp:
            return None
        width = self.spec_metadata.runtime_tokens_per_gen_step
        others = [peer.num_tokens(width) for peer in self.dist.running]
        return self.dist.tp_allgather("attn_metadata.all_rank_num_tokens", attn_metadata.num_tokens, others)

    def _gather_spec_counts(self, attn_metadata: Any, spec_metadata: SpecMetadata) -> None:
        """Tell the other ranks what this one drafts for, once ``prepare`` has made ``num_tokens`` what they count."""
        if not self.dist.enable_attention_dp:
            return
        peers, gather = self.dist.running, self.dist.tp_allgather
        width = spec_metadata.runtime_tokens_per_gen_step
        num_tokens = [spec_metadata.dp_num_tokens(peer.num_tokens(width), peer.num_generations) for peer in peers]
        spec_metadata.set_all_rank_counts(
            gather("spec_metadata.all_rank_num_tokens", spec_metadata.num_tokens, num_tokens),
            gather("spec_metadata.all_rank_num_seqs", attn_metadata.num_seqs, [peer.num_seqs for peer in peers]),
            gather(
                "spec_metadata.all_rank_num_gens",
                spec_metadata.num_generations,
                [peer.num_generations for peer in peers],
            ),
        )

    def _flatten(self, scheduled_requests: ScheduledRequests, previous: SampleStateTensors | None = None) -> _Rows:
        """The batch as the host knows it: of requests in flight it counts all rows as accepted, and no token."""
        rows = _Rows([], [], [], [], [], [], [], [])
        for request in scheduled_requests.context_requests:
            chunk = request.context_chunk
            past = request.context_current_position
            self._add_sequence(rows, chunk, past, range(past, past + len(chunk)), len(chunk), request.py_request_id)
            rows.gather_ids.append(len(rows.input_ids) - 1)
        for request in scheduled_requests.generation_requests:
            drafts = request.py_draft_tokens
            begin = len(rows.input_ids)
            previous_row = None if previous is None else request.previous_row
            tokens = [request.generated[-1] if previous_row is None else 0, *drafts]
            past = request.num_cached_tokens
            positions = [past] * len(tokens) if self.spec_config.use_dynamic_tree else range(past, past + len(tokens))
            if previous is not None and previous_row is not None:
                past += previous.tokens_of_rows[previous_row]
            self._add_sequence(rows, tokens, past, positions, request.py_prompt_len, request.py_request_id)
            rows.gather_ids.extend(range(begin, len(rows.input_ids)))
            rows.draft_tokens.extend(drafts)
        return rows

    @staticmethod
    def _add_sequence(
        rows: _Rows, tokens: list[int], past: int, positions: Sequence[int], prompt_len: int, request_id: int
    ) -> None:
        rows.input_ids.extend(tokens)
        rows.position_ids.extend(positions)
        rows.sequence_lengths.append(len(tokens))
        rows.num_cached_tokens.append(past)
        rows.prompt_lengths.append(prompt_len)
        rows.request_ids.append(request_id)

    def _upload(self, name: str, values: list[int]) -> Tensor:
        """Copy to the front of the persistent device buffer of that name and return that part of it."""
        buffer: Tensor = getattr(self, name)
        return copy_to_device(name, buffer[: len(values)], host_tensor(values, self.device))
