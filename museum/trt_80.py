"""TRT-80: of rows that were gathered from all ranks a rank takes those of another one for its own."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, MTP_EAGLE, Patch, bug


@bug(
    "TRT-80",
    kind="K9",
    workers=(MTP_EAGLE, DRAFT_TARGET),
    title="A drafter goes on with the first rows of those gathered, which are another rank's",
    reference="TensorRT-LLM #16440",
    caught_by=("drafts-equal-reference", "other-ranks-do-not-matter"),
)
def rows_of_the_first_rank(patch: Patch) -> None:
    from engines.portable.distributed import Distributed

    gather_rows = Distributed.allgather_rows

    def allgather_rows(self: Any, name: str, rows: Any, sizes: Any) -> Any:
        gathered = gather_rows(self, name, rows, sizes)
        return gathered.roll(sum(sizes[: self.tp_rank]), 0) if name == "draft_model.moe" else gathered

    patch(Distributed, "allgather_rows", allgather_rows)
