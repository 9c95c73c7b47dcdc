"""The executor around upstream's classes: real worker, real metadata, everything else from the portable engine.

Requests, KV-cache manager, sampler, graph runner and the tracer model are the portable engine's, which calls
draft models, metadata and managers as upstream does.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

from engines.portable.distributed import Distributed
from engines.portable.models import HIDDEN_SIZE, NUM_LAYERS, SpecDecOneEngineForCausalLM
from engines.portable.pyexecutor.cuda_graph_runner import CUDAGraphRunner
from engines.portable.pyexecutor.model_engine import PyTorchModelEngine
from engines.portable.pyexecutor.py_executor import PyExecutor
from engines.portable.pyexecutor.py_executor_creator import create_setting, create_spec_config
from engines.portable.pyexecutor.sampler import SpecSampler
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.drafter import Setting
from engines.tensorrt_llm.backend import spec_metadata_class
from engines.tensorrt_llm.cache_managers import DSACacheManager, KVCacheManager
from engines.tensorrt_llm.drafters import DFLASH_BACKEND, get_draft_model
from engines.tensorrt_llm.loader import Upstream
from engines.tensorrt_llm.probe import METADATA_CLASSES, arguments_for, fields_for
from engines.tensorrt_llm.real_metadata import attention_metadata
from engines.tensorrt_llm.stand_ins import INVALID_PROMPT_LOOKAHEAD_TOKEN, MappingStandIn
from engines.tensorrt_llm.trees import TreeKVCacheManager, TreeResources, tree_resources
from engines.tensorrt_llm.worker_state import HiddenStatesResources
from engines.tracer import SparseTracer, Tracer, TreeTracer
from scenarios import BACKENDS, Config, UsageError
from scenarios.tracer import MASK_TOKEN, VOCAB_SIZE

KEYWORD: Final = "keyword"
POSITIONAL: Final = "positional"
CALLS: Final = (KEYWORD, POSITIONAL)
"""How the metadata reaches ``forward``; upstream's caller uses keywords, its template looks for both."""

_ARGUMENTS: Final = (
    "input_ids", "position_ids", "hidden_states", "logits", "attn_metadata", "spec_metadata", "draft_model",
    "resource_manager",
)  # fmt: skip
"""Arguments of a worker's forward, in order."""


class DraftKVCacheManager:
    """The draft layers' manager of an engine whose target and draft layers share their pages.

    A manager of its own as far as a worker can tell, which makes it swap managers and block tables.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class ResourceManager:
    """Gives a worker the manager that it asks for by type."""

    def __init__(self, **managers: Any) -> None:
        self._managers = managers

    def get_resource_manager(self, kind: Any) -> Any:
        """The manager of that name; None if there is none."""
        return self._managers.get(getattr(kind, "name", ""))


class OneEngineModel(SpecDecOneEngineForCausalLM):
    """Target, drafter and an upstream worker; its forward hands the worker all that upstream's wrapper does."""

    def __init__(
        self, tracer: Tracer, draft_model: Any, worker: nn.Module, resources: ResourceManager, call: str
    ) -> None:
        super().__init__(tracer, draft_model, worker)
        self._resources = resources
        self._call = call

    def forward(
        self, *, input_ids: Tensor, position_ids: Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> dict[str, Tensor]:
        """Run the target, then the worker; returns the worker's outputs."""
        self.draft_model.steering.depth = 0
        common = {"input_ids": input_ids, "position_ids": position_ids, "attn_metadata": attn_metadata}
        hidden_states = self.model(spec_metadata=spec_metadata, **common)
        rows = hidden_states.index_select(0, spec_metadata.gather_ids)
        values = common | {
            "spec_metadata": spec_metadata,
            "hidden_states": hidden_states,
            "logits": self.logits_processor(rows, self.lm_head, attn_metadata, True),
            "draft_model": self.draft_model,
            "resource_manager": self._resources,
        }
        if self._call == POSITIONAL:
            outputs: dict[str, Tensor] = self.spec_worker(*(values[name] for name in _ARGUMENTS))
        else:
            outputs = self.spec_worker(**values)
        return outputs


class ModelEngine(PyTorchModelEngine):
    """The portable model engine with upstream's attention metadata; ``slot_storage`` holds trees of drafts."""

    def __init__(
        self,
        metadata_class: Any,
        draft_kv_cache_manager: DraftKVCacheManager,
        slot_storage: Any,
        index_topk: int,
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        rows, tokens, manager = (parts[p] for p in ("max_num_requests", "max_num_tokens", "kv_cache_manager"))
        width = parts["spec_config"].spec_tree_width
        trees = {"spec_tree_width": width, "slot_storage": slot_storage} if width else {}
        self.attn_metadata = attention_metadata(
            metadata_class, manager, draft_kv_cache_manager, rows, tokens, index_topk, **trees
        )


def _spec_config(upstream: Upstream, config: Config, spec_config: DecodingConfig) -> SimpleNamespace:
    """What workers read of a decoding configuration; nothing but greedy drafting is switched on."""
    mode = upstream.interface.SpeculativeDecodingMode[spec_config.spec_dec_mode.name]
    return SimpleNamespace(
        spec_dec_mode=mode,
        max_draft_len=config.max_draft_len,
        max_total_draft_tokens=spec_config.max_total_draft_tokens,
        tokens_per_gen_step=spec_config.max_total_draft_tokens + 1,
        mask_token_id=MASK_TOKEN,
        attention_backend=DFLASH_BACKEND,
        sa_config=None,
        use_dynamic_tree=spec_config.use_dynamic_tree,
        dynamic_tree_max_topK=spec_config.dynamic_tree_max_topK,
        _max_batch_size=config.max_num_requests,
        use_relaxed_acceptance_for_thinking=False,
        _use_shared_kv_cache=False,
        _allow_separate_draft_kv_cache=True,
    )


def _worker(worker_class: type, spec_config: SimpleNamespace, separate: bool) -> nn.Module:
    mapping = MappingStandIn()
    values = {
        "spec_config": spec_config,
        "mapping": mapping,
        "model_config": SimpleNamespace(mapping=mapping),
        "use_separate_draft_kv_cache": separate,
    }
    worker: nn.Module = worker_class(**arguments_for(worker_class, values))
    return worker


def _spec_resources(
    upstream: Upstream, worker_class: type, config: Config, spec_config: SimpleNamespace, setting: Setting
) -> HiddenStatesResources | TreeResources | None:
    """The manager of what a worker keeps per request, None for a worker that keeps nothing or does it itself.

    With a slot per page, as requests that are not in the batch keep theirs and each owns a page.
    """
    if spec_config.use_dynamic_tree:
        return tree_resources(setting)
    if not spec_config.spec_dec_mode.is_mtp_vanilla():
        return None
    values = {
        "config": spec_config,
        "dtype": torch.int64,
        "hidden_size": HIDDEN_SIZE,
        "max_num_requests": config.num_blocks,
    }
    manager_class = upstream.module_of(worker_class).MTPHiddenStatesManager
    return HiddenStatesResources(manager_class(**arguments_for(manager_class, values)))


def _spec_metadata(
    upstream: Upstream,
    worker_class: type,
    config: Config,
    spec_config: SimpleNamespace,
    resources: HiddenStatesResources | TreeResources | None,
) -> Any:
    name = METADATA_CLASSES[config.worker]
    workers = [cls for cls in worker_class.__mro__ if issubclass(cls, upstream.interface.SpecWorkerBase)]
    modules = [upstream.module_of(cls) for cls in workers]
    metadata_class = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
    if metadata_class is None:
        names = ", ".join(module.__name__ for module in modules)
        raise UsageError(f"config.worker: {config.worker} needs {name}, which none of {names} has; name another worker")
    no_token = getattr(upstream.interface, "INVALID_PROMPT_LOOKAHEAD_TOKEN", INVALID_PROMPT_LOOKAHEAD_TOKEN)
    eagle3 = not spec_config.spec_dec_mode.is_mtp_eagle_one_model()
    values = {
        "max_num_requests": config.max_num_requests,
        "max_draft_len": config.max_draft_len,
        "max_total_draft_tokens": spec_config.max_total_draft_tokens,
        "spec_dec_mode": spec_config.spec_dec_mode,
        "num_extra_kv_tokens": config.num_extra_kv_tokens,
        "num_layers": NUM_LAYERS,
        "max_num_tokens": config.max_num_tokens,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "layers_to_capture": tuple(range(NUM_LAYERS)) if eagle3 else None,
        "dtype": torch.int64,
        "mtp_num_modules": config.max_draft_len,
        "mtp_hidden_states_manager": getattr(resources, "manager", None),
    }
    driven: Any = spec_metadata_class(metadata_class, no_token)
    return driven(**fields_for(metadata_class, values))


@dataclass(frozen=True)
class Options:
    """How the worker is called and configured.

    metadata                 "keyword" or "positional": how the metadata reaches its forward
    separate_draft_kv_cache  whether the draft layers have a KV-cache manager and block tables of their own, which
                             is upstream's default
    """

    metadata: str = KEYWORD
    separate_draft_kv_cache: bool = True


def _cache_and_tracer(
    config: Config, decoding: DecodingConfig, device: torch.device
) -> tuple[KVCacheManager | DSACacheManager, Tracer]:
    """The cache that the attention backend reads, and the arithmetic that reads it."""
    sparse = BACKENDS[config.attention_backend].sparse
    dense_manager, dense = (TreeKVCacheManager, TreeTracer) if decoding.use_dynamic_tree else (KVCacheManager, Tracer)
    manager = (DSACacheManager if sparse else dense_manager)(
        num_layers=1 + decoding.num_draft_layers,
        num_blocks=config.num_blocks,
        tokens_per_block=config.tokens_per_block,
        max_seq_len=config.max_seq_len,
        max_total_draft_tokens=decoding.max_total_draft_tokens,
        num_extra_kv_tokens=config.num_extra_kv_tokens,
        device=device,
    )
    slots = manager.max_blocks_per_seq * config.tokens_per_block
    if sparse:
        return manager, SparseTracer(slots, device, config.index_topk)
    return manager, dense(slots, device, max_shift=decoding.num_draft_layers)


def create_py_executor(
    upstream: Upstream, worker_class: type, config: Config, device: torch.device, options: Options
) -> PyExecutor:
    """The executor of a configuration. Call it, and everything of it, while ``upstream`` is active."""
    decoding = create_spec_config(config)
    manager, tracer = _cache_and_tracer(config, decoding, device)
    draft_manager = DraftKVCacheManager(manager)
    setting = create_setting(config, decoding, tracer, Distributed(), device)
    spec_config = _spec_config(upstream, config, decoding)
    worker = _worker(worker_class, spec_config, options.separate_draft_kv_cache)
    resources = _spec_resources(upstream, worker_class, config, spec_config, setting)
    managers = ResourceManager(
        KV_CACHE_MANAGER=manager, DRAFT_KV_CACHE_MANAGER=draft_manager, SPEC_RESOURCE_MANAGER=resources
    )
    model_engine = ModelEngine(
        # The kernels that write masks and offsets of trees are the suite's, and so are the buffers.
        upstream.suites_metadata if decoding.use_dynamic_tree else upstream.metadata[config.attention_backend],
        draft_manager,
        getattr(resources, "slot_storage", None),
        config.index_topk,
        model=OneEngineModel(tracer, get_draft_model(setting), worker, managers, options.metadata),
        spec_config=decoding,
        spec_metadata=_spec_metadata(upstream, worker_class, config, spec_config, resources),
        kv_cache_manager=manager,
        cuda_graph_runner=CUDAGraphRunner(config.graph_warmup_runs, config.max_num_tokens, device),
        max_num_requests=config.max_num_requests,
        max_num_tokens=config.max_num_tokens,
        device=device,
    )
    return PyExecutor(model_engine, manager, SpecSampler(), config.error_budget, resources)
