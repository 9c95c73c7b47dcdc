"""TRT-83: ranks that replay graphs choose them each by itself."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP_EAGLE, PARD, Patch, bug


@bug(
    "TRT-83",
    kind="K9",
    workers=(EAGLE3, MTP_EAGLE, PARD),
    title="A rank replays the graph of its own batch size, and not that of the largest batch of all ranks",
    reference="TensorRT-LLM #18437, #16544",
    caught_by=("rank-counts-follow-batches", "layout-equals-reference", "ranks-run-the-same-collectives"),
)
def graph_of_its_own_size(patch: Patch) -> None:
    from engines.portable.pyexecutor.attention_dp import AttentionDPPadding

    pad = AttentionDPPadding.pad

    def pad_for_itself(self: Any, batch: Any, draft_len: int, *, use_cuda_graph: bool) -> Any:
        return pad(self, batch, draft_len, use_cuda_graph=False)

    patch(AttentionDPPadding, "pad", pad_for_itself)
