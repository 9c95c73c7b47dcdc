"""VLL-20: a page's offset is its id times a stride, and overflows an integer that is wide enough for either.

Upstream's had 32 bits and pools of thousands of pages; the width here fits the small pools of this suite.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug

_PAGES = 8


@bug(
    "VLL-20",
    kind="K4",
    workers=(EAGLE3, PARD),
    title=f"Writes to page {_PAGES} and later ones wrap around to the first pages of the pool",
    reference="vLLM #47671, #46222, #50427",
    caught_by=("kv-content-equals-reference", "output-lossless"),
)
def offset_overflows(patch: Patch) -> None:
    from engines import tracer

    original = tracer.write

    def write(cache: Any, *args: Any) -> None:
        original(tracer.Cache(cache.pool, cache.table % _PAGES), *args)

    patch(tracer, "write", write)
