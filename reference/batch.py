"""The batch of one step: which tokens each row feeds to the target, at which positions, and which rows get logits.

Contexts come first, then generations; the tokens of all rows lie one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from reference.acceptance import accepted
from reference.history import History, Text
from scenarios.model import Config, Context, Generation, Step
from scenarios.tracer import DUMMY_TOKEN, PAD_TOKEN, choose, dummy_drafts


@dataclass(frozen=True)
class Row:
    """A request, or a dummy (``request`` None), in one step.

    prompt_len  length of its whole prompt (dummy generation: of what is cached)
    past        tokens cached before the step
    tokens      what the target is fed, at positions ``past``, ``past + 1``, ...
    drafts      how many of them, from the second on, are drafts to verify (a parallel drafter feeds more)
    agree       how many of the drafts made in this step the target will agree with
    """

    request: int | None
    is_context: bool
    text: Text
    prompt_len: int
    past: int
    tokens: list[int]
    drafts: int
    agree: int

    @property
    def query(self) -> int:
        """Tokens fed (upstream: its entry of ``seq_lens``)."""
        return len(self.tokens)

    @property
    def kv(self) -> int:
        """KV length in the target forward."""
        return self.past + self.query

    @property
    def positions(self) -> range:
        """Positions of the tokens fed."""
        return range(self.past, self.kv)

    @cached_property
    def hidden(self) -> list[int]:
        """The target's hidden state at each token fed: the digest of all tokens up to it."""
        reading = self.text.reading(self.past)
        return [reading.read(token) for token in self.tokens]

    @cached_property
    def choices(self) -> list[int]:
        """The target's token after each token fed."""
        return [choose(digest) for digest in self.hidden]

    @cached_property
    def accepted(self) -> list[int]:
        """Tokens that the worker accepts: one for a context (after its chunk), 1..K+1 for a generation."""
        if self.is_context:
            return [choose(self.hidden[-1])]
        return accepted(self.tokens[1 : 1 + self.drafts], self.choices)

    @cached_property
    def end(self) -> int:
        """Tokens cached after the step."""
        return self.kv if self.is_context else self.past + len(self.accepted)

    @property
    def emits(self) -> int:
        """Tokens that the step gives to the user: none before the prompt is over."""
        return len(self.accepted) if self.end >= self.prompt_len else 0


@dataclass(frozen=True)
class Batch:
    """Rows of one step.

    draft_len      K, drafts verified and made per row (upstream: ``runtime_draft_len``)
    max_draft_len  Kmax, the longest that K can be
    width          draft slots of a generation (upstream: ``runtime_tokens_per_gen_step - 1``)
    """

    rows: list[Row]
    num_contexts: int
    draft_len: int
    max_draft_len: int
    width: int

    @property
    def is_startup(self) -> bool:
        """Whether it holds dummies, of which no step but those of start-up has any."""
        return self.rows[0].request is None

    @property
    def contexts(self) -> list[Row]:
        """Its context rows."""
        return self.rows[: self.num_contexts]

    @property
    def generations(self) -> list[Row]:
        """Its generation rows."""
        return self.rows[self.num_contexts :]

    @cached_property
    def seq_lens(self) -> list[int]:
        """Tokens fed per row."""
        return [row.query for row in self.rows]

    @cached_property
    def kv_lens(self) -> list[int]:
        """KV length per row, this step's tokens included."""
        return [row.kv for row in self.rows]

    @property
    def input_ids(self) -> list[int]:
        """Tokens fed to the target."""
        return [token for row in self.rows for token in row.tokens]

    @property
    def position_ids(self) -> list[int]:
        """Their positions."""
        return [position for row in self.rows for position in row.positions]

    @property
    def gather_ids(self) -> list[int]:
        """Rows of the forward that get logits: the last token of a context, every token of a generation."""
        ends = list(accumulate(self.seq_lens, initial=0))
        first_generation = ends[self.num_contexts]
        return [end - 1 for end in ends[1 : self.num_contexts + 1]] + list(range(first_generation, ends[-1]))

    @property
    def draft_tokens(self) -> list[int]:
        """Drafts to verify, ``width`` per generation."""
        return [token for row in self.generations for token in row.tokens[1:]]


def lay_out(step: Step, config: Config, histories: Mapping[int, History]) -> Batch:
    """The batch of ``step`` for requests with these histories."""
    width = config.tokens_per_gen_step(step.draft_len) - 1
    rows = [_context(row, config, histories) for row in step.contexts]
    rows += [_generation(row, step.draft_len, width, config, histories) for row in step.generations]
    return Batch(rows, len(step.contexts), step.draft_len, config.max_draft_len, width)


def _context(row: Context, config: Config, histories: Mapping[int, History]) -> Row:
    if row.request is None:
        history = History(Text([DUMMY_TOKEN] * row.chunk, index_topk=config.index_topk), row.chunk)
    else:
        history = histories[row.request]
    past = history.past
    tokens = history.text.tokens(past, past + row.chunk)
    return Row(row.request, True, history.text, history.prompt_len, past, tokens, 0, row.agree)


def _generation(row: Generation, draft_len: int, width: int, config: Config, histories: Mapping[int, History]) -> Row:
    if row.request is None:
        text = Text([DUMMY_TOKEN], holes=row.past, index_topk=config.index_topk)
        prompt_len = past = row.past
        drafts = dummy_drafts(past, draft_len, row.accept, config.index_topk)
    else:
        history = histories[row.request]
        text, prompt_len, past = history.text, history.prompt_len, history.past
        drafts = list(history.drafts[:draft_len])
    tokens = [text.token(past), *drafts, *[PAD_TOKEN] * (width - len(drafts))]
    return Row(row.request, False, text, prompt_len, past, tokens, draft_len, row.agree)
