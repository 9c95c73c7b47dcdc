"""VLL-11: what is built on first use is built in the warm-up of a graph, so the graph itself does not build it."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "VLL-11",
    kind="K10",
    workers=(EAGLE3, PARD),
    title="A captured graph does not rebuild what its warm-up had built from the lengths",
    reference="vLLM #44253, #48261",
    caught_by=("replay-equals-eager",),
)
def built_in_warmup(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    def on_update_kv_lens(self: Any) -> None:
        pass

    patch(TrtllmAttentionMetadata, "on_update_kv_lens", on_update_kv_lens)
