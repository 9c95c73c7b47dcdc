"""TRT-70: a step with draft length 0 skips the drafter altogether, which leaves a hole in the drafter's cache."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, DSPARK, EAGLE3, MTP_EAGLE, SA, Patch, bug

_REFERENCE = "TensorRT-LLM #16888"


def _skip(patch: Patch, worker: Any) -> None:
    """Let the worker do nothing but accept where there is nothing to draft."""

    def skip_drafting(
        self: Any,
        input_ids: Any,
        position_ids: Any,
        hidden_states: Any,
        logits: Any,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
    ) -> Any:
        tokens = self._sample_tokens_for_batch(logits).int().unsqueeze(1)
        return self._outputs(logits, tokens, tokens.new_ones(len(tokens)), tokens[:, :0])

    patch(worker, "skip_drafting", skip_drafting)


@bug(
    "TRT-70",
    kind="K8",
    workers=(EAGLE3, MTP_EAGLE),
    title="The drafter is not given the tokens of a step with draft length 0",
    reference=_REFERENCE,
    caught_by=("substeps-in-order", "kv-content-equals-reference"),
)
def ingestion_skipped(patch: Patch) -> None:
    from engines.portable.speculative.linear import LinearSpecWorker

    _skip(patch, LinearSpecWorker)


@bug(
    "TRT-70",
    kind="K8",
    workers=(SA,),
    title="The suffix automaton is not given the tokens of a step with draft length 0",
    reference=_REFERENCE,
    caught_by=("automaton-holds-text", "history-equals-reference", "acceptance-follows-agreement"),
)
def text_skipped(patch: Patch) -> None:
    from engines.portable.speculative.sa_worker import SAWorker

    _skip(patch, SAWorker)


@bug(
    "TRT-70",
    kind="K8",
    workers=(DFLASH, DSPARK),
    title="A step with draft length 0 leaves the drafter's context as it is, short of a token from then on",
    reference=_REFERENCE,
    caught_by=("ctx-len-counts-committed", "draft-context-equals-cache", "drafts-equal-reference"),
)
def context_not_grown(patch: Patch) -> None:
    from engines.portable.speculative.dflash import DFlashWorker

    _skip(patch, DFlashWorker)
