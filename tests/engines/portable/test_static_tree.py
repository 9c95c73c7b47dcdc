"""Static trees: nodes, masks and depths out of the paths that a configuration lists."""

from __future__ import annotations

import pytest

from engines.portable.speculative.static_tree import StaticTreeManager
from tests.engines.portable.support import CPU


def test_a_tree_of_two_branches() -> None:
    """Order and repetition do not matter: nodes are numbered by depth, then by path."""
    tree = StaticTreeManager([[1], [0, 1], [0], [1, 0], [0, 0], [0, 1, 2], [0]], 4, CPU)
    assert tree.eagle_paths.tolist() == [
        [
            [0, -1, -1, -1, -1],
            [0, 1, -1, -1, -1],
            [0, 2, -1, -1, -1],
            [0, 1, 3, -1, -1],
            [0, 1, 4, -1, -1],
            [0, 2, 5, -1, -1],
            [0, 1, 4, 6, -1],
        ]
    ]
    assert tree.spec_dec_position_offsets.tolist() == [[0, 1, 1, 2, 2, 2, 3]]
    assert tree.spec_dec_mask_matrix[0, 6].tolist() == [1, 1, 0, 0, 1, 0, 1]
    assert tree.spec_dec_packed_mask.flatten().tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101, 0b1010011]
    assert tree.nodes_list_per_layer == [[0], [1, 2], [3, 4, 5], [6], []]
    assert tree.top_k_list == [[2], [2, 1], [1], []]


def test_trees_that_are_stars_and_chains() -> None:
    """TRT-29: a tree of depth 1, and a chain; the latter's mask is causal, beyond one word too."""
    star = StaticTreeManager([[i] for i in range(4)], 1, CPU)
    assert star.spec_dec_packed_mask.flatten().tolist() == [0b1, 0b11, 0b101, 0b1001, 0b10001]
    assert star.top_k_list == [[4]]
    chain = StaticTreeManager([[0] * n for n in range(1, 34)], 33, CPU)
    assert chain.spec_dec_packed_mask[0, 30:].tolist() == [[2**31 - 1, 0], [-1, 0], [-1, 1], [-1, 3]]
    assert chain.spec_dec_position_offsets.tolist() == [list(range(34))]
    assert chain.top_k_list == [[1]] * 33


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], [1, 0]], r"\[1, 0\] has no parent; add \[1\]"),
        ([[]], r"\[\] has length 0, not 1 to 2"),
        ([[0], [0, 0], [0, 0, 0]], r"\[0, 0, 0\] has length 3, not 1 to 2"),
    ],
)
def test_paths_that_make_no_tree(choices: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StaticTreeManager(choices, 2, CPU)
