"""Compressed attention: a window of plain tokens and compressed ones before it, counted anew for every forward.

A compressed token of ratio r stands for r tokens. The target adds one where the last of these is fed, so which ones a
forward adds, and which a token sees, hangs on two lengths: with and without the forward's own tokens. All of that is
derived on the device; what is not derived anew after a change of lengths is that of the target's forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import Any, Final

from invariants.case import Moment, StepCase
from invariants.check import Check
from invariants.pools import read_by
from invariants.registry import REFERENCE, invariant
from scenarios import Config
from scenarios.tracer import compress

_LENS: Final = ("_seq_lens", "kv_lens_cuda")
_COUNTS: Final = (
    "cu_seq_lens",
    "cached_token_lens",
    "past_kv_lens",
    "compressed_kv_lens",
    "new_comp_kv_lens",
    "cu_new_comp_kv",
    "compressed_position_ids",
    "compressed_mask",
)
_SEEN: Final = ("swa_local_indices", "sparse_mla_topk_lens", "compressed_local_indices")
_OWNERS: Final = ("slot_owners", "scale_owners")
_KEYS: Final = ("cu_seqlen_ks", "cu_seqlen_ke", "fullkv_owners")
_SLIDING: Final = "sliding_block_tables"
_COMPRESS: Final = "compress_block_tables"


def _rows(moment: Moment) -> list[tuple[int, int]]:
    """(KV index of the first token, KV length) per row of a forward."""
    pairs = zip(moment.seen["_seq_lens"], moment.seen["kv_lens_cuda"], strict=False)
    return [(kv - query, kv) for query, kv in pairs]


def _compressing(step: StepCase) -> Iterator[Moment]:
    """Forwards over compressed tokens, of which the lengths were observed."""
    if step.config.compress_ratios:
        yield from (moment for moment in step.forwards if all(field in moment.seen for field in _LENS))


def _totals(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))


def _counts(rows: list[tuple[int, int]], ratios: Sequence[int]) -> dict[str, Any]:
    """What ``_COUNTS`` must be."""
    added = {r: [range(past // r, kv // r) for past, kv in rows] for r in ratios}
    sizes = {r: list(map(len, added[r])) for r in ratios}
    tokens = sum(kv - past for past, kv in rows)
    return {
        "cu_seq_lens": _totals([kv - past for past, kv in rows]),
        "cached_token_lens": [past for past, _ in rows],
        "past_kv_lens": {r: [past // r for past, _ in rows] for r in ratios},
        "compressed_kv_lens": {r: [kv // r for _, kv in rows] for r in ratios},
        "new_comp_kv_lens": sizes,
        "cu_new_comp_kv": {r: _totals(sizes[r]) for r in ratios},
        "compressed_position_ids": {r: [r * i for of_row in added[r] for i in of_row] for r in ratios[1:]},
        "compressed_mask": {r: [i < sum(sizes[r]) for i in range(tokens)] for r in ratios[1:]},
    }


@invariant(
    "compressed-counts-follow-lengths",
    reads=(*_COUNTS, *_LENS),
    museum=("TRT-12", "TRT-13", "TRT-16"),
    predicates=("P7",),
)
def compressed_counts_follow_lengths(step: StepCase, check: Check) -> None:
    """In every forward the counts of compressed tokens are those of its lengths: ``kv // r``, less what was there.

    So are their running totals and the positions of those that are added, row by row: for each ratio r
    ``new_comp_kv_lens == kv // r - (kv - query) // r``. PR #16925 tells of maps that kept to the target's layout.
    """
    for moment in _compressing(step):
        rows = _rows(moment)
        for field, expected in _counts(rows, step.config.compress_ratios).items():
            if field in moment.seen:
                check.equal(moment, field, expected, moment.seen[field], f"rows reach from and to {rows}")


def _sights(places: Sequence[int], config: Config) -> dict[str, Any]:
    """What ``_SEEN`` must say of tokens at these KV indices, without what fills a row up."""
    window, ratios = config.window_size, config.compress_ratios
    columns = {1: [min(place + 1, window) for place in places]}
    columns[ratios[1]] = [window + min((place + 1) // ratios[1], config.index_topk) for place in places]
    sights: dict[str, Any] = {
        "swa_local_indices": [list(range(max(0, place + 1 - window), place + 1)) for place in places],
        "sparse_mla_topk_lens": columns,
    }
    for ratio in ratios[2:]:
        columns[ratio] = [window + (place + 1) // ratio for place in places]
        sights["compressed_local_indices"] = [list(range((place + 1) // ratio)) for place in places]
    return sights


@invariant(
    "tokens-see-up-to-themselves",
    reads=(*_SEEN, *_LENS),
    museum=("TRT-16", "TRT-49"),
    predicates=("P7",),
)
def tokens_see_up_to_themselves(step: StepCase, check: Check) -> None:
    """In every forward each token sees the window that ends with it and the compressed tokens complete by then.

    The kernel reads as many columns as that makes: of a layer with compressed tokens a whole window and theirs, at
    most ``index_topk`` where an indexer selects them.
    """
    for moment in _compressing(step):
        places = [place for past, kv in _rows(moment) for place in range(past, kv)]
        for field, expected in _sights(places, step.config).items():
            if field in moment.seen:
                seen = moment.seen[field]
                if field != "sparse_mla_topk_lens":
                    rows = list(zip_longest(seen, expected[: len(seen)], fillvalue=()))
                    fill = [list(row)[len(mine) :] for row, mine in rows]
                    filled = all(index == -1 for row in fill for index in row)
                    check.that(filled, moment, field, -1, fill, f"{field} names more than its tokens see")
                    seen = [list(row)[: len(mine)] for row, mine in rows]
                check.equal(moment, field, expected, seen, f"tokens lie at {places}")


@invariant(
    "compressed-keys-follow-lengths",
    reads=(*_OWNERS, *_KEYS, *_LENS),
    museum=("TRT-12", "TRT-17"),
    predicates=("P7",),
)
def compressed_keys_follow_lengths(step: StepCase, check: Check) -> None:
    """The indexer writes one key for each compressed token that a row adds, in its place, and looks through all keys.

    A context's token looks through the compressed tokens of its request that are complete by then.
    """
    for moment in _compressing(step):
        rows, ratio = _rows(moment), step.config.compress_ratios[1]
        contexts = rows[: step.num_contexts]
        firsts = _totals([kv // ratio for _, kv in contexts])
        added = [[row, i] for row, (past, kv) in enumerate(rows) for i in range(past // ratio, kv // ratio)]
        ends = [
            (first, first + (place + 1) // ratio)
            for first, (past, kv) in zip(firsts, contexts, strict=False)
            for place in range(past, kv)
        ]
        expected = {
            "slot_owners": added,
            "scale_owners": added,
            "cu_seqlen_ks": [first for first, _ in ends],
            "cu_seqlen_ke": [end for _, end in ends],
            "fullkv_owners": [[row, i] for row, (_, kv) in enumerate(contexts) for i in range(kv // ratio)],
        }
        for field, value in expected.items():
            if field in moment.seen:
                check.equal(moment, field, value, moment.seen[field], f"rows reach from and to {rows}")


@invariant(
    "compressed-tables-name-owned-pages",
    reads=(_SLIDING, _COMPRESS, "kv_cache_block_offsets", "draft_kv_cache_block_offsets"),
    museum=("TRT-65", "TRT-63", "VLL-08"),
    predicates=("P7",),
)
def compressed_tables_name_owned_pages(step: StepCase, check: Check) -> None:
    """Window and compressed tokens are read through the pages of their own row, in the pool that the forward reads.

    PR #17892: a drafter with a cache of its own was given tables of the target's manager.
    """
    prepared = step.prepared
    if prepared is None:
        return
    for moment in step.moments:
        source = read_by(step.config, moment).field("kv_cache_block_offsets")
        if source not in prepared.seen:
            continue
        pages = prepared.seen[source]
        if _SLIDING in moment.seen:
            check.equal(moment, _SLIDING, pages, moment.seen[_SLIDING], f"so says {source}")
        if _COMPRESS in moment.seen:
            expected = dict.fromkeys(step.config.compress_ratios[1:], prepared.seen["kv_cache_block_offsets"])
            check.equal(moment, _COMPRESS, expected, moment.seen[_COMPRESS], "so says kv_cache_block_offsets")


@invariant(
    "compressed-cache-is-made-of-tokens",
    reads=("target_compressed_kv", "target_indexer_kv", "target_kv"),
    museum=("TRT-16", "TRT-35"),
    predicates=("P7", "P9"),
)
def compressed_cache_is_made_of_tokens(step: StepCase, check: Check) -> None:
    """After each step a compressed token is made of the tokens that its request has cached, and so is its key.

    One that was made of drafts is made again when other tokens take their places.
    """
    moment = step.updated
    if moment is None or "target_kv" not in moment.seen or not step.active:
        return
    expected = {
        r: {request: _compressed(slots, r) for request, slots in moment.seen["target_kv"].items()}
        for r in step.config.compress_ratios[1:]
    }
    if "target_compressed_kv" in moment.seen:
        check.equal(moment, "target_compressed_kv", expected, moment.seen["target_compressed_kv"], "so is target_kv")
        if "target_indexer_kv" in moment.seen:
            keys = expected[step.config.compress_ratios[1]]
            check.equal(moment, "target_indexer_kv", keys, moment.seen["target_indexer_kv"], "so is target_kv")


def _compressed(slots: list[int], ratio: int) -> list[int]:
    return [compress(ratio * i, slots[ratio * i : ratio * i + ratio]) for i in range(len(slots) // ratio)]


@invariant(
    "compression-equals-reference",
    reads=(*_COUNTS, *_SEEN, *_KEYS),
    museum=("TRT-12", "TRT-16", "TRT-35"),
    kind=REFERENCE,
    predicates=("P7",),
)
def compression_equals_reference(step: StepCase, check: Check) -> None:
    """In every forward counts, positions and indices of compressed tokens are the reference's."""
    for moment in step.forwards:
        check.said(moment, (*_COUNTS, *_SEEN, *_KEYS) if step.config.compress_ratios else ())
