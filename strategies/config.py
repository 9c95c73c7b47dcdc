"""Configurations and the requests that they can hold: small, and often tight."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

from hypothesis import strategies as st

from scenarios import BACKENDS, WORKERS, Config, Request, Schedule, UsageError, closest
from scenarios.acceptance import VARIANTS
from scenarios.backends import longest_grant, runs_on
from scenarios.trees import most_nodes
from strategies.acceptance import draw_thinking, draw_variants
from strategies.choices import MANY, Draw, choose, digits, in_range, pick
from strategies.layout import Room, Space, pages
from strategies.prefixes import draw_block_reuse, draw_prompt
from strategies.sizes import least_draft_len

DENSE: Final = ("TRTLLM",)
"""The backend that all workers run on."""
_USUAL: Final = ("TRTLLM", "DSA")
"""Backends that are drawn twice as often as others."""

_BLOCKS: Final = (4, 1, 2, 3, 5, 6, 7, 8)
_DRAFT_LENS: Final = (1, 2, 3, 4, 7)
_ROWS: Final = (1, 2, 3, 4, 5, 6)
_RUNS: Final = (2, 0, 1, 3)
_BUDGETS: Final = (8, 0, 1, 2)
_TOPK: Final = (2, 1, 3, 4, 8, 128)
"""The last one is not below any ``max_seq_len`` that is drawn: it selects everything."""
_WINDOWS: Final = (2, 1, 3, 5, 8)
_RATIOS: Final = ((1, 2), (1, 2, 4), (1, 4), (1, 3), (1, 4, 8))
"""``compress_ratios``, each with a last one that is a multiple of the others."""
_TREE_TOPK: Final = (2, 3, 4)
_MAX_DEPTH: Final = 4
"""Depth of the deepest tree that is drawn; wide ones cost time, and width is what goes wrong."""
_TREE_BLOCKS: Final = 256
"""Pages where each generation feeds a tree: with the default, batches of several would hardly ever fit."""
_MAX_NODES: Final = 34
_WORD: Final = 32
"""Draft nodes that would fit into one word of a mask, if there were not the root beside them."""
_SEEDS: Final = 16
_CACHES: Final = (
    *((False, "V1", False),) * 4,
    (True, "V1", False),
    (True, "V2", False),
    (True, "V1", True),
    (True, "V2", True),
    (False, "V2", False),
    (False, "V1", True),
)
"""Whether the drafter has a KV cache of its own, the version of the managers, and whether pages move."""
_SLACK: Final = 16
"""Tokens by which a tight limit exceeds the least."""
_TIGHT: Final = (
    (),
    ("pool",),
    ("tokens",),
    ("length",),
    ("pool", "tokens"),
    ("pool", "length"),
    ("tokens", "length"),
    ("pool", "tokens", "length"),
    *((),) * 5,
)


def configs(
    *,
    workers: Collection[str] | None = None,
    backends: Collection[str] = DENSE,
    variants: Collection[str] = (),
    max_draft_len: int = 7,
    max_batch: int = 8,
    plain_caches: bool = False,
) -> st.SearchStrategy[Config]:
    """Configurations that can serve at least one request.

        configs(workers=["PARDWorker"], max_draft_len=4)

    workers        class names, by default all of ``WORKERS``
    backends       attention backends, keys of ``BACKENDS``, by default the dense one, which is also drawn for workers
                   that run on none of them
    variants       ways to accept and to read drafts that may be drawn, of ``VARIANTS``, by default none
    max_draft_len  largest ``Config.max_draft_len``, at most 31; drawn is this one, or one of 1, 2, 3, 4, 7 below it
    max_batch      largest ``Config.max_num_requests``, at most 256
    plain_caches   whether target and drafter always share one KV cache of version V1, whose pages stay in place

    Pages of 1 to 12 tokens, or of a whole sequence on a backend that has one page for each; in four of ten, where the
    worker allows it, the drafter's cache has a manager and pages of its own. In half of them, one or more of the pools,
    ``max_num_tokens`` and ``max_seq_len`` are so small that a few steps exhaust them. Shrinks to a roomy configuration
    with draft length 1. Raises ``UsageError`` for a name that does not exist or a number that is out of range.
    """
    names = _names("workers", WORKERS if workers is None else workers, WORKERS)
    known_backends = _names("backends", backends, BACKENDS)
    for variant in variants:
        if variant not in VARIANTS:
            problem = f"configs(): variants names {variant!r}, which does not exist"
            raise UsageError(f"{problem}; {closest(variant, VARIANTS)}")
    in_range("configs", "max_draft_len", max_draft_len, 1, 31)
    in_range("configs", "max_batch", max_batch, 1, MANY)
    draft_lens = tuple(dict.fromkeys((*(k for k in _DRAFT_LENS if k < max_draft_len), max_draft_len)))
    rows = (max_batch, *(n for n in _ROWS if n < max_batch), *(max_batch,) * 4)
    caches = _CACHES[:1] if plain_caches else _CACHES
    return _configs(names, known_backends, tuple(variants), draft_lens, rows, caches)


def _names(argument: str, names: Collection[str], known: Collection[str]) -> tuple[str, ...]:
    if not names or isinstance(names, str):
        listed = ", ".join(known)
        raise UsageError(f"configs(): {argument} is not a collection of names; write one or more of {listed}")
    for name in names:
        if name not in known:
            raise UsageError(f"configs(): {argument} names {name!r}, which does not exist; {closest(name, known)}")
    return tuple(names)


@st.composite
def _configs(
    draw: st.DrawFn,
    workers: tuple[str, ...],
    backends: tuple[str, ...],
    variants: tuple[str, ...],
    draft_lens: tuple[int, ...],
    rows: tuple[int, ...],
    caches: tuple[tuple[bool, str, bool], ...],
) -> Config:
    worker = choose(draw, workers)
    fitting = [b for b in backends if runs_on(worker, b)] or list(DENSE)
    usual = [b for b in fitting if b in _USUAL]
    backend = choose(draw, fitting if usual == fitting else [*fitting, *usual])
    draft_len, block, max_rows = choose(draw, draft_lens), choose(draw, _BLOCKS), choose(draw, rows)
    runs, budget, seed = digits(draw, (len(_RUNS), len(_BUDGETS), _SEEDS))
    tight = choose(draw, _TIGHT)
    separate, manager, offload = choose(draw, caches)
    topk, nodes = 0, 0
    if WORKERS[worker].tree:
        draft_len = min(draft_len, _MAX_DEPTH)
        topk = choose(draw, _TREE_TOPK)
        most = min(most_nodes(draft_len, topk), _MAX_NODES)
        table = tuple(range(draft_len, most + 1))
        nodes = choose(draw, (*table, *(_WORD,) * (len(table) // 2)) if _WORD in table else table)
    config = Config(
        worker=worker,
        max_draft_len=draft_len,
        tokens_per_block=block,
        num_blocks=_TREE_BLOCKS if nodes else Config.num_blocks,
        max_num_requests=max_rows,
        graph_warmup_runs=_RUNS[runs],
        error_budget=_BUDGETS[budget],
        seed=seed,
        attention_backend=backend,
        index_topk=choose(draw, _TOPK) if BACKENDS[backend].sparse else 0,
        dynamic_tree_max_topK=topk,
        max_total_draft_tokens=nodes,
        kv_cache_manager=manager,
        host_offload=offload,
    )
    if separate and config.traits.separate_draft_kv_cache:
        config = _with_draft_cache(config, choose(draw, _BLOCKS))
    config = _sized_for_backend(draw, config)
    config = draw_variants(draw, _tighten(draw, config, tight) if tight else config, variants)
    return draw_block_reuse(draw, config) if "enable_block_reuse" in variants else config


def _sized_for_backend(draw: Draw, config: Config) -> Config:
    """``config`` with the sizes that only its backend has, and pages that suit it."""
    backend = BACKENDS[config.attention_backend]
    if backend.one_page:
        return replace(config, tokens_per_block=longest_grant(config))
    if not backend.compressed:
        return config
    window, ratios = choose(draw, _WINDOWS), choose(draw, _RATIOS)
    return replace(
        config,
        window_size=window,
        compress_ratios=ratios,
        # Whole compressed tokens, of each ratio.
        tokens_per_block=pages(config.tokens_per_block, ratios[-1]) * ratios[-1],
    )


def _with_draft_cache(config: Config, block: int) -> Config:
    """``config`` with a cache of the drafter's own that holds as many tokens, in pages of this size."""
    blocks = pages(config.num_blocks * config.tokens_per_block, block)
    return replace(config, use_separate_draft_kv_cache=True, draft_num_blocks=blocks, draft_tokens_per_block=block)


def _tighten(draw: Draw, config: Config, tight: Collection[str]) -> Config:
    """``config`` with limits from what one short request needs at the largest draft length upwards."""
    extra, fed = config.num_extra_kv_tokens, config.tokens_per_gen_step(config.max_draft_len)
    prompt = max(1, config.least_history)
    if "pool" in tight:
        for name, (_, size) in zip(("num_blocks", "draft_num_blocks"), config.pools):
            start = pages(prompt + extra + fed, size)
            tight_pool: dict[str, Any] = {name: start + pick(draw, 4 * start)}
            config = replace(config, **tight_pool)
    if "tokens" in tight:
        config = replace(config, max_num_tokens=fed + pick(draw, 2 * fed + _SLACK))
    if "length" in tight:
        config = replace(config, max_seq_len=prompt + extra + fed + pick(draw, _SLACK))
    return config


def requests(
    config: Config, *, min_size: int = 1, max_size: int = 3, first_id: int = 0
) -> st.SearchStrategy[tuple[Request, ...]]:
    """Requests with ids from ``first_id`` on, each of which could start in the empty pool of ``config``.

    Prompts end around page boundaries and, where these are near, at ``max_seq_len`` and ``max_num_tokens``.
    Shrinks to ``min_size`` requests with prompts of one token. Raises ``UsageError`` for sizes that are out of
    range and a configuration that can hold no request.
    """
    in_range("requests", "min_size", min_size, 0)
    in_range("requests", "max_size", max_size, min_size)
    in_range("requests", "first_id", first_id, 0)
    return _requests(config, room_of("requests", config).longest_prompt, min_size, max_size, first_id)


@st.composite
def _requests(
    draw: st.DrawFn, config: Config, longest: int, min_size: int, max_size: int, first_id: int
) -> tuple[Request, ...]:
    size = min_size + pick(draw, max_size - min_size + 1)
    return tuple(draw_request(draw, config, first_id + i, Space(longest, blank=longest)) for i in range(size))


def draw_request(draw: Draw, config: Config, request: int, space: Space, oldest: Request | None = None) -> Request:
    """The request with this id and a prompt for which there is so much ``space``; see ``draw_prompt``."""
    prompt = draw_prompt(draw, config, request, space, oldest)
    return Request(id=request, thinking=draw_thinking(draw, config), **prompt)


def room_of(strategy: str, config: Config) -> Room:
    """What the empty engine of ``config`` holds at its smallest draft length, which is at least one request."""
    room = Room(Schedule(config), least_draft_len(config))
    if not room.takes_prompt:
        need = room.least_prompt + room.extra
        least = [pages(need + room.width, size) for size in room.sizes]
        blocks = " and ".join(f"{name} of {n}" for name, n in zip(("num_blocks", "draft_num_blocks"), least))
        raise UsageError(
            f"{strategy}(): config holds no request; write {blocks} or more and max_seq_len of {need} or more"
        )
    return room
