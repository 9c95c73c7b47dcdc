"""What the user gets: the target's greedy text, whatever was drafted."""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush

from invariants.case import StepCase
from invariants.check import Check
from invariants.registry import invariant
from invariants.rows import prompt
from scenarios.tracer import PRIME, choose, entry, term


class Greedy:
    """Greedy decoding of one prompt by the target model alone: one request, one token at a time, no drafts.

    With ``index_topk`` the target attends sparsely: of all terms it adds up the largest ones.
    """

    def __init__(self, seed: int, request: int, prompt_len: int, index_topk: int = 0) -> None:
        self._digest = 0
        self._position = 0
        self._terms: list[int] = []
        self._topk = index_topk
        self._tokens: list[int] = []
        for token in prompt(seed, request, prompt_len):
            self._feed(token)

    def _feed(self, token: int) -> None:
        added = term(self._position, entry(self._position, token))
        if self._topk:
            heappush(self._terms, added)
            if len(self._terms) > self._topk:
                added -= heappop(self._terms)
        self._digest = (self._digest + added) % PRIME
        self._position += 1

    def tokens(self, count: int) -> list[int]:
        """The first ``count`` tokens that it emits."""
        while len(self._tokens) < count:
            self._tokens.append(choose(self._digest))
            self._feed(self._tokens[-1])
        return self._tokens[:count]


greedy = lru_cache(maxsize=1024)(Greedy)
"""``Greedy`` decodings, kept: equal arguments, equal text."""


@invariant(
    "output-lossless",
    reads=("emitted",),
    museum=("TRT-24", "TRT-30", "TRT-57", "TRT-85", "TRT-88", "VLL-03", "VLL-12", "VLL-20"),
)
def output_lossless(step: StepCase, check: Check) -> None:
    """Greedy output with speculation equals greedy output without it, token for token."""
    case, moment = step.case, step.updated
    if moment is None:
        return
    for request, tokens in moment.seen.get("emitted", {}).items():
        decoding = greedy(case.config.seed, request, case.prompt_lens[request], case.config.index_topk)
        text = decoding.tokens(len(tokens))
        check.equal(moment, "emitted", text, tokens, f"what the target says to the prompt of request {request}")


@invariant(
    "emitted-follows-acceptance",
    reads=("emitted", "new_tokens"),
    museum=("TRT-35", "TRT-73", "VLL-04", "VLL-05"),
)
def emitted_follows_acceptance(step: StepCase, check: Check) -> None:
    """Each request emits the new tokens of its own row, once; a prompt that is not over emits nothing."""
    moment = step.updated
    restored = step.runs[-1].restored if step.runs else None
    if moment is None or restored is None or not step.active:
        return
    if "emitted" not in moment.seen or "new_tokens" not in restored.seen:
        return
    before = step.before.updated if step.before is not None else None
    earlier = before.seen.get("emitted", {}) if before is not None else {}
    expected = {request: list(earlier.get(request, [])) for request in step.active}
    for row, tokens in zip(step.rows, restored.seen["new_tokens"], strict=False):
        if row.request is not None and row.accepted:
            expected[row.request] += tokens
    check.equal(moment, "emitted", expected, moment.seen["emitted"], "what was emitted before, then the new tokens")
