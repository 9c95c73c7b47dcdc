"""TRT-81: ranks run different kinds of forward in one iteration, so their collectives do not match."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP_EAGLE, Patch, bug

_REFERENCE = "TensorRT-LLM #17095"


@bug(
    "TRT-81",
    kind="K9",
    workers=(EAGLE3, MTP_EAGLE),
    title="A rank without requests runs no forward while the others run theirs",
    reference=_REFERENCE,
    caught_by=("substeps-in-order",),
)
def idle_rank_waits(patch: Patch) -> None:
    from engines.portable.pyexecutor.attention_dp import AttentionDPPadding

    pad = AttentionDPPadding.pad

    def pad_no_idle_rank(self: Any, batch: Any, draft_len: int, *, use_cuda_graph: bool) -> Any:
        padded = pad(self, batch, draft_len, use_cuda_graph=use_cuda_graph)
        return padded if batch.all_requests() else batch

    patch(AttentionDPPadding, "pad", pad_no_idle_rank)


@bug(
    "TRT-81",
    kind="K9",
    workers=(DRAFT_TARGET, MTP_EAGLE),
    variant="rounds",
    title="A rank makes as many rounds of collectives as its own rows need, and not the largest rank's",
    reference=_REFERENCE,
    caught_by=("collectives-equal-reference", "ranks-run-the-same-collectives"),
)
def rounds_of_its_own(patch: Patch) -> None:
    from engines.portable.distributed import FusedMoE

    forward = FusedMoE.forward

    def forward_by_own_rows(self: Any, hidden_states: Any, all_rank_num_tokens: list[int] | None) -> Any:
        if all_rank_num_tokens is None:
            return forward(self, hidden_states, None)
        own = all_rank_num_tokens[self.dist.tp_rank]
        # The others' part of the rounds that it makes.
        return forward(self, hidden_states, [min(count, own) for count in all_rank_num_tokens])

    patch(FusedMoE, "forward", forward_by_own_rows)
