"""SGL-12: rows are gathered with the token counts of another stage."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP_EAGLE, Patch, bug

_REFERENCE = "SGLang #12052"


@bug(
    "SGL-12",
    kind="K9",
    workers=(EAGLE3,),
    title="Later forwards of the drafter, of one token per sequence, are given the counts of the first one",
    reference=_REFERENCE,
    caught_by=("draft-calls-go-by-their-own-counts", "rank-counts-equal-reference"),
)
@bug(
    "SGL-12",
    kind="K9",
    workers=(MTP_EAGLE,),
    title="Later forwards of the drafter gather one row per sequence with the counts of the first one",
    reference=_REFERENCE,
    caught_by=("draft-calls-go-by-their-own-counts", "steps-complete"),
)
def counts_of_the_first_forward(patch: Patch) -> None:
    from engines.portable.speculative.eagle3 import Eagle3OneModelSpecMetadata

    take_over = Eagle3OneModelSpecMetadata.set_all_rank_counts

    def set_all_rank_counts(self: Any, num_tokens: Any, num_seqs: Any, num_gens: Any) -> None:
        take_over(self, num_tokens, num_seqs, num_gens)
        self.subseq_all_rank_num_tokens = num_tokens

    patch(Eagle3OneModelSpecMetadata, "set_all_rank_counts", set_all_rank_counts)


@bug(
    "SGL-12",
    kind="K9",
    workers=(DRAFT_TARGET,),
    variant="sequences",
    title="Draft forwards gather rows with the counts of the target, also where each sequence has only one",
    reference=_REFERENCE,
    caught_by=("steps-complete",),
)
def counts_of_the_target(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecMetadata

    def set_all_rank_counts(self: Any, num_tokens: Any, num_seqs: Any, num_gens: Any) -> None:
        self.all_rank_num_tokens, self.all_rank_num_gens = num_tokens, num_gens

    patch(SpecMetadata, "set_all_rank_counts", set_all_rank_counts)
