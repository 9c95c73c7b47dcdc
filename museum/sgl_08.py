"""SGL-08: what a step is planned with is counted before the batches of the ranks are padded to one size."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP_EAGLE, PARD, Patch, bug


@bug(
    "SGL-08",
    kind="K5",
    workers=(EAGLE3, MTP_EAGLE, PARD),
    title="Tokens of the other ranks are counted before dummies pad their batches",
    reference="SGLang #30805",
    caught_by=("rank-counts-follow-batches", "ranks-run-the-same-collectives"),
)
def counted_before_padding(patch: Patch) -> None:
    from engines.portable.pyexecutor.model_engine import PyTorchModelEngine

    def _gather_num_tokens(self: Any, attn_metadata: Any) -> Any:
        if not self.dist.enable_attention_dp:
            return None
        width = self.spec_metadata.runtime_tokens_per_gen_step
        others = [peer.num_tokens(width) for peer in self.dist.scheduled]
        return self.dist.tp_allgather("attn_metadata.all_rank_num_tokens", attn_metadata.num_tokens, others)

    patch(PyTorchModelEngine, "_gather_num_tokens", _gather_num_tokens)
