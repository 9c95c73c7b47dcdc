"""Trees as tensors: masks, links, the walk of verification, and the moves after it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.speculative.dynamic_tree_ops import (
    DynamicTree,
    build_dynamic_tree,
    pack_mask,
    update_kv_cache_draft_token_location,
    verify_dynamic_tree_greedy,
)
from engines.portable.speculative.spec_tree_manager import SpecTreeManager
from tests.engines.portable.support import CPU


def longs(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def tree() -> DynamicTree:
    """Two layers of two: the first keeps both of its nodes, and the second of them has the better children.

    Made: 0, 1 by the root; 2, 3 by node 1 and 4, 5 by node 0, as node 1 was fed first. Kept: 0, 1, 3, 4.
    """
    return build_dynamic_tree(longs([[-1, 1, 0]]), longs([[0, 1, 3, 4]]), topk=2, depth=2)


def test_build() -> None:
    built = tree()
    assert built.position_offsets.tolist() == [[0, 1, 1, 2, 2]]
    assert built.packed_mask.flatten().tolist() == [0b1, 0b11, 0b101, 0b1101, 0b10011]
    assert built.retrieve_next_token.tolist() == [[1, 4, 3, -1, -1]]
    assert built.retrieve_next_sibling.tolist() == [[-1, 2, -1, -1, -1]]


def test_a_chain_is_a_tree() -> None:
    chain = build_dynamic_tree(longs([[-1, 0, 2]]), longs([[0, 2, 4]]), topk=2, depth=3)
    assert chain.position_offsets.tolist() == [[0, 1, 2, 3]]
    assert chain.packed_mask.flatten().tolist() == [1, 3, 7, 15]
    assert chain.retrieve_next_token.tolist() == [[1, 2, 3, -1]]
    assert (chain.retrieve_next_sibling == -1).all()


def test_a_batch_without_generations_has_no_tree() -> None:
    nothing = build_dynamic_tree(longs([]).view(0, 3), longs([]).view(0, 4), topk=2, depth=2)
    assert nothing.packed_mask.shape == (0, 5, 1)


@pytest.mark.parametrize(("nodes", "words"), [(31, 1), (32, 1), (33, 2), (64, 2)])
def test_the_last_bit_of_a_word_is_its_sign(nodes: int, words: int) -> None:
    packed = pack_mask(torch.ones(nodes, dtype=torch.bool), words)
    assert packed.dtype == torch.int32
    assert sum(bin(word & 0xFFFFFFFF).count("1") for word in packed.tolist()) == nodes
    assert pack_mask(torch.arange(nodes) == nodes - 1, words)[-1].item() in (1 << (nodes - 1) % 32, -(1 << 31))


@pytest.mark.parametrize(
    ("predict", "valid", "path", "tokens"),
    [
        ([11, 21, 0, 0, 31], True, [0, 1, 4], [11, 21, 31]),
        ([12, 0, 22, 41, 0], True, [0, 2, 3], [12, 22, 41]),
        ([12, 0, 99, 0, 0], True, [0, 2, 0], [12, 99, 0]),
        ([11, 22, 0, 0, 0], True, [0, 1, 0], [11, 22, 0]),
        ([13, 21, 22, 0, 0], True, [0, 0, 0], [13, 0, 0]),
        ([11, 21, 0, 0, 31], False, [0, 0, 0], [11, 0, 0]),
    ],
)
def test_verification_walks_to_the_child_that_the_target_chose(
    predict: list[int], valid: bool, path: list[int], tokens: list[int]
) -> None:
    """Children of the root say 11 and 12, node 4 below the first 21, node 3 below the second 22."""
    built = tree()
    nodes, accepted, choices = verify_dynamic_tree_greedy(
        torch.tensor([[0, 11, 12, 22, 21]], dtype=torch.int32),
        built.retrieve_next_token,
        built.retrieve_next_sibling,
        longs([predict]),
        torch.tensor([valid]),
        topk=2,
        depth=2,
    )
    assert nodes.tolist() == [path]
    assert choices.tolist() == [tokens]
    assert accepted.tolist() == [sum(node > 0 for node in path)]


def test_moves_read_all_before_they_write() -> None:
    """Two rows of pages of two tokens; the second node of a path lies where the third one goes to."""
    pool = torch.arange(100, 116).view(8, 2)
    table = torch.tensor([[0, 1, 2, 3], [7, 6, 5, 4]], dtype=torch.int32)
    before = pool[table.long()].flatten(1)
    accept_index = longs([[0, 2, 4, 0], [0, 3, 0, 0]])
    update_kv_cache_draft_token_location(pool, table, accept_index, torch.tensor([3, 1]), torch.tensor([1, 3]))
    after = pool[table.long()].flatten(1)
    moved = before.clone()
    moved[0, 2], moved[0, 3] = before[0, 3], before[0, 5]
    assert after.tolist() == moved.tolist()


def test_a_slot_is_a_requests_until_its_end_and_says_nothing_of_the_last_owner() -> None:
    manager = SpecTreeManager(num_slots=3, num_nodes=5, max_num_requests=4, device=CPU)
    first, second, third = (LlmRequest(i, [1], context_chunk_size=1) for i in range(3))
    manager.prepare_resources(ScheduledRequests((first, second)))
    storage = manager.slot_storage
    slots = manager.slot_manager.get_slots([1, 0])
    manager.prepare_resources(ScheduledRequests((), (second, first)))
    assert storage.all_ids_buf[:2].tolist() == slots
    placeholder = [part.clone() for part in (storage.packed_mask, storage.position_offsets)]
    storage.scatter_to_slot_storage(storage.all_ids_buf[:1], tree())
    assert storage.has_tree.tolist() == [slot == slots[0] for slot in range(3)]
    assert storage.position_offsets[slots[0]].tolist() == [0, 1, 1, 2, 2]
    assert storage.position_offsets[slots[1]].tolist() == [0, 1, 1, 1, 1]
    assert storage.packed_mask[slots[1]].flatten().tolist() == [0b1, 0b11, 0b101, 0b1001, 0b10001]
    manager.free_resources(second)
    manager.prepare_resources(ScheduledRequests((third,)))
    assert manager.slot_manager.get_slots([2]) == slots[:1]
    assert not storage.has_tree.any()
    assert storage.packed_mask.equal(placeholder[0])
    assert storage.position_offsets.equal(placeholder[1])
