"""Builds an executor with everything below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from engines.compressed_tracer import CompressedTracer
from engines.page_tracer import HostTracer, ViewTracer
from engines.portable.attention.backends.flashinfer import FlashInferAttentionMetadata
from engines.portable.attention.backends.sparse.deepseek_v4.cache_manager import (
    DeepseekV4CacheManager,
    DeepseekV4CacheManagerV2,
)
from engines.portable.attention.backends.sparse.deepseek_v4.metadata import DeepseekV4TrtllmAttentionMetadata
from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager, DSACacheManagerV2
from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from engines.portable.attention.backends.sparse.dsa.params import DSAMetadataParams
from engines.portable.attention.backends.trtllm import DRAFT_LAYER, TrtllmAttentionMetadata
from engines.portable.attention.backends.vanilla import VanillaAttentionMetadata
from engines.portable.distributed import Distributed, FusedMoE
from engines.portable.heads import Steering
from engines.portable.models import SpecDecOneEngineForCausalLM
from engines.portable.pyexecutor.attention_dp import AttentionDPPadding
from engines.portable.pyexecutor.cuda_graph_runner import CUDAGraphRunner
from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder
from engines.portable.pyexecutor.kv_cache_manager_v2 import KVCacheManagerV2
from engines.portable.pyexecutor.mamba_cache_manager import MambaHybridCacheManager, MambaHybridCacheManagerV2
from engines.portable.pyexecutor.model_engine import PyTorchModelEngine
from engines.portable.pyexecutor.py_executor import PyExecutor
from engines.portable.pyexecutor.resource_manager import KVCacheManager
from engines.portable.pyexecutor.sampler import SpecSampler
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.drafter import Setting
from engines.portable.speculative.utils import (
    MODES,
    get_draft_model,
    get_spec_metadata,
    get_spec_resource_manager,
    get_spec_worker,
)
from engines.portable.vocab_shards import VocabShards
from engines.tracer import SparseTracer, Tracer, TreeTracer
from scenarios import BACKENDS, Config
from scenarios.reuse import look_ahead
from scenarios.tracer import BEGIN_THINKING_TOKEN, MASK_TOKEN

_DENSE_CACHES: Final = {"V1": KVCacheManager, "V2": KVCacheManagerV2}
_HYBRID_CACHES: Final = {"V1": MambaHybridCacheManager, "V2": MambaHybridCacheManagerV2}
_SPARSE_CACHES: Final = {"V1": DSACacheManager, "V2": DSACacheManagerV2}
_COMPRESSED_CACHES: Final = {"V1": DeepseekV4CacheManager, "V2": DeepseekV4CacheManagerV2}
"""By version: of tokens alone, with recurrent states, an indexer's keys, or what tokens are compressed to, beside."""


def create_py_executor(config: Config, device: torch.device) -> PyExecutor:
    """The executor of a configuration, with model, worker, metadata, cache and graph runner on ``device``."""
    spec_config = create_spec_config(config)
    kv_cache_manager, draft_kv_cache_manager = _kv_cache_managers(config, spec_config, device)
    managers = [m for m in (kv_cache_manager, draft_kv_cache_manager) if m is not None]
    slots = max(manager.max_blocks_per_seq * manager.tokens_per_block for manager in managers)
    tracer = _create_tracer(config, spec_config, slots, device)
    dist = Distributed(config.attention_dp_size, config.attention_dp_rank)
    setting = create_setting(config, spec_config, tracer, dist, device)
    spec_resource_manager = get_spec_resource_manager(setting)
    draft_model, worker = get_draft_model(setting), get_spec_worker(setting)
    worker.set_draft_model(draft_model)
    if config.tp_size > 1:
        worker.vocab_shards = VocabShards(config.tp_size, config.tp_rank)
    guided_decoder = _create_guided_decoder(config, device) if config.guided_decoding else None
    if guided_decoder is not None:
        worker.set_guided_decoder(guided_decoder)
    spec_metadata = get_spec_metadata(setting, spec_resource_manager)
    seq_slot_manager = SeqSlotManager(config.num_blocks) if config.rejection_sampling else None
    if seq_slot_manager is not None:
        spec_metadata.prepare_rejection_sampling_buffers(seq_slot_manager, config.max_draft_len)
    model_engine = PyTorchModelEngine(
        model=SpecDecOneEngineForCausalLM(
            tracer,
            draft_model,
            worker,
            FusedMoE(dist, "target_model.moe"),
            second_choice=config.guided_decoding or config.use_relaxed_acceptance_for_thinking,
            probabilities=config.rejection_sampling,
            recurrent=config.recurrent,
        ),
        spec_config=spec_config,
        spec_metadata=spec_metadata,
        kv_cache_manager=kv_cache_manager,
        cuda_graph_runner=CUDAGraphRunner(config.graph_warmup_runs, config.max_num_tokens, device),
        max_num_requests=config.max_num_requests,
        max_num_tokens=config.max_num_tokens,
        device=device,
        attn_metadata_class=partial(
            _attn_metadata_class(config, spec_config),
            draft_kv_cache_manager=draft_kv_cache_manager,
        ),
        dist=dist,
        enable_overlap=config.overlap,
        guided_decoder=guided_decoder,
    )
    return PyExecutor(
        model_engine,
        kv_cache_manager,
        SpecSampler(),
        config.error_budget,
        spec_resource_manager,
        draft_kv_cache_manager,
        AttentionDPPadding(config, dist),
        guided_decoder,
        seq_slot_manager,
        disable_overlap_scheduler=not config.overlap,
    )


def create_setting(
    config: Config, spec_config: DecodingConfig, tracer: Tracer, dist: Distributed, device: torch.device
) -> Setting:
    """The engine around the worker of a configuration."""
    steering = Steering(
        config.max_num_requests,
        device,
        draft_vocab_map=config.draft_vocab_map,
        second_choice=config.guided_decoding,
        probabilities=config.rejection_sampling,
    )
    return Setting(
        spec_config=spec_config,
        max_num_requests=config.max_num_requests,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=config.max_seq_len,
        num_slots=config.num_blocks,
        tracer=tracer,
        steering=steering,
        device=device,
        dist=dist,
    )


def _create_tracer(config: Config, spec_config: DecodingConfig, slots: int, device: torch.device) -> Tracer:
    backend = BACKENDS[config.attention_backend]
    if backend.compressed:
        return CompressedTracer(
            slots,
            device,
            window_size=config.window_size,
            ratios=config.compress_ratios,
            index_topk=config.index_topk,
        )
    if backend.sparse:
        return SparseTracer(slots, device, config.index_topk)
    if backend.one_page:
        return HostTracer(slots, device)
    if backend.draft_view:
        return ViewTracer(slots, device)
    dense = TreeTracer if spec_config.use_dynamic_tree else Tracer
    return dense(slots, device, max_shift=spec_config.num_draft_layers)


def _attn_metadata_class(config: Config, spec_config: DecodingConfig) -> Callable[..., Any]:
    """The backend's class, given what its constructor takes beyond that of the others."""
    backend = BACKENDS[config.attention_backend]
    if backend.one_page:
        return VanillaAttentionMetadata
    if backend.draft_view:
        return partial(
            FlashInferAttentionMetadata, draft_shares_kv=config.shares_target_kv, enable_overlap=config.overlap
        )
    drafts: dict[str, Any] = {
        "max_total_draft_tokens": spec_config.max_total_draft_tokens,
        "spec_tree_width": spec_config.spec_tree_width,
    }
    if not backend.sparse:
        return partial(TrtllmAttentionMetadata, **drafts)
    params = DSAMetadataParams(index_topk=config.index_topk)
    if backend.compressed:
        params = replace(
            params,
            skip_indexer_for_short_seqs=False,
            compress_ratios=config.compress_ratios,
            window_size=config.window_size,
        )
    return partial(
        DeepseekV4TrtllmAttentionMetadata if backend.compressed else DSAtrtllmAttentionMetadata,
        max_draft_tokens=config.max_draft_len,
        sparse_metadata_params=params,
        **drafts,
    )


def create_spec_config(config: Config) -> DecodingConfig:
    """What a configuration says of speculation, as the engine is told."""
    return DecodingConfig(
        spec_dec_mode=MODES[config.worker],
        max_draft_len=config.max_draft_len,
        num_extra_kv_tokens=config.num_extra_kv_tokens,
        mask_token_id=MASK_TOKEN,
        dynamic_tree_max_topK=config.dynamic_tree_max_topK,
        dynamic_tree_max_nodes=config.max_total_draft_tokens,
        force_num_accepted_tokens=config.force_num_accepted_tokens,
        sa_threshold=config.sa_threshold,
        use_relaxed_acceptance_for_thinking=config.use_relaxed_acceptance_for_thinking,
        relaxed_topk=config.relaxed_topk,
        relaxed_delta=config.relaxed_delta,
        begin_thinking_phase_token=BEGIN_THINKING_TOKEN,
        ragged_verify=config.ragged_verify,
        use_shared_kv_cache=config.shares_target_kv,
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


def _kv_cache_managers(
    config: Config, spec_config: DecodingConfig, device: torch.device
) -> tuple[KVCacheManager, KVCacheManager | None]:
    """The manager of all layers, or that of the target's and that of the drafter's."""
    common = {
        "max_seq_len": config.max_seq_len,
        "max_total_draft_tokens": spec_config.max_total_draft_tokens,
        "num_extra_kv_tokens": config.num_extra_kv_tokens,
        "device": device,
        "host_offload": config.host_offload,
        "context_reserve_draft_tokens": spec_config.max_total_draft_tokens if config.overlap else 0,
        "enable_block_reuse": config.enable_block_reuse,
        # A drafter that is a token ahead has in the last slot of a page the token behind it.
        "reuse_look_ahead": look_ahead(config),
    }
    target_class, draft_class = _cache_classes(config)
    target = partial(target_class, num_blocks=config.num_blocks, tokens_per_block=config.tokens_per_block, **common)
    if not config.use_separate_draft_kv_cache:
        return target(num_layers=DRAFT_LAYER + spec_config.num_draft_layers), None
    return target(num_layers=DRAFT_LAYER), draft_class(
        num_layers=spec_config.num_draft_layers,
        first_layer=DRAFT_LAYER,
        num_blocks=config.draft_num_blocks,
        tokens_per_block=config.draft_tokens_per_block,
        **common,
    )


def _cache_classes(config: Config) -> tuple[Callable[..., KVCacheManager], Callable[..., KVCacheManager]]:
    """Managers of the target's cache and of the drafter's own, whose layers compress nothing."""
    backend, version = BACKENDS[config.attention_backend], config.kv_cache_manager
    if backend.compressed:
        compressed = partial(_COMPRESSED_CACHES[version], compress_ratios=config.compress_ratios)
        return compressed, _DENSE_CACHES[version]
    if config.recurrent:
        width = config.tokens_per_gen_step(config.max_draft_len)
        states = {"max_batch_size": config.max_num_requests, "tokens_per_gen_step": width}
        return partial(_HYBRID_CACHES[version], **states), _DENSE_CACHES[version]
    caches = _SPARSE_CACHES if backend.sparse else _DENSE_CACHES
    return caches[version], caches[version]
