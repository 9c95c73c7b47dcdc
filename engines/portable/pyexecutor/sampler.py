"""From the worker's outputs to the requests: tokens emitted, drafts kept, KV tokens to give back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests


@dataclass(frozen=True)
class SampleState:
    """Outputs of a step on the host, row by row.

    new_tokens         int32 [n, drafts + 1]
    new_tokens_lens    int32 [n]
    next_draft_tokens  int32 [n, drafts]
    runtime_draft_len  drafts of a row that the worker made; its other draft slots are padding
    """

    scheduled_requests: ScheduledRequests
    new_tokens: Tensor
    new_tokens_lens: Tensor
    next_draft_tokens: Tensor
    runtime_draft_len: int


class SpecSampler:
    """The sampler of every one-model worker."""

    def sample_async(
        self, scheduled_requests: ScheduledRequests, outputs: dict[str, Tensor], runtime_draft_len: int
    ) -> SampleState:
        """Bring the outputs to the host."""
        return SampleState(
            scheduled_requests,
            outputs["new_tokens"].cpu(),
            outputs["new_tokens_lens"].cpu(),
            outputs["next_draft_tokens"].cpu(),
            runtime_draft_len,
        )

    def update_requests(self, state: SampleState) -> None:
        """Append the new tokens of each row to its request and keep its drafts for the next step."""
        lens = state.new_tokens_lens.tolist()
        rows = zip(state.new_tokens.tolist(), lens, state.next_draft_tokens[:, : state.runtime_draft_len].tolist())
        for request, (tokens, count, drafts) in zip(state.scheduled_requests.all_requests(), rows):
            if request.is_context:
                self._update_context(request, tokens)
            else:
                self._update_generation(request, tokens[:count])
            request.py_draft_tokens = drafts

    def _update_context(self, request: LlmRequest, tokens: list[int]) -> None:
        is_last_chunk = request.prompt_lookahead_token is None
        request.context_current_position += request.context_chunk_size
        if is_last_chunk:
            request.generated.append(tokens[0])

    def _update_generation(self, request: LlmRequest, tokens: list[int]) -> None:
        width = len(request.py_draft_tokens)
        request.generated.extend(tokens)
        request.py_num_accepted_draft_tokens = len(tokens) - 1
        request.py_rewind_len = width - request.py_num_accepted_draft_tokens
