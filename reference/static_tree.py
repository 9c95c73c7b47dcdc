"""A static tree of drafts: what upstream's ``SpecTreeManager`` derives from ``eagle_choices``, one node at a time.

A choice names a node by the way to it: which child to take at each depth. Node 0 is the root; the others are numbered
layer by layer, those of a layer in the order of their choices, as upstream's configuration sorts them. The parent of a
node is the one that its choice names without the last step. All else follows from the paths: a node sees those on its
path, its position is as far from the root as its path is long, and a drafter that goes on from the nodes of a layer is
fed these and all above them but the root, which the call before it has drafted from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from reference.tree import ROOT, paths

_WORD = 32
"""Keys per word of a packed mask."""


@dataclass(frozen=True)
class StaticTree:
    """The tree of ``choices``, which all requests share.

    choices  per node but the root the children taken on the way to it, in any order; each node needs the one that it
             follows, else ``ValueError``
    """

    choices: Sequence[Sequence[int]]

    @cached_property
    def parents(self) -> list[int]:
        """Per node the one that it follows, ``ROOT`` for the first."""
        ways = sorted({(), *map(tuple, self.choices)}, key=lambda way: (len(way), way))
        for way in ways[1:]:
            if way[:-1] not in ways:
                raise ValueError(f"eagle_choices: {list(way)} follows {list(way[:-1])}, which is missing")
        return [ways.index(way[:-1]) if way else ROOT for way in ways]

    @cached_property
    def paths(self) -> list[list[int]]:
        """Per node the nodes that it sees, the root first and itself last."""
        return paths(self.parents)

    @property
    def depth(self) -> int:
        """Layers below the root (upstream: ``max_draft_len``)."""
        return max(len(path) for path in self.paths) - 1

    @property
    def eagle_paths(self) -> list[list[int]]:
        """``paths``, filled up with -1 to one width [nodes, depth + 1]."""
        width = self.depth + 1
        return [[*path, *[-1] * (width - len(path))] for path in self.paths]

    @property
    def mask_matrix(self) -> list[list[int]]:
        """1 where the node of the row sees that of the column, 0 elsewhere (``spec_dec_mask_matrix``)."""
        return _matrix(self.paths, len(self.paths))

    @property
    def packed_mask(self) -> list[list[int]]:
        """The same as words of 32 nodes each, the first in the lowest bit (``spec_dec_packed_mask``)."""
        return [_packed(row, len(self.paths)) for row in self.mask_matrix]

    @property
    def position_offsets(self) -> list[int]:
        """How far each node is from the root (``spec_dec_position_offsets``)."""
        return [len(path) - 1 for path in self.paths]

    @property
    def nodes_list_per_layer(self) -> list[list[int]]:
        """Nodes at each depth, from the root on."""
        offsets = self.position_offsets
        return [[node for node, depth in enumerate(offsets) if depth == layer] for layer in range(self.depth + 1)]

    @property
    def top_k_list(self) -> list[list[int]]:
        """Per layer but the last how many candidates each node that has children offers."""
        counts = [[self.parents.count(node) for node in nodes] for nodes in self.nodes_list_per_layer[:-1]]
        return [[count for count in layer if count] for layer in counts]

    @property
    def tokens_gather_idx(self) -> list[list[int]]:
        """Per layer below the root the nodes that the next draft call is fed; none behind the last."""
        return [
            sorted({above for node in nodes if node in self.parents for above in self.paths[node][1:]})
            for nodes in self.nodes_list_per_layer[1:]
        ]

    @property
    def drafter_packed_masks(self) -> list[list[list[int]]]:
        """Per draft call its nodes as a mask over one another (``spec_dec_packed_mask_for_drafter_model``)."""
        masks = []
        for nodes in self.tokens_gather_idx:
            seen = [[nodes.index(above) for above in self.paths[node][1:]] for node in nodes]
            masks.append([_packed(row, len(self.paths)) for row in _matrix(seen, len(nodes))])
        return masks

    @property
    def drafter_position_offsets(self) -> list[list[int]]:
        """Per draft call how far its nodes are from the root's children."""
        return [[len(self.paths[node]) - 2 for node in nodes] for nodes in self.tokens_gather_idx]

    @property
    def hidden_states_read(self) -> list[list[int]]:
        """Per draft call the node whose hidden state each of its nodes is fed: the one that it follows."""
        return [[self.parents[node] for node in nodes] for nodes in self.tokens_gather_idx]


def _matrix(seen: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    return [[int(node in row) for node in range(width)] for row in seen]


def _packed(row: Sequence[int], nodes: int) -> list[int]:
    """Words of one row, as many as all ``nodes`` of the tree need; the highest bit is the sign of an int32."""
    words = [sum(bit << i for i, bit in enumerate(row[at : at + _WORD])) for at in range(0, nodes, _WORD)]
    return [word - 2**_WORD if word >> (_WORD - 1) else word for word in words]
