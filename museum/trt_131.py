"""TRT-131: relaxed acceptance is for requests that think, by what is kept in their slots, and takes what is close."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP, MTP_EAGLE, Patch, bug

_REFERENCE = "TensorRT-LLM, no public number"
_DELTA = "relaxed-delta-belongs-to-thinking"
_ACCEPTED = "acceptance-equals-reference"


def _with_pool(patch: Patch, pool: Any) -> None:
    """Let acceptance read ``pool(worker, pool, spec_metadata)``, while updates still write the pool of deltas."""
    from engines.portable.speculative.relaxed_acceptance import RelaxedAcceptanceWorker

    accept = RelaxedAcceptanceWorker.sample_and_accept_draft_tokens

    def _accept(self: Any, logits: Any, attn_metadata: Any, spec_metadata: Any) -> Any:
        real = self._relaxed_delta_pool
        self._relaxed_delta_pool = lambda spec_metadata: pool(self, real(spec_metadata), spec_metadata)
        try:
            return accept(self, logits, attn_metadata, spec_metadata)
        finally:
            del self._relaxed_delta_pool

    patch(RelaxedAcceptanceWorker, "sample_and_accept_draft_tokens", _accept)


@bug(
    "TRT-131",
    kind="K5",
    workers=(EAGLE3, MTP),
    title="A slot keeps the delta of the request that has ended",
    reference=_REFERENCE,
    caught_by=(_DELTA,),
)
def delta_kept(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import SpecResourceManager
    from engines.portable.speculative.relaxed_acceptance import RelaxedDeltaManager

    patch(RelaxedDeltaManager, "free_resources", SpecResourceManager.free_resources)


@bug(
    "TRT-131",
    kind="K8",
    workers=(EAGLE3, MTP_EAGLE),
    variant="no-drafts",
    title="In a step without drafts it is not noticed that a request begins to think",
    reference=_REFERENCE,
    caught_by=(_DELTA, _ACCEPTED),
)
def not_noticed_without_drafts(patch: Patch) -> None:
    from engines.portable.speculative.relaxed_acceptance import RelaxedAcceptanceWorker

    update = RelaxedAcceptanceWorker._update_relaxed_delta

    def _update(self: Any, input_ids: Any, attn_metadata: Any, spec_metadata: Any) -> None:
        if spec_metadata.runtime_draft_len:
            update(self, input_ids, attn_metadata, spec_metadata)

    patch(RelaxedAcceptanceWorker, "_update_relaxed_delta", _update)


@bug(
    "TRT-131",
    kind="K5",
    workers=(MTP_EAGLE, MTP),
    variant="rows",
    title="Deltas are read by the row of the batch and not by the slot",
    reference=_REFERENCE,
    caught_by=(_ACCEPTED,),
)
def read_by_row(patch: Patch) -> None:
    def by_row(self: Any, pool: Any, spec_metadata: Any) -> Any:
        rows = spec_metadata.batch_indices_cuda[: len(spec_metadata.request_ids)].long()
        shuffled = pool.clone()
        shuffled[spec_metadata.slot_ids[: len(rows)]] = pool[rows]
        return shuffled

    _with_pool(patch, by_row)


@bug(
    "TRT-131",
    kind="K12",
    workers=(EAGLE3, MTP),
    variant="all",
    title="Requests that do not think accept what is close, too",
    reference=_REFERENCE,
    caught_by=(_ACCEPTED,),
)
def all_relaxed(patch: Patch) -> None:
    _with_pool(patch, lambda self, pool, spec_metadata: pool.new_full(pool.shape, self.spec_config.relaxed_delta))


@bug(
    "TRT-131",
    kind="K12",
    workers=(MTP_EAGLE,),
    variant="any-distance",
    title="Whatever is among the first choices is accepted, however far below the first",
    reference=_REFERENCE,
    caught_by=(_ACCEPTED,),
)
def any_distance(patch: Patch) -> None:
    _with_pool(patch, lambda self, pool, spec_metadata: (pool > 0) * 1.0)


@bug(
    "TRT-131",
    kind="K12",
    workers=(EAGLE3, MTP),
    variant="corrected",
    title="What is emitted for an accepted draft is the target's first choice",
    reference=_REFERENCE,
    caught_by=(_ACCEPTED,),
)
def corrected(patch: Patch) -> None:
    from engines.portable.speculative.relaxed_acceptance import RelaxedAcceptanceWorker

    accept = RelaxedAcceptanceWorker.sample_and_accept_draft_tokens

    def _accept(self: Any, logits: Any, attn_metadata: Any, spec_metadata: Any) -> Any:
        accepted, counts = accept(self, logits, attn_metadata, spec_metadata)
        if self.spec_config.use_relaxed_acceptance_for_thinking:
            first = attn_metadata.num_contexts
            accepted[first:] = logits[first:].argmax(-1).view_as(accepted[first:])
        return accepted, counts

    patch(RelaxedAcceptanceWorker, "sample_and_accept_draft_tokens", _accept)


@bug(
    "TRT-131",
    kind="K5",
    workers=(EAGLE3, MTP),
    variant="neighbour",
    title="A prompt that begins to think makes all prompts of its batch think",
    reference=_REFERENCE,
    caught_by=(_DELTA,),
)
def all_of_the_batch(patch: Patch) -> None:
    from engines.portable.speculative.relaxed_acceptance import RelaxedAcceptanceWorker

    update = RelaxedAcceptanceWorker._update_relaxed_delta

    def _update(self: Any, input_ids: Any, attn_metadata: Any, spec_metadata: Any) -> None:
        update(self, input_ids, attn_metadata, spec_metadata)
        if self.spec_config.use_relaxed_acceptance_for_thinking:
            pool, slots = self._relaxed_delta_pool(spec_metadata), spec_metadata.slot_ids[: attn_metadata.num_contexts]
            if len(slots):
                pool[slots] = pool[slots].max()

    patch(RelaxedAcceptanceWorker, "_update_relaxed_delta", _update)
