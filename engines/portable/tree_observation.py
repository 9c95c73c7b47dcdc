"""What the observer reads of trees of drafts: what the kernels are told of a forward, and what lies in the slots."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from engines.portable.cache_observation import Committed
from engines.portable.speculative.dynamic_tree_ops import NO_NODE
from engines.portable.speculative.spec_tree_manager import SpecTreeManager


class TreeObserver:
    """Reads the masks of attention metadata, and the trees that requests have stored."""

    def __init__(self, manager: SpecTreeManager) -> None:
        self._manager = manager

    def device_fields(self, attn: Any) -> dict[str, Any]:
        """Masks, offsets and lengths of the generations of the forward that the metadata describes."""
        lens = attn.spec_decoding_generation_lengths[: attn.num_generations].tolist()
        flat = attn.spec_decoding_position_offsets[: sum(lens)].tolist()
        ends = [sum(lens[: i + 1]) for i in range(len(lens))]
        return _spec_decoding_fields(attn, lens, [flat[end - n : end] for end, n in zip(ends, lens)])

    def draft_trees(self, requests: Iterable[Committed]) -> dict[int, list[int]]:
        """Parent of each draft node of each request, -1 for the root; nothing where no tree is stored."""
        storage, manager = self._manager.slot_storage, self._manager.slot_manager
        slots = {request.py_request_id: manager.get_slot(request.py_request_id) for request in requests}
        stored = storage.has_tree.tolist()
        children, siblings = storage.retrieve_next_token.tolist(), storage.retrieve_next_sibling.tolist()
        return {i: _parents(children[s], siblings[s]) if stored[s] else [] for i, s in slots.items() if s is not None}


def linear_fields(attn: Any) -> dict[str, Any]:
    """The same where drafts are chains: of tables that all steps share."""
    lens = attn.spec_decoding_generation_lengths[: attn.num_generations].tolist()
    offsets = attn.spec_decoding_position_offsets[: len(lens)].tolist()
    return _spec_decoding_fields(attn, lens, [row[:n] for row, n in zip(offsets, lens)])


def _spec_decoding_fields(attn: Any, lens: list[int], offsets: list[list[int]]) -> dict[str, Any]:
    mask = attn.spec_decoding_packed_mask[: len(lens)].tolist()
    return {
        "spec_decoding_packed_mask": [[_bits(words) for words in rows[:n]] for rows, n in zip(mask, lens)],
        "spec_decoding_position_offsets": offsets,
        "spec_decoding_generation_lengths": lens,
    }


def _bits(words: list[int]) -> list[int]:
    return [32 * i + bit for i, word in enumerate(words) for bit in _bits_of(word)]


@cache
def _bits_of(word: int) -> tuple[int, ...]:
    return tuple(bit for bit in range(32) if word >> bit & 1)


def _parents(children: list[int], siblings: list[int]) -> list[int]:
    parents = [NO_NODE] * (len(children) - 1)
    for parent, child in enumerate(children):
        while child != NO_NODE:
            # The root is no draft node.
            parents[child - 1] = parent - 1
            child = siblings[child]
    return parents
