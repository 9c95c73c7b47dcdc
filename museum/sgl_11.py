"""SGL-11: a prompt goes on behind what the target has of it, and the drafter lacks some of that."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, EAGLE3_TREE, MTP_EAGLE, PARD, Patch, bug

_REFERENCE = "SGLang #19897"


@bug(
    "SGL-11",
    kind="K7",
    workers=(EAGLE3, PARD, DRAFT_TARGET, EAGLE3_TREE),
    title="The drafter's manager grants empty pages for what the target reuses",
    reference=_REFERENCE,
    caught_by=("kv-content-equals-reference", "kv-ledger-equals-reference", "block-reuse-equals-no-reuse"),
)
def empty_pages(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TARGET_LAYER
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    claim = KVCacheManager._claim_blocks

    def _claim_blocks(self: Any, request: Any) -> None:
        if TARGET_LAYER in self.layer_offsets:
            claim(self, request)

    patch(KVCacheManager, "_claim_blocks", _claim_blocks)


@bug(
    "SGL-11",
    kind="K7",
    workers=(EAGLE3, PARD),
    variant="shorter",
    title="A prompt goes on behind what the target has, though the drafter's pages were taken for others",
    reference=_REFERENCE,
    caught_by=("prompts-start-behind-known-pages", "known-pages-hold-their-prompt", "block-reuse-equals-no-reuse"),
)
def target_alone_decides(patch: Patch) -> None:
    from engines.portable.pyexecutor import py_executor
    from engines.portable.pyexecutor.block_reuse import find_reused_tokens

    def by_the_target(pools: Any, request: Any) -> int:
        return find_reused_tokens(pools[:1], request)

    patch(py_executor, "find_reused_tokens", by_the_target)


@bug(
    "SGL-11",
    kind="K12",
    workers=(EAGLE3, MTP_EAGLE, EAGLE3_TREE),
    variant="next-token",
    title="Where prompts part at the end of a page, the drafter's last slot in it has the token of the other one",
    reference=_REFERENCE,
    caught_by=("prompts-start-behind-known-pages", "known-pages-hold-their-prompt", "drafts-equal-reference"),
)
def key_without_the_next_token(patch: Patch) -> None:
    from engines.portable.pyexecutor import py_executor_creator

    patch(py_executor_creator, "look_ahead", lambda config: 0)
