"""What the KV caches hold of the active requests, on the device, and how a trace's value of it is laid out there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engines.portable._utils import maybe_pin_memory
from engines.portable.cache_observation import CONTENT
from engines.portable.mismatches import ANYTHING
from engines.portable.pyexecutor.py_executor import PyExecutor
from engines.portable.pyexecutor.resource_manager import KVCacheManager
from engines.portable.reuse_observation import KNOWN_CONTENT
from scenarios import Config


def committed(
    config: Config, executor: PyExecutor, said: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor, list[int] | None]]:
    """For each pool of which something is ``said``: its field, its slots (int64, device) and what they should hold.

    The slots are those of the pages that each request has used, one after the other. What they should hold is None
    where it does not fit: other requests are active than the trace says, or one of them has another number of tokens.
    Of a step in flight only the trace says how many there are. Caches of compressed tokens are not looked into.
    """
    content = said.get(CONTENT[0], {})
    used = {i: request.num_cached_tokens for i, request in executor.active_requests.items()}
    if executor.previous_batch is not None:
        used = {i: len(content.get(i, ())) for i in executor.held_requests}
    if config.compress_ratios or not (used or content):
        return
    parts = [_pools(manager, used) for manager in executor.kv_cache_managers]
    layers = [(pool, sizes) for pools, sizes in parts for pool in pools.unbind(0)]
    if config.index_topk and len(parts) > 1:
        # Each manager has its layers and then those of their indexers.
        layers = [layers[i] for i in (0, 2, 1, 3)]
    for i, (slots, sizes) in enumerate(layers):
        field, expected = _of_layer(config, i, said)
        if expected is not None:
            yield field, slots, _laid_out(expected, used, sizes)


def known(executor: PyExecutor, said: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, list[int] | None]]:
    """The same for the pages that may be reused, in the order of the trace, whoever has them."""
    for manager in executor.kv_cache_managers:
        if manager.reusable_blocks is None:
            return
        blocks = manager.reusable_blocks.known()
        pages = [i for _, i in sorted(([block.owners, *block.key], i) for i, block in blocks.items())]
        for layer in manager.layer_offsets.keys() & KNOWN_CONTENT.keys():
            field = KNOWN_CONTENT[layer]
            if field not in said or not (pages or said[field]):
                continue
            places = manager._memory_pool_indices(pages)
            slots = manager.get_buffers(layer).index_select(0, uploaded_index(places, manager.device))
            fits = [len(page) for page in said[field]] == [manager.tokens_per_block] * len(pages)
            yield field, slots.flatten(), [slot for page in said[field] for slot in page] if fits else None


def uploaded_index(places: Sequence[int], device: torch.device) -> Tensor:
    """Places in a pool, int64, on the device; nobody waits for them."""
    return maybe_pin_memory(torch.tensor(places, dtype=torch.int64), device).to(device, non_blocking=True)


def _pools(manager: KVCacheManager, used: Mapping[int, int]) -> tuple[Tensor, Sequence[int]]:
    """The used pages of every pool, [pools, slots], and the slots of each request among them."""
    size = manager.tokens_per_block
    pages = [manager.get_memory_pool_indices(i)[: -(-tokens // size)] for i, tokens in used.items()]
    index = uploaded_index([page for owned in pages for page in owned], manager.device)
    return manager.kv_cache_pools.index_select(1, index).flatten(1), [len(owned) * size for owned in pages]


def _of_layer(config: Config, layer: int, said: Mapping[str, Any]) -> tuple[str, Mapping[int, Sequence[int]] | None]:
    if config.worker == "MTPWorker" and layer:
        field = "draft_layers_kv"
        return field, {i: layers[layer - 1] for i, layers in said[field].items()} if field in said else None
    return CONTENT[layer], said.get(CONTENT[layer])


def _laid_out(expected: Mapping[int, Sequence[int]], used: Mapping[int, int], sizes: Sequence[int]) -> list[int] | None:
    if expected.keys() != used.keys():
        return None
    flat: list[int] = []
    for (request, tokens), size in zip(used.items(), sizes):
        entries = expected[request]
        if len(entries) != tokens or tokens > size:
            return None
        flat += [*entries, *[ANYTHING] * (size - tokens)]
    return flat
