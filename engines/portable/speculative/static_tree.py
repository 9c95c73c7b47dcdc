"""Static trees of drafts: what follows from the paths that a configuration lists, the same for every request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engines.portable.speculative.dynamic_tree_ops import pack_mask, packed_words


class StaticTreeManager:
    """The one tree of all requests (upstream: ``SpecTreeManager`` without ``use_dynamic_tree``).

    eagle_choices  a path per draft node: at each depth, which of the candidates follows. All starts of a path are
        paths too; order and repetition do not matter
    max_draft_len  depth that the tree may have at most

    Nodes are the root, then those of the choices, sorted by length and then by entries: ``n`` in all. Below, 1 stands
    for the one tree that there is.

    eagle_paths                int32 [1, n, max_draft_len + 1]: nodes from the root to each node, then -1
    spec_dec_mask_matrix       int32 [1, n, n]: 1 where a node has the other on its path
    spec_dec_packed_mask       int32 [1, n, words]: the same, 32 nodes to a word
    spec_dec_position_offsets  int32 [1, n]: depth of each node
    nodes_list_per_layer       nodes of each depth, 0 to ``max_draft_len``
    top_k_list                 per draft step, how many children each node that has any gets

    Raises ``ValueError`` for a path that is empty or too long, and for one whose start is missing.
    """

    def __init__(self, eagle_choices: Iterable[Sequence[int]], max_draft_len: int, device: torch.device) -> None:
        paths = sorted({tuple(choice) for choice in eagle_choices}, key=lambda path: (len(path), path))
        node = {(): 0} | {path: number for number, path in enumerate(paths, 1)}
        for path in paths:
            if not 1 <= len(path) <= max_draft_len:
                raise ValueError(f"eagle_choices: {list(path)} has length {len(path)}, not 1 to {max_draft_len}")
            if path[:-1] not in node:
                raise ValueError(f"eagle_choices: {list(path)} has no parent; add {list(path[:-1])}")
        ways = [[node[path[:depth]] for depth in range(len(path) + 1)] for path in node]
        eagle_paths = torch.tensor([way + [-1] * (max_draft_len + 1 - len(way)) for way in ways], dtype=torch.int32)
        mask = (eagle_paths.unsqueeze(2) == torch.arange(len(ways))).any(1)
        self.eagle_paths = eagle_paths.unsqueeze(0).to(device)
        self.spec_dec_mask_matrix = mask.int().unsqueeze(0).to(device)
        self.spec_dec_packed_mask = pack_mask(mask, packed_words(len(ways))).unsqueeze(0).to(device)
        self.spec_dec_position_offsets = (mask.sum(1, dtype=torch.int32) - 1).unsqueeze(0).to(device)
        self.nodes_list_per_layer = [
            [number for number, way in enumerate(ways) if len(way) == depth + 1] for depth in range(max_draft_len + 1)
        ]
        parents = [way[-2] for way in ways if len(way) > 1]
        self.top_k_list = [
            [parents.count(number) for number in layer if number in parents]
            for layer in self.nodes_list_per_layer[:max_draft_len]
        ]
