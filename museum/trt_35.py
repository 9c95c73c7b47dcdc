"""TRT-35: a request ends before the rewind of its last step is applied."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, SA, Patch, bug


@bug(
    "TRT-35",
    kind="K3",
    workers=(EAGLE3,),
    title="The KV cache of a request that ends is freed before what it did not accept is rewound",
    reference="TensorRT-LLM #9693",
    caught_by=("steps-complete",),
)
def freed_before_rewound(patch: Patch) -> None:
    from engines.portable.pyexecutor.py_executor import PyExecutor

    forward_step = PyExecutor._forward_step

    def _forward_step(self: Any, iteration: Any) -> Any:
        error = forward_step(self, iteration)
        if error is None:
            self._free(iteration.finished)
        return error

    patch(PyExecutor, "_forward_step", _forward_step)


@bug(
    "TRT-35",
    kind="K3",
    workers=(EAGLE3, PARD),
    variant="in-flight",
    title="A request that ended while its next step was in flight is rewound for that step, too",
    reference="TensorRT-LLM #9693",
    caught_by=("steps-complete", "batch-equals-requests-alone"),
)
def rewound_after_its_end(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    update = KVCacheManager.update_resources

    def update_resources(self: Any, scheduled_batch: Any) -> None:
        for request in scheduled_batch.generation_requests:
            if request.is_finished and request.py_rewind_len > 0:
                self.rewind_kv_cache(request, request.py_rewind_len)
        update(self, scheduled_batch)

    patch(KVCacheManager, "update_resources", update_resources)


@bug(
    "TRT-35",
    kind="K3",
    workers=(EAGLE3, PARD, SA),
    variant="again",
    title="A request that ended while its next step was in flight is active again after that step",
    reference="TensorRT-LLM #9693",
    caught_by=("ended-requests-are-left-alone",),
)
def active_again(patch: Patch) -> None:
    from engines.portable.pyexecutor.py_executor import PyExecutor

    patch(PyExecutor, "_served", staticmethod(lambda batch: [r for r in batch.all_requests() if not r.is_dummy]))
