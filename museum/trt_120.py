"""TRT-120: a draft model installs counts of its own in the attention metadata, and they are not put back.

An entry of this suite's own. PR #16325 argued about such lists after failures. Upstream's relative is the MTP head of
Qwen3-Next, which went by the wrong list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, EAGLE3_TREE, MTP_EAGLE, MTP_EAGLE_TREE, Patch, bug

_REFERENCE = "TensorRT-LLM #16325"


def _keep(patch: Patch, keep: Any) -> None:
    from engines.portable import models
    from engines.portable.speculative import draft_target, eagle3_dynamic_tree

    for module in (models, draft_target, eagle3_dynamic_tree):
        patch(module, "all_rank_num_tokens_kept", keep)


@bug(
    "TRT-120",
    kind="K2",
    workers=(MTP_EAGLE, DRAFT_TARGET, EAGLE3_TREE, MTP_EAGLE_TREE),
    title="A draft forward or loop that fails leaves its token counts of the ranks in the attention metadata",
    reference=_REFERENCE,
    caught_by=("restored-layout",),
)
def left_by_a_failure(patch: Patch) -> None:
    @contextmanager
    def kept_on_success(attn_metadata: Any) -> Iterator[None]:
        original = attn_metadata.all_rank_num_tokens
        yield
        attn_metadata.all_rank_num_tokens = original

    _keep(patch, kept_on_success)


@bug(
    "TRT-120",
    kind="K1",
    workers=(EAGLE3, MTP_EAGLE, DRAFT_TARGET, EAGLE3_TREE, MTP_EAGLE_TREE),
    variant="always",
    title="Token counts of the ranks that a draft forward installs stay in the attention metadata",
    reference=_REFERENCE,
    caught_by=("restored-layout",),
)
def never_put_back(patch: Patch) -> None:
    @contextmanager
    def never(attn_metadata: Any) -> Iterator[None]:
        yield

    _keep(patch, never)


@bug(
    "TRT-120",
    kind="K9",
    workers=(MTP_EAGLE,),
    variant="not-installed",
    title="An MTP head gathers rows with the target's counts, and not with those that it is given",
    reference="TensorRT-LLM, no public number",
    caught_by=("steps-complete",),
)
def not_installed(patch: Patch) -> None:
    from engines.portable.models import MTPEagleLayer

    forward = MTPEagleLayer.forward

    def with_the_targets(self: Any, *, all_rank_num_tokens: Any, **inputs: Any) -> Any:
        return forward(self, all_rank_num_tokens=None, **inputs)

    patch(MTPEagleLayer, "forward", with_the_targets)
