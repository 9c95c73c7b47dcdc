"""Guided decoding: a grammar that restricts what requests choose, in the target and while they are drafted for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engines.portable._utils import host_tensor
from engines.portable.copies import copy_to_device
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from engines.tracer import grammar_allows, grammar_state
from scenarios.tracer import GRAMMAR_START, VOCAB_SIZE


class CapturableGuidedDecoder(SeqSlotManager):
    """A matcher per request, advanced by what a step feeds and drafts, and taken back by what was not accepted.

    A matcher is the stack of its states. Upstream's lives on the host, in host functions that a graph calls; here it
    lives on the device. Rows of dummies, and of chunks that more of the prompt follows, are not guided: their matcher
    is the one of ``dummy_slot``, which never advances.

    matcher_states       int64 [num_slots + 1, max_tokens + 1], device: the state after so many tokens
    num_advanced_tokens  int64 [num_slots + 1], device
    """

    def __init__(self, *, num_slots: int, max_num_requests: int, width: int, max_tokens: int, device: torch.device):
        super().__init__(num_slots)
        self.device = device
        shape = num_slots + 1, max_tokens + 1
        self.matcher_states = torch.full(shape, GRAMMAR_START, dtype=torch.int64, device=device)
        self.num_advanced_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._slots = torch.zeros(max_num_requests, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(max_num_requests, width, dtype=torch.int32, device=device)
        self._new_tokens = torch.zeros(max_num_requests, dtype=torch.int32, device=device)
        self._num_accepted_tokens = torch.zeros(max_num_requests, dtype=torch.int32, device=device)
        self._num_contexts = self._num_generations = self._width = self._draft_len = 0

    def _add_slot(self, request: LlmRequest) -> int:
        slot = super()._add_slot(request)
        self.num_advanced_tokens[slot] = 0
        return slot

    def row_slots(self, requests: Sequence[LlmRequest]) -> list[int]:
        """Slot of the matcher of each row, ``dummy_slot`` for a row that is not guided."""
        slots = self.get_slots([request.py_request_id for request in requests])
        # A prompt is no text of the grammar, nor is what is drafted before it ends.
        return [self.dummy_slot if r.prompt_lookahead_token is not None else s for r, s in zip(requests, slots)]

    def add_batch(self, scheduled_requests: ScheduledRequests, draft_len: int) -> None:
        """Learn the rows of a step: their matchers, and how many drafts will be made; then ``feed`` what they feed."""
        requests = scheduled_requests.all_requests()
        self._num_contexts = len(scheduled_requests.context_requests)
        self._num_generations = len(scheduled_requests.generation_requests)
        self._draft_len = draft_len
        slots = host_tensor(self.row_slots(requests), self.device)
        copy_to_device("guided_decoder.slots", self._slots[: len(slots)], slots)

    def feed(self, tokens: Tensor) -> None:
        """Take what the generations feed to the target, int32 [G, width], device: the host may not know it yet."""
        rows, self._width = tokens.shape
        self._tokens[:rows, : self._width].copy_(tokens)

    def execute(self, logits: Tensor) -> None:
        """Mask the target's logits, float32 [C + G * width, VOCAB_SIZE], in place.

        Each row of a generation by what it feeds up to that row, which its matcher keeps until the accepted count is
        known; a context by a matcher that has been told nothing.
        """
        contexts, generations = self._split(self._slots)
        states = [self._states(contexts)]
        if self._num_generations:
            by_row = []
            for tokens in self._tokens[: self._num_generations, : self._width].unbind(1):
                self._advance(generations, tokens)
                by_row.append(self._states(generations))
            states.append(torch.stack(by_row, dim=1).flatten())
            generations = generations.repeat_interleave(self._width)
        self._mask(logits, torch.cat([contexts, generations]), torch.cat(states))

    def add_draft_batch(self, new_tokens: Tensor, num_accepted_tokens: Tensor, draft_step: int = 0) -> None:
        """Take the token that each row drafts from, int [n], and with the first ones how many it has accepted."""
        self._new_tokens[: len(new_tokens)].copy_(new_tokens)
        if draft_step == 0:
            self._num_accepted_tokens[: len(num_accepted_tokens)].copy_(num_accepted_tokens)

    def execute_draft_batch(self, logits: Tensor, d2t: Tensor | None = None, draft_step: int = 0) -> None:
        """Mask the draft head's logits, float32 [n, VOCAB_SIZE], in place; with ``d2t`` in the draft vocabulary.

        What the matchers are told while drafting they forget in the last draft step.
        """
        if draft_step == 0:
            self._rollback_rejected_tokens()
        slots = self._slots[: self._num_contexts + self._num_generations]
        self._advance(slots, self._new_tokens[: len(slots)])
        states = self._states(slots)
        if draft_step == self._draft_len - 1:
            self._rollback(slots, self._draft_len)
        self._mask(logits, slots, states, d2t)

    def rollback_rejected_batch(self, num_accepted_tokens: Tensor) -> None:
        """Forget what was not accepted, int32 [n], of workers whose drafting is not guided (PR #19296)."""
        self._num_accepted_tokens[: len(num_accepted_tokens)].copy_(num_accepted_tokens)
        self._rollback_rejected_tokens()

    def _rollback_rejected_tokens(self) -> None:
        _, generations = self._split(self._slots)
        _, accepted = self._split(self._num_accepted_tokens)
        self._rollback(generations, self._width - accepted)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Entries of the contexts and of the generations."""
        contexts, generations = rows[: self._num_contexts + self._num_generations].tensor_split([self._num_contexts])
        return contexts, generations

    def _states(self, slots: Tensor) -> Tensor:
        return self.matcher_states[slots, self.num_advanced_tokens[slots]]

    def _advance(self, slots: Tensor, tokens: Tensor) -> None:
        ends = self.num_advanced_tokens[slots]
        self.matcher_states.index_put_((slots, ends + 1), grammar_state(self.matcher_states[slots, ends], tokens))
        self.num_advanced_tokens.index_add_(0, slots, self._is_guided(slots).long())

    def _rollback(self, slots: Tensor, count: Tensor | int) -> None:
        self.num_advanced_tokens.index_add_(0, slots, -count * self._is_guided(slots).long())

    def _is_guided(self, slots: Tensor) -> Tensor:
        return slots < self.dummy_slot

    def _mask(self, logits: Tensor, slots: Tensor, states: Tensor, d2t: Tensor | None = None) -> None:
        tokens = torch.arange(VOCAB_SIZE, device=logits.device)
        if d2t is not None:
            tokens = tokens + d2t
        refused = ~grammar_allows(states.unsqueeze(1), tokens) & self._is_guided(slots).unsqueeze(1)
        # Behind the vocabulary there may be columns that are no tokens.
        logits[:, :VOCAB_SIZE].masked_fill_(refused, -torch.inf)
