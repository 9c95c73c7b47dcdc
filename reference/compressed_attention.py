"""Fields that ``DeepseekV4TrtllmAttentionMetadata`` adds: which compressed tokens a forward adds, and what rows see.

A layer of ratio r has one compressed token for each r tokens that follow each other from the start of the request. It
is there as soon as the last of them is fed, accepted or not; the step that feeds other tokens there adds it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from reference.attention import compressed
from reference.batch import Batch
from reference.history import History
from reference.indexer_prefill import Chunk, new_keys, windows
from reference.workers import DraftCall, Fields
from scenarios.model import Config

Rows = Sequence[Chunk]


def seen_compressed(forward: Batch | DraftCall, config: Config) -> Fields:
    """What a forward must find, all of it by the lengths of its own rows; nothing where nothing is compressed."""
    if not config.compress_ratios:
        return {}
    rows = [Chunk(kv - query, query) for query, kv in zip(forward.seq_lens, forward.kv_lens, strict=True)]
    ratios = config.compress_ratios
    places = [place for row in rows for place in range(row.past, row.past + row.query)]
    fields: Fields = {
        "cu_seq_lens": list(accumulate((row.query for row in rows), initial=0)),
        "cached_token_lens": [row.past for row in rows],
        "past_kv_lens": {r: [row.past // r for row in rows] for r in ratios},
        "compressed_kv_lens": {r: [(row.past + row.query) // r for row in rows] for r in ratios},
        "new_comp_kv_lens": {r: [len(new_keys(row, r)) for row in rows] for r in ratios},
        "cu_new_comp_kv": {r: list(accumulate((len(new_keys(row, r)) for row in rows), initial=0)) for r in ratios},
        "compressed_position_ids": {r: [r * i for _, i in added(rows, r)] for r in ratios[1:]},
        "compressed_mask": {r: [n < len(added(rows, r)) for n in range(len(places))] for r in ratios[1:]},
        "swa_local_indices": [
            filled(range(max(0, place + 1 - config.window_size), place + 1), config.window_size) for place in places
        ],
        "sparse_mla_topk_lens": {
            r: list(map(width, places)) for r, width in zip(ratios, widths(config), strict=True)
        },
    }  # fmt: skip
    if len(ratios) == 3:
        columns = most(config.max_seq_len, ratios[2])
        seen = [filled(range((place + 1) // ratios[2]), columns) for place in places]
        fields["compressed_local_indices"] = seen
    return fields


def widths(config: Config) -> list[Callable[[int], int]]:
    """Per ratio how many columns the kernel reads for a token at some place: the window's, then compressed ones.

    A layer with compressed tokens has a whole window before them, however short the request.
    """
    window, topk = config.window_size, config.index_topk

    def of(ratio: int, limit: int) -> Callable[[int], int]:
        return lambda place: window + min((place + 1) // ratio, limit)

    limits = (topk, config.max_seq_len)
    compressed = [of(ratio, limit) for ratio, limit in zip(config.compress_ratios[1:], limits)]
    return [lambda place: min(place + 1, window), *compressed]


def most(max_seq_len: int, ratio: int) -> int:
    """Columns that have room for all compressed tokens of the longest request: a power of two."""
    tokens = -(-max_seq_len // ratio)
    return 1 << (tokens - 1).bit_length()


def filled(indices: Iterable[int], columns: int) -> list[int]:
    """A row of a table: the indices, then -1."""
    listed = list(indices)
    return listed + [-1] * (columns - len(listed))


def added(rows: Rows, ratio: int) -> list[list[int]]:
    """[row, compressed token] of each that a forward adds."""
    return [[row, i] for row, chunk in enumerate(rows) for i in new_keys(chunk, ratio)]


def indexed(batch: Batch, config: Config) -> Fields:
    """Where the target's indexer writes the keys of a step: one for each compressed token of the second ratio."""
    if not config.compress_ratios:
        return {}
    owners = added([Chunk(row.past, row.query) for row in batch.rows], config.compress_ratios[1])
    return {"slot_owners": owners, "scale_owners": owners}


def searched(batch: Batch, config: Config) -> Fields:
    """What ``prepare()`` says of the keys of contexts: those of cached tokens too, one request after the other."""
    if not config.compress_ratios:
        return {}
    ratio = config.compress_ratios[1]
    rows = [Chunk(row.past, row.query) for row in batch.contexts]
    seen = windows(rows, ratio)
    fields: Fields = {"cu_seqlen_ks": [start for start, _ in seen], "cu_seqlen_ke": [end for _, end in seen]}
    if rows:
        fields["fullkv_owners"] = [
            [index, i] for index, row in enumerate(rows) for i in range((row.past + row.query) // ratio)
        ]
    return fields


def caches(histories: Mapping[int, History], config: Config) -> Fields:
    """Contents of the caches of compressed tokens, and of the indexer's, which has a key for each of its layer."""
    by_ratio = {
        ratio: {i: compressed(history.text.slots(history.past), ratio) for i, history in histories.items()}
        for ratio in config.compress_ratios[1:]
    }
    return {"target_compressed_kv": by_ratio, "target_indexer_kv": by_ratio[config.compress_ratios[1]]}
