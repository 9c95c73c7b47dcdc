"""The kernels in Triton. Each says which torch operations it stands for, and gives their bits.

Nothing is specialised by the value or the alignment of an argument, so that each kernel is compiled once for each type
of its arguments and ``warm_up`` compiles all of them. What is read and written lies inside the tensors whatever their
content: a wrong row or page gives a wrong value, as with torch, or the nearest one's, where torch ends the process.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from scenarios import tracer

_BLOCK: Final = 256
MAX_SEQUENCES: Final = _BLOCK
"""Sequences of a batch at most, where one program handles all of them."""

_PRIME: tl.constexpr = tl.constexpr(tracer.PRIME)
_ENTRY_FACTOR: tl.constexpr = tl.constexpr(tracer.ENTRY_FACTOR)
_INDEX_FACTOR: tl.constexpr = tl.constexpr(tracer.INDEX_FACTOR)
_TERM_SHIFT: tl.constexpr = tl.constexpr(tracer.TERM_SHIFT)
_ONE_POSITION: tl.constexpr = tl.constexpr(tracer.VOCAB_SIZE)
_EMPTY: tl.constexpr = tl.constexpr(tracer.EMPTY)


def _kernel(function: Any) -> Any:
    """Compile ``function`` without regard to what its arguments are worth."""
    names = [name for name in function.__code__.co_varnames[: function.__code__.co_argcount] if name != "BLOCK"]
    return triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)


@_kernel
def _slot_mapping(
    positions, rows, table, data, scales, count, last_row, columns, size, page_bytes, data_bytes, scale_bytes,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < count
    position = tl.load(positions + token, mask=inside, other=0).to(tl.int64)
    row = tl.load(rows + token, mask=inside, other=0).to(tl.int64)
    row = tl.minimum(tl.maximum(row, 0), last_row)
    # Division of what is negative rounds towards 0 here, but all of that is the first page's.
    ordinal = tl.minimum(tl.maximum(position // size, 0), columns - 1)
    page = tl.load(table + row * columns + ordinal, mask=inside, other=0).to(tl.int64) * page_bytes
    offset = position % size
    offset = tl.where(offset < 0, offset + size, offset)
    tl.store(data + token, page + offset * data_bytes, mask=inside)
    tl.store(scales + token, page + size * data_bytes + offset * scale_bytes, mask=inside)


def slot_mapping(
    positions: Tensor, table: Tensor, rows: Tensor, size: int, page_bytes: int, data_bytes: int, scale_bytes: int
) -> tuple[Tensor, Tensor]:
    """Byte offsets of data and of scale of each token's key: ``indexer.slots_of``."""
    # Of one type each: another one would be compiled anew, perhaps while a graph is captured.
    positions, table, rows = positions.long().contiguous(), table.int().contiguous(), rows.int().contiguous()
    count = len(positions)
    data, scales = torch.empty(2, count, dtype=torch.int64, device=positions.device)
    if count:
        _slot_mapping[(triton.cdiv(count, _BLOCK),)](
            positions, rows, table, data, scales, count, len(table) - 1, table.shape[1], size, page_bytes, data_bytes,
            scale_bytes, BLOCK=_BLOCK,
        )  # fmt: skip
    return data, scales


@_kernel
def _to_global(
    indices, token_stride, column_stride, table, row_stride, rows, slots, count, width, last_row, columns, size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = item < count
    token, column = item // width, item % width
    index = tl.load(indices + token * token_stride + column * column_stride, mask=present, other=-1)
    row = tl.load(rows + token, mask=present, other=0).to(tl.int64)
    row = tl.minimum(tl.maximum(row, 0), last_row)
    inside = tl.minimum(tl.maximum(index, 0), columns * size - 1)
    page = tl.load(table + row * row_stride + inside // size, mask=present, other=-1).to(tl.int64)
    slot = page * size + inside % size
    tl.store(slots + item, tl.where((inside != index) | (page < 0), -1, slot), mask=present)


def to_global(indices: Tensor, table: Tensor, rows: Tensor, size: int) -> Tensor:
    """Slots of the pool that indices into sequences stand for: ``indexer.to_global``."""
    indices, table, rows = indices.long(), table.int(), rows.int().contiguous()
    slots = torch.empty(indices.shape, dtype=torch.int64, device=indices.device)
    count = slots.numel()
    if count:
        _to_global[(triton.cdiv(count, _BLOCK),)](
            indices, *indices.stride(), table, table.stride(0), rows, slots, count, indices.shape[1], len(table) - 1,
            table.shape[1], size, BLOCK=_BLOCK,
        )  # fmt: skip
    return slots


@_kernel
def _follow_accepted(kv_lens, accepted, count, contexts, draft_len, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    inside = row < count
    kv = tl.load(kv_lens + row, mask=inside, other=0)
    change = tl.load(accepted + row, mask=inside, other=0) - draft_len
    tl.store(kv_lens + row, kv + tl.where(row < contexts, 1, change).to(tl.int32), mask=inside)


def follow_accepted(kv_lens: Tensor, accepted: Tensor, contexts: int, draft_len: int) -> None:
    """KV lengths, in place, after the first draft: ``linear.follow_accepted``."""
    _follow_accepted[(1,)](kv_lens, accepted, len(kv_lens), contexts, draft_len, BLOCK=MAX_SEQUENCES)


@_kernel
def _running_totals(queries, kv_lens, cu_q, cu_kv, count, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    inside = row < count
    tl.store(cu_q + row, tl.cumsum(tl.load(queries + row, mask=inside, other=0), 0), mask=inside)
    tl.store(cu_kv + row, tl.cumsum(tl.load(kv_lens + row, mask=inside, other=0), 0), mask=inside)


def running_totals(queries: Tensor, kv_lens: Tensor, cu_q: Tensor, cu_kv: Tensor) -> None:
    """Running totals of query and KV lengths, into the last two: two of ``torch.cumsum``."""
    _running_totals[(1,)](queries, kv_lens, cu_q, cu_kv, len(queries), BLOCK=MAX_SEQUENCES)


@triton.jit
def _slot(pool, table, columns, row_stride, size, last_page, row, place, wanted):
    """Content of a slot of a sequence, EMPTY behind those that its pages have."""
    wanted = wanted & (place >= 0) & (place < columns * size)
    page = tl.load(table + row * row_stride + place // size, mask=wanted, other=0).to(tl.int64)
    page = tl.minimum(tl.maximum(page, 0), last_page)
    return tl.load(pool + page * size + place % size, mask=wanted, other=_EMPTY)


@triton.jit
def _term(index, value):
    x = (value % _PRIME * _ENTRY_FACTOR + index * _INDEX_FACTOR + _TERM_SHIFT) % _PRIME
    return x * x % _PRIME * x % _PRIME


@_kernel
def _digest(
    pool, table, columns, row_stride, size, last_page, draft_pool, draft_table, draft_columns, draft_row_stride,
    draft_size, draft_last_page, sequences, indices, digests, slots, shift, BLOCK: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    row = tl.load(sequences + item)
    last = tl.minimum(tl.maximum(tl.load(indices + item) + shift, 0), slots + shift - 1)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    begin = last * 0
    while begin <= last:
        place = begin + tl.arange(0, BLOCK).to(tl.int64)
        wanted = place <= last
        value = _slot(pool, table, columns, row_stride, size, last_page, row, place, wanted & (place < slots))
        # Without a shift the drafter's cache is not looked at.
        before = wanted & (shift > 0)
        drafted = _slot(
            draft_pool, draft_table, draft_columns, draft_row_stride, draft_size, draft_last_page, row, place - shift,
            before,
        )  # fmt: skip
        value = tl.where(drafted == _EMPTY, value, drafted + shift * _ONE_POSITION)
        total += tl.where(wanted, _term(place, value), 0)
        begin += BLOCK
    tl.store(digests + item, tl.sum(total, 0) % _PRIME)


def digest(target: Any, draft: Any, rows: Any, slots: int, shift: int) -> Tensor:
    """Digests of rows that see all of their sequence up to themselves, or ``shift`` tokens more with a drafter's eyes.

    ``tracer.Tracer.target`` where the shift is 0, else ``tracer.Tracer.shifted``; ``target`` and ``draft`` are
    ``tracer.Cache``, ``rows`` is ``tracer.Rows``.
    """
    sequences, indices = rows.sequence.contiguous(), rows.index.contiguous()
    digests = torch.empty_like(indices)
    if len(digests):
        _digest[(len(digests),)](
            *_cache(target), *_cache(draft), sequences, indices, digests, slots, shift, BLOCK=_BLOCK
        )  # fmt: skip
    return digests


def _cache(cache: Any) -> tuple[Tensor, Tensor, int, int, int, int]:
    """A pool and its table with the sizes that the kernel reads them by; the table's last dimension has stride 1.

    These are the table's columns, the stride of its rows, tokens of a page, and the last page of the pool.
    """
    pool, table = cache.pool, cache.table
    if table.stride(1) != 1:
        table = table.contiguous()
    return pool, table, table.shape[1], table.stride(0), pool.shape[1], len(pool) - 1


@_kernel
def _compare(actual, expected, anything, step, base, state, count, BLOCK: tl.constexpr):
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    said = tl.load(expected + item, mask=inside, other=0)
    seen = tl.load(actual + item, mask=inside, other=0).to(tl.int64)
    wrong = inside & (said != anything) & (said != seen)
    place = tl.load(step) + base + item
    none = tl.load(state + 2)
    tl.atomic_min(state, tl.min(tl.where(wrong, place, none), 0))
    tl.atomic_add(state + 1, tl.sum(wrong.to(tl.int64), 0))


def compare(actual: Tensor, expected: Tensor, anything: int, step: Tensor, base: int, state: Tensor) -> None:
    """Add what differs to ``state``, int64 [3]: the first place, how many there are, and what stands for no place."""
    count = len(actual)
    if count:
        _compare[(triton.cdiv(count, _BLOCK),)](actual, expected, anything, step, base, state, count, BLOCK=_BLOCK)


@cache
def warm_up(device: str) -> None:
    """Compile every kernel for the types that the engine calls it with."""
    one = torch.zeros(1, dtype=torch.int64, device=device)
    small = torch.zeros(1, dtype=torch.int32, device=device)
    table, pool = small.view(1, 1), one.view(1, 1)
    slot_mapping(one, table, small, 1, 1, 1, 1)
    to_global(pool, table, small, 1)
    follow_accepted(small, small, 1, 1)
    running_totals(small, small, small.clone(), small.clone())
    cache = SimpleNamespace(pool=pool, table=table)
    digest(cache, cache, SimpleNamespace(sequence=one, index=one), 1, 1)
    state = torch.zeros(3, dtype=torch.int64, device=device)
    for actual in (one, small):
        compare(actual, one, -(2**63), one, 0, state)


INTERPRETED: Final = type(_compare).__name__ == "InterpretedFunction"
"""Whether Triton interprets its kernels (TRITON_INTERPRET=1), on the CPU."""
