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


@bug(
    "TRT-83",
    kind="K9",
    workers=(EAGLE3, PARD),
    variant="idle",
    title="A rank with nothing but dummies runs its batch by Python, while the others replay a graph",
    reference="TensorRT-LLM #18437, #16544",
    caught_by=("ranks-run-the-same-collectives",),
)
def idle_rank_without_graph(patch: Patch) -> None:
    from engines.portable.pyexecutor.model_engine import PyTorchModelEngine

    forward = PyTorchModelEngine.forward

    def forward_of_requests(self: Any, scheduled_requests: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs["capture"]:
            kwargs["use_cuda_graph"] &= not all(request.is_dummy for request in scheduled_requests.all_requests())
        return forward(self, scheduled_requests, *args, **kwargs)

    patch(PyTorchModelEngine, "forward", forward_of_requests)
