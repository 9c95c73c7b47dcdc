"""Lengths and page tables as ``FlashInferAttentionMetadata`` has them, from what each request has cached."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class FlashInferRow(NamedTuple):
    """A row of a batch: ``query`` tokens after ``past`` cached ones."""

    past: int
    query: int

    @property
    def kv(self) -> int:
        """KV length in the forward."""
        return self.past + self.query


class PageTables(NamedTuple):
    """Arrays of ``prepare()``, under upstream's names without their underscores."""

    qo_indptr: list[int]
    paged_kv_indptr_prefill: list[int]
    paged_kv_indptr_decode: list[int]
    paged_kv_last_page_len: list[int]
    cached_token_lens: list[int]
    batch_indices: list[int]
    positions: list[int]


def num_pages(kv: int, page_size: int) -> int:
    """Pages that hold ``kv`` tokens."""
    return -(-kv // page_size)


def last_page_len(kv: int, page_size: int) -> int:
    """How many of them are on the last page, which is never empty."""
    return kv - (num_pages(kv, page_size) - 1) * page_size


def page_tables(rows: Sequence[FlashInferRow], num_contexts: int, page_size: int) -> PageTables:
    """What a forward over these rows is told; pages of contexts and of generations are counted apart."""
    pages = [num_pages(row.kv, page_size) for row in rows]
    return PageTables(
        list(accumulate((row.query for row in rows), initial=0)),
        list(accumulate(pages[:num_contexts], initial=0)),
        list(accumulate(pages[num_contexts:], initial=0)),
        [last_page_len(row.kv, page_size) for row in rows],
        [row.past for row in rows],
        [index for index, row in enumerate(rows) for _ in range(row.query)],
        [position for row in rows for position in range(row.past, row.kv)],
    )


def shared_kv_lens(rows: Sequence[FlashInferRow], accepted: Sequence[int], num_contexts: int) -> list[int]:
    """KV lengths of a drafter that reads the target's cache: what is cached for good after the step.

    accepted  per row, the target's own token included; of a context its chunk counts, whatever it says
    """
    return [
        row.kv if index < num_contexts else row.past + tokens
        for index, (row, tokens) in enumerate(zip(rows, accepted, strict=True))
    ]
