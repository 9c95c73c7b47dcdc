"""TRT-25: the draft batch leaves out requests, and its positions are used as those of the target batch.

Upstream's two models left out requests at their limit; a parallel drafter leaves out contexts.
"""

from __future__ import annotations

from typing import Any

from museum.bug import PARD, Patch, bug


@bug(
    "TRT-25",
    kind="K6",
    workers=(PARD,),
    title="Drafts are copied back by the position in the draft batch, not in the target's",
    reference="TensorRT-LLM #7803",
    caught_by=("drafts-carried-over", "acceptance-follows-agreement", "batch-equals-requests-alone"),
)
def draft_batch_index(patch: Patch) -> None:
    from engines.portable.pyexecutor.sampler import SpecSampler

    update = SpecSampler.update_requests

    def update_requests(self: Any, state: Any) -> None:
        update(self, state)
        drafts = state.next_draft_tokens[:, : state.runtime_draft_len].tolist()
        for index, request in enumerate(state.scheduled_requests.generation_requests):
            request.py_draft_tokens = drafts[index]

    patch(SpecSampler, "update_requests", update_requests)
