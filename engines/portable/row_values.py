"""What is kept by row on the device (recurrent states, proposals, matchers), under the trace's names, unread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from engines.portable.cache_values import uploaded_index
from engines.portable.pyexecutor.llm_request import ScheduledRequests
from engines.portable.pyexecutor.mamba_cache_manager import MambaHybridCacheManager
from engines.portable.pyexecutor.py_executor import PyExecutor
from scenarios import Config

Values = dict[str, Tensor]
Part = tuple[str, Tensor, Sequence[Any] | None]
"""A field, its values on the device, and what they should be, in the trace's form; None where that does not fit."""

OPEN_ROWS: Final = frozenset({"ssm_states", "intermediate_ssm_states", "draft_probs", "matcher_rows"})
"""Fields that say None of a row of which nothing is asked."""


class RowValues:
    """Finds the tensors of one engine; nothing where it has no such state.

    Slots of states and of matchers are those that the managers know, not those that the device is told, which may be
    wrong. They are kept at one address, for graphs that note what is there.
    """

    def __init__(self, config: Config, executor: PyExecutor) -> None:
        manager = executor.kv_cache_manager
        self._states = manager if config.recurrent and isinstance(manager, MambaHybridCacheManager) else None
        self._proposals = executor.seq_slot_manager if config.rejection_sampling else None
        self._executor = executor
        self._decoder = executor.guided_decoder
        device = executor.kv_cache_manager.device
        self._slots, self._matchers = torch.zeros(2, config.max_num_requests, dtype=torch.int64, device=device)
        self._size = 0

    def begin(self, batch: ScheduledRequests) -> None:
        """A batch has been prepared."""
        requests = batch.all_requests()
        self._size = len(requests)
        if self._states is not None:
            slots = self._states.get_state_indices([request.py_request_id for request in requests])
            self._slots[: self._size].copy_(self._index(slots))
        if self._decoder is not None:
            self._matchers[: self._size].copy_(self._index(self._decoder.row_slots(requests)))

    def entered(self) -> Values:
        """Live states that a forward finds."""
        if self._states is None:
            return {}
        return {"ssm_states": self._states.ssm_states.index_select(0, self._slots[: self._size])}

    def verified(self, attn: Any, spec: Any) -> Values:
        """What the generations have to choose from, and what was proposed for their drafts."""
        values, gens = Values(), attn.num_generations
        if not gens:
            return values
        if self._states is not None:
            values["intermediate_ssm_states"] = self._states.intermediate_ssm_states[
                :gens, : spec.runtime_tokens_per_gen_step
            ]
        if self._proposals is not None:
            values["draft_probs"] = self._proposed(spec, spec.batch_slot_ids[attn.num_contexts : attn.num_seqs])
        return values

    def restored(self, attn: Any, spec: Any) -> Values:
        """Live states after a forward, and what it has proposed."""
        values = self.entered() | self.matchers()
        if self._states is not None:
            values["sentinel_state"] = self._states.ssm_states[-1:]
        if self._proposals is not None:
            values["rejection_rows"] = spec.rejection_rows
            if spec.runtime_draft_len:
                values["draft_probs"] = self._proposed(spec, spec.batch_slot_ids[: attn.num_seqs])
        return values

    def matchers(self) -> Values:
        """How far the matcher of each row is, and in which state: int64 [n, 2]."""
        return {} if self._decoder is None else {"matcher_rows": self._read(self._matchers[: self._size])}

    def _read(self, slots: Tensor) -> Tensor:
        assert self._decoder is not None
        states = self._decoder.matcher_states.index_select(0, slots)
        counts = self._decoder.num_advanced_tokens.index_select(0, slots).unsqueeze(1)
        # A matcher that was taken back too often is to be seen, too.
        return torch.cat([counts, states.gather(1, counts.clamp(0, states.shape[1] - 1))], dim=1)

    def kept(self, said: Mapping[str, Any]) -> list[Part]:
        """The same of all requests of which something is ``said``, proposals as the last step of each has left them."""
        parts: list[Part] = []
        if self._states is not None and "recurrent_states" in said:
            states: Mapping[int, int] = said["recurrent_states"]
            slots = self._held(self._states.mamba_slots.slot_manager.taken(), states)
            tensor = self._states.ssm_states
            parts.append(("recurrent_states", *self._picked(tensor, slots, list(states.values()))))
        if self._proposals is not None and "kept_draft_probs" in said:
            kept: Mapping[int, Sequence[int]] = said["kept_draft_probs"]
            slots = self._held(self._proposals.slot_manager.taken(), kept)
            tensor = self._executor.model_engine.spec_metadata.draft_probs
            parts.append(("kept_draft_probs", *self._picked(tensor, slots, list(kept.values()))))
        if self._decoder is not None and "matchers" in said:
            read: Mapping[int, Sequence[int]] = said["matchers"]
            slots = self._held(self._decoder.slot_manager.taken(), read)
            tensor = self._decoder.matcher_states if slots is None else self._read(self._index(slots))
            parts.append(("matchers", tensor, None if slots is None else list(read.values())))
        return [part for part in parts if part[2] is None or part[2]]

    @staticmethod
    def _held(taken: Mapping[int, int], requests: Mapping[int, Any]) -> list[int] | None:
        """Slots of these requests; None if others hold slots, or some of them hold none."""
        return [taken[i] for i in requests] if taken.keys() == requests.keys() else None

    def _picked(
        self, tensor: Tensor, slots: list[int] | None, expected: Sequence[Any]
    ) -> tuple[Tensor, Sequence[Any] | None]:
        return (tensor, None) if slots is None else (tensor.index_select(0, self._index(slots)), expected)

    def _proposed(self, spec: Any, slots: Tensor) -> Tensor:
        rows: Tensor = spec.draft_probs.index_select(0, slots)
        return rows[:, : spec.runtime_draft_len]

    def _index(self, slots: Sequence[int]) -> Tensor:
        return uploaded_index(slots, self._executor.kv_cache_manager.device)
