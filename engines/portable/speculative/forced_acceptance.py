"""Forced acceptance: generations accept a given number of drafts, whatever was drafted (upstream: for benchmarks)."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from engines.portable._utils import is_graph_warmup

FORCE_ACCEPT_SEED: Final = 0xACCE9D
FORCE_ACCEPT_POOL_SIZE: Final = 1 << 16


class ForcedAcceptance(nn.Module):
    """The part of a worker that forces acceptance; by default it forces nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.force_num_accepted_tokens = 0.0
        self._force_accept_rng_pool: Tensor | None = None
        self._force_accept_rng_counter: Tensor | None = None

    def set_force_num_accepted_tokens(self, value: float, device: torch.device) -> None:
        """Make generations accept ``value`` drafts, by ``_apply_force_accepted_tokens``; before the first forward.

        The numbers that decide about a fraction are drawn here: float32 [65536], the same on all ranks. Upstream draws
        them in the first forward that needs them, which may be the capture of a graph.
        """
        self.force_num_accepted_tokens = value
        if value > int(value):
            generator = torch.Generator().manual_seed(FORCE_ACCEPT_SEED)
            self._force_accept_rng_pool = torch.rand(FORCE_ACCEPT_POOL_SIZE, generator=generator).to(device)
            self._force_accept_rng_counter = torch.zeros(1, dtype=torch.int64, device=device)

    def _apply_force_accepted_tokens(
        self, num_accepted_tokens: Tensor, num_contexts: int, draft_len: int, spec_metadata: Any
    ) -> None:
        """Replace the counts of the generations, in place, by the forced one, the target's own token on top.

        A fraction is decided by a number of the pool; which one follows from the row and from a counter, which is on
        the device as graphs replay. The counter moves on by one in each forward that has something to decide: not where
        all drafts are accepted without the fraction. While a graph warms up nothing is forced.
        """
        force = self.force_num_accepted_tokens
        if not force or is_graph_warmup(spec_metadata):
            return
        least, chance = min(int(force), draft_len) + 1, force - int(force)
        counts = num_accepted_tokens[num_contexts:]
        pool, counter = self._force_accept_rng_pool, self._force_accept_rng_counter
        if pool is None or counter is None or least > draft_len:
            counts.fill_(least)
            return
        counter.add_(1)
        rows = spec_metadata.batch_indices_cuda[: len(counts)]
        places = (counter * 6007 + rows * 1009).bitwise_and(FORCE_ACCEPT_POOL_SIZE - 1)
        counts.copy_((pool.index_select(0, places) < chance) + least)
