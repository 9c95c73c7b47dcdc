"""Layouts: who is in the batch of one step, in which order, with how much of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import le, sub
from typing import Final, NamedTuple

from hypothesis import strategies as st

from scenarios import Context, Generation, RequestState, Schedule, UsageError
from strategies.acceptance import draw_matches, draw_near, least_agreement, most_agreement
from strategies.choices import Draw, arrangement, choose, in_range
from strategies.drafting import draw_agreements
from strategies.sizes import SHAPES, chunk_lens, fitting_shape
from strategies.widths import draw_widths

NEW: Final = -1
"""Stands for a request that has not entered yet."""


class Space(NamedTuple):
    """What a prompt that starts in a step finds.

    longest  most tokens that it can have
    blank    most for which no page whose content is known gives way
    later    prompts that may start behind it in the same step
    """

    longest: int
    blank: int
    later: int = 0


Arrival = Callable[[Space], int]
"""Lets a request enter whose prompt finds so much space, and returns its id."""


class Layout(NamedTuple):
    """Rows of a step, contexts first."""

    contexts: tuple[Context, ...]
    generations: tuple[Generation, ...]


def pages(tokens: int, tokens_per_block: int) -> int:
    """KV-cache pages of this size that hold so many tokens."""
    return -(-tokens // tokens_per_block)


class Room:
    """What a step with this draft length may still take: rows, tokens of the target forward, pages of every KV cache.

    It follows the grants of ``Schedule``, so that whatever is admitted is valid.
    """

    def __init__(self, schedule: Schedule, draft_len: int) -> None:
        config = schedule.config
        self.config = config
        self.extra = config.num_extra_kv_tokens
        self.width = schedule.draft_width(draft_len)
        self.prompt_width = schedule.context_width(draft_len)
        self.fed = config.tokens_per_gen_step(draft_len)
        self.rows = config.max_num_requests
        self.tokens = config.max_num_tokens
        self.sizes = [size for _, size in config.pools]
        self.pages = [blocks - used for (blocks, _), used in zip(config.pools, schedule.blocks_in_use)]
        self.known = [len(pool.cached) for pool in schedule.reuse.pools] or [0] * len(self.sizes)
        self.least_prompt = max(1, config.least_history)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that could start now; below 1 if none could."""
        config = self.config
        if not self.rows or not self.tokens:
            return 0
        longest = min(self._prompt_in(self.pages), config.max_seq_len - self.extra)
        return longest if config.traits.chunked_prefill else min(longest, self.tokens)

    def space(self, later: int) -> Space:
        """What a prompt finds that starts now, with ``later`` others behind it."""
        return Space(self.longest_prompt, self._prompt_in(self._blank), later)

    @property
    def presses(self) -> bool:
        """Whether one dummy more would make a page give way whose content is known."""
        past = self._hold(self._blank) - self.extra - self.width - 1
        return any(self.known) and past < self.config.least_history

    @property
    def takes_prompt(self) -> bool:
        """Whether some prompt could start now."""
        return self.longest_prompt >= self.least_prompt

    def longest_past(self, later: int = 0) -> int:
        """Most cached tokens of a dummy generation that could join now, with ``later`` more to come.

        Below ``Config.least_history`` if none could.
        """
        config = self.config
        if self.rows <= later or self.tokens < self.fed * (later + 1):
            return -1
        least = self.extra + self.width + 1
        reserved = self._pages(config.least_history + least)
        left = [free - later * needed for free, needed in zip(self.pages, reserved)]
        in_pool = self._hold(left) - least
        return min(in_pool, config.max_seq_len - self.extra - self.fed)

    def start(self, prompt_len: int) -> None:
        """Grant the pages of a whole prompt."""
        self._grant(self._pages(prompt_len + self.extra + self.prompt_width))

    def start_dummy(self, past: int) -> None:
        """Grant the pages and take the rows of a dummy generation."""
        self._grant(self._pages(past + 1 + self.extra + self.width))
        self.take(self.fed)

    def take(self, tokens: int) -> None:
        """Count one row that feeds so many tokens."""
        self.rows -= 1
        self.tokens -= tokens

    def admits_context(self, state: RequestState) -> bool:
        """Whether a waiting request could compute a part of its prompt."""
        if state.granted:
            return self.rows > 0 and self.tokens > 0
        return self.least_prompt <= state.prompt_len <= self.longest_prompt

    def admits_generation(self, state: RequestState) -> bool:
        """Whether a request could verify its drafts."""
        config = self.config
        return (
            self.rows > 0
            and self.tokens >= self.fed
            and state.past + state.ahead + self.fed + self.extra <= config.max_seq_len
            and all(map(le, self._growth(state), self.pages))
        )

    def admit_generation(self, state: RequestState) -> bool:
        """Take the row of a request that verifies its drafts, if it fits."""
        if not self.admits_generation(state):
            return False
        self._grant(self._growth(state))
        self.take(self.fed)
        return True

    def _growth(self, state: RequestState) -> list[int]:
        return [*map(sub, self._pages(state.granted + 1 + self.width), self._pages(state.granted))]

    @property
    def _blank(self) -> list[int]:
        return [*map(sub, self.pages, self.known)]

    def _prompt_in(self, free: list[int]) -> int:
        return self._hold(free) - self.extra - self.prompt_width

    def _hold(self, free: list[int]) -> int:
        """Tokens that all pools can hold in so many pages each."""
        return min(blocks * size for blocks, size in zip(free, self.sizes))

    def _pages(self, tokens: int) -> list[int]:
        return [pages(tokens, size) for size in self.sizes]

    def _grant(self, needed: list[int]) -> None:
        self.pages = [*map(sub, self.pages, needed)]


def layouts(schedule: Schedule, *, draft_len: int) -> st.SearchStrategy[Layout]:
    """Batches that could come next with the requests that ``schedule`` knows, as (contexts, generations).

    Small shapes and those that use all there is; requests absent or out of order; prompts whole or in chunks;
    agreements as in ``agreements``. Shrinks to one row. The schedule is only read, when a layout is drawn.
    Raises ``UsageError`` if none of its requests could run with that draft length.
    """
    config = schedule.config
    in_range("layouts", "draft_len", draft_len, config.min_draft_len, config.max_draft_len)
    if not runnable(schedule, draft_len):
        raise UsageError("layouts(): no request of schedule can run now; add one with schedule.add(...)")
    return _layouts(schedule, draft_len)


@st.composite
def _layouts(draw: st.DrawFn, schedule: Schedule, draft_len: int) -> Layout:
    return draw_layout(draw, schedule, draft_len)


def runnable(schedule: Schedule, draft_len: int) -> bool:
    """Whether at least one request of ``schedule`` could run with that draft length."""
    room, states = Room(schedule, draft_len), schedule.requests
    return not schedule.over and (
        any(room.admits_context(states[r]) for r in schedule.waiting)
        or any(room.admits_generation(states[r]) for r in schedule.generating)
    )


def draw_layout(
    draw: Draw,
    schedule: Schedule,
    draft_len: int,
    *,
    arrive: Arrival | None = None,
    graphs: Mapping[int, Collection[int]] | None = None,
) -> Layout:
    """A layout, with the ``draw`` of a composite strategy; without rows if nothing could run.

    arrive  lets new requests enter
    graphs  batch sizes of graphs, with the numbers of rows that they have: as many generations as the one nearest to
            the shape that is drawn, and no context
    """
    room, states = Room(schedule, draft_len), schedule.requests
    ready = [r for r in schedule.generating if room.admits_generation(states[r])]
    waiting = [r for r in schedule.waiting if room.admits_context(states[r])]
    new = room.rows if arrive is not None and room.takes_prompt else 0
    limits = min(len(waiting) + new, room.tokens), min(len(ready), room.tokens // room.fed)
    if not any(limits):
        return Layout((), ())
    contexts, generations = choose(draw, SHAPES)
    if room.config.ragged_verify:
        # Widths differ between two generations at least: until there are, prompts start.
        contexts, generations = max(contexts, 2 - len(schedule.generating)), max(generations, 2)
    contexts, generations = fitting_shape((contexts, generations), *limits, room.rows)
    if graphs:
        contexts, generations = 0, min(len(ready), min(graphs, key=lambda size: abs(size - generations)))
    running = [r for r in arrangement(draw, ready, generations) if room.admit_generation(states[r])]
    coming = arrangement(draw, waiting + [NEW] * min(new, contexts), contexts)
    chunks = _draw_chunks(draw, schedule, room, coming, arrive)
    return _with_agreements(draw, schedule, draft_len, chunks, running, (graphs or {}).get(len(running), ()))


def _draw_chunks(
    draw: Draw, schedule: Schedule, room: Room, coming: list[int], arrive: Arrival | None
) -> list[tuple[int, int]]:
    chunks = []
    for later, request in zip(range(len(coming) - 1, -1, -1), coming):
        if request == NEW and arrive is not None and room.takes_prompt:
            request = arrive(room.space(later))
        if request == NEW or not room.admits_context(schedule.requests[request]):
            continue
        state = schedule.requests[request]
        reused = 0 if state.granted else schedule.reuse.found(request)
        begin = state.past + reused
        left = state.prompt_len - begin
        # The contexts that follow get a token each, if there are enough.
        most = max(1, room.tokens - later) if room.config.traits.chunked_prefill else left
        chunk = left if most == left else choose(draw, chunk_lens(room.config, begin, left, most))
        if not state.granted:
            room.start(state.prompt_len)
        room.take(chunk)
        chunks.append((request, reused + chunk))
    return chunks


def _with_agreements(
    draw: Draw,
    schedule: Schedule,
    draft_len: int,
    chunks: list[tuple[int, int]],
    running: list[int],
    sums: Collection[int],
) -> Layout:
    steered = chunks if schedule.config.traits.drafts_for_contexts else []
    config, size = schedule.config, len(steered) + len(running)
    agree = draw_agreements(draw, most_agreement(config, draft_len), size, least_agreement(config, draft_len))
    near = draw_near(draw, config, draft_len, agree)
    contexts = [
        Context(request=r, chunk=chunk, agree=agree[i] if steered else 0, near=near[i] if steered else 0)
        for i, (r, chunk) in enumerate(chunks)
    ]
    first = len(steered)
    match = draw_matches(draw, config, len(running))
    widths = draw_widths(draw, config, draft_len, len(running), sums)
    generations = [
        Generation(request=r, agree=a, near=n, match=m, verify=v)
        for r, a, n, m, v in zip(running, agree[first:], near[first:], match, widths)
    ]
    return Layout(tuple(contexts), tuple(generations))
