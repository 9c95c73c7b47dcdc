"""The batch of one step: which tokens each row feeds to the target, at which positions, and which rows get logits.

Contexts come first, then generations; the tokens of all rows lie one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from reference.acceptance import agreed
from reference.attention import Reading, Sight
from reference.history import Drafts, History, Text
from reference.tree import ROOT, paths
from scenarios.acceptance import relaxes
from scenarios.model import Config, Context, Generation, Peer, Step
from scenarios.ranks import batches
from scenarios.tracer import DUMMY_TOKEN, GRAMMAR_START, PAD_TOKEN, choose, dummy_drafts, grammar_state, guided


@dataclass(frozen=True)
class Row:
    """A request, or a dummy (``request`` None), in one step.

    before      its text before the step, as far as that is decided
    prompt_len  length of its whole prompt (dummy generation: of what is cached)
    past        tokens cached before the step
    tokens      what the target is fed: a chain that follows on what is cached, or a tree with the first for its root
    parents     per token fed the one that it follows, ``ROOT`` for the first
    drafts      how many of them, from the second on, are drafts to verify (a parallel drafter feeds more)
    agree       how many of the drafts made in this step the target will agree with
    most        tokens that it accepts at most, however many drafts the target agrees with; None without such a limit
    near        how many of the drafts after those that agree are to be the target's second choice
    relaxed     whether it accepts second choices, too; None where no request ever does
    match       how long a match its suffix automaton finds in this step
    overridden  whether the automaton's drafts, which ``agree`` then speaks of, are the row's
    proposals   what the drafter thought of the drafts to verify, and of those that are not verified any more
    """

    request: int | None
    is_context: bool
    before: Text
    prompt_len: int
    past: int
    tokens: list[int]
    parents: Sequence[int]
    drafts: int
    agree: int
    most: int | None = None
    near: int = 0
    relaxed: bool | None = None
    match: int = 0
    overridden: bool = False
    proposals: Sequence[int] = ()

    @property
    def model_agree(self) -> int:
        """How many of the drafts that a model makes for it the target would agree with."""
        return 0 if self.overridden else self.agree

    @property
    def query(self) -> int:
        """Tokens fed (upstream: its entry of ``seq_lens``)."""
        return len(self.tokens)

    @property
    def kv(self) -> int:
        """KV length in the target forward."""
        return self.past + self.query

    @cached_property
    def paths(self) -> list[list[int]]:
        """Per token fed the ones among them that it sees: those on its path and itself."""
        return paths(self.parents)

    @cached_property
    def positions(self) -> list[int]:
        """Positions of the tokens fed: those of a path follow each other, so siblings share theirs."""
        positions: list[int] = []
        for parent in self.parents:
            positions.append(self.past if parent == ROOT else positions[parent] + 1)
        return positions

    @cached_property
    def hidden(self) -> list[int]:
        """The target's hidden state at each token fed: the digest of what is cached and of its path."""
        readings: list[Reading] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            start = self.before.reading(self.past) if parent == ROOT else readings[parent]
            readings.append(start.after(token))
        return [reading.digest for reading in readings]

    @cached_property
    def choices(self) -> list[int]:
        """The target's token after each token fed, as far as a grammar lets it.

        The matcher of a generation reads each token fed, that of a context starts with the end of the prompt.
        """
        choices = [choose(digest) for digest in self.hidden]
        if not self.before.guides(self.kv):
            return choices
        if self.is_context:
            return [*choices[:-1], guided(choices[-1], GRAMMAR_START)]
        states = list(accumulate(self.tokens, grammar_state, initial=self.before.matched(self.past)))
        return list(map(guided, choices, states[1:]))

    @cached_property
    def _path(self) -> list[int]:
        """Which of the tokens fed would be followed by an accepted one, whatever the limit."""
        if self.is_context:
            return [self.query - 1]
        fed = self.tokens[: 1 + self.drafts]
        return agreed(fed, self.parents, self.choices, relaxed=bool(self.relaxed))

    @property
    def standing(self) -> list[int]:
        """Which of the tokens fed are followed by an accepted one: of a context the last, of a generation a path."""
        return self._path[: self.most]

    @cached_property
    def accepted(self) -> list[int]:
        """Tokens that the worker accepts: one for a context (after its chunk), 1..K+1 for a generation.

        They are the drafts that stand, then the target's choice.
        """
        tokens = [self.tokens[node] for node in self._path[1:]]
        return [*tokens, self.choices[self._path[-1]]][: self.most]

    @cached_property
    def text(self) -> Text:
        """Its text once the step is over."""
        return self.before if self.is_context else self.before.going_on(self.past + 1, self.accepted)

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
    width          draft slots of a generation (upstream: ``runtime_tokens_per_gen_step - 1``); where each row says how
                   many drafts it verifies, the most that it may
    topk           candidates per node of a tree of drafts (upstream: ``dynamic_tree_max_topK``)
    ranks          the batch of each rank of attention data parallelism, this one included; empty without others
    shares_target_kv  whether the drafter reads the target's KV cache, and writes to none
    """

    rows: list[Row]
    num_contexts: int
    draft_len: int
    max_draft_len: int
    width: int
    topk: int
    ranks: Sequence[Peer] = ()
    shares_target_kv: bool = False

    @cached_property
    def has_dummies(self) -> bool:
        """Whether any of its rows is a dummy: all are in start-up, the last ones where ranks are kept in step."""
        return any(row.request is None for row in self.rows)

    def tokens_of_ranks(self, per_generation: int) -> list[int] | None:
        """Rows per rank of a forward over all tokens of its contexts and so many per generation."""
        return [sum(rank.contexts) + per_generation * rank.generations for rank in self.ranks] or None

    def rows_of_ranks(self, each: int = 1) -> list[int] | None:
        """Rows per rank of a forward over ``each`` tokens per request."""
        return [each * (len(rank.contexts) + rank.generations) for rank in self.ranks] or None

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
    def paths(self) -> list[list[list[int]]]:
        """Per generation which of its tokens each of them sees."""
        return [row.paths for row in self.generations]

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
        """Drafts to verify of each generation, ``width`` unless it says how many."""
        return [token for row in self.generations for token in row.tokens[1:]]

    def limited(self, counts: Sequence[int]) -> Batch:
        """The same batch whose generations accept so many tokens at most."""
        limited = [replace(row, most=count) for row, count in zip(self.generations, counts, strict=True)]
        return replace(self, rows=self.contexts + limited)


def lay_out(step: Step, config: Config, histories: Mapping[int, History]) -> Batch:
    """The batch of ``step`` for requests with these histories."""
    width = config.tokens_per_gen_step(step.draft_len) - 1
    rows = [_context(row, config, histories) for row in step.contexts]
    rows += [_generation(row, step.draft_len, width, config, histories) for row in step.generations]
    ranks = list(batches(config, step)) if config.attention_dp_size > 1 else []
    if ranks and not step.phase.is_startup:
        # What is reused is not fed.
        own = Peer(contexts=tuple(row.query for row in rows if row.is_context), generations=len(step.generations))
        ranks[config.attention_dp_rank] = own
    topk = config.dynamic_tree_max_topK
    return Batch(
        rows, len(step.contexts), step.draft_len, config.max_draft_len, width, topk, ranks, config.shares_target_kv
    )


def _context(row: Context, config: Config, histories: Mapping[int, History]) -> Row:
    if row.request is None:
        history = History(Text([DUMMY_TOKEN] * row.chunk, sight=Sight.of(config)), row.chunk)
    else:
        history = histories[row.request]
    past = history.past
    # A first chunk counts what it reuses.
    tokens = history.text.tokens(past, row.chunk + (past if history.started else 0))
    parents = _chain(tokens)
    return Row(row.request, True, history.text, history.prompt_len, past, tokens, parents, 0, row.agree, near=row.near)


def _generation(row: Generation, draft_len: int, width: int, config: Config, histories: Mapping[int, History]) -> Row:
    if row.request is None:
        text = Text([DUMMY_TOKEN], holes=row.past, sight=Sight.of(config))
        history = History(text, row.past)
        past = row.past
        seen = Sight.of(config)
        made = Drafts() if config.traits.tree else Drafts(dummy_drafts(past, draft_len, row.accept, *seen))
    else:
        history = histories[row.request]
        text, past, made = history.text, history.past, history.drafts
    if row.verify is not None:
        width = draft_len = row.verify
    verified = width if config.traits.tree else draft_len
    drafts = made.tokens[:verified]
    tokens = [text.token(past), *drafts, *[PAD_TOKEN] * (width - len(drafts))]
    parents = _tree(made.parents, width) if config.traits.tree else _chain(tokens)
    relaxed = history.thinking and relaxes(config) if config.use_relaxed_acceptance_for_thinking else None
    overridden = draft_len > 0 and row.match >= config.sa_threshold > 0
    return Row(
        row.request, False, text, history.prompt_len, past, tokens, parents, verified, row.agree,
        near=row.near, relaxed=relaxed, match=row.match, overridden=overridden, proposals=made.proposals,
    )  # fmt: skip


def _chain(tokens: Sequence[int]) -> Sequence[int]:
    """Parents of tokens that follow each other."""
    return range(ROOT, len(tokens) - 1)


def _tree(parents: Sequence[int], width: int) -> Sequence[int]:
    """Parents of a root and the drafts after it; where no tree was drafted, ``width`` placeholders follow the root."""
    return [ROOT, *([parent + 1 for parent in parents] or [0] * width)]
