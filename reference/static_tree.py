"""A static tree of drafts: what upstream's ``SpecTreeManager`` derives from ``eagle_choices``, one node at a time.

A choice names a node by the way to it: which child to take at each depth. Node 0 is the root; the others are numbered
layer by layer, those of a layer in the order of their choices, as upstream's configuration sorts them. The parent of a
node is the one that its choice names without the last step. All else follows from the paths: a node sees those on its
path, and its position is as far from the root as its path is long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from reference.tree import ROOT, paths

_WORD = 32
"""Nodes per word of a packed mask."""


@dataclass(frozen=True)
class StaticTree:
    """The tree of ``choices``, which all requests share.

    choices        per node but the root the children taken on the way to it, in any order, each with the one that it
                   follows
    max_draft_len  layers below the root that there is room for

    What makes no such tree is a ``ValueError`` once something is asked of it.
    """

    choices: Sequence[Sequence[int]]
    max_draft_len: int

    @cached_property
    def parents(self) -> list[int]:
        """Per node the one that it follows, ``ROOT`` for the first."""
        ways = [(), *sorted(set(map(tuple, self.choices)), key=lambda way: (len(way), way))]
        for way in ways[1:]:
            if way[:-1] not in ways or not 1 <= len(way) <= self.max_draft_len:
                problem = f"eagle_choices: {list(way)} is no node of a tree of depth {self.max_draft_len}"
                raise ValueError(f"{problem}; add the node that it follows, or raise max_draft_len")
        return [ways.index(way[:-1]) if way else ROOT for way in ways]

    @cached_property
    def paths(self) -> list[list[int]]:
        """Per node the nodes that it sees, the root first and itself last."""
        return paths(self.parents)

    @property
    def eagle_paths(self) -> list[list[int]]:
        """``paths``, filled up with -1 to one width [nodes, max_draft_len + 1]."""
        width = self.max_draft_len + 1
        return [[*path, *[-1] * (width - len(path))] for path in self.paths]

    @property
    def mask_matrix(self) -> list[list[int]]:
        """1 where the node of the row sees that of the column, 0 elsewhere (``spec_dec_mask_matrix``)."""
        return [[int(node in path) for node in range(len(self.paths))] for path in self.paths]

    @property
    def packed_mask(self) -> list[list[int]]:
        """The same as words of 32 nodes each, the first in the lowest bit (``spec_dec_packed_mask``)."""
        return [_packed(row) for row in self.mask_matrix]

    @property
    def position_offsets(self) -> list[int]:
        """How far each node is from the root (``spec_dec_position_offsets``)."""
        return [len(path) - 1 for path in self.paths]

    @property
    def nodes_list_per_layer(self) -> list[list[int]]:
        """Nodes at each depth, from the root on."""
        offsets = self.position_offsets
        return [
            [node for node, depth in enumerate(offsets) if depth == layer] for layer in range(self.max_draft_len + 1)
        ]

    @property
    def top_k_list(self) -> list[list[int]]:
        """Per layer but the last how many candidates each node that has children offers."""
        counts = [[self.parents.count(node) for node in nodes] for nodes in self.nodes_list_per_layer[:-1]]
        return [[count for count in layer if count] for layer in counts]


def _packed(row: Sequence[int]) -> list[int]:
    """Words of one row; the highest bit of a word is the sign of an int32."""
    words = [sum(bit << i for i, bit in enumerate(row[at : at + _WORD])) for at in range(0, len(row), _WORD)]
    return [word - 2**_WORD if word >> (_WORD - 1) else word for word in words]
