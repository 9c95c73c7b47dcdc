"""TRT-80: of rows and of tokens that are spread over all ranks one takes the wrong ones."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, DRAFT_TARGET, EAGLE3, MTP, MTP_EAGLE, PARD, Patch, bug

_REFERENCE = "TensorRT-LLM #16440"


@bug(
    "TRT-80",
    kind="K9",
    workers=(MTP_EAGLE, DRAFT_TARGET),
    title="A drafter goes on with the first rows of those gathered, which are another rank's",
    reference=_REFERENCE,
    caught_by=("drafts-equal-reference", "other-ranks-do-not-matter"),
)
def rows_of_the_first_rank(patch: Patch) -> None:
    from engines.portable.distributed import Distributed

    gather_rows = Distributed.allgather_rows

    def allgather_rows(self: Any, name: str, rows: Any, sizes: Any) -> Any:
        gathered = gather_rows(self, name, rows, sizes)
        return gathered.roll(sum(sizes[: self.tp_rank]), 0) if name == "draft_model.moe" else gathered

    patch(Distributed, "allgather_rows", allgather_rows)


@bug(
    "TRT-80",
    kind="K9",
    workers=(EAGLE3, DRAFT_TARGET, PARD),
    variant="shard",
    title="Each rank drafts the best token of its own shard of the vocabulary",
    reference=_REFERENCE,
    caught_by=("ranks-of-a-replica-agree", "drafts-equal-reference"),
)
def best_of_its_own_shard(patch: Patch) -> None:
    from engines.portable.vocab_shards import VocabShards

    def argmax(self: Any, logits: Any) -> Any:
        best = self.local_argmax(self.shard(logits, self.tp_rank), self.first_token(logits, self.tp_rank))
        return self.merge(best)

    patch(VocabShards, "argmax", argmax)


@bug(
    "TRT-80",
    kind="K9",
    workers=(EAGLE3, MTP, DFLASH),
    variant="offset",
    title="A rank tells the others where in its own shard the best token is, as if the vocabulary began there",
    reference=_REFERENCE,
    caught_by=("ranks-of-a-replica-agree", "drafts-equal-reference"),
)
def place_in_its_own_shard(patch: Patch) -> None:
    from engines.portable.vocab_shards import VocabShards

    local_argmax = VocabShards.local_argmax

    def without_offset(shard: Any, first_token: int) -> Any:
        return local_argmax(shard, 0)

    patch(VocabShards, "local_argmax", staticmethod(without_offset))
