"""TRT-36: this step's accepted count is set against the drafts of the next one, which took their place meanwhile.

Upstream's victim was a metric. Here it is the rewind as well, as both are computed from the same two numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "TRT-36",
    kind="K3",
    workers=(PARD,),
    title="What was not accepted is counted against the next step's drafts",
    reference="TensorRT-LLM #17082",
    caught_by=("acceptance-in-range", "kv-ledger-equals-reference"),
)
def counted_after_replacement(patch: Patch) -> None:
    from engines.portable.pyexecutor.sampler import SpecSampler

    update = SpecSampler.update_requests

    def update_requests(self: Any, state: Any) -> None:
        update(self, replace(state, draft_slots=(state.runtime_draft_len,) * len(state.draft_slots)))

    patch(SpecSampler, "update_requests", update_requests)


@bug(
    "TRT-36",
    kind="K3",
    workers=(EAGLE3, PARD),
    variant="in-flight",
    title="What was not accepted is counted against the draft slots of a step launched since",
    reference="TensorRT-LLM #17082",
    caught_by=("acceptance-in-range", "kv-ledger-equals-reference"),
)
def counted_after_the_launch(patch: Patch) -> None:
    from engines.portable.pyexecutor.sampler import SpecSampler

    update = SpecSampler._update_generation

    def _update_generation(self: Any, request: Any, tokens: list[int], draft_slots: int) -> None:
        update(self, request, tokens, len(request.py_draft_tokens))

    patch(SpecSampler, "_update_generation", _update_generation)
