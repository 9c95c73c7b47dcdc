"""The tracer model of ``scenarios.tracer`` on int64 tensors, for any engine that keeps a paged cache in torch.

The definitions there (``entry``, ``term``, ``choose``, ``disagree``) use only arithmetic that int64 tensors share
with Python's integers, so they are applied as they are; this module adds what a batch needs: where a row's slot
is, and its digest out of the pages that the block table names.

A *pool* is int64 [pages, tokens_per_block]; a *table* is int32 [n, pages per row]. Nothing here waits for the
device, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from scenarios import tracer
from scenarios.tracer import EMPTY, MASK_TOKEN, PRIME, VOCAB_SIZE

entry = cast(Callable[[Tensor, Tensor], Tensor], tracer.entry)
term = cast(Callable[[Tensor, Tensor], Tensor], tracer.term)
choose = cast(Callable[[Tensor], Tensor], tracer.choose)
disagree = cast(Callable[[Tensor], Tensor], tracer.disagree)

_ONE_POSITION: Final = VOCAB_SIZE
"""By how much an entry grows when its position grows by one."""


@dataclass(frozen=True)
class Rows:
    """Where the rows of one forward are: their sequences and KV indices, int64 [rows] each."""

    sequence: Tensor
    index: Tensor


def locate(cu_q: Tensor, cu_kv: Tensor, rows: int) -> Rows:
    """Place ``rows`` rows, given the running totals of query and KV lengths (int [n + 1], from 0 on).

    The last row of a sequence is at index ``kv_len - 1``, the others before it. Rows beyond the total belong to
    the last sequence: wrong lengths give wrong digests, never an access outside the table.
    """
    ends = cu_q[1:]
    row = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    sequence = torch.searchsorted(ends, row, right=True).clamp_(max=len(ends) - 1)
    first = cu_kv[1:] - cu_kv[:-1] - ends
    return Rows(sequence, (row + first.index_select(0, sequence)).long())


def _write(pool: Tensor, table: Tensor, rows: Rows, values: Tensor) -> None:
    tokens_per_block, pages = pool.shape[1], table.shape[1]
    index = rows.index.clamp(0, pages * tokens_per_block - 1)
    page = torch.take(table, rows.sequence * pages + index // tokens_per_block)
    pool.view(-1).scatter_(0, page * tokens_per_block + index % tokens_per_block, values)


def _read(pool: Tensor, table: Tensor) -> Tensor:
    """Slots of every sequence in order: int64 [n, pages per row * tokens_per_block]."""
    return pool.index_select(0, table.reshape(-1)).view(table.shape[0], -1)


def _digest(totals: Tensor, rows: Rows, ahead: int = 0) -> Tensor:
    """The running total of each row's sequence at its own index plus ``ahead``, modulo PRIME."""
    index = (rows.index + ahead).clamp_(0, totals.shape[1] - 1)
    return torch.take(totals, rows.sequence * totals.shape[1] + index) % PRIME


class Tracer:
    """Target and drafters over pools whose block tables span ``slots`` tokens per row."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._index = torch.arange(slots, device=device)

    def target(self, pool: Tensor, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor) -> Tensor:
        """Digests of target rows, once their entries are written: int64 [rows]."""
        _write(pool, table, rows, entry(positions.long(), tokens.long()))
        return _digest(term(self._index, _read(pool, table)).cumsum(1), rows)

    def shifted(
        self, target_pool: Tensor, draft_pool: Tensor, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Digests of draft rows that are given the token after their position, and each row's own term in it."""
        own = entry(positions.long(), tokens.long())
        _write(draft_pool, table, rows, own)
        drafted = _read(draft_pool, table)[:, :-1]
        seen = _read(target_pool, table)
        # Slot s of the drafter holds what slot s + 1 of the target will.
        seen[:, 1:] = torch.where(drafted == EMPTY, seen[:, 1:], drafted + _ONE_POSITION)
        digests = _digest(term(self._index, seen).cumsum(1), rows, ahead=1)
        return digests, term(rows.index + 1, own + _ONE_POSITION)

    def parallel(
        self, target_pool: Tensor, draft_pool: Tensor, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor,
        masks: int,
    ) -> Tensor:  # fmt: skip
        """Digests of draft rows given tokens at their own positions, masks standing for unknown ones: int64 [rows].

        A row at the end of a run of up to ``masks`` masks has the digest that the target would have there if it
        had chosen each of them.
        """
        _write(draft_pool, table, rows, entry(positions.long(), tokens.long()))
        drafted = _read(draft_pool, table)
        seen = torch.where(drafted == EMPTY, _read(target_pool, table), drafted)
        known = (seen == EMPTY) | ((seen - tracer.entry(0, MASK_TOKEN)) % _ONE_POSITION != 0)
        last_known = torch.where(known, self._index, -1).cummax(1).values
        totals = term(self._index, seen).cumsum(1)
        last = self._index.shape[0] - 1
        start = torch.take(last_known, rows.sequence * (last + 1) + rows.index.clamp(0, last))
        digests = _digest(totals, Rows(rows.sequence, start))
        for step in range(1, masks + 1):
            index = (start + step).clamp_(max=last)
            guess = torch.take(seen, rows.sequence * (last + 1) + index) - MASK_TOKEN + choose(digests)
            digests = torch.where(start + step <= rows.index, (digests + term(index, guess)) % PRIME, digests)
        return digests


def one_hot(tokens: Tensor) -> Tensor:
    """Logits that choose ``tokens`` (int64 [rows]) beyond doubt: float32 [rows, VOCAB_SIZE]."""
    logits: Any = torch.zeros(tokens.shape[0], VOCAB_SIZE, device=tokens.device)
    return cast(Tensor, logits.scatter_(1, tokens.unsqueeze(1), 1.0))
