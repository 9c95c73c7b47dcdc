"""Attention data parallelism: every rank is told the same of every rank, and all run the same things together.

One process is one rank and the others are data, so a count that only this rank has wrong shows against its own batch,
and what it runs at another time than the others shows in the list of what it runs with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from invariants.case import Moment, StepCase
from invariants.check import Check
from invariants.registry import REFERENCE, invariant
from scenarios import Peer
from scenarios.trace import ENTERED, PREPARED, RESTORED, SAVED, VERIFIED

_OF_TARGET: Final = (PREPARED, ENTERED, VERIFIED, SAVED, RESTORED)
"""Sub-steps at which the metadata speaks of the batch as the target runs it."""
_ANNOUNCED: Final = ("spec_all_rank_num_tokens", "all_rank_num_seqs", "all_rank_num_gens", "subseq_all_rank_num_tokens")


@invariant(
    "rank-counts-follow-batches",
    reads=("all_rank_num_tokens", "num_tokens", "spec_num_tokens", *_ANNOUNCED),
    museum=("TRT-78", "TRT-83", "VLL-10"),
    predicates=("P12",),
)
def rank_counts_follow_batches(step: StepCase, check: Check) -> None:
    """Each rank is told how many tokens, sequences and generations every rank runs, dummies included.

    Its own entry is what it runs itself, and what its metadata says when it is prepared (PR #18629).
    """
    config = step.config
    if config.attention_dp_size == 1:
        return
    ranks, mine = step.ranks, config.attention_dp_rank
    width = config.tokens_per_gen_step(step.draft_len)
    tokens = [sum(rank.contexts) + width * rank.generations for rank in ranks]
    for moment in step.moments:
        if moment.name in _OF_TARGET and "all_rank_num_tokens" in moment.seen:
            told = moment.seen["all_rank_num_tokens"]
            check.equal(moment, "all_rank_num_tokens", tokens, told, "tokens of the batch of each rank")
            if told == tokens and "num_tokens" in moment.seen:
                check.equal(moment, "num_tokens", told[mine], moment.seen["num_tokens"], "what all ranks are told")
    if step.prepared is not None:
        _check_announced(step.prepared, ranks, mine, check)


def _check_announced(moment: Moment, ranks: Sequence[Peer], mine: int, check: Check) -> None:
    """What the speculative metadata says of all ranks, once it is prepared."""
    seen = moment.seen
    sequences = [len(rank.contexts) + rank.generations for rank in ranks]
    generations = [rank.generations for rank in ranks]
    for field, counts in zip(_ANNOUNCED[1:], (sequences, generations, sequences), strict=True):
        if seen.get(field) is not None:
            check.equal(moment, field, counts, seen[field], "so many does each rank have")
    told = seen.get("spec_all_rank_num_tokens")
    if told is not None and "spec_num_tokens" in seen:
        complete = len(told) == len(ranks)
        message = f"{len(told)} counts are told of {len(ranks)} ranks"
        check.that(complete, moment, "spec_all_rank_num_tokens", len(ranks), told, message)
        if complete:
            check.equal(moment, "spec_num_tokens", told[mine], seen["spec_num_tokens"], "what all ranks are told")


@invariant(
    "draft-calls-go-by-their-own-counts",
    reads=("draft_all_rank_num_tokens", "_seq_lens", "spec_all_rank_num_tokens"),
    museum=("SGL-12",),
    predicates=("P12",),
)
def draft_calls_go_by_their_own_counts(step: StepCase, check: Check) -> None:
    """The first call of a draft model goes by what was announced, a later one by what it feeds for each sequence.

    Counts of the target, or of the call before, gather the wrong rows.
    """
    if step.config.attention_dp_size == 1:
        return
    sequences = [len(rank.contexts) + rank.generations for rank in step.ranks]
    announced = step.prepared.seen.get("spec_all_rank_num_tokens") if step.prepared is not None else None
    for run in step.runs:
        for i, moment in run.drafts.items():
            seen = moment.seen
            if "draft_all_rank_num_tokens" not in seen:
                continue
            told = seen["draft_all_rank_num_tokens"]
            if i == 0 and announced is not None:
                check.equal(moment, "draft_all_rank_num_tokens", announced, told, "what was announced")
            elif i > 0 and seen.get("_seq_lens"):
                rows = [count * max(seen["_seq_lens"]) for count in sequences]
                check.equal(moment, "draft_all_rank_num_tokens", rows, told, "what is fed for each sequence")


@invariant(
    "rank-counts-equal-reference",
    reads=("draft_all_rank_num_tokens", "all_rank_num_tokens", "spec_num_tokens", *_ANNOUNCED),
    museum=("TRT-78", "SGL-12"),
    kind=REFERENCE,
    predicates=("P12",),
)
def rank_counts_equal_reference(step: StepCase, check: Check) -> None:
    """What is announced, what the metadata shows and what a draft call is given are the reference's."""
    if step.config.attention_dp_size == 1:
        return
    if step.prepared is not None:
        check.said(step.prepared, ("spec_num_tokens", *_ANNOUNCED))
    for run in step.runs:
        for moment in run.drafts.values():
            check.said(moment, ("draft_all_rank_num_tokens", "all_rank_num_tokens"))


@invariant(
    "collectives-equal-reference",
    reads=("collectives", "graph_key"),
    museum=("TRT-78", "TRT-81", "TRT-82", "VLL-19"),
    kind=REFERENCE,
    predicates=("P12",),
)
def collectives_equal_reference(step: StepCase, check: Check) -> None:
    """A rank runs each collective of a step once, in order, with what every rank brings to it, in the right graph."""
    if step.updated is not None:
        check.said(step.updated, ("collectives", "graph_key"))
