"""The tracer model for FLASHINFER, whose page tables are arrays, and for VANILLA, whose lengths only the host knows.

As ``engines.tracer``, but where rows are written and how far they see are two arguments, as FLASHINFER says them apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.tracer import Cache, Rows, Tracer, digest_of, entry, term, write
from engines.unseen import unseen
from scenarios.tracer import PRIME, VOCAB_SIZE


class ViewTracer(Tracer):
    """Target and drafters whose rows are written where arrays of rows and positions say."""

    @unseen
    def target_at(self, cache: Cache, written: Rows, rows: Rows, positions: Tensor, tokens: Tensor) -> Tensor:
        """Digests of target rows that see up to ``rows``, once their entries are ``written``: int64 [rows]."""
        write(cache, written, entry(positions.long(), tokens.long()))
        return digest_of(self._scores(self._read(cache)).cumsum(1), rows)

    @unseen
    def shifted_at(
        self, target: Cache, draft: Cache, written: Rows, rows: Rows, positions: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Digests of draft rows with shift 1, and each row's own term in it: two of int64 [rows]."""
        own = entry(positions.long(), tokens.long())
        write(draft, written, own)
        seen = self._read_shifted(target, draft)
        return digest_of(self._scores(seen).cumsum(1), rows, ahead=1), term(rows.index + 1, own + VOCAB_SIZE)

    @unseen
    def shared(
        self, cache: Cache, lens: Tensor, positions: Tensor, tokens: Tensor, recurrent: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What a drafter on the target's cache chooses from, int64 [n], and what it passes on, int64 [n, 2].

        lens       int32 [n]: KV lengths as the view has them
        positions, tokens  int [n]
        recurrent  int64 [n, 2]: what was passed on to it
        """
        hidden, base = recurrent.unbind(1)
        step = base // PRIME
        sequence = torch.arange(len(lens), device=lens.device)
        seen = digest_of(self._scores(self._read(cache)).cumsum(1), Rows(sequence, lens.long() - 1))
        hidden = (hidden + term(lens.long() + step, entry(positions.long() + step, tokens.long()))) % PRIME
        return (hidden + base - seen) % PRIME, torch.stack([hidden, base + PRIME], dim=1)


class HostTracer(Tracer):
    """The target of VANILLA. It computes what its base does; its class says which backend it is for."""
