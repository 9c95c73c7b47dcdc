"""VLL-03: what a request accepted is looked up by its row of now, not by the one it had in the last step."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, EAGLE3, MTP, PARD, SA, Patch, bug


@bug(
    "VLL-03",
    kind="K3",
    workers=(EAGLE3, PARD, DFLASH),
    title="Tokens and accepted counts of the step in flight are taken from the row that a request has now",
    reference="vLLM #45100",
    caught_by=("corrections-follow-last-step", "overlap-equals-reference"),
)
def row_of_now(patch: Patch) -> None:
    from engines.portable.pyexecutor.overlap import OverlapInputs

    find_rows = OverlapInputs._rows

    def _rows(generations: Any) -> list[int]:
        rows = find_rows(generations)
        last = max(rows, default=0)
        return [min(now, last) if row >= 0 else row for now, row in enumerate(rows)]

    patch(OverlapInputs, "_rows", staticmethod(_rows))


@bug(
    "VLL-03",
    kind="K13",
    workers=(EAGLE3, MTP, SA),
    variant="recurrent",
    title="Recurrent states become live by the counts of the step before, row by row",
    reference="vLLM #45100",
    caught_by=("accepted-state-becomes-live", "recurrent-state-equals-cache", "recurrent-states-equal-reference"),
)
def counts_of_the_last_step(patch: Patch) -> None:
    from engines.portable.pyexecutor.mamba_cache_manager import MambaHybridCacheManager

    update = MambaHybridCacheManager.update_mamba_states

    def update_mamba_states(self: Any, *, attn_metadata: Any, num_accepted_tokens: Any, **kwargs: Any) -> None:
        stale = num_accepted_tokens.clone()
        last = vars(self).get("_last_counts", stale[:0])[: len(stale)]
        stale[: len(last)] = last
        self._last_counts = num_accepted_tokens.clone()
        update(self, attn_metadata=attn_metadata, num_accepted_tokens=stale, **kwargs)

    patch(MambaHybridCacheManager, "update_mamba_states", update_mamba_states)
