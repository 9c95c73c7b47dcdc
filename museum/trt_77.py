"""TRT-77: a count of accepted tokens includes the target's own on one path and not on the other.

Upstream's was a count that a debugging variable forces; here it is that one or the real one.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP, MTP_EAGLE, SA, Patch, bug

_REFERENCE = "TensorRT-LLM #9608"


@bug(
    "TRT-77",
    kind="K8",
    workers=(EAGLE3,),
    title="A request counts the target's own token among its accepted drafts",
    reference=_REFERENCE,
    caught_by=("acceptance-in-range", "acceptance-follows-agreement", "kv-ledger-equals-reference"),
)
def counted_as_draft(patch: Patch) -> None:
    from engines.portable.pyexecutor.sampler import SpecSampler

    def _update_generation(self: Any, request: Any, tokens: list[int], draft_slots: int) -> None:
        request.generated.extend(tokens)
        request.py_num_accepted_draft_tokens = len(tokens)
        request.py_rewind_len = draft_slots - request.py_num_accepted_draft_tokens

    patch(SpecSampler, "_update_generation", _update_generation)


@bug(
    "TRT-77",
    kind="K8",
    workers=(MTP_EAGLE,),
    variant="worker",
    title="The worker takes its count of accepted tokens for one of drafts and feeds on one token too late",
    reference=_REFERENCE,
    caught_by=("new-tokens-plumbed", "drafts-equal-reference"),
)
def taken_for_drafts(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    next_new_tokens = SpecWorkerBase._prepare_next_new_tokens

    def _prepare_next_new_tokens(self: Any, accepted_tokens: Any, num_accepted: Any, drafts: Any) -> Any:
        beyond = (num_accepted + 1).clamp(max=accepted_tokens.shape[1])
        return next_new_tokens(self, accepted_tokens, beyond, drafts)

    patch(SpecWorkerBase, "_prepare_next_new_tokens", _prepare_next_new_tokens)


@bug(
    "TRT-77",
    kind="K8",
    workers=(EAGLE3, MTP, SA),
    variant="forced",
    title="The forced number counts the target's own token, so that one draft less is accepted",
    reference=_REFERENCE,
    caught_by=("acceptance-equals-reference", "kv-ledger-equals-reference"),
)
def own_token_counted(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    set_force = SpecWorkerBase.set_force_num_accepted_tokens

    def counted(self: Any, value: float, device: Any) -> None:
        set_force(self, max(value - 1, 0.0), device)

    patch(SpecWorkerBase, "set_force_num_accepted_tokens", counted)
