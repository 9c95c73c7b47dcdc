"""Attention data parallelism: what each rank is told of the others, and what all of them run together.

A rank attends to requests of its own, but tokens of all ranks meet at the experts, which go by what every rank is
told of every rank's tokens: where that differs from rank to rank, or from the tokens at hand, rows get lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference.batch import Batch
from reference.workers import Drafting, Fields, SpecWorker
from scenarios.model import Config, Phase, Step
from scenarios.tracer import MOE_MAX_NUM_TOKENS


def announced(batch: Batch, worker: SpecWorker) -> Fields:
    """Counts of all ranks that the speculative metadata holds (PR #18629); nothing without other ranks."""
    if not batch.ranks:
        return {}
    sequences = batch.rows_of_ranks()
    fields = {
        "spec_all_rank_num_tokens": batch.tokens_of_ranks(worker.announced(batch)),
        "all_rank_num_seqs": sequences,
        "all_rank_num_gens": [rank.generations for rank in batch.ranks],
    }
    return fields | {"subseq_all_rank_num_tokens": sequences} if worker.tells_sequences else fields


def collectives(
    step: Step, config: Config, batch: Batch, worker: SpecWorker, drafting: Drafting, phases: Sequence[str]
) -> Fields:
    """What ranks run together in a step, as [name, count of each rank], and in which graph; that with one rank too.

    Served ranks tell each other how many requests they have, so that each can add the dummies that keep them in step;
    then they exchange counts; then each forward meets at its experts. Of a replay Python runs the exchange alone. A
    graph is one that all of them have chosen.
    """
    rows = sum(batch.seq_lens)
    key = [len(batch.rows), batch.width, rows] if step.phase in (Phase.CAPTURE, Phase.REPLAY) else None
    if not batch.ranks:
        return {"graph_key": key}
    told = announced(batch, worker)
    made: list[list[object]] = []
    if not step.phase.is_startup:
        made.append(["executor.batch", _real(step, config)])
    target = batch.tokens_of_ranks(batch.width + 1)
    made.append(["attn_metadata.all_rank_num_tokens", target])
    made.append(["spec_metadata.all_rank_num_tokens", told["spec_all_rank_num_tokens"]])
    made += [[f"spec_metadata.{name}", told[name]] for name in ("all_rank_num_seqs", "all_rank_num_gens")]
    for phase in phases:
        if phase != "replay":
            made += _gathers("target_model.moe", target)
            for call in drafting.calls if worker.shares_experts else ():
                made += _gathers("draft_model.moe", call.rank_counts)
    return {"collectives": made, "graph_key": key}


def _real(step: Step, config: Config) -> list[int]:
    """Requests of each rank, before any dummies."""
    rows = [len(peer.contexts) + peer.generations for peer in step.peers]
    rows.insert(config.attention_dp_rank, sum(row.request is not None for row in step.rows))
    return rows


def _gathers(name: str, counts: Sequence[int] | None) -> list[list[object]]:
    """The experts of one forward, in as many chunks as the largest rank needs: each rank's tokens, cut evenly."""
    assert counts is not None
    chunks = -(-max(counts) // MOE_MAX_NUM_TOKENS)
    return [[name, [count // chunks + (chunk < count % chunks) for count in counts]] for chunk in range(chunks)]
