"""Stand-ins for what the modules under test import but the suite does not test.

A ``StandInModule`` answers every name: with the behaviour listed in ``behaviours`` where the modules under test
depend on one, with an empty class otherwise. The classes answer too, because upstream uses enum members of such
classes as defaults of dataclass fields. What would need a behaviour that is not listed raises when it is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NoReturn

import torch

from engines.tensorrt_llm import trees
from engines.tensorrt_llm.source import PACKAGE, SPECULATIVE, attention_package

ROOTS: Final = (PACKAGE, "flashinfer", "transformers", "triton")
"""Top-level packages that never come from elsewhere while a checkout is loaded."""

INVALID_PROMPT_LOOKAHEAD_TOKEN: Final = -1
NUM_SMS: Final = 132
"""Multiprocessors of the GPU that schedules are made for."""


class _Answering(type):
    """Metaclass whose classes answer unknown attributes, the same object each time."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Member(f"{cls.__name__}.{name}")
        setattr(cls, name, value)
        return value


@dataclass(frozen=True)
class _Member:
    """An attribute of a stand-in class, for instance a member of an enum."""

    name: str


def stand_in_class(name: str, module: str) -> type:
    """An empty class called ``name`` that answers unknown attributes."""
    return _Answering(name, (), {"__module__": module, "__doc__": "Stand-in."})


class StandInModule(ModuleType):
    """A module that answers every name; also a package, so that anything can be imported from below it."""

    def __init__(self, name: str, behaviours: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__(name, "Stand-in.")
        self._behaviours = behaviours
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        make = self._behaviours.get(name)
        if make is None and name.startswith("__"):
            raise AttributeError(name)
        value = make() if make else stand_in_class(name, self.__name__)
        setattr(self, name, value)
        return value


@dataclass
class Logger:
    """Stand-in of upstream's logger that keeps what is written to it: (level, text)."""

    records: list[tuple[str, str]] = field(default_factory=list)

    def __getattr__(self, level: str) -> Callable[..., None]:
        if level.startswith("__"):
            raise AttributeError(level)
        return lambda text, *args, **kwargs: self.records.append((level, str(text)))


@dataclass
class MappingStandIn:
    """Upstream's parallel mapping for one rank."""

    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    enable_attention_dp: bool = False
    enable_lm_head_tp_in_adp: bool = False

    def has_cp_helix(self) -> bool:
        """Whether helix parallelism is on."""
        return False


class SlotManager:
    """Hands out the lowest free slot of ``max_num_requests``; an unknown request has slot None."""

    def __init__(self, max_num_requests: int) -> None:
        self._free = list(range(max_num_requests))
        self._slots: dict[Any, int] = {}

    def get_slot(self, request_id: Any) -> int | None:
        """Slot of a request."""
        return self._slots.get(request_id)

    def add_slot(self, request_id: Any) -> int:
        """Give a request its slot."""
        self._slots[request_id] = slot = self._free.pop(0)
        return slot

    def remove_slot(self, request_id: Any) -> None:
        """Take the slot of a request back."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free = sorted([*self._free, slot])

    def shutdown(self) -> None:
        """Forget every request."""
        for request_id in list(self._slots):
            self.remove_slot(request_id)


def is_dsa_cache_manager(manager: Any) -> bool:
    """Whether a KV-cache manager has a cache for the keys of an indexer."""
    return hasattr(manager, "index_head_dim")


@dataclass(frozen=True)
class DSAMetadataParams:
    """What sparse metadata is told of the model's sparse attention, by the names that its versions use.

    index_topk  positions that the indexer selects per row
    """

    index_topk: int
    index_head_dim: int = 128
    indexer_max_chunk_size: int = 32768
    skip_indexer_for_short_seqs: bool = False
    enable_indexer_skip: bool = False
    enable_heuristic_topk: bool = False
    use_cute_dsl_topk: bool = False
    use_cute_dsl_paged_mqa_logits: bool = False
    has_shared_indexer_layers: bool = False
    mtp_index_share: bool = False

    @property
    def max_sparse_topk(self) -> int:
        """Positions selected at most."""
        return self.index_topk


class ResourceManagerType(Enum):
    """Names of the resource managers that a worker may ask for."""

    KV_CACHE_MANAGER = "KV_CACHE_MANAGER"
    DRAFT_KV_CACHE_MANAGER = "DRAFT_KV_CACHE_MANAGER"
    SEQ_SLOT_MANAGER = "SEQ_SLOT_MANAGER"
    PEFT_CACHE_MANAGER = "PEFT_CACHE_MANAGER"
    SPEC_RESOURCE_MANAGER = "SPEC_RESOURCE_MANAGER"


def nvtx_range(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Decorator that leaves its function alone; also for upstream's ``maybe_compile``."""
    return lambda function: function


def inplace_slice_copy(dst: torch.Tensor, src: torch.Tensor, first: int, last: int) -> None:
    """Write the rows of ``src`` to columns ``first..last-1`` of the first rows of ``dst``."""
    dst[: src.shape[0], first:last] = src


def select_position_ids(position_ids: torch.Tensor, rows: Any) -> torch.Tensor:
    """Positions of ``rows`` in the last dimension."""
    return position_ids[..., rows]


def greedy_search_sampling_batch(logits: torch.Tensor, return_probs: bool = False) -> tuple[torch.Tensor, None]:
    """Most likely token of each row."""
    return torch.argmax(logits, dim=-1), None


def paged_mqa_logits_metadata(kv_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """Schedule of a kernel that is not run: int32 [num_sms + 1, 2], on the device of the lengths."""
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=kv_lens.device)


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} has no stand-in: only greedy sampling on one rank is driven")

    return refused


def _imported(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(module), name)


def _value(value: Any) -> Callable[[], Any]:
    return lambda: value


_TORCH_PACKAGE: Final = f"{PACKAGE}._torch"
Behaviours = dict[str, dict[str, Callable[[], Any]]]
"""Module -> name -> maker of the stand-in, for the names that need a behaviour."""


def behaviours(layout: str, logger: Logger, pin_memory: bool, metadata_class: Callable[[type], type]) -> Behaviours:
    """Everything that needs a behaviour.

    ``metadata_class`` derives the backend's metadata from the real ``AttentionMetadata``; the class stands in for
    ``TrtllmAttentionMetadata``, so that the worker base's checks of the backend find it.
    """
    return _surroundings(logger, pin_memory) | _attention(layout, metadata_class) | _executor() | _speculative()


def _surroundings(logger: Logger, pin_memory: bool) -> Behaviours:
    """Other packages, and what of this one is not about attention or requests."""

    def maybe_pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if pin_memory else tensor

    return {
        "triton": {"next_power_of_2": _value(lambda n: 1 << (n - 1).bit_length())},
        "flashinfer": {"__version__": _value("0.6.4")},
        f"{PACKAGE}.logger": {"logger": _value(logger)},
        f"{PACKAGE}._utils": {
            "get_sm_version": _value(lambda: 90),
            "prefer_pinned": _value(lambda: pin_memory),
            "maybe_pin_memory": _value(maybe_pin_memory),
            "nvtx_range": _value(nvtx_range),
        },
        f"{PACKAGE}.mapping": {"Mapping": _value(MappingStandIn)},
        f"{PACKAGE}.deep_gemm": {
            "get_num_sms": _value(lambda: NUM_SMS),
            "get_paged_mqa_logits_metadata": _value(paged_mqa_logits_metadata),
        },
        f"{_TORCH_PACKAGE}.cute_dsl_utils": {"IS_CUTLASS_DSL_AVAILABLE": _value(False)},
        f"{_TORCH_PACKAGE}.flashinfer_utils": {"IS_FLASHINFER_AVAILABLE": _value(True)},
        f"{_TORCH_PACKAGE}.custom_ops": {"inplace_slice_copy": _value(inplace_slice_copy)},
        f"{_TORCH_PACKAGE}.distributed.ops": {"allgather": _value(_refuse("allgather"))},
    }


def _attention(layout: str, metadata_class: Callable[[type], type]) -> Behaviours:
    """Backends and their metadata."""
    attention = attention_package(layout)
    interface = f"{attention}.interface"
    # Two packages above a backend, in either layout.
    utils = {
        "get_model_extra_attrs": _value(lambda: None),
        "get_global_attrs": _value(SimpleNamespace),
        "maybe_compile": _value(nvtx_range),
    }
    sparse = {
        "is_dsa_cache_manager": _value(is_dsa_cache_manager),
        "DSAtrtllmAttentionMetadata": _imported(f"{attention}.sparse.dsa.metadata", "DSAtrtllmAttentionMetadata"),
        "Indexer": _imported(f"{attention}.sparse.dsa.indexer", "Indexer"),
    }
    return {
        f"{_TORCH_PACKAGE}.utils": utils,
        f"{_TORCH_PACKAGE}.attention.utils": utils,
        attention: {"AttentionMetadata": _imported(interface, "AttentionMetadata")},
        f"{attention}.trtllm": {
            "AttentionBackend": _imported(interface, "AttentionBackend"),
            "TrtllmAttentionMetadata": lambda: metadata_class(_imported(interface, "AttentionMetadata")()),
        },
        f"{attention}.sparse.dsa": sparse,
        f"{attention}.sparse.dsa.cache_manager": sparse,
        f"{attention}.sparse.dsa.params": {"DSAMetadataParams": _value(DSAMetadataParams)},
    }


def _executor() -> Behaviours:
    """What lies around the model: requests, resources, graphs, sampling."""
    executor = f"{_TORCH_PACKAGE}.pyexecutor"
    refused = (
        "compute_probs_from_logits",
        "resolve_advanced_sampling_filters",
        "sample_from_logits_op",
        "sampling_batch_spec_dec_one_model_for_rejection",
    )
    return {
        f"{executor}.resource_manager": {
            "ResourceManagerType": _value(ResourceManagerType),
            "SlotManager": _value(SlotManager),
        },
        f"{executor}.sampler.ops.vanilla": {"greedy_search_sampling_batch": _value(greedy_search_sampling_batch)},
        f"{executor}.sampler.ops.flashinfer": {name: _value(_refuse(name)) for name in refused},
        f"{executor}.cuda_graph_runner": {"CUDA_GRAPH_DUMMY_REQUEST_ID": _value((1 << 64) - 1)},
        # Upstream's is 0, which is the id of a request here.
        f"{executor}.llm_request": {"ATTENTION_DP_DUMMY_REQUEST_ID": _value(-1)},
    }


def _speculative() -> Behaviours:
    """Helpers of workers, kernels of trees among them."""
    return {
        f"{SPECULATIVE}.accept_stats": {"maybe_create_recorder": _value(lambda max_draft_len, rank: None)},
        f"{SPECULATIVE}.utils": {"get_num_extra_kv_tokens": _value(lambda spec_config: spec_config.max_draft_len - 1)},
        f"{SPECULATIVE}.dynamic_tree_ops": {"DynamicTreeOpsConverter": _value(trees.DynamicTreeOpsConverter)},
        f"{SPECULATIVE}.eagle3_dynamic_tree": {
            "_build_mask_and_position": _value(trees.build_mask_and_position),
            "_gather_repack_step0_kernel": _value(trees.GatherRepackStep0Kernel()),
            "_resample_final_tokens": _value(trees.resample_final_tokens),
            "_select_topk_draft_tokens": _value(trees.select_topk_draft_tokens),
        },
        f"{SPECULATIVE}.mtp": {"_select_mtp_position_ids": _value(select_position_ids)},
        f"{SPECULATIVE}.mtp_tail_trim": {"mtp_tail_trim_enabled": _value(lambda: False)},
    }
