"""What a request says and what it has lived through; all that the oracle knows of it follows from these two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from reference.attention import EVERYTHING, Reading, Sight
from scenarios.tracer import EMPTY, GRAMMAR_START, PAD_TOKEN, choose, entry, grammar_state, guided


class Text:
    """A prompt and its greedy continuation by the target, one token at a time, as far as it is asked for.

    It depends on the prompt, on what the target attends to (its ``sight``) and on the grammar if it is ``guided``,
    hence on no draft, batch, chunk or draft length; what it has worked out it keeps. Before the prompt of a dummy
    there are ``holes`` positions whose slots are EMPTY.
    """

    def __init__(
        self, prompt: Sequence[int], *, holes: int = 0, sight: Sight = EVERYTHING, guided: bool = False
    ) -> None:
        self._tokens = [PAD_TOKEN] * holes + list(prompt)
        self._prompt_len = len(self._tokens)
        self._guided = guided
        self._sight = sight
        self._reading = sight.reading()
        self._slots: list[int] = []
        self._digests = [0]
        for _ in range(holes):
            self._cache(EMPTY)

    def _cache(self, slot: int) -> None:
        self._slots.append(slot)
        self._digests.append(self._reading.see(slot))

    def _state(self, length: int) -> int:
        return reduce(grammar_state, self._tokens[self._prompt_len : length], GRAMMAR_START)

    def _reach(self, length: int) -> None:
        """Work out the first ``length`` tokens, their slots and digests."""
        for n in range(len(self._slots), length):
            if n == len(self._tokens):
                choice = choose(self._digests[n])
                self._tokens.append(guided(choice, self._state(n)) if self._guided else choice)
            self._cache(entry(n, self._tokens[n]))

    def going_on(self, length: int, tokens: Sequence[int]) -> Text:
        """The text that goes on with ``tokens`` after the first ``length``: itself, or another one of no grammar."""
        if self.tokens(length, length + len(tokens)) == list(tokens):
            return self
        return Text([*self.tokens(0, length), *tokens], sight=self._sight)

    def guides(self, position: int) -> bool:
        """Whether the grammar has a say in the token at ``position``: it has none in the prompt."""
        return self._guided and position >= self._prompt_len

    def matched(self, length: int) -> int:
        """State of a matcher that has read what is generated of the first ``length`` tokens."""
        self._reach(length)
        return self._state(length)

    def token(self, position: int) -> int:
        """The token at ``position``."""
        self._reach(position + 1)
        return self._tokens[position]

    def tokens(self, start: int, stop: int) -> list[int]:
        """The tokens at positions ``start..stop-1``."""
        self._reach(stop)
        return self._tokens[start:stop]

    def slots(self, length: int) -> list[int]:
        """What the target's cache holds for the first ``length`` tokens."""
        self._reach(length)
        return self._slots[:length]

    def hidden(self, start: int, stop: int) -> list[int]:
        """The target's hidden states at positions ``start..stop-1``."""
        self._reach(stop)
        return self._digests[start + 1 : stop + 1]

    def reading(self, length: int) -> Reading:
        """The target after the first ``length`` tokens, to be led on by any others."""
        self._reach(length)
        return self._reading.fork(length, self._digests[length])


@dataclass(frozen=True)
class Drafts:
    """Drafts for the next step: a chain, or the nodes of a tree.

    parents  of a tree: per token the one that it follows, -1 for the root; none of a chain
    model    what the draft model made, where the drafts of a suffix automaton have taken its place
    proposals  what the drafter thought of each, where that will be asked
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    model: Sequence[int] = ()
    proposals: Sequence[int] = ()

    @property
    def own(self) -> Sequence[int]:
        """The drafts of the draft model, whichever will be verified."""
        return self.model or self.tokens


@dataclass(frozen=True)
class Turn:
    """What one step did for a request.

    cached   tokens that it added to the KV cache for good
    emitted  tokens that it gave to the user
    granted  KV tokens granted before its forward
    rewound  KV tokens taken back after it (upstream: ``py_rewind_len``)
    drafts   what it drafted for the next step
    """

    cached: int
    emitted: int
    granted: int
    rewound: int
    drafts: Drafts


@dataclass(frozen=True)
class History:
    """A request: its text, the length of its prompt and the turns it has taken.

    reused    tokens of its prompt that another request has cached for it
    thinking  whether its prompt ends with the token that begins the thinking phase; which lasts until the request ends
    """

    text: Text
    prompt_len: int
    turns: tuple[Turn, ...] = ()
    thinking: bool = False
    reused: int = 0

    def after(self, turn: Turn, text: Text) -> History:
        """The same request one turn later, with what is its text by then."""
        return replace(self, text=text, turns=(*self.turns, turn))

    @property
    def started(self) -> bool:
        """Whether it has been in a batch."""
        return bool(self.turns)

    @property
    def past(self) -> int:
        """Tokens in the KV cache (upstream: ``num_cached_tokens_per_seq``)."""
        return self.reused + sum(turn.cached for turn in self.turns)

    @property
    def kv_tokens(self) -> int:
        """KV tokens that it holds."""
        return sum(turn.granted - turn.rewound for turn in self.turns)

    @property
    def prompt(self) -> list[int]:
        """What the user has asked."""
        return self.text.tokens(0, self.prompt_len)

    @property
    def said(self) -> list[int]:
        """The prompt and what the user has been given."""
        return self.text.tokens(0, self.prompt_len + sum(turn.emitted for turn in self.turns))

    @property
    def emitted(self) -> list[int]:
        """What the user has been given."""
        return self.said[self.prompt_len :]

    @property
    def is_thinking(self) -> bool:
        """Whether the end of its prompt has told that the target's second choices will do."""
        return self.thinking and self.past >= self.prompt_len

    @property
    def drafts(self) -> Drafts:
        """What its last turn drafted."""
        return self.turns[-1].drafts if self.turns else Drafts()
