"""Rows of generations that each feed a number of their own: from a flat tensor to one of equal rows, and back.

All of it works on the device and waits for nothing, so that a graph can replay other widths than it was captured with.
Wrong widths give wrong rows, never an access outside.
"""

from __future__ import annotations

import torch
from torch import Tensor


def first_rows(widths: Tensor) -> Tensor:
    """Where the rows of each generation begin among all of them: int64 [G], of int [G] widths."""
    return widths.cumsum(0) - widths


def padded(rows: Tensor, widths: Tensor, columns: int) -> Tensor:
    """``rows`` [r, ...] with ``columns`` for each generation: [G, columns, ...], the last one of each repeated.

    ``r`` is not 0. What stands for a generation without rows is one of another.
    """
    column = torch.arange(columns, device=rows.device)
    index = first_rows(widths).unsqueeze(1) + torch.minimum(column, widths.unsqueeze(1) - 1)
    return rows.index_select(0, index.clamp(0, len(rows) - 1).flatten()).unflatten(0, (len(widths), columns))


def padded_with(value: int, rows: Tensor, widths: Tensor, columns: int) -> Tensor:
    """The same for ``rows`` [r], with ``value`` behind those of each generation; there may be none."""
    if not len(rows):
        return torch.full((len(widths), columns), value, dtype=rows.dtype, device=rows.device)
    is_row = torch.arange(columns, device=rows.device) < widths.unsqueeze(1)
    return torch.where(is_row, padded(rows, widths, columns), value)


def generation_of(widths: Tensor, num_rows: int) -> Tensor:
    """Which generation each of ``num_rows`` rows belongs to: int64 [num_rows]."""
    row = torch.arange(num_rows, device=widths.device)
    return torch.searchsorted(widths.cumsum(0), row, right=True).clamp_(max=len(widths) - 1)


def flat(values: Tensor, widths: Tensor, num_rows: int) -> Tensor:
    """The first ``widths`` of the columns of each generation, [G, columns], one after the other: [num_rows]."""
    generation, columns = generation_of(widths, num_rows), values.shape[1]
    column = torch.arange(num_rows, device=widths.device) - first_rows(widths).index_select(0, generation)
    return torch.take(values, generation * columns + column.clamp_(0, columns - 1))
