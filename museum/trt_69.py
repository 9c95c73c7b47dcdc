"""TRT-69: a KV connector is told of pages that are granted, and not of pages that a rewind frees."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "TRT-69",
    kind="K7",
    workers=(EAGLE3, PARD),
    title="The connector's list of a request's pages only grows",
    reference="TensorRT-LLM #16448, #16455",
    caught_by=("connector-knows-owned-pages",),
)
def list_grows(patch: Patch) -> None:
    from engines.portable.pyexecutor.kv_cache_connector import KvCacheConnector
    from engines.portable.pyexecutor.py_executor import PyExecutor

    prepare = PyExecutor._prepare_resources

    def update(self: Any, requests: Any) -> None:
        for request in requests:
            told = self._block_ids.setdefault(request.py_request_id, [])
            told += [b for b in self._manager.get_block_ids(request.py_request_id) if b not in told]

    def _prepare_resources(self: Any, batch: Any) -> None:
        prepare(self, batch)
        self.kv_connector.update(batch.all_requests())

    patch(KvCacheConnector, "update", update)
    patch(PyExecutor, "_prepare_resources", _prepare_resources)


@bug(
    "TRT-69",
    kind="K7",
    workers=(EAGLE3, PARD),
    variant="ended",
    title="The connector goes on knowing the pages of a request that has ended",
    reference="TensorRT-LLM, no public number",
    caught_by=("managers-forget-the-ended",),
)
def ended_request_is_known(patch: Patch) -> None:
    from engines.portable.pyexecutor.kv_cache_connector import KvCacheConnector

    patch(KvCacheConnector, "request_finished", lambda self, request: self._num_tokens.pop(request.py_request_id, None))
