"""Block reuse: which pages of the KV caches are known by what they hold, and how much of a prompt is found in them.

A page that is full of prompt tokens is *known* once the step that has computed the last chunk of that prompt is
processed, by the tokens up to its end and ``look_ahead`` tokens more, as a drafter's slot may hold the token after its
own. If the same is known of another page already, it is not of this one. A request that starts takes the known pages of
its prompt's beginning, together with those who have them. Known pages that nobody has are free, and keep what they hold
until there is no other free page: then those go first that were released first, and of one request the last ones.

The tokens that a prompt reuses are the same in every cache, so a multiple of each cache's page, and leave one token at
least to compute. All prompts that start in a step look before any page is granted in it. After a failed step no page is
known: where it struck decides what it had taken.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import lcm

from scenarios.errors import require
from scenarios.model import Config, Request
from scenarios.plans import RowPlan
from scenarios.traits import BACKENDS

Key = tuple[int, ...]


def reuses_on(config: Config) -> bool:
    """Whether block reuse is combined with a configuration's worker and attention backend."""
    pages = not BACKENDS[config.attention_backend].one_page
    return config.traits.reuses_blocks and pages and not config.recurrent


def check_reuse(config: Config) -> None:
    """Raise ``ScenarioError`` for what is not combined with block reuse."""
    if not config.enable_block_reuse:
        return
    traits, name = config.traits, "config.enable_block_reuse"
    problem = f"the drafter of {config.worker} keeps a context that no page has"
    require(not traits.keeps_context, name, problem, "leave it out")
    require(traits.chunked_prefill, name, f"{config.worker} computes all of a prompt, in one", "leave it out")
    require(
        not config.recurrent,
        name,
        "finds pages of a prompt and no recurrent state behind them",
        "leave one of them out",
    )
    require(reuses_on(config), name, f"no page of {config.attention_backend} is ever full", "leave it out")


def check_prefix(request: Request, place: str) -> None:
    """Raise ``ScenarioError`` unless a prompt that begins like another says whose tokens these are, and how many."""
    source, length = request.prefix_of, request.prefix_len
    if source is None:
        require(not length, f"{place}.prefix_len", f"{length} tokens are nobody's", "leave it out or add prefix_of")
        return
    require(0 <= source < 2**31, f"{place}.prefix_of", f"{source} is outside 0..2**31-1", "write the id of a request")
    itself = source == request.id
    require(not itself, f"{place}.prefix_of", f"{source} is the request itself", "name another, or leave it out")
    require(
        1 <= length <= request.prompt_len,
        f"{place}.prefix_len",
        f"{length} is outside 1..{request.prompt_len}",
        "write how many tokens of the prompt are those of prefix_of",
    )


def look_ahead(config: Config) -> int:
    """Tokens behind a page on which what it holds depends: a drafter's slot holds the next token, if it is shifted."""
    writes = config.traits.draft_model and not config.shares_target_kv
    return int(writes and not config.traits.parallel)


@dataclass
class KnownPages:
    """The known pages of one cache, by key; of the others a schedule knows how many there are.

    owners    how many active requests have each known page that somebody has
    cached    known pages that nobody has, those that are taken first in front
    """

    size: int
    owners: dict[Key, int] = field(default_factory=dict)
    cached: dict[Key, None] = field(default_factory=dict)
    held: dict[int, list[Key]] = field(default_factory=dict)
    """Known pages of each request, in order."""

    def fork(self) -> KnownPages:
        """A copy that can be changed on trial."""
        held = {request: list(keys) for request, keys in self.held.items()}
        return KnownPages(self.size, dict(self.owners), dict(self.cached), held)

    def found(self, keys: Sequence[Key]) -> int:
        """Tokens at the beginning of a prompt with these keys that known pages hold."""
        for i, key in enumerate(keys):
            if key not in self.owners and key not in self.cached:
                return i * self.size
        return len(keys) * self.size

    def claim(self, request: int, keys: Sequence[Key]) -> None:
        """Let a request have known pages, with those who have them already."""
        for key in keys:
            self.cached.pop(key, None)
            self.owners[key] = self.owners.get(key, 0) + 1
        self.held[request] = list(keys)

    def store(self, request: int, keys: Sequence[Key]) -> None:
        """Let the pages of a computed prompt be known, but for those that are already."""
        held = self.held.setdefault(request, [])
        for key in keys:
            if key not in self.owners and key not in self.cached:
                self.owners[key] = 1
                held.append(key)

    def release(self, request: int) -> None:
        """Take the known pages of a request from it, the last one first."""
        for key in reversed(self.held.pop(request, [])):
            self.owners[key] -= 1
            if not self.owners[key]:
                del self.owners[key]
                self.cached[key] = None

    @property
    def shared(self) -> int:
        """Owners beyond the first of each page: by so many a sum over all requests counts too many pages."""
        return sum(self.owners.values()) - len(self.owners)

    def reclaim(self, room: int) -> None:
        """Forget cached pages until no more than ``room`` are left."""
        for key in list(self.cached)[: max(0, len(self.cached) - room)]:
            del self.cached[key]


@dataclass
class Reuse:
    """What a schedule knows of block reuse; without ``Config.enable_block_reuse`` it keeps nothing.

    ``landing`` and ``ending`` are the requests whose prompt the last step has completed and that end with it, in the
    order in which that happens when it is processed.
    """

    config: Config
    prompts: dict[int, list[int]] = field(default_factory=dict)
    pools: list[KnownPages] = field(default_factory=list)
    landing: list[int] = field(default_factory=list)
    ending: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.enabled and not self.pools:
            self.pools = [KnownPages(size) for _, size in self.config.pools]

    @property
    def enabled(self) -> bool:
        """Whether there is any."""
        return self.config.enable_block_reuse

    def add(self, request: Request) -> None:
        """Let a request enter."""
        if self.enabled:
            self.prompts[request.id] = request.prompt(self.config.seed)

    def fork(self) -> Reuse:
        """A copy that can be advanced on trial."""
        if not self.enabled:
            return self
        pools = [pool.fork() for pool in self.pools]
        return Reuse(self.config, dict(self.prompts), pools, list(self.landing), list(self.ending))

    def found(self, request: int) -> int:
        """Tokens of its prompt that a request would reuse if it started now."""
        if not self.enabled:
            return 0
        unit = lcm(*(pool.size for pool in self.pools))
        most = min(pool.found(self._keys(pool, request, len(self.prompts[request]) - 1)) for pool in self.pools)
        return most // unit * unit

    def claim(self, rows: Collection[RowPlan]) -> None:
        """Let requests start with what they reuse."""
        for row in rows:
            if row.request is not None and row.reused:
                for pool in self.pools:
                    pool.claim(row.request, self._keys(pool, row.request, row.reused))

    def shared(self) -> tuple[int, ...]:
        """Of each pool, by how many a sum over all requests counts too many pages, as some have several owners."""
        return tuple(pool.shared for pool in self.pools)

    def take(self, in_use: Collection[int]) -> None:
        """Let so many pages of each pool be in use: known ones that nobody has give way if there is no other."""
        for pool, pages, (blocks, _) in zip(self.pools, in_use, self.config.pools):
            pool.reclaim(blocks - pages)

    def computed(self, request: int) -> None:
        """The last step completes the prompt of a request."""
        if self.enabled:
            self.landing.append(request)

    def ends(self, request: int) -> None:
        """A request ends with the last step."""
        if self.enabled:
            self.ending.append(request)

    def land(self) -> None:
        """The last step has been processed: prompts are computed, then requests end."""
        for request in self.landing:
            for pool in self.pools:
                pool.store(request, self._keys(pool, request, len(self.prompts[request])))
        for request in self.ending:
            for pool in self.pools:
                pool.release(request)
        self.landing, self.ending = [], []

    def forget(self) -> None:
        """A step has failed, and with it every request that had a page."""
        self.pools = [KnownPages(pool.size) for pool in self.pools]
        self.landing, self.ending = [], []

    def _keys(self, pool: KnownPages, request: int, tokens: int) -> list[Key]:
        """Keys of the pages of the first ``tokens`` tokens of a prompt that can be known."""
        prompt, ahead = self.prompts[request], look_ahead(self.config)
        end = min(tokens, len(prompt) - ahead)
        return [tuple(prompt[: i + ahead]) for i in range(pool.size, end + 1, pool.size)]
