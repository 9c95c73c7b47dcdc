"""What a schedule knows of a request between two steps, and of its row in a step: lengths alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowPlan:
    """Lengths of one row of a step.

    past      tokens cached before the step (upstream: ``num_cached_tokens_per_seq``)
    query     rows it feeds to the target (upstream: ``seq_lens``)
    accepted  tokens that the step commits, the target's own included (0 for a non-final chunk)
    granted   KV tokens granted to the request once the step is prepared; with overlap, what its step in flight will
              give back is still among them
    ahead     tokens by which the host takes ``past`` for more: it counts all rows of the step in flight as accepted
    wasted    its request has ended, as the host will learn while this step is in flight: nothing of it counts
    reused    of a first chunk, the tokens that it finds in known pages; they are all of its ``past``
    """

    request: int | None
    is_context: bool
    past: int
    query: int
    accepted: int
    granted: int
    ahead: int = 0
    wasted: bool = False
    reused: int = 0

    @property
    def host_past(self) -> int:
        """Tokens that the host takes for cached before the step."""
        return self.past + self.ahead


@dataclass
class RequestState:
    """Where a real request stands between two steps."""

    prompt_len: int
    past: int = 0
    granted: int = 0
    drafts: int = 0
    """Drafts that its last step made for it."""
    agree: int = 0
    """How many of them the target accepts."""
    thinking: bool = False
    active: bool = True
    ahead: int = 0
    """With overlap: tokens by which the host takes ``past`` for more, while its last step is in flight."""
    rewind: int = 0
    """Granted tokens that are taken back when its last step has been processed; with overlap, that is a step later."""
    ending: bool = False
    """With overlap: it ends when this step is processed."""

    @property
    def in_context(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return self.past < self.prompt_len

    def land(self) -> None:
        """The step in flight has been processed."""
        self.granted -= self.rewind
        self.active = self.active and not self.ending
        self.ahead, self.rewind, self.ending = 0, 0, False
