"""VLL-10: the dummy of an idle rank counts once as a row of tokens and once as a request."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP_EAGLE, PARD, Patch, bug


@bug(
    "VLL-10",
    kind="K5",
    workers=(EAGLE3, MTP_EAGLE, PARD),
    title="An idle rank tells the others one token for its dummy, which feeds as many as any generation",
    reference="vLLM #34187, #34009",
    caught_by=("rank-counts-follow-batches", "ranks-run-the-same-collectives"),
)
def one_token_of_a_dummy(patch: Patch) -> None:
    from engines.portable.pyexecutor.model_engine import PyTorchModelEngine

    flatten = PyTorchModelEngine._flatten

    def _flatten(self: Any, scheduled_requests: Any, *args: Any) -> Any:
        requests = scheduled_requests.all_requests()
        self.is_idle = all(r.is_dummy for r in requests) and bool(self.dist.scheduled)
        return flatten(self, scheduled_requests, *args)

    def _gather_num_tokens(self: Any, attn_metadata: Any) -> Any:
        if not self.dist.enable_attention_dp:
            return None
        width = self.spec_metadata.runtime_tokens_per_gen_step
        own = attn_metadata.num_seqs if self.is_idle else attn_metadata.num_tokens
        others = [peer.num_tokens(width) for peer in self.dist.running]
        return self.dist.tp_allgather("attn_metadata.all_rank_num_tokens", own, others)

    patch(PyTorchModelEngine, "_flatten", _flatten)
    patch(PyTorchModelEngine, "_gather_num_tokens", _gather_num_tokens)
