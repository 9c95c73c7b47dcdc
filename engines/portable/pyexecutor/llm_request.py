"""A request as the executor keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class LlmRequest:
    """Tokens and positions of one request; a dummy is one that start-up or the padding of ranks makes up.

    py_request_id                  its id; ids of dummies are no user's
    is_attention_dp_dummy          it keeps ranks in step: one object in all steps, of which nothing is kept
    prompt                         prompt tokens
    context_current_position       prompt tokens computed so far, or reused
    prepopulated_prompt_len        those that are reused
    context_chunk_size             prompt tokens that this step computes
    generated                      tokens emitted
    py_draft_tokens                drafts to verify, one per draft slot of the step
    py_verify_len                  how many of its drafts this step verifies; None for as many as the step has
    py_num_drafts                  how many of these were made; the others are padding
    py_num_accepted_draft_tokens   drafts accepted in the last step
    py_rewind_len                  KV tokens to give back after it
    py_batch_idx                   its row in the batch in flight, None when it is in none
    is_finished                    it has ended; a row that it may have in the batch in flight is wasted
    """

    py_request_id: int
    prompt: list[int]
    is_dummy: bool = False
    is_attention_dp_dummy: bool = False
    context_current_position: int = 0
    prepopulated_prompt_len: int = 0
    context_chunk_size: int = 0
    generated: list[int] = field(default_factory=list)
    py_draft_tokens: list[int] = field(default_factory=list)
    py_verify_len: int | None = None
    py_num_drafts: int = 0
    py_num_accepted_draft_tokens: int = 0
    py_rewind_len: int = 0
    py_batch_idx: int | None = None
    is_finished: bool = False

    @property
    def request_id(self) -> int:
        """Its id, by the name that upstream's resource managers read."""
        return self.py_request_id

    @property
    def py_prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def previous_row(self) -> int | None:
        """Its row in the batch in flight, None without; a dummy goes on from nothing (PR #4853, PR #5058)."""
        return None if self.is_dummy else self.py_batch_idx

    @property
    def is_context(self) -> bool:
        """Whether prompt tokens are still to be computed; a dummy generation has none to compute."""
        return not self.generated and self.context_current_position < len(self.prompt)

    @property
    def is_first_context_chunk(self) -> bool:
        """Whether none of the prompt is computed yet; some of it may be reused."""
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def context_chunk(self) -> list[int]:
        """Prompt tokens of this step."""
        begin = self.context_current_position
        return self.prompt[begin : begin + self.context_chunk_size]

    @property
    def prompt_lookahead_token(self) -> int | None:
        """The prompt token after this step's chunk, None when the chunk is the last."""
        end = self.context_current_position + self.context_chunk_size
        return self.prompt[end] if end < len(self.prompt) else None

    def set_prepopulated_prompt_len(self, tokens: int) -> None:
        """Start behind ``tokens`` that the cache has already; they count as part of this step's chunk."""
        self.prepopulated_prompt_len = self.context_current_position = tokens
        self.context_chunk_size -= tokens

    def move_to_next_context_chunk(self) -> None:
        """Its chunk is computed, or will be before anything else is."""
        self.context_current_position += self.context_chunk_size

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV is in the cache between two steps: all but the last one emitted.

        Of a request in the batch in flight: as many as the host knows of.
        """
        if self.is_context:
            return self.context_current_position
        return len(self.prompt) + len(self.generated) - 1


@dataclass(frozen=True)
class ScheduledRequests:
    """The batch of one step: contexts first, then generations."""

    context_requests: tuple[LlmRequest, ...] = ()
    generation_requests: tuple[LlmRequest, ...] = ()

    def all_requests(self) -> tuple[LlmRequest, ...]:
        """Requests in row order."""
        return self.context_requests + self.generation_requests
