"""Builds an executor with everything below it."""

from __future__ import annotations

from functools import partial

import torch

from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from engines.portable.attention.backends.sparse.dsa.params import DSAMetadataParams
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from engines.portable.models import SpecDecOneEngineForCausalLM, Steering
from engines.portable.pyexecutor.cuda_graph_runner import CUDAGraphRunner
from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder
from engines.portable.pyexecutor.model_engine import PyTorchModelEngine
from engines.portable.pyexecutor.py_executor import PyExecutor
from engines.portable.pyexecutor.resource_manager import KVCacheManager
from engines.portable.pyexecutor.sampler import SpecSampler
from engines.portable.speculative.drafter import Setting
from engines.portable.speculative.interface import DecodingConfig
from engines.portable.speculative.utils import (
    MODES,
    get_draft_model,
    get_spec_metadata,
    get_spec_resource_manager,
    get_spec_worker,
)
from engines.tracer import SparseTracer, Tracer, TreeTracer
from scenarios import BACKENDS, Config
from scenarios.tracer import BEGIN_THINKING_TOKEN, MASK_TOKEN


def create_py_executor(config: Config, device: torch.device) -> PyExecutor:
    """The executor of a configuration, with model, worker, metadata, cache and graph runner on ``device``."""
    spec_config = DecodingConfig(
        spec_dec_mode=MODES[config.worker],
        max_draft_len=config.max_draft_len,
        num_extra_kv_tokens=config.num_extra_kv_tokens,
        mask_token_id=MASK_TOKEN,
        dynamic_tree_max_topK=config.dynamic_tree_max_topK,
        dynamic_tree_max_nodes=config.max_total_draft_tokens,
        force_num_accepted_tokens=config.force_num_accepted_tokens,
        use_relaxed_acceptance_for_thinking=config.use_relaxed_acceptance_for_thinking,
        relaxed_topk=config.relaxed_topk,
        relaxed_delta=config.relaxed_delta,
        begin_thinking_phase_token=BEGIN_THINKING_TOKEN,
    )
    sparse = BACKENDS[config.attention_backend].sparse
    cache_class = DSACacheManager if sparse else KVCacheManager
    kv_cache_manager = cache_class(
        num_layers=1 + spec_config.num_draft_layers,
        num_blocks=config.num_blocks,
        tokens_per_block=config.tokens_per_block,
        max_seq_len=config.max_seq_len,
        max_total_draft_tokens=spec_config.max_total_draft_tokens,
        num_extra_kv_tokens=config.num_extra_kv_tokens,
        device=device,
    )
    slots = kv_cache_manager.max_blocks_per_seq * config.tokens_per_block
    dense = TreeTracer if spec_config.use_dynamic_tree else Tracer
    tracer = (
        SparseTracer(slots, device, config.index_topk)
        if sparse
        else dense(slots, device, max_shift=spec_config.num_draft_layers)
    )
    setting = Setting(
        spec_config=spec_config,
        max_num_requests=config.max_num_requests,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=config.max_seq_len,
        num_slots=config.num_blocks,
        tracer=tracer,
        steering=Steering(
            config.max_num_requests,
            device,
            draft_vocab_map=config.draft_vocab_map,
            second_choice=config.guided_decoding,
        ),
        device=device,
    )
    spec_resource_manager = get_spec_resource_manager(setting)
    draft_model, worker = get_draft_model(setting), get_spec_worker(setting)
    worker.set_draft_model(draft_model)
    guided_decoder = _create_guided_decoder(config, device) if config.guided_decoding else None
    if guided_decoder is not None:
        worker.set_guided_decoder(guided_decoder)
    model_engine = PyTorchModelEngine(
        model=SpecDecOneEngineForCausalLM(
            tracer,
            draft_model,
            worker,
            second_choice=config.guided_decoding or config.use_relaxed_acceptance_for_thinking,
        ),
        spec_config=spec_config,
        spec_metadata=get_spec_metadata(setting, spec_resource_manager),
        kv_cache_manager=kv_cache_manager,
        cuda_graph_runner=CUDAGraphRunner(config.graph_warmup_runs, config.max_num_tokens, device),
        max_num_requests=config.max_num_requests,
        max_num_tokens=config.max_num_tokens,
        device=device,
        attn_metadata_class=(
            partial(
                DSAtrtllmAttentionMetadata,
                max_draft_tokens=config.max_draft_len,
                sparse_metadata_params=DSAMetadataParams(index_topk=config.index_topk),
            )
            if sparse
            else TrtllmAttentionMetadata
        ),
    )
    return PyExecutor(
        model_engine, kv_cache_manager, SpecSampler(), config.error_budget, spec_resource_manager, guided_decoder
    )


def _create_guided_decoder(config: Config, device: torch.device) -> CapturableGuidedDecoder:
    width = config.tokens_per_gen_step(config.max_draft_len)
    return CapturableGuidedDecoder(
        num_slots=config.num_blocks,
        max_num_requests=config.max_num_requests,
        width=width,
        # A text with the rows that are fed behind its end.
        max_tokens=config.max_seq_len + width,
        device=device,
    )
