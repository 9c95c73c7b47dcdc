"""Suffix automata of the requests' texts: a stand-in that says how a text goes on as the target would have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engines.portable._utils import host_tensor
from engines.portable.copies import copy_to_device, to_device
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.resource_manager import SpecResourceManager
from engines.tracer import Tracer, disagree


class SuffixAutomatonManager(SpecResourceManager):
    """The text of each request, prompt and what was committed since, on the device, and drafts out of it.

    The automaton itself is a native kernel upstream. Here the tracer continues the text, as well as ``steering``
    says, which also says how long the match is.

    with_contexts  whether what a context samples is appended on the device when it is sampled. If not, the host appends
        it when it prepares the request's first generation, or ``append_first_tokens`` does where the host does not know
        it yet

    text         int32 [slots, max_seq_len + max_draft_len + 1]
    text_lens    int64 [slots]
    batch_slots  int64 [max_num_requests]: slot of each row
    """

    def __init__(
        self,
        tracer: Tracer,
        steering: Any,
        max_draft_len: int,
        num_slots: int,
        max_num_requests: int,
        max_seq_len: int,
        device: torch.device,
        *,
        with_contexts: bool = True,
    ) -> None:
        super().__init__(num_slots)
        self.device = device
        self.with_contexts = with_contexts
        self.text = torch.zeros(num_slots, max_seq_len + max_draft_len + 1, dtype=torch.int32, device=device)
        self.text_lens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.batch_slots = torch.zeros(max_num_requests, dtype=torch.int64, device=device)
        self._tracer = tracer
        self._steering = steering
        self._pending: dict[int, list[int]] = {}
        self._first_generations: list[int] = []

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Grant slots to requests that start, and take over what was sampled for a context."""
        super().prepare_resources(scheduled_batch)
        self._first_generations = []
        for row, request in enumerate(() if self.with_contexts else scheduled_batch.generation_requests):
            if not request.generated:
                self._first_generations.append(row)
            elif len(request.generated) == 1 and request.previous_row is None:
                (slot,) = self.slot_manager.get_slots([request.py_request_id])
                self._pending[slot] = request.prompt + request.generated

    def _add_slot(self, request: LlmRequest) -> int:
        slot = super()._add_slot(request)
        self._pending[slot] = request.prompt + request.generated
        return slot

    def prepare(self, request_ids: Sequence[int]) -> None:
        """Upload the texts of requests that have started, and the slots of the batch."""
        while self._pending:
            slot, tokens = self._pending.popitem()
            copy_to_device("automaton.text", self.text[slot, : len(tokens)], host_tensor(tokens, self.device))
            self.text_lens[slot].fill_(len(tokens))
        slots = self.slot_manager.get_slots(request_ids)
        copy_to_device("automaton.batch_slots", self.batch_slots[: len(slots)], host_tensor(slots, self.device))

    def append_first_tokens(self, tokens: Tensor) -> None:
        """Append what a context in flight has sampled to the texts of those that generate now.

        tokens  int32 [G], device: the first one that each generation of the batch feeds
        """
        if self._first_generations:
            indices = host_tensor(self._first_generations, self.device)
            rows = to_device("automaton.first_generations", indices, self.device).long()
            slots = self.batch_slots.index_select(0, rows)
            self.text.index_put_((slots, self.text_lens.index_select(0, slots)), tokens.index_select(0, rows))
            self.text_lens.index_add_(0, slots, torch.ones_like(slots))

    def extend(self, accepted_tokens: Tensor, num_accepted_tokens: Tensor, max_draft_len: int) -> tuple[Tensor, Tensor]:
        """Append to each row's text the first ``num_accepted_tokens``, int32 [n], of its tokens, int32 [n, any]; draft.

        The rows are those that were prepared. Returns the length of the match, int64 [n], 0 for none, and what
        followed it: int32 [n, max_draft_len].
        """
        slots = self.batch_slots[: len(accepted_tokens)]
        text, lens = self.text.index_select(0, slots), self.text_lens.index_select(0, slots)
        # How far each column lies behind the end of the text. The dummies of a graph, to whose text each forward on the
        # way to it appends, run over the last column: what has no room is dropped.
        behind = torch.arange(text.shape[1], device=text.device) - lens.unsqueeze(1)
        is_new = (behind >= 0) & (behind < num_accepted_tokens.unsqueeze(1))
        text = torch.where(is_new, accepted_tokens.gather(1, behind.clamp(0, accepted_tokens.shape[1] - 1)), text)
        lens = (lens + num_accepted_tokens).clamp(max=text.shape[1])
        self.text.index_copy_(0, slots, text)
        self.text_lens.index_copy_(0, slots, lens)
        return self._match(text, lens, max_draft_len)

    def _match(self, text: Tensor, lens: Tensor, max_draft_len: int) -> tuple[Tensor, Tensor]:
        agree = self._steering.sa_agree[: len(text)].unsqueeze(1)
        tokens = self._tracer.continue_text(text, lens, max_draft_len)
        depth = torch.arange(max_draft_len, device=text.device)
        drafts = torch.where(depth < agree, tokens, disagree(tokens)).int()
        return self._steering.sa_match[: len(text)], drafts


def sa_manager_of(manager: SpecResourceManager | None) -> SuffixAutomatonManager | None:
    """The suffix automata of a worker: its manager itself, or the one beside what else it keeps; None without."""
    return manager if isinstance(manager, SuffixAutomatonManager) else getattr(manager, "sa_manager", None)
