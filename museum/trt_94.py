"""TRT-94: the drafter is fed the prompt shifted by one, so a chunk needs the prompt token that follows it."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP_EAGLE, MTP_EAGLE_TREE, SA, Patch, bug

_REFERENCE = "TensorRT-LLM #18295"


@bug(
    "TRT-94",
    kind="K12",
    workers=(EAGLE3, MTP_EAGLE, DRAFT_TARGET, MTP_EAGLE_TREE),
    title="A chunk that is not the last is shifted with the sampled token instead of the next prompt token",
    reference=_REFERENCE,
    caught_by=("inputs-equal-reference", "kv-content-equals-reference", "chunked-equals-one-shot"),
)
@bug(
    "TRT-94",
    kind="K12",
    workers=(SA,),
    title="The token sampled after a chunk that is not the last is appended to the suffix automaton's text",
    reference=_REFERENCE,
    caught_by=("automaton-holds-text", "history-equals-reference", "chunked-equals-one-shot"),
)
def no_look_ahead(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecMetadata

    def populate_context_prompt_lookahead(self: Any, context_requests: Any) -> None:
        pass

    patch(SpecMetadata, "populate_context_prompt_lookahead", populate_context_prompt_lookahead)
