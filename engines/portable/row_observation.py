"""What the observer reads of recurrent states and of proposals, both of which belong to one row of a batch each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.mamba_cache_manager import MambaHybridCacheManager
from engines.portable.pyexecutor.py_executor import PyExecutor
from scenarios import Config

Fields = dict[str, Any]


class RowObserver:
    """Reads the slots and states of one engine; nothing where it has neither kind of state.

    A batch is begun when it is prepared; ``promotions`` counts how often its forward has made states live.
    """

    def __init__(self, config: Config, executor: PyExecutor) -> None:
        manager = executor.kv_cache_manager
        self._states = manager if config.recurrent and isinstance(manager, MambaHybridCacheManager) else None
        self._rows = executor.seq_slot_manager if config.rejection_sampling else None
        self._executor = executor
        self._batch = ScheduledRequests()
        self._made: dict[int, int] = {}
        self.promotions = 0

    def begin(self, batch: ScheduledRequests) -> None:
        """A batch has been prepared."""
        self._batch = batch

    def slots(self, attn: Any, spec: Any) -> Fields:
        """Which slots the rows have, as the device is told."""
        fields: Fields = {}
        if self._states is not None:
            fields["state_indices"] = attn.mamba_metadata.state_indices[: attn.num_seqs].tolist()
        if self._rows is not None:
            fields["batch_slot_ids"] = spec.batch_slot_ids[: attn.num_seqs].tolist()
        return fields

    def entered(self, attn: Any) -> Fields:
        """Live states that a forward finds."""
        self.promotions = 0
        if self._states is None:
            return {}
        cached = attn.kv_cache_params.num_cached_tokens_per_seq
        found = zip(self._live(self._batch.all_requests()), cached)
        return {"ssm_states": [state if past else None for state, past in found]}

    def verified(self, attn: Any, spec: Any) -> Fields:
        """What the generations have to choose from, and what was proposed for their drafts."""
        gens, fields = self._batch.generation_requests, {}
        if self._states is not None:
            states = self._states.intermediate_ssm_states[: len(gens), : spec.runtime_tokens_per_gen_step]
            fields["intermediate_ssm_states"] = _as_wide(_unless_dummy(states, gens), gens, 1)
        if self._rows is not None:
            slots = spec.batch_slot_ids[attn.num_seqs - len(gens) : attn.num_seqs]
            fields["draft_probs"] = _as_wide(self._proposals(spec, slots, gens), gens, 0)
        return fields

    def restored(self, attn: Any, spec: Any, *, replay: bool) -> Fields:
        """Live states after a forward, and what it has proposed."""
        fields = self.left()
        if self._states is not None:
            fields["ssm_states"] = self._live(self._batch.all_requests())
            if not replay:
                fields["update_mamba_states"] = self.promotions
        if self._rows is not None:
            fields["rejection_rows"] = int(spec.rejection_rows)
            slots = spec.batch_slot_ids[: attn.num_seqs]
            fields["draft_probs"] = self._proposals(spec, slots, self._batch.all_requests())
            self._made |= {r.py_request_id: spec.runtime_draft_len for r in self._batch.all_requests()}
        return fields

    def content(self, requests: Collection[int]) -> Fields:
        """Live states, and proposals of their last steps, of these requests."""
        fields: Fields = {}
        if self._states is not None:
            states = self._states.ssm_states[self._states.get_state_indices([*requests])].tolist()
            fields["recurrent_states"] = dict(zip(requests, states))
        if self._rows is not None:
            probs = self._executor.model_engine.spec_metadata.draft_probs
            kept = probs[self._rows.get_slots([*requests])].tolist()
            fields["kept_draft_probs"] = {i: row[: self._made[i]] for i, row in zip(requests, kept)}
        return fields

    def left(self) -> Fields:
        """What the slot of dummies holds."""
        return {} if self._states is None else {"sentinel_state": int(self._states.ssm_states[-1])}

    def taken(self) -> Fields:
        """Who holds which slot."""
        fields: Fields = {}
        if self._states is not None:
            fields["mamba_slots"] = self._states.mamba_slots.slot_manager.taken()
        if self._rows is not None:
            fields["seq_slots"] = self._rows.slot_manager.taken()
        return fields

    def _live(self, rows: Sequence[LlmRequest]) -> list[int | None]:
        assert self._states is not None
        slots = self._states.get_state_indices([request.py_request_id for request in rows])
        return _unless_dummy(self._states.ssm_states[slots], rows)

    def _proposals(self, spec: Any, slots: Tensor, rows: Sequence[LlmRequest]) -> list[Any]:
        return _unless_dummy(spec.draft_probs[slots, : spec.runtime_draft_len], rows)


def _as_wide(values: list[Any], gens: Sequence[LlmRequest], more: int) -> list[Any]:
    """Values of as many rows as each generation verifies drafts, and ``more``."""
    return [
        row and row[: r.py_verify_len + more] if r.py_verify_len is not None else row for row, r in zip(values, gens)
    ]


def _unless_dummy(values: Tensor, rows: Sequence[LlmRequest]) -> list[Any]:
    return [None if request.is_dummy else value for value, request in zip(values.tolist(), rows)]
