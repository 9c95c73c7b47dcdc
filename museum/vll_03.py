"""VLL-03: what a request accepted is looked up by its row of now, not by the one it had in the last step."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, EAGLE3, PARD, Patch, bug


@bug(
    "VLL-03",
    kind="K3",
    workers=(EAGLE3, PARD, DFLASH),
    title="Tokens and accepted counts of the step in flight are taken from the row that a request has now",
    reference="vLLM #45100",
    caught_by=("corrections-follow-last-step", "overlap-equals-reference"),
)
def row_of_now(patch: Patch) -> None:
    from engines.portable.pyexecutor.overlap import OverlapInputs

    find_rows = OverlapInputs._rows

    def _rows(generations: Any) -> list[int]:
        rows = find_rows(generations)
        last = max(rows, default=0)
        return [min(now, last) if row >= 0 else row for now, row in enumerate(rows)]

    patch(OverlapInputs, "_rows", staticmethod(_rows))
