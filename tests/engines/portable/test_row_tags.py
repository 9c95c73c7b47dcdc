"""Tags through tensor operations: each is done to three elements of three requests, with and without somebody watching.

Values tell what a tag must be where an operation only moves elements: 10, 20 and 30 are of requests 7, 8 and 9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engines.portable.graphs import CpuGraph, capture
from engines.portable.row_tags import MIXED, UNTAGGED, RowTags
from engines.unseen import unseen

NONE = UNTAGGED
OWNERS = {10: 7, 20: 8, 30: 9}
T = torch.tensor


def _run(operation: Callable[[Tensor, Tensor], Any], *, watched: bool) -> tuple[Any, Any]:
    """What an operation makes of elements of requests 7, 8, 9 and of some of 7, 8 and nobody; and tags of that."""
    tags = RowTags()
    a, b = T([10, 20, 30]), T([1, 2, 3])
    if not watched:
        result: Tensor = operation(a, b)
        return result.tolist(), None
    with tags:
        tags.put(a, T([7, 8, 9], dtype=torch.int32))
        tags.put(b, T([7, 8, NONE], dtype=torch.int32))
        result = operation(a, b)
    return result.tolist(), tags.of(result).tolist()


def _tags(operation: Callable[[Tensor, Tensor], Any]) -> Any:
    """Tags of a result, which must be what it is when nobody watches, in inference mode and out of it."""
    found = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            values, tags = _run(operation, watched=True)
            assert values == _run(operation, watched=False)[0]
            found.append((values, tags))
    assert found[0] == found[1]
    return found[0]


def _owners(values: Any) -> Any:
    return [_owners(value) for value in values] if isinstance(values, list) else OWNERS.get(int(values), NONE)


def _grid(a: Tensor) -> Tensor:
    return a.view(3, 1).repeat(1, 2)


def _out(a: Tensor) -> Tensor:
    """A result of earlier that is written over."""
    return a.roll(1)


MOVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # Taken from where an index or a mask says.
    "index": lambda a, b: a[T([2, 0])],
    "index grid": lambda a, b: _grid(a)[T([2, 0]), T([[1], [0]])],
    "index mask": lambda a, b: a[T([True, False, True])],
    "index_select": lambda a, b: _grid(a).index_select(0, T([2, 2, 0])),
    "index_select out": lambda a, b: torch.index_select(a, 0, T([2, 2, 0]), out=_out(a)),
    "gather": lambda a, b: _grid(a).gather(0, T([[2, 1], [0, 0]])),
    "gather out": lambda a, b: torch.gather(a, 0, T([2, 2, 0]), out=_out(a)),
    "take": lambda a, b: torch.take(_grid(a), T([[5], [2]])),
    "take out": lambda a, b: torch.take(a, T([1, 1, 0]), out=_out(a)),
    "take_along_dim": lambda a, b: torch.take_along_dim(_grid(a), T([[1], [0], [1]]), dim=1),
    "masked_select": lambda a, b: a.masked_select(T([False, True, True])),
    "embedding": lambda a, b: functional.embedding(T([2, 1]), _grid(a).float()),
    "sort of indices": lambda a, b: a[a.argsort(descending=True)],
    # Elsewhere, more of them, or seen in another way.
    "roll": lambda a, b: a.roll(1),
    "flip": lambda a, b: _grid(a).flip(0, 1),
    "rot90": lambda a, b: torch.rot90(_grid(a)),
    "repeat": lambda a, b: a.repeat(2, 1),
    "tile": lambda a, b: a.tile(2),
    "repeat_interleave": lambda a, b: a.repeat_interleave(2),
    "repeat_interleave of each": lambda a, b: a.repeat_interleave(b),
    "cat": lambda a, b: torch.cat([T([1]), a.flip(0)[:2]]),
    "cat out": lambda a, b: torch.cat([a[2:], a[:2]], out=_out(a)),
    "stack": lambda a, b: torch.stack([a, a.flip(0)], dim=1),
    "hstack": lambda a, b: torch.hstack([a, T([1])]),
    "block_diag": lambda a, b: torch.block_diag(a[:2], a[2:]),
    "diag_embed": lambda a, b: torch.diag_embed(a),
    "tril": lambda a, b: a.expand(3, 3).tril(),
    "triu": lambda a, b: a.expand(3, 3).triu(),
    "pad": lambda a, b: functional.pad(a, (1, 2)),
    "pad with a number": lambda a, b: functional.pad(a, (1, 0), value=5),
    "as_strided": lambda a, b: a.as_strided((2, 2), (1, 1)),
    "unfold": lambda a, b: a.unfold(0, 2, 1).contiguous(),
    "views": lambda a, b: _grid(a).t().unsqueeze(1).expand(2, 4, 3).flatten(1)[:, 1::2].unbind()[1],
    "view in place": lambda a, b: a.unsqueeze_(0).detach_(),
    "split": lambda a, b: torch.cat(a.split([1, 2])[::-1]),
    "reshape": lambda a, b: _grid(a).t().reshape(3, 2),
    # Other types, and from one tensor to another.
    "to": lambda a, b: a.to(torch.float32).to(torch.int16),
    "type of another": lambda a, b: a.type_as(b.float()).double().clone(),
    "copy_": lambda a, b: torch.zeros(2, 3).copy_(a),
    "copy_ to a part": lambda a, b: torch.cat([_part(a)]),
    "where": lambda a, b: torch.where(T([True, False, True]), a, -1),
    "where of two": lambda a, b: torch.where(T([True, False, True]), a, a.roll(1)),
    "where out": lambda a, b: torch.where(T([True, False, True]), a, T(1), out=_out(a)),
    # Written to where an index, a mask or a slice says.
    "slice written": lambda a, b: _set(_grid(a), slice(1, 3), a[:2]),
    "place written": lambda a, b: _set(_grid(a), (2, 0), a[1]),
    "number written": lambda a, b: _set(a, slice(0, 2), 5),
    "index written": lambda a, b: _set(a, T([2, 0]), a[:2].clone()),
    "mask written": lambda a, b: _set(_grid(a), T([True, False, False]), 4),
    "index_put": lambda a, b: torch.zeros(3, 2, dtype=torch.int64).index_put((T([1, 2]), T([0, 1])), a[1:]),
    "index_put_ number": lambda a, b: a.index_put_((T([1]),), T(5)),
    "index_copy_": lambda a, b: torch.zeros(3, dtype=torch.int64).index_copy_(0, T([2, 0, 1]), a),
    "index_copy": lambda a, b: torch.zeros(2, 3).index_copy(0, T([1]), a.view(1, 3).float()),
    "index_fill_": lambda a, b: _grid(a).index_fill_(0, T([1]), 5),
    "index_fill_ element": lambda a, b: _grid(a).index_fill_(0, T([1]), a[2]),
    "put_": lambda a, b: _grid(a).put_(T([0, 5]), a[1:]),
    "masked_fill_": lambda a, b: _grid(a).masked_fill_(T([[True, False]]), 5),
    "masked_fill element": lambda a, b: a.masked_fill(T([True, False, False]), a[2]),
    "masked_scatter_": lambda a, b: a.clone().masked_scatter_(T([False, True, True]), a),
    "scatter": lambda a, b: torch.zeros(3, 3, dtype=torch.int64).scatter(1, T([[2, 0, 1]]), a.view(1, 3)),
    "scatter_": lambda a, b: a.clone().scatter_(0, T([1]), a),
    "scatter out": lambda a, b: torch.scatter(a, 0, T([1]), a, out=_out(a)),
    "select_scatter": lambda a, b: torch.select_scatter(_grid(a), a.roll(1), 1, 1),
    "diagonal_scatter": lambda a, b: torch.diagonal_scatter(torch.zeros(3, 3, dtype=torch.int64), a),
    "slice_scatter": lambda a, b: torch.slice_scatter(a, a[:1], 0, 2),
    "fill_": lambda a, b: a.fill_(3),
    "fill_ element": lambda a, b: _grid(a).fill_(a[1].clone()),
    "zero_": lambda a, b: a.zero_(),
    # Made anew.
    "new": lambda a, b: a.new_zeros(3),
    "like": lambda a, b: torch.cat([torch.zeros_like(a), torch.full_like(a, 3)]),
    "from the host": lambda a, b: T([*a.tolist(), 1]) - 1,
}


def _set(tensor: Tensor, place: Any, value: Any) -> Tensor:
    tensor[place] = value
    return tensor


def _part(a: Tensor) -> Tensor:
    wide = torch.zeros(4, 2, dtype=torch.int32)
    wide[1:, 0].copy_(a)
    return wide


@pytest.mark.parametrize("name", MOVES)
def test_tags_are_where_elements_are(name: str) -> None:
    values, tags = _tags(MOVES[name])
    assert tags == _owners(values)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        # Element by element.
        (lambda a, b: a + b, [7, 8, 9]),
        (lambda a, b: a // b, [7, 8, 9]),
        (lambda a, b: 100 - torch.rsub(a, b), [7, 8, 9]),
        (lambda a, b: a.add_(b.roll(1)), [7, MIXED, MIXED]),
        (lambda a, b: a + b.roll(1) + a, [7, MIXED, MIXED]),
        (lambda a, b: torch.maximum(a, b.roll(1), out=_out(a)), [7, MIXED, MIXED]),
        (lambda a, b: a * T([1, 0, 1]), [7, NONE, 9]),
        (lambda a, b: (a > 0) & T([True, False, True]), [7, NONE, 9]),
        (lambda a, b: a.view(3, 1).expand(3, 2) | 1, [[7, 7], [8, 8], [9, 9]]),
        # Many that become one, or one of them.
        (lambda a, b: torch.stack([a, b]).sum(dim=0), [7, 8, 9]),
        (lambda a, b: torch.stack([a, b.roll(1)]).sum(dim=0) + a, [7, MIXED, MIXED]),
        (lambda a, b: a.sum(), MIXED),
        (lambda a, b: a.max() + T([1, 2]), [MIXED] * 2),
        (lambda a, b: a[:0].sum(), NONE),
        (lambda a, b: _grid(a).float().mean(dim=1, keepdim=True), [[7], [8], [9]]),
        (lambda a, b: _grid(a).max(dim=1).indices, [7, 8, 9]),
        (lambda a, b: _grid(a).topk(2, dim=1).values, [[7, 7], [8, 8], [9, 9]]),
        (lambda a, b: _grid(a).sort(dim=0, stable=True).values, [[MIXED, MIXED]] * 3),
        (lambda a, b: _grid(a).argsort(dim=1), [[7, 7], [8, 8], [9, 9]]),
        (lambda a, b: _grid(a).float().softmax(dim=1), [[7, 7], [8, 8], [9, 9]]),
        (lambda a, b: a.cumsum(0), [7, MIXED, MIXED]),
        (lambda a, b: torch.cumsum(a, 0, out=_out(a)), [7, MIXED, MIXED]),
        (lambda a, b: _grid(a).cumsum_(1), [[7, 7], [8, 8], [9, 9]]),
        (lambda a, b: b.flip(0).cumsum(0), [NONE, 8, MIXED]),
        (lambda a, b: a[:0].cumsum(0), []),
        # Numbers that are written belong to whoever said where.
        (lambda a, b: torch.zeros(3, 40).scatter_(1, a.view(3, 1), 1.0).argmax(dim=-1), [7, 8, 9]),
        # What is added to what was there.
        (lambda a, b: a.index_add_(0, T([0, 1, 2]), b), [7, 8, 9]),
        (lambda a, b: a.index_add(0, T([2, 0, 0]), T([1, 1, 1])), [7, 8, 9]),
        (lambda a, b: _grid(a).index_add_(0, T([1]), a[2:].view(1, 1).expand(1, 2)), [[7, 7], [MIXED] * 2, [9, 9]]),
        (lambda a, b: torch.zeros(2).index_add(0, T([1, 0, 0]), a.float()), [MIXED, 7]),
        (lambda a, b: torch.zeros(2).scatter_add_(0, T([0, 1, 1]), a.float()), [7, MIXED]),
        (lambda a, b: a.scatter(0, T([1]), 5, reduce="add"), [7, 8, 9]),
        (lambda a, b: a.scatter_reduce(0, T([0, 2]), b, "amax"), [7, 8, MIXED]),
        (lambda a, b: a.index_put_((T([1]),), b[:1], accumulate=True), [7, MIXED, 9]),
        (lambda a, b: a.put_(T([1]), b[:1], accumulate=True), [7, MIXED, 9]),
        # Of which nothing is known: none, also where there have been some.
        (lambda a, b: T([4, 5, 6, 7])[b], [NONE] * 3),
        (lambda a, b: torch.searchsorted(a, b), [NONE] * 3),
        (lambda a, b: a.unique(), [NONE] * 3),
        (lambda a, b: torch.repeat_interleave(b), [NONE] * 6),
        (lambda a, b: a.nonzero(), [[NONE]] * 3),
        (lambda a, b: a.bincount()[10:11], [NONE]),
        (lambda a, b: _grid(a) @ b[:2], [NONE] * 3),
        (lambda a, b: torch.searchsorted(a, b, out=_out(a)), [NONE] * 3),
        (lambda a, b: _in_lists(a), [NONE] * 3),
        (lambda a, b: _first_renormed(a), [[NONE], [8], [9]]),
    ],
)
def test_what_is_made_of_elements_is_of_whom_they_all_are(
    operation: Callable[[Tensor, Tensor], Tensor], expected: Any
) -> None:
    assert _tags(operation)[1] == expected


@pytest.mark.parametrize(
    "name",
    [
        "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "count_nonzero", "cummax", "cummin", "cumprod",
        "cumsum", "log_softmax", "logcumsumexp", "logsumexp", "max", "mean", "median", "min", "mode", "prod",
        "softmax", "sort", "std", "sum", "var",
    ],
)  # fmt: skip
def test_what_is_made_of_a_row_is_its_own_and_of_several_rows_nobody_s(name: str) -> None:
    def reduced(dim: int) -> Callable[[Tensor, Tensor], Tensor]:
        def operation(a: Tensor, b: Tensor) -> Tensor:
            result = getattr(torch, name)(_grid(a).float(), dim=dim)
            return result if isinstance(result, Tensor) else torch.stack([*result], dim=-1)

        return operation

    assert [_all_in(row) for row in _tags(reduced(1))[1]] == [{7}, {8}, {9}]
    first, *others = _tags(reduced(0))[1]
    # Where a running total begins there is one row alone.
    assert _all_in(first) == {7 if name.startswith(("cum", "logcum")) else MIXED}
    assert _all_in(others) == {MIXED}


def _all_in(tags: Any) -> set[int]:
    return set().union(*map(_all_in, tags)) if isinstance(tags, list) else {tags}


def _in_lists(a: Tensor) -> Tensor:
    """Writes and returns nothing."""
    torch._foreach_mul_([a], 2)
    return a


def _first_renormed(a: Tensor) -> Tensor:
    """Writes a part of what has tags."""
    wide = a.view(3, 1).float()
    wide[:1].renorm_(2, 0, 1.0)
    return wide


def test_what_lies_where_tagged_elements_have_been_has_none() -> None:
    tags = RowTags()
    for _ in range(50):
        with tags:
            tags.put(torch.ones(4), torch.full((4,), 7, dtype=torch.int32))
        # Nobody sees this one made, and it has mostly the memory of the one before.
        assert tags.of(torch.ones(4)).tolist() == [NONE] * 4


def test_what_is_seen_in_another_width_has_none() -> None:
    tags = RowTags()
    with tags:
        rows = torch.ones(2, dtype=torch.int64)
        tags.put(rows, T([7, 8], dtype=torch.int32))
        assert tags.of(rows.view(torch.float64)).tolist() == [7, 8]
        halves = rows.view(torch.int32)
        assert tags.of(halves).tolist() == [NONE] * 4
        halves.fill_(1)
        assert tags.of(rows).tolist() == [NONE] * 2


def test_kernels_of_graphs_are_seen_when_they_are_captured_and_when_they_are_replayed() -> None:
    tags = RowTags()
    slots, rows = torch.zeros(3, dtype=torch.int64), T([10, 20, 30])

    @unseen
    def kernel(slots: Tensor, rows: Tensor) -> Tensor:
        slots.copy_(rows.roll(1))
        return rows + 1

    with torch.inference_mode(), tags:
        tags.put(rows, T([7, 8, 9], dtype=torch.int32))
        graph, result = capture(lambda: kernel(slots, rows), torch.device("cpu"))
        assert (tags.of(slots).tolist(), tags.of(result).tolist()) == ([9, 7, 8], [7, 8, 9])
        rows.copy_(rows.flip(0))
        graph.replay()
    assert isinstance(graph, CpuGraph)
    assert len(graph._calls) == 1
    assert (tags.of(slots).tolist(), tags.of(result).tolist()) == ([7, 9, 8], [9, 8, 7])
