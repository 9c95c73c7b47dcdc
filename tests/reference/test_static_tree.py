"""A static tree: its paths by hand, how masks and offsets hang together for any choices, and the portable engine's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.static_tree import StaticTree

#         0
#        / \
#       1   2
#      / \   \
#     3   4   5
#     |
#     6
BUSH = StaticTree([[0, 0, 0], [1], [0], [0, 1], [0, 0], [1, 0], [1]], 3)


def test_a_bush_by_hand() -> None:
    assert BUSH.eagle_paths == [
        [0, -1, -1, -1],
        [0, 1, -1, -1],
        [0, 2, -1, -1],
        [0, 1, 3, -1],
        [0, 1, 4, -1],
        [0, 2, 5, -1],
        [0, 1, 3, 6],
    ]
    assert BUSH.mask_matrix[5] == [1, 0, 1, 0, 0, 1, 0]
    assert BUSH.packed_mask == [[1], [0b11], [0b101], [0b1011], [0b10011], [0b100101], [0b1001011]]
    assert BUSH.position_offsets == [0, 1, 1, 2, 2, 2, 3]
    assert BUSH.nodes_list_per_layer == [[0], [1, 2], [3, 4, 5], [6]]
    assert BUSH.top_k_list == [[2], [2, 1], [1]]


@pytest.mark.parametrize("depth", [1, 4, 40])
def test_a_chain_is_what_linear_drafting_has(depth: int) -> None:
    """Also with 32 nodes and more: the words before a node's own are full, the highest bit is the sign."""
    chain = StaticTree([[0] * n for n in range(1, depth + 1)], depth)
    assert chain.position_offsets == list(range(depth + 1))
    assert chain.top_k_list == [[1]] * depth
    unpacked = [[int(words[i // 32] >> i % 32 & 1) for i in range(depth + 1)] for words in chain.packed_mask]
    assert unpacked == [[1] * (i + 1) + [0] * (depth - i) for i in range(depth + 1)]
    assert all(-(2**31) <= word < 2**31 for words in chain.packed_mask for word in words)


@pytest.mark.parametrize("choices", [[[0], [1, 0]], [[]], [[0], [0, 0], [0, 0, 0]]])
def test_what_makes_no_tree_is_refused(choices: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"eagle_choices: \[.*\] is no node of a tree of depth 2"):
        StaticTree(choices, 2).parents  # noqa: B018 - found when it is asked for


@st.composite
def trees(draw: st.DrawFn) -> StaticTree:
    """Nodes put one after the other below any that are there, named in any order; there may be room for more layers."""
    ways: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, 40))):
        above = draw(st.sampled_from(ways))
        ways.append((*above, sum(way[:-1] == above for way in ways if way)))
    return StaticTree(draw(st.permutations(ways[1:])), max(map(len, ways)) + draw(st.integers(0, 1)))


@given(trees())
def test_a_node_sees_its_parent_what_that_sees_and_itself(tree: StaticTree) -> None:
    matrix, offsets = tree.mask_matrix, tree.position_offsets
    assert offsets == sorted(offsets)
    for node, parent in enumerate(tree.parents[1:], start=1):
        assert offsets[node] == offsets[parent] + 1
        assert [seen - above for seen, above in zip(matrix[node], matrix[parent], strict=True)] == [
            int(i == node) for i in range(len(matrix))
        ]
    assert [sum(layer) for layer in tree.top_k_list] == [len(nodes) for nodes in tree.nodes_list_per_layer[1:]]


@given(trees())
def test_the_portable_engine_derives_the_same(tree: StaticTree) -> None:
    torch = pytest.importorskip("torch", reason="the portable engine needs torch")
    from engines.portable.speculative.static_tree import StaticTreeManager

    manager = StaticTreeManager(tree.choices, tree.max_draft_len, torch.device("cpu"))
    assert manager.eagle_paths.tolist() == [tree.eagle_paths]
    assert manager.spec_dec_mask_matrix.tolist() == [tree.mask_matrix]
    assert manager.spec_dec_packed_mask.tolist() == [tree.packed_mask]
    assert manager.spec_dec_position_offsets.tolist() == [tree.position_offsets]
    assert manager.nodes_list_per_layer == tree.nodes_list_per_layer
    assert manager.top_k_list == tree.top_k_list
