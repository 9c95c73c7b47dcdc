"""Block reuse: pages of prompts that have been computed, and that a prompt which begins with the same tokens shares.

What a page holds follows from the tokens up to its end and, if the drafter is always one token ahead, from the next
one: these tokens are its *key*. A page is known by its key from the end of its prompt on, for as long as nobody needs
its room, also when nobody owns it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm

from reference import kv_cache
from reference.batch import Batch
from reference.history import History, Text
from reference.workers import Fields, SpecWorker
from scenarios.model import Config, Step

Key = tuple[int, ...]


@dataclass
class Pages:
    """The pages of one manager.

    num_blocks  how many there are
    size        tokens of one
    ahead       tokens after its end that a page depends on
    owners      key of each known page -> how many requests own it
    idle        keys of those that nobody owns, the least recently released first
    tokens      tokens granted to each request
    held        request -> its pages in order; None for one that is not known, and so is its alone
    """

    num_blocks: int
    size: int
    ahead: int
    owners: dict[Key, int] = field(default_factory=dict)
    idle: list[Key] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    held: dict[int, list[Key | None]] = field(default_factory=dict)

    def keys(self, prompt: Sequence[int]) -> list[Key]:
        """Keys of the pages that a prompt fills, and of which it has what follows."""
        ends = range(self.size, len(prompt) - self.ahead + 1, self.size)
        return [tuple(prompt[: end + self.ahead]) for end in ends]

    def matched(self, prompt: Sequence[int]) -> int:
        """With how many of its tokens the prompt begins that lie in known pages."""
        tokens = 0
        for key in self.keys(prompt):
            if key not in self.owners:
                break
            tokens += self.size
        return tokens

    def claim(self, request: int, prompt: Sequence[int], tokens: int) -> None:
        """Let a request own the pages that hold the first ``tokens`` of its prompt, with whoever does already."""
        claimed = self.keys(prompt)[: tokens // self.size]
        for key in claimed:
            self.owners[key] += 1
        self.idle = [key for key in self.idle if key not in claimed]
        self.held[request] = [*claimed]

    def grant(self, request: int, tokens: int) -> None:
        """Give a request the pages that it lacks for so many tokens more, or for its first ones."""
        self.tokens[request] = self.tokens.get(request, 0) + tokens
        pages = self.held.setdefault(request, [])
        lacking = max(0, -(-self.tokens[request] // self.size) - len(pages))
        self._take(lacking)
        pages += [None] * lacking

    def lend(self, dummies: Sequence[int]) -> None:
        """Let dummies have pages for so many tokens each, and take them back."""
        self._take(sum(-(-tokens // self.size) for tokens in dummies))

    def _take(self, count: int) -> None:
        """Make room for so many pages more: where no page is blank, those are forgotten that were idle longest."""
        forgotten = max(0, count - (self.free - len(self.idle)))
        for key in self.idle[:forgotten]:
            del self.owners[key]
        self.idle = self.idle[forgotten:]

    @property
    def free(self) -> int:
        """Pages that nobody owns, known ones among them."""
        shared = len(self.owners) - len(self.idle)
        return self.num_blocks - shared - sum(pages.count(None) for pages in self.held.values())

    def rewind(self, request: int, tokens: int) -> None:
        """Take back the pages beyond ``tokens``, which nobody else can own."""
        self.tokens[request] = tokens
        del self.held[request][-(-tokens // self.size) :]

    def store(self, request: int, prompt: Sequence[int]) -> None:
        """Make the pages of a computed prompt known, but for those of which there is another with the same content."""
        for index, key in enumerate(self.keys(prompt)):
            if key not in self.owners:
                self.owners[key] = 1
                self.held[request][index] = key

    def release(self, request: int) -> None:
        """A request owns nothing any more. Of what is known its last page is released first, as it is needed least."""
        self.tokens.pop(request, None)
        for key in reversed(self.held.pop(request, [])):
            if key is not None:
                self.owners[key] -= 1
                self.idle += [key] if not self.owners[key] else []

    def known(self) -> list[list[int]]:
        """[owners, key ...] of every known page, in order."""
        return sorted([owners, *key] for key, owners in self.owners.items())

    def order(self) -> list[int]:
        """Which of ``known`` would be taken first, next, ..."""
        return [self.known().index([0, *key]) for key in self.idle]

    def contents(self, slots: Callable[[History], list[int]]) -> list[list[int]]:
        """What each known page holds, in the same order: the last slots of a request that ends with it."""
        keys = [key for _, *key in self.known()]
        ending = [History(Text(key), len(key), reused=len(key) - self.ahead) for key in keys]
        return [slots(history)[-self.size :] for history in ending]


class BlockReuse:
    """All managers of an engine. A prompt goes on from where the pages end that each of them knows."""

    def __init__(self, config: Config, worker: SpecWorker) -> None:
        self._config = config
        self._draft_slots = None if config.shares_target_kv else worker.draft_slots
        ahead = 0 if config.shares_target_kv else worker.looks_ahead
        self._pools = [Pages(blocks, size, ahead) for blocks, size in config.pools]
        self._reused: dict[int, int] = {}

    def begin(self, step: Step, histories: Mapping[int, History]) -> dict[int, History]:
        """The requests that start in ``step``, with what they reuse; each owns it before any is given new pages."""
        begun = {}
        for row in step.contexts:
            if row.request is not None and not histories[row.request].started:
                history = histories[row.request]
                reused = self._reusable(history.prompt)
                for pool in self._pools:
                    pool.claim(row.request, history.prompt, reused)
                begun[row.request] = replace(history, reused=reused)
                self._reused[row.request] = reused
        return begun

    def _reusable(self, prompt: Sequence[int]) -> int:
        """Tokens of the longest beginning that fills known pages of every pool; one token at least is left.

        A drafter with a cache of its own has to know as much as the target does; what it knows less is computed again.
        """
        most = min(len(prompt) - 1, *(pool.matched(prompt) for pool in self._pools))
        return most - most % lcm(*(pool.size for pool in self._pools))

    def grant(self, batch: Batch, after: Mapping[int, History]) -> None:
        """Pages for the tokens that each row is granted, row by row, dummies last. In start-up no page is known.

        after  the requests once the step is over
        """
        for pool in self._pools:
            for row in batch.rows:
                if row.request is not None:
                    pool.grant(row.request, after[row.request].turns[-1].granted)
            pool.lend(kv_cache.dummies(batch, self._config))

    def update(self, batch: Batch, held: Mapping[int, int]) -> None:
        """A step is over: drafts that were not accepted go, prompts that it has ended become known.

        held  tokens of each request by then
        """
        for pool in self._pools:
            for request, tokens in held.items():
                pool.rewind(request, tokens)
            for row in batch.contexts:
                if row.request is not None and row.request in held and row.end == row.prompt_len:
                    pool.store(row.request, row.before.tokens(0, row.prompt_len))

    def release(self, requests: Iterable[int]) -> None:
        """Requests have ended, in this order."""
        for request in requests:
            del self._reused[request]
            for pool in self._pools:
                pool.release(request)

    def forget(self) -> None:
        """A step has failed, and ended all requests. Whose room it had taken by then is not known."""
        self._pools = [Pages(pool.num_blocks, pool.size, pool.ahead) for pool in self._pools]
        self._reused.clear()

    def fields(self) -> Fields:
        """Free pages, what requests have reused, and what is known: which pages, and what they hold."""
        fields: Fields = {"reused_tokens": dict(self._reused)}
        for prefix, pool in zip(("", "draft_"), self._pools, strict=False):
            shown = {"free_blocks": pool.free, "known_pages": pool.known(), "reclaim_order": pool.order()}
            fields |= {prefix + name: value for name, value in shown.items()}
        fields["known_kv"] = self._pools[0].contents(lambda history: history.text.slots(history.past))
        return fields | {"known_draft_kv": self._pools[-1].contents(self._draft_slots)} if self._draft_slots else fields
