"""TRT-91: the device reads the host's rows of a block table, which change hands and grow before it does."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "TRT-91",
    kind="K11",
    workers=(EAGLE3, PARD),
    title="Block tables are read from the manager's own rows, which are written when pages are granted",
    reference="TensorRT-LLM #16088, #15607",
    caught_by=("copies-are-not-overtaken",),
)
def rows_of_the_manager(patch: Patch) -> None:
    from engines.portable.copies import copy_to_device
    from engines.portable.pyexecutor.kv_cache_manager_v2 import KVCacheManagerV2

    copy_all = KVCacheManagerV2.copy_batch_block_offsets

    def copy_batch_block_offsets(self: Any, dst: Any, request_ids: Any) -> None:
        if self._offloading is not None:
            # Then the rows do not say where pages lie.
            copy_all(self, dst, request_ids)
            return
        for row, slot in enumerate(self._index_mapper.get_slots(request_ids)):
            # K and V apart, so that a device is given this very memory to copy from.
            for table in dst[0, row]:
                copy_to_device("block_offsets", table, self.host_kv_cache_block_offsets[slot])

    patch(KVCacheManagerV2, "copy_batch_block_offsets", copy_batch_block_offsets)


@bug(
    "TRT-91",
    kind="K11",
    workers=(EAGLE3, PARD),
    variant="not-yet",
    title="The host reads the outputs of a step without waiting until they have arrived",
    reference="TensorRT-LLM, no public number",
    caught_by=("output-lossless", "emitted-follows-acceptance"),
)
def read_before_they_arrive(patch: Patch) -> None:
    from engines.portable.pyexecutor.sampler import SampleState

    patch(SampleState, "synchronize", lambda self: None)
