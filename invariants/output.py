"""What the user gets: the target's greedy text, whatever was drafted."""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from typing import Final, NamedTuple

from invariants.case import StepCase
from invariants.check import Check
from invariants.registry import invariant
from invariants.rows import prompt
from scenarios import Config, Request
from scenarios.acceptance import relaxes
from scenarios.tracer import GRAMMAR_START, PRIME, choose, compressed_digest, entry, grammar_state, guided, near, term


class Attention(NamedTuple):
    """What of a ``Config`` says what the target attends to."""

    index_topk: int = 0
    window_size: int = 0
    compress_ratios: tuple[int, ...] = ()


EVERYTHING: Final = Attention()


def _attention(config: Config) -> Attention:
    return Attention(config.index_topk, config.window_size, tuple(config.compress_ratios))


class Greedy:
    """Greedy decoding of one prompt by the target model alone: one request, one token at a time, no drafts.

    ``attends``: with ``index_topk`` the target attends sparsely, so that of all terms it adds up the largest ones, and
    with ``compress_ratios`` to a window and to compressed tokens. ``is_guided``: a grammar masks what it chooses.
    """

    def __init__(self, seed: int, request: Request, attends: Attention = EVERYTHING, is_guided: bool = False) -> None:
        self._digest = 0
        self._position = 0
        self._terms: list[int] = []
        self._attends = attends
        self._entries: list[int] = []
        self._is_guided = is_guided
        self._state = GRAMMAR_START
        self._tokens: list[int] = []
        for token in prompt(seed, request):
            self._feed(token)

    def _feed(self, token: int) -> None:
        fed, topk = entry(self._position, token), self._attends.index_topk
        self._position += 1
        if self._attends.compress_ratios:
            self._entries.append(fed)
            self._digest = compressed_digest(self._entries, *self._attends[1:], topk)
            return
        added = term(self._position - 1, fed)
        if topk:
            heappush(self._terms, added)
            if len(self._terms) > topk:
                added -= heappop(self._terms)
        self._digest = (self._digest + added) % PRIME

    def _emit(self, token: int) -> None:
        self._tokens.append(token)
        self._feed(token)
        self._state = grammar_state(self._state, token)

    @property
    def _choice(self) -> int:
        choice = choose(self._digest)
        return guided(choice, self._state) if self._is_guided else choice

    def tokens(self, count: int) -> list[int]:
        """The first ``count`` tokens that it emits."""
        while len(self._tokens) < count:
            self._emit(self._choice)
        return self._tokens[:count]

    def relaxed(self, tokens: list[int]) -> list[int]:
        """``tokens``, if each of them is the first or the second choice after those before it; else the first there."""
        for token in tokens:
            self._emit(token if token == near(self._choice) else self._choice)
        return self._tokens


greedy = lru_cache(maxsize=1024)(Greedy)
"""``Greedy`` decodings, kept: equal arguments, equal text."""


@invariant(
    "output-lossless",
    reads=("emitted",),
    museum=("TRT-24", "TRT-30", "TRT-57", "TRT-85", "TRT-88", "VLL-03", "VLL-12", "VLL-20"),
    predicates=("P14",),
)
def output_lossless(step: StepCase, check: Check) -> None:
    """Greedy output with speculation equals greedy output without it, token for token.

    Only where relaxed acceptance is at work, a request that thinks may emit the target's second choices, too.
    """
    case, moment, config = step.case, step.updated, step.config
    if moment is None:
        return
    for number, tokens in moment.seen.get("emitted", {}).items():
        request = case.requests.get(number)
        if request is None:
            # Nobody's text: ``emitted-follows-acceptance`` says so.
            continue
        if request.thinking and relaxes(config):
            text = Greedy(config.seed, request, _attention(config)).relaxed(tokens)
        else:
            text = greedy(config.seed, request, _attention(config), config.guided_decoding).tokens(len(tokens))
        check.equal(moment, "emitted", text, tokens, f"what the target says to the prompt of request {number}")


@invariant(
    "emitted-follows-acceptance",
    reads=("emitted", "new_tokens"),
    museum=("TRT-35", "TRT-73", "VLL-04", "VLL-05"),
    predicates=("P8", "P10"),
)
def emitted_follows_acceptance(step: StepCase, check: Check) -> None:
    """Each request emits the new tokens of its own row, once; a prompt that is not over emits nothing."""
    moment, restored = step.updated, step.returned
    if moment is None or restored is None or not step.active:
        return
    if "emitted" not in moment.seen or "new_tokens" not in restored.seen:
        return
    before = step.before_with_rows
    updated = before.updated if before is not None else None
    earlier = updated.seen.get("emitted", {}) if updated is not None else {}
    expected = {request: list(earlier.get(request, [])) for request in step.active}
    for row, tokens in zip(step.rows, restored.seen["new_tokens"], strict=False):
        if row.request is not None and row.accepted and not row.wasted:
            expected[row.request] += tokens
    check.equal(moment, "emitted", expected, moment.seen["emitted"], "what was emitted before, then the new tokens")
