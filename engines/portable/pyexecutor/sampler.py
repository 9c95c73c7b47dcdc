"""From the worker's outputs to the requests: tokens emitted, drafts kept, KV tokens to give back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.portable import copies
from engines.portable._utils import prefer_pinned
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests


@dataclass(frozen=True)
class SampleState:
    """Outputs of a step on the host, row by row, once ``synchronize`` has returned.

    new_tokens         int32 [n, drafts + 1]
    new_tokens_lens    int32 [n]
    next_draft_tokens  int32 [n, drafts]
    runtime_draft_len  drafts of a row that the worker made; its other draft slots are padding
    draft_slots        draft slots that each generation of this step has verified
    is_last_chunk      per context whether its chunk ended the prompt
    sampler_event      when the copies to the host have run; None where they are not asynchronous
    copies             the same point among the copies to the device, see ``engines.portable.copies``
    """

    scheduled_requests: ScheduledRequests
    new_tokens: Tensor
    new_tokens_lens: Tensor
    next_draft_tokens: Tensor
    runtime_draft_len: int
    draft_slots: tuple[int, ...]
    is_last_chunk: tuple[bool, ...] = ()
    sampler_event: torch.cuda.Event | None = None
    copies: int = 0

    def synchronize(self) -> None:
        """Wait for the step."""
        if self.sampler_event is not None:
            self.sampler_event.synchronize()
        copies.synchronize(self.copies)


class SpecSampler:
    """The sampler of every one-model worker."""

    def sample_async(
        self,
        scheduled_requests: ScheduledRequests,
        outputs: dict[str, Tensor],
        runtime_draft_len: int,
        draft_slots: tuple[int, ...],
    ) -> SampleState:
        """Start to bring the outputs to the host; ``synchronize`` waits for them."""
        names = "new_tokens", "new_tokens_lens", "next_draft_tokens"
        new_tokens, new_tokens_lens, next_draft_tokens = (_to_host(outputs[name]) for name in names)
        event = None
        if prefer_pinned(outputs["new_tokens"].device):
            event = torch.cuda.Event()
            event.record()
        chunks = scheduled_requests.context_requests
        return SampleState(
            scheduled_requests,
            new_tokens,
            new_tokens_lens,
            next_draft_tokens,
            runtime_draft_len,
            draft_slots,
            tuple(request.prompt_lookahead_token is None for request in chunks),
            event,
            copies.record_event(),
        )

    def update_requests(self, state: SampleState) -> None:
        """Append the new tokens of each row to its request and keep its drafts for the next step.

        Nothing for requests that have ended since, whose rows are wasted, and for dummies that keep ranks in step.
        """
        state.synchronize()
        batch, contexts = state.scheduled_requests.all_requests(), len(state.is_last_chunk)
        lens = state.new_tokens_lens.tolist()
        rows = zip(state.new_tokens.tolist(), lens, state.next_draft_tokens[:, : state.runtime_draft_len].tolist())
        for row, (request, (tokens, count, drafts)) in enumerate(zip(batch, rows)):
            if request.is_finished or request.is_attention_dp_dummy:
                continue
            if row >= contexts:
                self._update_generation(request, tokens[:count], state.draft_slots[row - contexts])
            elif state.is_last_chunk[row]:
                request.generated.append(tokens[0])
            request.py_draft_tokens = drafts

    def _update_generation(self, request: LlmRequest, tokens: list[int], draft_slots: int) -> None:
        # Not by the request's drafts, which may be those of a step launched since (PR #17082).
        request.generated.extend(tokens)
        request.py_num_accepted_draft_tokens = len(tokens) - 1
        request.py_rewind_len = draft_slots - request.py_num_accepted_draft_tokens


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host that the next step's outputs do not reach."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=prefer_pinned(tensor.device))
    return copies.copy_to_host(host, tensor)
