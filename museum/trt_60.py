"""TRT-60: the managers of target and drafter have rows for different numbers of requests and dummies."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP, PARD, Patch, bug


@bug(
    "TRT-60",
    kind="K5",
    workers=(EAGLE3, PARD, MTP),
    title="The drafter's manager has a row for each of a batch, the target's for all who may own a page",
    reference="TensorRT-LLM #19006",
    caught_by=("steps-complete",),
)
def rows_of_one_batch(patch: Patch) -> None:
    from engines.portable.pyexecutor import py_executor_creator
    from engines.portable.pyexecutor.kv_cache_manager_v2 import KVCacheManagerV2
    from engines.portable.pyexecutor.resource_manager import SlotManager

    create = py_executor_creator._kv_cache_managers

    def _kv_cache_managers(config: Any, *args: Any) -> Any:
        target, drafter = create(config, *args)
        if isinstance(drafter, KVCacheManagerV2):
            drafter._index_mapper = SlotManager(config.max_num_requests)
        return target, drafter

    patch(py_executor_creator, "_kv_cache_managers", _kv_cache_managers)
