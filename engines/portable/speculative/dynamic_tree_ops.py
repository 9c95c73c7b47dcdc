"""Trees of drafts as tensors: packed masks, links between nodes, verification along them, moves of verified slots.

Upstream has a kernel for each. A tree has ``n`` nodes, the root first and no child before its parent. Nothing here
waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NO_NODE = -1
"""Where a node has no child, or no sibling after it."""


class DynamicTree(NamedTuple):
    """Trees of a batch.

    packed_mask            int32 [G, n, words]: bit ``v`` of node ``q`` says whether ``v`` is on its path
    position_offsets       int32 [G, n]: depth of each node
    retrieve_next_token    int64 [G, n]: first child of each node, -1 for none
    retrieve_next_sibling  int64 [G, n]: next child of its parent, -1 for none
    """

    packed_mask: Tensor
    position_offsets: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor


def packed_words(nodes: int) -> int:
    """32-bit words that hold a bit for each node."""
    return -(-nodes // 32)


def pack_mask(mask: Tensor, words: int) -> Tensor:
    """Bits of bool [..., nodes], 32 to a word: int32 [..., words]."""
    bit = torch.arange(32, device=mask.device)
    # The last one is the sign.
    weights = torch.where(bit == 31, -(1 << 31), 1 << bit).int()
    padded = torch.nn.functional.pad(mask.int(), (0, 32 * words - mask.shape[-1]))
    return (padded.unflatten(-1, (words, 32)) * weights).sum(-1, dtype=torch.int32)


def build_dynamic_tree(parents: Tensor, selected: Tensor, topk: int, depth: int) -> DynamicTree:
    """The trees of the nodes that were kept of all that were made.

    parents   int64 [G, 1 + nodes fed]: -1 for the root, then which of the nodes made each node fed is
    selected  int64 [G, n - 1], ascending: which of the nodes made are kept. Each ``topk`` of them, in order, are the
        children of one entry of ``parents``
    depth     of the deepest node
    """
    made_of_parent = parents.gather(1, selected // topk)
    node = (selected.unsqueeze(1) == made_of_parent.unsqueeze(2)).int().argmax(2) + 1
    parent = torch.where(made_of_parent < 0, 0, node)
    # The root counts as its own parent here, and as nobody's child.
    parent = torch.nn.functional.pad(parent, (1, 0))
    n = parent.shape[1]
    index = torch.arange(n, device=parent.device)
    path = (index == index.unsqueeze(1)).expand(len(parent), -1, -1)
    of_parent = parent.unsqueeze(2).expand(-1, -1, n)
    own = path
    for _ in range(depth):
        path = own | path.gather(1, of_parent)
    is_child = (parent.unsqueeze(1) == index.unsqueeze(1)) & (index > 0)
    after = (parent.unsqueeze(1) == parent.unsqueeze(2)) & (index > index.unsqueeze(1)) & (index > 0).unsqueeze(1)
    return DynamicTree(
        packed_mask=pack_mask(path, packed_words(n)),
        position_offsets=path.sum(2, dtype=torch.int32) - 1,
        retrieve_next_token=_first(is_child),
        retrieve_next_sibling=_first(after),
    )


def _first(chosen: Tensor) -> Tensor:
    """The first true column, -1 without one: int64."""
    n = chosen.shape[-1]
    first = torch.where(chosen, torch.arange(n, device=chosen.device), n).amin(-1)
    return torch.where(first == n, NO_NODE, first)


def verify_dynamic_tree_greedy(
    candidates: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    tree_valid: Tensor,
    topk: int,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each tree from its root, always to the child whose token is the target's choice.

    candidates      int32 [G, n]: tokens of the nodes
    target_predict  int64 [G, n]: the target's choice after each
    tree_valid      bool [G]: without a tree nothing is accepted

    Returns the nodes of the walk, int64 [G, depth + 1] with the root first and wherever it has ended, how many of
    them follow the root, int64 [G], and the target's choices along it, int64 [G, depth + 1], 0 after its end.
    """
    node = torch.zeros_like(retrieve_next_token[:, :1])
    walking = tree_valid.unsqueeze(1)
    steps, choices = [node], [target_predict[:, :1]]
    accepted = torch.zeros_like(node)
    for _ in range(depth):
        wanted = target_predict.gather(1, node)
        child = retrieve_next_token.gather(1, node)
        for _ in range(topk):
            here = child.clamp(min=0)
            settled = (child < 0) | (candidates.gather(1, here) == wanted)
            child = torch.where(settled, child, retrieve_next_sibling.gather(1, here))
        walking = walking & (child >= 0)
        node = torch.where(walking, child, node)
        accepted = accepted + walking
        steps.append(torch.where(walking, node, 0))
        choices.append(torch.where(walking, target_predict.gather(1, node), 0))
    return torch.cat(steps, dim=1), accepted.squeeze(1), torch.cat(choices, dim=1)


def update_kv_cache_draft_token_location(
    pool: Tensor, table: Tensor, accept_index: Tensor, num_accepted: Tensor, past: Tensor
) -> None:
    """Move the slots of accepted nodes to where the next tokens of a chain would be.

    pool          int64 [pages, tokens_per_block], written in place
    table         int32 [G, pages per row]: pages of each row
    accept_index  int64 [G, P]: nodes of each walk; the first ``num_accepted`` (int32 [G]) of them count
    past          int [G]: slots before the root's
    """
    size = pool.shape[1]
    place = torch.arange(accept_index.shape[1], device=pool.device)
    node = torch.where(place < num_accepted.unsqueeze(1), accept_index, place)

    def slots(offsets: Tensor) -> Tensor:
        index = past.long().unsqueeze(1) + offsets
        return table.gather(1, index // size).long() * size + index % size

    # All are read before one is written: a node may come to where a later one of its walk was.
    moved = torch.take(pool, slots(node))
    pool.view(-1).index_copy_(0, slots(place).flatten(), moved.flatten())
