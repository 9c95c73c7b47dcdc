"""Each Triton kernel beside the torch operations that it stands for, on drawn content: equal bits on any device.

A comparison takes the device to run on and fails where a bit differs. Content is drawn with a fixed seed; among it are
places outside a table, pages that are none and rows at the ends of the sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

import engines.tracer
from engines import kernels
from engines.portable.attention.backends.sparse.dsa.indexer import slots_of, to_global
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from engines.portable.mismatches import ANYTHING, Mismatches
from engines.portable.speculative.linear import follow_accepted
from engines.tracer import Cache, Rows, Tracer
from scenarios.tracer import EMPTY

Comparison = Callable[[str], None]
SEQUENCES, PAGES, SIZE, POOL = 5, 7, 4, 60


def both(call: Callable[[], Any]) -> tuple[Any, Any]:
    """What ``call`` gives with torch's kernels and with Triton's."""
    with kernels.using("torch"):
        expected = call()
    with kernels.using("triton"):
        return expected, call()


def assert_equal(expected: Tensor, actual: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.tolist() == expected.tolist()


def numbers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def table_with_gaps(rows: int, seed: int = 0) -> Tensor:
    """Pages of sequences, a third of them none."""
    table = numbers(0, POOL, rows, PAGES, seed=seed)
    return torch.where(numbers(0, 3, rows, PAGES, seed=seed + 9) == 0, -1, table)


def slot_mapping(device: str) -> None:
    """Positions before, in and behind a table that is a part of a larger one."""
    manager: Any = SimpleNamespace(
        index_tokens_per_block=SIZE, index_page_bytes=528, index_data_bytes=128, index_scale_bytes=4
    )
    table = numbers(0, POOL, SEQUENCES, PAGES).to(device)
    for tokens in (1, 300):
        positions = numbers(-3, PAGES * SIZE + 9, tokens, dtype=torch.int64).to(device)
        rows = numbers(0, SEQUENCES, tokens).to(device)
        for expected, actual in zip(*both(partial(slots_of, positions, table, rows, manager))):
            assert_equal(expected, actual)


def topk_to_global(device: str) -> None:
    """Indices that are none or outside, in a view of a larger selection; tables with pages that are none."""
    table = table_with_gaps(SEQUENCES + 2).to(device)[1:-1]
    rows = numbers(0, SEQUENCES, 100).to(device)
    chosen = numbers(-2, PAGES * SIZE + 3, 100, 2, 6, dtype=torch.int64).to(device)
    for indices in (chosen[:, 0], chosen.flatten(1), chosen[:0, 1]):
        assert_equal(*both(partial(to_global, indices, table, rows[: len(indices)], SIZE)))


def kv_lens_after_acceptance(device: str) -> None:
    """Contexts and generations, each alone and together."""
    accepted = numbers(1, 5, SEQUENCES).to(device)

    def lens(contexts: int) -> Tensor:
        kv_lens = numbers(9, 90, SEQUENCES + 3, seed=1).to(device)
        follow_accepted(kv_lens[:SEQUENCES], accepted, contexts, 4)
        return kv_lens

    for contexts in range(SEQUENCES + 1):
        assert_equal(*both(partial(lens, contexts)))


def running_totals(device: str) -> None:
    """Totals of batches of one and of many rows, the rest of the buffers untouched."""

    def totals(rows: int) -> Tensor:
        attn = TrtllmAttentionMetadata(max_num_requests=256, max_num_tokens=9, device=torch.device(device))
        attn.seq_lens = numbers(1, 9, rows)
        attn.kv_lens_cuda.copy_(numbers(1, 999, 256))
        attn.mla_scheduler_buffers()
        return torch.stack([attn.mla_cu_q_rows, attn.mla_cu_kv_seqlens])

    for rows in (1, SEQUENCES, 256):
        assert_equal(*both(partial(totals, rows)))


def tracer_digests(device: str) -> None:
    """Target and drafters with several shifts; caches of two page sizes, empty slots, rows outside their sequences."""
    tables = [table_with_gaps(SEQUENCES, seed=i).to(device) for i in range(2)]
    index = numbers(-2, PAGES * SIZE + 3, 70, dtype=torch.int64).to(device)
    rows = Rows(numbers(0, SEQUENCES, 70, dtype=torch.int64).to(device), index)
    positions, tokens = numbers(0, 99, 70).to(device), numbers(1, 1000, 70).to(device)
    tracer = Tracer(PAGES * SIZE + 5, torch.device(device), max_shift=3)

    def digests(shift: int) -> Tensor:
        pools = [numbers(0, 1 << 20, POOL, size, dtype=torch.int64, seed=size).to(device) for size in (SIZE, SIZE + 1)]
        for pool in pools:
            pool[pool % 3 == 0] = EMPTY
        target, draft = (Cache(pool, table) for pool, table in zip(pools, tables))
        if shift == 0:
            return tracer.target(target, rows, positions, tokens)
        return torch.stack(tracer.shifted(target, draft, rows, positions, tokens, shift))

    # Nothing is written: which of two writes to a slot wins is not defined.
    with mock.patch.object(engines.tracer, "write"):
        for shift in range(4):
            assert_equal(*both(partial(digests, shift)))


def pages_outside_the_pool(device: str) -> None:
    """A page that the pool does not have, as the table of another cache may name, is read as the last one.

    Torch ends the process there, so it is given the last one itself.
    """
    table = table_with_gaps(SEQUENCES).to(device)
    rows = Rows(*numbers(0, SEQUENCES, 2, 70, dtype=torch.int64).to(device))
    pool = numbers(1, 1 << 20, POOL // 2, SIZE, dtype=torch.int64).to(device)
    tracer, unknown = Tracer(PAGES * SIZE, torch.device(device)), torch.zeros(70, dtype=torch.int32, device=device)

    def digests() -> Tensor:
        pages = table if kernels.triton_for(pool) else table.clamp(max=len(pool) - 1)
        return tracer.target(Cache(pool, pages), rows, unknown, unknown)

    with mock.patch.object(engines.tracer, "write"):
        assert_equal(*both(digests))


def on_device_comparison(device: str) -> None:
    """Equal content, one and several places that differ, and some of which nothing is said; both integer types."""
    said = numbers(0, 4, 600, dtype=torch.int64)
    said[5] = ANYTHING

    def state(dtype: torch.dtype, changed: list[int]) -> Tensor:
        mismatches = Mismatches(torch.device(device))
        mismatches.begin_step("step")
        actual = torch.where(said == ANYTHING, 0, said).to(dtype)
        actual[changed] += 1
        mismatches.compare(actual.to(device), said.to(device), 1000)
        return mismatches.state

    for dtype in (torch.int32, torch.int64):
        for changed in ([], [5], [599, 300], [7]):
            assert_equal(*both(partial(state, dtype, changed)))


COMPARISONS: Final[tuple[Comparison, ...]] = (
    slot_mapping,
    topk_to_global,
    kv_lens_after_acceptance,
    running_totals,
    tracer_digests,
    pages_outside_the_pool,
    on_device_comparison,
)
