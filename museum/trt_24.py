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

    from engines.portable.pyexecutor.llm_request import ScheduledRequests
    from engines.portable.pyexecutor.sampler import SpecSampler

    update = SpecSampler.update_requests

    def update_requests(self: Any, state: Any) -> None:
        requests = state.scheduled_requests.all_requests()
        order = sorted(requests, key=lambda request: request.prompt_lookahead_token is not None)
        update(self, replace(state, scheduled_requests=ScheduledRequests(generation_requests=tuple(order))))

    patch(SpecSampler, "update_requests", update_requests)
