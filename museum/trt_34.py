"""TRT-34: the device writes ahead of what the host has granted, up to a draft length.

Upstream's cause was disputed. Here a prompt is granted room for the drafts of its first chunk, and the step in flight
is counted with those of its last.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "TRT-34",
    kind="K3",
    workers=(EAGLE3, PARD),
    title="A prompt is granted room for the drafts of its first chunk, though the next step may have more",
    reference="TensorRT-LLM #16280",
    caught_by=("kv-ledger-equals-reference",),
)
def room_for_the_first_chunk(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    initialise = KVCacheManager.__init__

    def __init__(self: Any, **options: Any) -> None:
        initialise(self, **options | {"context_reserve_draft_tokens": 0})

    patch(KVCacheManager, "__init__", __init__)
