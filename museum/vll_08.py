"""VLL-08: the drafter's cache has pages of another size, and the size that everybody uses is the target's."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug

_REFERENCE = "vLLM #31540"
_GLOBAL = 4
"""The size that a configuration has when it says nothing."""


@bug(
    "VLL-08",
    kind="K7",
    workers=(EAGLE3, PARD),
    title="Pages of the drafter's cache are counted in the target's page size",
    reference=_REFERENCE,
    caught_by=("tables-name-owned-pages", "kv-ledger-balanced", "kv-ledger-equals-reference"),
)
def counted_in_the_other_size(patch: Patch) -> None:
    from dataclasses import replace

    from engines.portable.pyexecutor import py_executor_creator

    create = py_executor_creator._kv_cache_managers

    def _kv_cache_managers(config: Any, *args: Any) -> Any:
        return create(replace(config, draft_tokens_per_block=config.tokens_per_block), *args)

    patch(py_executor_creator, "_kv_cache_managers", _kv_cache_managers)


@bug(
    "VLL-08",
    kind="K7",
    workers=(EAGLE3, PARD),
    variant="slots",
    title="The slots of the drafter's indexer are counted in the target's page size",
    reference=_REFERENCE,
    caught_by=("slots-in-own-pages", "cache-layout-does-not-matter"),
)
def slots_in_the_other_size(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa import indexer, metadata

    slots_of = indexer.slots_of

    def by_global_size(positions: Any, block_offsets: Any, req_idx: Any, manager: Any) -> Any:
        columns = block_offsets.shape[1]
        ordinals = (positions // _GLOBAL).clamp(0, columns - 1)
        shifted = ordinals * manager.tokens_per_block + positions % _GLOBAL % manager.tokens_per_block
        return slots_of(shifted, block_offsets, req_idx, manager)

    for module in (indexer, metadata):
        patch(module, "slots_of", by_global_size)
