"""TRT-73: room for drafts is reserved before speculation is switched off for the step, and never given back."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, Patch, bug


@bug(
    "TRT-73",
    kind="K8",
    workers=(DRAFT_TARGET,),
    title="A step without drafts keeps the KV tokens that were reserved for them",
    reference="TensorRT-LLM #10160",
    caught_by=("kv-ledger-balanced", "kv-ledger-equals-reference"),
)
def reserved_and_not_rewound(patch: Patch) -> None:
    from engines.portable.pyexecutor.py_executor import PyExecutor

    pad_draft_tokens = PyExecutor._pad_draft_tokens

    def _pad_draft_tokens(self: Any, iteration: Any) -> None:
        if iteration.draft_len == 0:
            for request in iteration.batch.generation_requests:
                self.kv_cache_manager._add_tokens(request, self.model_engine.spec_config.max_draft_len)
        pad_draft_tokens(self, iteration)

    patch(PyExecutor, "_pad_draft_tokens", _pad_draft_tokens)
