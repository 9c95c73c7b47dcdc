"""TRT-75: the choice of the graph and the preparation of its inputs disagree about what a generation verifies."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, Patch, bug


@bug(
    "TRT-75",
    kind="K8",
    workers=(EAGLE3,),
    title="A graph is chosen by batch size, with a smaller draft length than the inputs have",
    reference="TensorRT-LLM #16746",
    caught_by=("layout-equals-reference", "gather-ids-match-layout", "replay-equals-eager"),
)
def graph_of_another_length(patch: Patch) -> None:
    from engines.portable.pyexecutor.cuda_graph_runner import CUDAGraphRunner

    get_graph_metadata, replay_graph = CUDAGraphRunner.get_graph_metadata, CUDAGraphRunner.replay

    def shortest(self: Any, key: Any) -> Any:
        return min((known for known in self.graphs if known[0] == key[0]), default=key)

    def metadata(self: Any, key: Any, attn_metadata: Any, spec_metadata: Any) -> Any:
        # A graph that is to be captured is not there yet.
        chosen = shortest(self, key) if key in self.graphs else key
        return get_graph_metadata(self, chosen, attn_metadata, spec_metadata)

    def replay(self: Any, key: Any, inputs: Any) -> Any:
        return replay_graph(self, shortest(self, key), inputs)

    patch(CUDAGraphRunner, "get_graph_metadata", metadata)
    patch(CUDAGraphRunner, "replay", replay)


@bug(
    "TRT-75",
    kind="K8",
    workers=(EAGLE3,),
    variant="rows",
    title="A graph is chosen by batch size and draft length, with fewer rows than the inputs have",
    reference="TensorRT-LLM #16746",
    caught_by=("kv-lens-equals-reference", "replay-equals-eager"),
)
def graph_of_other_rows(patch: Patch) -> None:
    from engines.portable.pyexecutor.cuda_graph_runner import CUDAGraphRunner

    get_graph_metadata, replay_graph = CUDAGraphRunner.get_graph_metadata, CUDAGraphRunner.replay

    def fewest(self: Any, key: Any) -> Any:
        return min((known for known in self.graphs if known[:2] == key[:2]), default=key)

    def metadata(self: Any, key: Any, attn_metadata: Any, spec_metadata: Any) -> Any:
        chosen = fewest(self, key) if key in self.graphs else key
        return get_graph_metadata(self, chosen, attn_metadata, spec_metadata)

    def replay(self: Any, key: Any, inputs: Any) -> Any:
        return replay_graph(self, fewest(self, key), inputs)

    patch(CUDAGraphRunner, "get_graph_metadata", metadata)
    patch(CUDAGraphRunner, "replay", replay)


@bug(
    "TRT-75",
    kind="K8",
    workers=(EAGLE3,),
    variant="key",
    title="The key of a graph names the widest batch, whatever rows its own generations verify",
    reference="TensorRT-LLM #16746",
    caught_by=("graph-fits-the-batch",),
)
def key_of_the_widest(patch: Patch) -> None:
    from engines.portable.pyexecutor.cuda_graph_runner import CUDAGraphRunner

    def widest(key: Any) -> Any:
        return (*key[:2], key[0] * (key[1] + 1))

    for name in ("get_graph_metadata", "capture", "replay"):
        original = getattr(CUDAGraphRunner, name)

        def renamed(self: Any, key: Any, *args: Any, _original: Any = original) -> Any:
            return _original(self, widest(key), *args)

        patch(CUDAGraphRunner, name, renamed)
