"""TRT-75: the choice of the graph and the preparation of its inputs disagree about what a generation verifies."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, Patch, bug


def _replay_the_smallest(patch: Patch, alike: int) -> None:
    """Let the smallest graph be replayed of those whose keys begin with the same ``alike`` numbers.

    A key is batch size, draft length and rows of the generations.
    """
    from engines.portable.pyexecutor.cuda_graph_runner import CUDAGraphRunner

    get_graph_metadata, replay_graph = CUDAGraphRunner.get_graph_metadata, CUDAGraphRunner.replay

    def smallest(self: Any, key: Any) -> Any:
        if key not in self.graphs:
            return key  # it is to be captured
        return min(known for known in self.graphs if known[:alike] == key[:alike])

    def metadata(self: Any, key: Any, attn_metadata: Any, spec_metadata: Any) -> Any:
        return get_graph_metadata(self, smallest(self, key), attn_metadata, spec_metadata)

    def replay(self: Any, key: Any, inputs: Any) -> Any:
        return replay_graph(self, smallest(self, key), inputs)

    patch(CUDAGraphRunner, "get_graph_metadata", metadata)
    patch(CUDAGraphRunner, "replay", replay)


@bug(
    "TRT-75",
    kind="K8",
    workers=(EAGLE3,),
    title="A graph is chosen by batch size, with a smaller draft length than the inputs have",
    reference="TensorRT-LLM #16746",
    caught_by=("layout-equals-reference", "gather-ids-match-layout", "replay-equals-eager"),
)
def graph_of_another_length(patch: Patch) -> None:
    _replay_the_smallest(patch, alike=1)


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
    _replay_the_smallest(patch, alike=2)


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
