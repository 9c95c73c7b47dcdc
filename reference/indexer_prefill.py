"""What the indexer of a sparse backend looks through for the tokens of contexts: windows over keys, and chunks of them.

The keys of all contexts of a batch lie one request after the other, those of cached tokens included. With a
compression ratio r, r tokens that follow each other from the start of the request share one key.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Chunk(NamedTuple):
    """A context in a step: ``query`` tokens after ``past`` cached ones."""

    past: int
    query: int


class PrefillChunk(NamedTuple):
    """Tokens that the indexer takes at once (upstream: an entry of ``indexer_prefill_chunks``).

    tokens   from which token of all contexts to which, the end not included
    keys     from which key to which
    windows  per token its keys, counted from the first of ``keys``
    """

    tokens: tuple[int, int]
    keys: tuple[int, int]
    windows: list[tuple[int, int]]


def new_keys(chunk: Chunk, ratio: int = 1) -> range:
    """Keys of the request that this step completes, counted from the start of the request."""
    return range(chunk.past // ratio, (chunk.past + chunk.query) // ratio)


def windows(chunks: Sequence[Chunk], ratio: int = 1) -> list[tuple[int, int]]:
    """Per token where its request's keys start and where those end that it may see.

    Upstream: ``cu_seqlen_ks`` and ``cu_seqlen_ke``.
    """
    firsts = _firsts(chunks, ratio)
    return [window for chunk, first in zip(chunks, firsts, strict=False) for window in _seen(chunk, first, ratio)]


def prefill_chunks(chunks: Sequence[Chunk], longest: int, ratio: int = 1) -> list[PrefillChunk]:
    """The contexts in pieces of at most ``longest`` tokens.

    Whole contexts share a piece as long as they fit; a longer one is cut, and its pieces are its own.
    """
    firsts = _firsts(chunks, ratio)
    tokens = list(accumulate((chunk.query for chunk in chunks), initial=0))
    pieces: list[PrefillChunk] = []
    for group in _packed([chunk.query for chunk in chunks], longest):
        first, start = firsts[group[0]], tokens[group[0]]
        seen = [window for i in group for window in _seen(chunks[i], firsts[i] - first, ratio)]
        for begin in range(0, len(seen), longest):
            part = seen[begin : begin + longest]
            # A cut context needs no keys beyond its own last token; contexts that share a piece need all of theirs.
            end = firsts[group[-1] + 1] if len(group) > 1 else first + part[-1][1]
            pieces.append(PrefillChunk((start + begin, start + begin + len(part)), (first, end), part))
    return pieces


def longest_chunk(configured: int, keys: int) -> int:
    """Most tokens of a piece, given the keys of the longest context: fewer the more keys there are."""
    if keys > 2**19:
        return min(configured, 2**13)
    return min(configured, 2**14) if keys >= 2**18 else configured


def _firsts(chunks: Sequence[Chunk], ratio: int) -> list[int]:
    """The first key of each context, and the number of all keys."""
    return list(accumulate(((chunk.past + chunk.query) // ratio for chunk in chunks), initial=0))


def _seen(chunk: Chunk, first: int, ratio: int) -> list[tuple[int, int]]:
    return [(first, first + (chunk.past + i + 1) // ratio) for i in range(chunk.query)]


def _packed(queries: Sequence[int], longest: int) -> list[list[int]]:
    """Contexts that share a piece: each with the one before it where both fit."""
    groups: list[list[int]] = []
    room = 0
    for i, query in enumerate(queries):
        if query > room:
            groups.append([])
            room = longest
        groups[-1].append(i)
        room -= query
    return groups
