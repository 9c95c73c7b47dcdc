"""The tracer model of compressed attention: windows of plain tokens, and compressed tokens beside them.

As ``engines.tracer``: int64 tensors, no waiting for the device, out of sight of torch function modes. Where tokens are
read from is for the engine to say, in slots counted through a pool; -1 stands for a slot that there is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.tracer import Cache, Rows, Tracer, choose, entry, filled, term, write
from engines.unseen import unseen
from scenarios import tracer
from scenarios.tracer import EMPTY, MASK_TOKEN, PRIME, VOCAB_SIZE


@dataclass(frozen=True)
class Columns:
    """What a layer of the target reads of each row: numbers of tokens and their slots, int64 [rows, columns] each.

    lens  int [rows]: so many columns are read, and no more
    """

    tokens: Tensor
    slots: Tensor
    lens: Tensor


class CompressedTracer(Tracer):
    """Rows see ``window_size`` plain tokens and, of each ratio but the first, compressed ones, all or a selection."""

    def __init__(
        self, slots: int, device: torch.device, *, window_size: int, ratios: Sequence[int], index_topk: int
    ) -> None:
        super().__init__(slots, device)
        self._window, self._ratios, self.index_topk = window_size, tuple(ratios), index_topk

    @unseen
    def store(self, cache: Cache, rows: Rows, positions: Tensor, tokens: Tensor) -> None:
        """Write the entries of rows."""
        write(cache, rows, entry(positions.long(), tokens.long()))

    @unseen
    def compress(self, pool: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Compressed tokens of the given slots, int64 [tokens, ratio]; ``positions`` are those of their first ones."""
        entries = _at(pool, slots)
        index = positions.unsqueeze(1) + torch.arange(slots.shape[1], device=slots.device)
        return _compressed(term(index, entries), entries != EMPTY)

    @unseen
    def store_compressed(self, pool: Tensor, slots: Tensor, values: Tensor, exists: Tensor) -> None:
        """Write those of the ``values`` that exist to their slots.

        slots, values  int64 [n]
        exists         bool [n]: True for the first ones, False for all behind them
        """
        count = exists.sum()
        # A graph makes n writes in every replay: those behind the last one that exists write that one again.
        place = torch.minimum(torch.arange(len(values), device=pool.device), (count - 1).clamp(min=0))
        slots, values = slots.index_select(0, place), values.index_select(0, place)
        pool.view(-1).scatter_(0, slots, torch.where(count > 0, values, torch.take(pool, slots)))

    @unseen
    def select(self, keys: Tensor, last: Tensor) -> Tensor:
        """Of each row's compressed tokens up to ``last``, int64 [rows], the best: int64 [rows, k], -1 for none.

        keys  int64 [rows, tokens]: what the indexer keeps of the row's sequence
        """
        index = torch.arange(keys.shape[1], device=keys.device)
        ranks = term(index, keys) * (keys.shape[1] + 1) + (keys.shape[1] - index)
        allowed = torch.where((keys != EMPTY) & (index <= last.unsqueeze(1)), ranks, -1)
        best = allowed.topk(min(self.index_topk, keys.shape[1]))
        return torch.where(best.values < 0, -1, best.indices)

    @unseen
    def attend(self, pool: Tensor, columns: Columns) -> Tensor:
        """What the columns that are read add to the digests of rows: int64 [rows]."""
        entries = _at(pool, columns.slots)
        place = torch.arange(entries.shape[1], device=entries.device)
        read = (entries != EMPTY) & (columns.tokens >= 0) & (place < columns.lens.unsqueeze(1))
        return torch.where(read, term(columns.tokens, entries), 0).sum(1) % PRIME

    @unseen
    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """Digests of rows from what each of their layers added: int64 [rows]."""
        return torch.stack(list(parts)).sum(0) % PRIME

    @unseen
    def shifted_window(
        self, target: Cache, draft: Cache, rows: Rows, window: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Digests of draft rows with shift 1, and what each row's own token adds: two of int64 [rows].

        window, slots  int64 [rows, any]: KV indices that each row sees, -1 for none, and the drafter's slots of these.
            What lies before the window is read through the table of the draft cache
        """
        seen = self._read_shifted(target, draft).index_select(0, rows.sequence)
        fallback = self._read(target)
        own = self._own_window(seen, rows, window, draft.pool, slots, fallback, shift=1)
        with_own, without = self.digests(own, rows.index + 1), self.digests(own, rows.index)
        return with_own, (with_own - without) % PRIME

    @unseen
    def parallel_window(
        self, target: Cache, draft: Cache, rows: Rows, window: Tensor, slots: Tensor, masks: int
    ) -> Tensor:
        """Digests of draft rows without shift, with up to ``masks`` masks guessed one by one: int64 [rows]."""
        fallback = self._read(target)
        seen = filled(fallback, self._read(draft)).index_select(0, rows.sequence)
        seen = self._own_window(seen, rows, window, draft.pool, slots, fallback, shift=0)
        index = self._index[: seen.shape[1]]
        masked = (seen != EMPTY) & ((seen - tracer.entry(0, MASK_TOKEN)) % VOCAB_SIZE == 0)
        known = ~masked & (index <= rows.index.unsqueeze(1))
        start = torch.where(known, index, -1).amax(1)
        digests = self.digests(seen, start)
        for step in range(1, masks + 1):
            place = (start + step).clamp(max=seen.shape[1] - 1).unsqueeze(1)
            guess = seen.gather(1, place).squeeze(1) - MASK_TOKEN + choose(digests)
            is_mask = start + step <= rows.index
            kept = seen.gather(1, place)
            seen = seen.scatter(1, place, torch.where(is_mask.unsqueeze(1), guess.unsqueeze(1), kept))
            digests = torch.where(is_mask, self.digests(seen, start + step), digests)
        return digests

    def digests(self, entries: Tensor, last: Tensor) -> Tensor:
        """``compressed_digest`` of the first ``last + 1`` of each row's entries, int64 [rows, tokens]: int64 [rows]."""
        index, last = torch.arange(entries.shape[1], device=entries.device), last.unsqueeze(1)
        counts = (entries != EMPTY) & (index <= last)
        terms = torch.where(counts, term(index, entries), 0)
        total = len(self._ratios) * torch.where(index > last - self._window, terms, 0).sum(1)
        for layer, ratio in enumerate(self._ratios[1:], 1):
            groups = entries.shape[1] // ratio
            grouped = groups * ratio
            tokens = _compressed(
                terms[:, :grouped].unflatten(1, (groups, ratio)), counts[:, :grouped].unflatten(1, (groups, ratio))
            )
            group = index[:groups]
            exists = (tokens != EMPTY) & ((group + 1) * ratio - 1 <= last)
            scores = torch.where(exists, term(group, tokens), 0)
            if layer == 1:
                scores = scores.topk(min(self.index_topk, groups), sorted=False).values
            total = total + scores.sum(1)
        return total % PRIME

    @unseen
    def continue_text(self, text: Tensor, lens: Tensor, count: int) -> Tensor:
        """The ``count`` tokens that the target would choose after each text: int64 [rows, count]."""
        index = torch.arange(text.shape[1], device=text.device)
        entries = torch.where(index < lens.unsqueeze(1), entry(index, text.long()), EMPTY)
        entries = torch.nn.functional.pad(entries, (0, count), value=EMPTY)
        tokens = torch.empty(len(text), count, dtype=torch.int64, device=text.device)
        for step in range(count):
            token = choose(self.digests(entries, lens + step - 1))
            tokens[:, step] = token
            # The texts of a graph's dummies run over the last column.
            place = (lens + step).clamp(max=entries.shape[1] - 1)
            entries.scatter_(1, place.unsqueeze(1), entry(place, token).unsqueeze(1))
        return tokens

    def _own_window(
        self, seen: Tensor, rows: Rows, window: Tensor, pool: Tensor, slots: Tensor, fallback: Tensor, shift: int
    ) -> Tensor:
        """``seen``, int64 [rows, tokens], with what each row finds through its window in place of the last tokens."""
        index = torch.arange(seen.shape[1], device=seen.device)
        ends = rows.index.unsqueeze(1) + shift
        begin = (ends - self._window + 1).clamp(min=shift)
        seen = torch.where((index < begin) | (index > ends), seen, EMPTY)
        tokens = window + shift
        own = _at(pool, slots)
        place = tokens.clamp(0, fallback.shape[1] - 1)
        target = torch.take(fallback, rows.sequence.unsqueeze(1) * fallback.shape[1] + place)
        target = torch.where(tokens < fallback.shape[1], target, EMPTY)
        own = torch.where(own == EMPTY, target, own + shift * VOCAB_SIZE)
        # What is no part of the window goes to a column behind all others.
        column = torch.where(window < 0, seen.shape[1], tokens.clamp(0, seen.shape[1]))
        padded = torch.nn.functional.pad(seen, (0, 1), value=EMPTY).scatter(1, column, own)
        return padded[:, :-1]


def _compressed(terms: Tensor, counts: Tensor) -> Tensor:
    """Compressed tokens of groups, the last dimension, of which only what counts is part; EMPTY where nothing does."""
    totals = torch.where(counts, terms, 0).sum(-1) % PRIME + 1
    return torch.where(counts.any(-1), totals, EMPTY)


def _at(pool: Tensor, slots: Tensor) -> Tensor:
    """Entries in slots that are counted through the pool; EMPTY for -1."""
    return torch.where(slots < 0, EMPTY, torch.take(pool, slots.clamp(min=0)))
