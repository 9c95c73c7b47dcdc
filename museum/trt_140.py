"""TRT-140: pages that prompts share, and what may go wrong with them in one cache. An entry of this suite's own."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, EAGLE3_TREE, MTP_EAGLE, PARD, SA, Patch, bug

_REFERENCE = "TensorRT-LLM, no public number"


@bug(
    "TRT-140",
    kind="K7",
    workers=(EAGLE3, SA, EAGLE3_TREE),
    title="A page that requests share is free when the first of them ends",
    reference=_REFERENCE,
    caught_by=("known-pages-count-their-owners", "kv-ledger-balanced"),
)
def freed_with_the_first(patch: Patch) -> None:
    from engines.portable.pyexecutor.block_reuse import ReusableBlocks

    def release(self: Any, block_id: int) -> bool:
        block = self._blocks.get(block_id)
        if block is None:
            return True
        block.owners -= 1
        self._cached[block_id] = None
        return False

    patch(ReusableBlocks, "release", release)


@bug(
    "TRT-140",
    kind="K7",
    workers=(EAGLE3, PARD),
    variant="emptied",
    title="What a prompt reuses is emptied as if it had just been granted",
    reference=_REFERENCE,
    caught_by=("known-pages-hold-their-prompt", "output-lossless", "block-reuse-equals-no-reuse"),
)
def emptied(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import KVCacheManager
    from scenarios.tracer import EMPTY

    claim = KVCacheManager._claim_blocks

    def _claim_blocks(self: Any, request: Any) -> None:
        claim(self, request)
        self.kv_cache_pools[:, self.get_memory_pool_indices(request.py_request_id)] = EMPTY

    patch(KVCacheManager, "_claim_blocks", _claim_blocks)


@bug(
    "TRT-140",
    kind="K1",
    workers=(EAGLE3, MTP_EAGLE, SA),
    variant="early",
    title="All pages of a prompt may be reused once its first chunk is computed",
    reference=_REFERENCE,
    caught_by=("known-pages-hold-their-prompt", "block-reuse-equals-reference"),
)
def known_too_early(patch: Patch) -> None:
    from dataclasses import replace

    from engines.portable.pyexecutor.py_executor import PyExecutor

    store = PyExecutor._store_prompts

    def _store_prompts(self: Any, state: Any) -> None:
        store(self, replace(state, is_last_chunk=(True,) * len(state.is_last_chunk)))

    patch(PyExecutor, "_store_prompts", _store_prompts)


@bug(
    "TRT-140",
    kind="K2",
    workers=(EAGLE3, PARD),
    variant="failure",
    title="After a failed step pages are still known that it may have taken",
    reference=_REFERENCE,
    caught_by=("block-reuse-equals-reference", "layout-equals-reference"),
)
def not_forgotten(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    patch(KVCacheManager, "reset_reuse_state", lambda self: None)


@bug(
    "TRT-140",
    kind="K4",
    workers=(PARD, SA),
    variant="whole-prompt",
    title="A prompt that is known to its end leaves no token to compute",
    reference=_REFERENCE,
    caught_by=("prompts-start-behind-known-pages", "steps-complete"),
)
def nothing_left(patch: Patch) -> None:
    from engines.portable.pyexecutor.block_reuse import ReusableBlocks

    def find(self: Any, prompt: list[int]) -> list[int]:
        found = []
        for key in self._keys(prompt, len(prompt) - self.look_ahead):
            if key not in self._by_key:
                break
            found.append(self._by_key[key])
        return found

    patch(ReusableBlocks, "find", find)


@bug(
    "TRT-140",
    kind="K4",
    workers=(EAGLE3, SA),
    variant="starved",
    title="Pages that are kept to be reused are never given to anyone else",
    reference=_REFERENCE,
    caught_by=("steps-complete",),
)
def never_taken(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    patch(KVCacheManager, "get_num_free_blocks", lambda self: len(self._free_blocks))


@bug(
    "TRT-140",
    kind="K7",
    workers=(EAGLE3, MTP_EAGLE),
    variant="coarser",
    title="What is reused ends with a page of the cache with the longer ones, and in the middle of one of the other",
    reference=_REFERENCE,
    caught_by=("block-reuse-equals-reference",),
)
def whole_pages_of_one_cache(patch: Patch) -> None:
    from engines.portable.pyexecutor import py_executor

    def find_reused_tokens(pools: Any, request: Any) -> int:
        tokens: int = min(len(pool.find(request.prompt)) * pool.tokens_per_block for pool in pools)
        longest: int = max(pool.tokens_per_block for pool in pools)
        return tokens // longest * longest

    patch(py_executor, "find_reused_tokens", find_reused_tokens)


@bug(
    "TRT-140",
    kind="K7",
    workers=(EAGLE3, SA),
    variant="late",
    title="A prompt is given known pages with which the next one of the same step is about to begin",
    reference=_REFERENCE,
    caught_by=("block-reuse-equals-reference", "known-pages-hold-their-prompt", "output-lossless"),
)
def claimed_one_by_one(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    claim, add_tokens = KVCacheManager._claim_blocks, KVCacheManager._add_tokens

    def _add_tokens(self: Any, request: Any, num_tokens: int) -> list[int]:
        if request.is_context and request.is_first_context_chunk and request.prepopulated_prompt_len:
            claim(self, request)
        return add_tokens(self, request, num_tokens)

    patch(KVCacheManager, "_claim_blocks", lambda self, request: None)
    patch(KVCacheManager, "_add_tokens", _add_tokens)
