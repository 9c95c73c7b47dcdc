"""What the oracle asks of a worker (upstream: ``SpecWorkerBase``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from reference.batch import Batch
from reference.history import Drafts, History
from scenarios.tracer import EMPTY

Fields = dict[str, Any]


@dataclass(frozen=True)
class DraftCall:
    """What one call of the draft model is given.

    input_ids, position_ids, hidden_states  per token fed; None where the model takes none or it is unspecified
    seq_lens, kv_lens, num_contexts         what the attention metadata says by then
    counted                                 lengths that its counters still follow, None for ``seq_lens``
    num_ctx_per_req                         columns per generation of a context of its own, None without one
    updated                                 whether ``update_for_spec_dec`` has run before it
    rank_counts                             token counts of the ranks that it goes by, None without other ranks
    takes_rank_counts                       whether it is given them as an argument
    shows_rank_counts                       whether the worker writes them into the attention metadata
    paths                                   of a tree: per row that its mask speaks of, which tokens each one sees

    What depends on what is kept for a dummy is None.
    """

    input_ids: list[int] | None
    position_ids: list[int] | None
    seq_lens: list[int]
    kv_lens: list[int]
    num_contexts: int
    counted: list[int] | None = None
    num_ctx_per_req: list[int] | None = None
    updated: bool = False
    use_spec_decoding: bool = True
    hidden_states: list[int] | list[list[int]] | None = None
    rank_counts: list[int] | None = None
    takes_rank_counts: bool = False
    shows_rank_counts: bool = False
    paths: list[list[list[int]]] = field(default_factory=list)


@dataclass(frozen=True)
class Drafting:
    """What a worker does with a batch whose drafts are verified.

    calls    its calls of the draft model
    drafts   per row what it drafts for its next step, nothing where the worker drafts nothing
    kv_lens  ``kv_lens_cuda`` after it, unless it was among the saved fields
    open     whether drafts of dummies depend on what is kept for a request, so that they are not specified
    """

    calls: list[DraftCall]
    drafts: list[Drafts]
    kv_lens: list[int]
    open: bool = False


class SpecWorker(ABC):
    """One worker.

    saves_kv_lens     in graph warm-up it saves ``kv_lens_cuda`` too, and so leaves it alone
    returns_kv_lens   it puts ``kv_lens_cuda`` back itself, whether its forward succeeds or fails
    tells_sequences   its metadata has the counts of later draft calls (upstream: ``subseq_all_rank_num_tokens``)
    shares_experts    its draft model has experts that all ranks share
    looks_ahead       tokens after a slot of its drafter's cache on which that slot depends
    """

    name: ClassVar[str]
    saves_kv_lens: ClassVar[bool] = False
    returns_kv_lens: ClassVar[bool] = False
    tells_sequences: ClassVar[bool] = False
    shares_experts: ClassVar[bool] = False
    looks_ahead: ClassVar[int] = 0

    def saved_fields(self, phase: str) -> list[str]:
        """Names given to ``prepare_for_spec_dec`` in a forward of this phase."""
        fields = ["_seq_lens", "_seq_lens_cuda"]
        return [*fields, "kv_lens_cuda"] if self.saves_kv_lens and phase == "graph_warmup" else fields

    @abstractmethod
    def draft(self, batch: Batch) -> Drafting:
        """Draft for every row of ``batch``; with draft length 0 only ingest its tokens."""

    def announced(self, batch: Batch) -> int:
        """Tokens per generation of full width that its metadata counts (upstream: ``num_tokens`` after ``prepare``)."""
        return batch.width + 1

    def spec_metadata(self, batch: Batch) -> Fields:
        """Counts that ``SpecMetadata.prepare`` leaves: tokens that the target is fed, less those not announced."""
        left_out = batch.width + 1 - self.announced(batch)
        return {"spec_num_tokens": sum(batch.seq_lens) - left_out * len(batch.generations)}

    def own_state(self, batch: Batch, *, after: bool) -> Fields:
        """Fields of what it keeps from step to step, before a forward or ``after`` it."""
        return {}

    def draft_slots(self, history: History) -> list[int]:
        """What the drafter's cache holds for the cached tokens of a request: nothing where it has none."""
        return [EMPTY] * history.past

    def kept(self, histories: Mapping[int, History]) -> Fields:
        """Fields of ``updated`` with what the worker keeps for each request."""
        return {"draft_kv": {i: self.draft_slots(history) for i, history in histories.items()}}
