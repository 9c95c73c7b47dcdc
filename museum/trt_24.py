"""TRT-24: rows that have no part in something are taken to come last; where one does not, all after it are shifted.

Upstream's were rows without a device row of the step before, and the offsets of the overlap scheduler. Here they are
chunks that are not a prompt's last, and the outputs of the step.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "TRT-24",
    kind="K6",
    workers=(EAGLE3, PARD),
    title="A row without a new token ahead of others hands each of them its neighbour's",
    reference="TensorRT-LLM #6136",
    caught_by=("emitted-follows-acceptance", "output-lossless", "batch-equals-requests-alone"),
)
def rows_shifted(patch: Patch) -> None:
    from dataclasses import replace

    from engines.portable.pyexecutor.sampler import SpecSampler

    update = SpecSampler.update_requests

    def update_requests(self: Any, state: Any) -> None:
        rows = range(len(state.scheduled_requests.all_requests()))
        order = sorted(rows, key=lambda row: row < len(state.is_last_chunk) and not state.is_last_chunk[row])
        outputs = ("new_tokens", "new_tokens_lens", "next_draft_tokens")
        taken = [order.index(row) for row in rows]
        state.synchronize()
        update(self, replace(state, **{name: getattr(state, name)[taken] for name in outputs}))

    patch(SpecSampler, "update_requests", update_requests)


@bug(
    "TRT-24",
    kind="K6",
    workers=(EAGLE3, PARD),
    variant="in-flight",
    title="Rows of the step in flight are handed to the last generations, whichever have none",
    reference="TensorRT-LLM #6136",
    caught_by=("corrections-follow-last-step", "inputs-equal-reference"),
)
def rows_at_the_end(patch: Patch) -> None:
    from engines.portable.pyexecutor.overlap import NO_PREVIOUS_ROW, OverlapInputs

    find_rows = OverlapInputs._rows

    def _rows(generations: Any) -> list[int]:
        rows = find_rows(generations)
        held = [row for row in rows if row != NO_PREVIOUS_ROW]
        return [NO_PREVIOUS_ROW] * (len(rows) - len(held)) + held

    patch(OverlapInputs, "_rows", staticmethod(_rows))
