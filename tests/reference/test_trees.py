"""Dynamic trees of drafts against examples worked out by hand or by running upstream's classes.

The layout of most of them: one context of 5 tokens, two generations with 10 and 20 cached tokens that accept 3 and 2,
three layers with two candidates per node, of which six nodes are kept.
"""

from __future__ import annotations

import pytest

from reference.acceptance import agreed
from reference.history import Text
from reference.tree import Growth, Node, grow, paths
from scenarios import Config, Context, Fault, FaultKind, Generation, Phase, Request, Step, StepTrace, Substep
from scenarios.tracer import DUMMY_TOKEN, PAD_TOKEN, alternative, choose, disagree, entry
from tests.reference.cases import EAGLE3_TREE, MTP_EAGLE_TREE, TREES, at, configuration, last_step, serve

MASK, OFFSETS = "spec_decoding_packed_mask", "spec_decoding_position_offsets"
LENGTHS = "spec_decoding_generation_lengths"
ALONE = [[0], *([0, node] for node in range(1, 7))]
"""Mask of a generation that has no tree: its nodes all follow the root."""


def counters(substep: Substep) -> list[int]:
    return [substep[name] for name in ("num_contexts", "num_ctx_tokens", "num_generations", "num_tokens")]


@pytest.mark.parametrize(("worker", "after"), [(EAGLE3_TREE, [11, 19, 28]), (MTP_EAGLE_TREE, [5, 17, 27])])
def test_lengths_in_the_draft_loop(worker: str, after: list[int]) -> None:
    step = serve(worker)
    assert at(step, "prepared")["kv_lens_cuda"] == at(step, "saved")["kv_lens_cuda"] == [5, 17, 27]
    assert [s["kv_lens_cuda"] for s in step.named("draft")] == [[5, 14, 24], [7, 15, 24], [9, 17, 26]]
    assert at(step, "restored")["kv_lens_cuda"] == after
    assert [s["_seq_lens"] for s in step.named("draft")] == [[5, 4, 4], [2, 2, 2], [4, 4, 4]]
    assert [counters(s) for s in step.named("draft")] == [[1, 5, 2, 13], [0, 0, 3, 6], [0, 0, 3, 12]]
    assert counters(at(step, "restored")) == [1, 5, 2, 19]
    assert all(s["_saved_tensors"] == ["_seq_lens", "_seq_lens_cuda"] for s in step.named("saved", "draft"))
    assert all(s["use_spec_decoding"] for s in step.named("prepared", "draft", "restored"))


@pytest.mark.parametrize("worker", TREES)
def test_positions_and_offsets_in_the_draft_loop(worker: str) -> None:
    calls = list(serve(worker).named("draft"))
    assert calls[0]["position_ids"] == [*range(5), *range(10, 14), *range(20, 24)]
    assert calls[1]["position_ids"] == [5, 5, 13, 13, 22, 22]
    assert calls[2]["position_ids"] == [5, 5, 6, 6, 13, 13, 14, 14, 22, 22, 23, 23]
    assert [call[LENGTHS] for call in calls] == [[4, 4], [2, 2, 2], [4, 4, 4]]
    assert [call[OFFSETS] for call in calls] == [[[0, 1, 2, 3]] * 2, [[0, 0]] * 3, [[0, 0, 1, 1]] * 3]
    assert calls[0][MASK] == [[[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]] * 2
    assert calls[1][MASK] == [[[0], [1]]] * 3


@pytest.mark.parametrize("worker", TREES)
@pytest.mark.parametrize(
    ("contexts", "past", "acc", "lengths"),
    [
        ((), (10, 20), (3, 2), [[14, 24], [15, 24], [17, 26]]),
        ((3, 2), (), (), [[3, 2], [5, 4], [7, 6]]),
        ((5,), (10, 20), (1, 1), [[5, 14, 24], [7, 13, 23], [9, 15, 25]]),
        ((5,), (10, 20), (4, 1), [[5, 14, 24], [7, 16, 23], [9, 18, 25]]),
    ],
)
def test_lengths_in_other_layouts(
    worker: str, contexts: tuple[int, ...], past: tuple[int, ...], acc: tuple[int, ...], lengths: list[list[int]]
) -> None:
    step = serve(worker, contexts=contexts, past=past, acc=acc)
    assert [s["kv_lens_cuda"] for s in step.named("draft")] == lengths
    assert at(step, "verified")["num_accepted_tokens"] == [1] * len(contexts) + list(acc)
    # Only the first call of a batch without generations is no speculative decoding.
    assert [s["use_spec_decoding"] for s in step.named("draft")] == [bool(past), True, True]


@pytest.mark.parametrize("worker", TREES)
def test_depth_two_and_one(worker: str) -> None:
    step = serve(worker, draft_len=2, max_total_draft_tokens=6)
    assert at(step, "prepared")["kv_lens_cuda"] == [5, 17, 27]
    assert [s["kv_lens_cuda"] for s in step.named("draft")] == [[5, 13, 23], [7, 15, 24]]
    (call,) = serve(worker, acc=(2, 1), draft_len=1).named("draft")
    assert (call["kv_lens_cuda"], call[LENGTHS]) == ([5, 12, 22], [2, 2])


@pytest.mark.parametrize("worker", TREES)
def test_the_target_is_fed_nodes_of_each_depth_at_one_position(worker: str) -> None:
    prepared = at(serve(worker), "prepared")
    assert (prepared["_seq_lens"], prepared[LENGTHS]) == ([5, 7, 7], [7, 7])
    for mask, offsets in zip(prepared[MASK], prepared[OFFSETS], strict=True):
        assert [nodes[-1] for nodes in mask] == list(range(7))
        assert all(nodes == [*mask[nodes[-2]], nodes[-1]] for nodes in mask[1:])
        assert offsets == [len(nodes) - 1 for nodes in mask]
        assert (offsets[0], max(offsets)) == (0, 3)
    positions = [past + offset for past, row in zip((10, 20), prepared[OFFSETS], strict=True) for offset in row]
    assert prepared["position_ids"] == [*range(5), *positions]
    assert prepared["gather_ids"] == list(range(4, 19))


@pytest.mark.parametrize("worker", TREES)
def test_the_first_call_is_fed_the_path_that_was_accepted(worker: str) -> None:
    step = serve(worker)
    accepted, call = at(step, "verified")["accepted_tokens"], at(step, "draft[0]")
    assert call["input_ids"][5:] == [*accepted[1], PAD_TOKEN, *accepted[2], PAD_TOKEN, PAD_TOKEN]
    # Where nothing is accepted, it is the root's hidden state.
    assert len(set(call["hidden_states"][5:9])) == 3
    assert call["hidden_states"][5] == call["hidden_states"][8]
    assert call["hidden_states"][9] == call["hidden_states"][11] == call["hidden_states"][12]


def _first_steps(worker: str, agree: int) -> list[StepTrace]:
    """A prompt of 4 tokens and two generations: without a tree, then with one of which ``agree`` nodes are right."""
    config = configuration(worker, 3)
    steps = [Step(draft_len=3, contexts=(Context(request=0, chunk=4),))]
    steps += [Step(draft_len=3, generations=(Generation(request=0, agree=agree),)) for _ in range(2)]
    requests = (Request(id=0, prompt_len=4),)
    return [last_step(config, requests, *steps[:count]) for count in (1, 2, 3)]


@pytest.mark.parametrize("worker", TREES)
def test_a_context_leaves_no_tree(worker: str) -> None:
    context, first, second = _first_steps(worker, 2)
    assert at(context, "restored")["next_draft_tokens"] == [[PAD_TOKEN] * 6]
    assert at(context, "updated")["draft_tree"] == {0: []}
    assert at(first, "prepared")["draft_tokens"] == [PAD_TOKEN] * 6
    assert at(first, "prepared")[MASK] == [ALONE]
    assert at(first, "prepared")["position_ids"] == [4, 5, 5, 5, 5, 5, 5]
    assert at(first, "verified")["num_accepted_tokens"] == [1]
    (tree,) = at(first, "updated")["draft_tree"].values()
    assert [mask[-2] - 1 for mask in at(second, "prepared")[MASK][0][1:]] == tree
    assert at(second, "prepared")["draft_tokens"] == at(first, "restored")["next_draft_tokens"][0]
    assert at(second, "verified")["num_accepted_tokens"] == [3]


@pytest.mark.parametrize("worker", TREES)
def test_the_ledger_and_the_caches(worker: str) -> None:
    *_, second = _first_steps(worker, 2)
    updated, accepted = at(second, "updated"), at(second, "verified")["accepted_tokens"][0]
    assert (updated["py_rewind_len"], updated["py_num_accepted_draft_tokens"]) == ({0: 4}, {0: 2})
    assert configuration(worker, 3).num_extra_kv_tokens == 3
    # The prompt, what was accepted so far, room for the layers and for the nodes of a tree.
    assert updated["kv_tokens"] == {0: 4 + 1 + 3 + 3 + 6}
    assert updated["draft_kv"][0][5:] == [entry(5 + j, token) for j, token in enumerate(accepted)]
    assert updated["target_kv"][0][6:] == [entry(6 + j, token) for j, token in enumerate(accepted[:2])]


@pytest.mark.parametrize("worker", TREES)
def test_a_dummy_has_no_tree(worker: str) -> None:
    dummies = (Generation(request=None, past=4), Generation(request=None, past=0))
    config = configuration(worker, 3, max_total_draft_tokens=5)
    step = last_step(config, (), Step(phase=Phase.CAPTURE, draft_len=3, generations=dummies))
    after = [11, 7] if worker == EAGLE3_TREE else [10, 6]
    assert at(step, "prepared")[MASK] == [ALONE[:6]] * 2
    assert at(step, "prepared")["input_ids"] == [DUMMY_TOKEN, *[PAD_TOKEN] * 5] * 2
    for run in range(3):
        assert at(step, "entered", run)["kv_lens_cuda"] == [10, 6]
        assert at(step, "verified", run)["num_accepted_tokens"] == [1, 1]
        assert at(step, "restored", run)["kv_lens_cuda"] == after
    assert at(step, "updated")["draft_tree"] == {}


@pytest.mark.parametrize("worker", TREES)
def test_masks_are_put_back(worker: str) -> None:
    step = serve(worker)
    before = at(step, "prepared")
    for name in (MASK, OFFSETS, LENGTHS):
        assert at(step, "entered")[name] == at(step, "restored")[name] == before[name]
        assert name not in at(step, "verified")
    contexts_only = serve(worker, contexts=(3, 2), past=(), acc=())
    assert at(contexts_only, "prepared")[MASK] == at(contexts_only, "draft[0]")[MASK] == []
    assert len(at(contexts_only, "draft[1]")[MASK]) == 2


def _failed(worker: str) -> Substep:
    """What is left of a generation step that fails."""
    fault = Fault(site="draft_model.forward", occurrence=2, kind=FaultKind.ERROR)
    steps = [Step(draft_len=3, contexts=(Context(request=0, chunk=4),))]
    steps += [Step(draft_len=3, generations=(Generation(request=0),), fault=fault)]
    return at(last_step(configuration(worker, 3), (Request(id=0, prompt_len=4),), *steps), "failed")


def test_a_failure_puts_back_the_masks_and_the_lengths_of_mtp_eagle() -> None:
    assert _failed(MTP_EAGLE_TREE)["kv_lens_cuda"] == [11]
    assert "kv_lens_cuda" not in _failed(EAGLE3_TREE)
    for worker in TREES:
        assert [_failed(worker)[name] for name in (MASK, OFFSETS, LENGTHS)] == [[ALONE], [[0, *[1] * 6]], [7]]


def test_acceptance_walks_down_from_the_root() -> None:
    parents = [-1, 0, 0, 1, 1, 2, 4]
    assert agreed([9, 5, 6, 7, 8, 7, 3], parents, [6, 0, 7, 0, 0, 2, 0]) == [0, 2, 5]
    assert agreed([9, 5, 6, 7, 8, 7, 3], parents, [5, 8, 0, 0, 3, 0, 1]) == [0, 1, 4, 6]
    # The right tokens after the wrong ones are not reached.
    assert agreed([9, 5, 6, 7, 8, 7, 3], parents, [4, 7, 7, 0, 3, 0, 1]) == [0]


def test_a_node_sees_those_above_it() -> None:
    assert paths([-1, 0, 0, 1, 3]) == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]
    assert paths([-1, -1, 1]) == [[0], [1], [1, 2]]


def test_layers_grow_from_the_best_nodes_of_the_layer_before() -> None:
    growth = grow(Text([11, 12, 13]), 3, depth=3, topk=3, agree=1, kept=9)
    assert [len(layer) for layer in growth.layers] == [3, 3, 3]
    assert len(growth.made) == 3 + 9 + 9
    assert [node.parent for node in growth.made[:12]] == [-1] * 3 + [0] * 3 + [1] * 3 + [2] * 3
    assert [node.parent for node in growth.made[12:]] == [n for n in growth.layers[1] for _ in range(3)]
    for layer, nodes in zip(growth.layers, (range(3), range(3, 12), range(12, 21)), strict=True):
        scores = [growth.made[node].score for node in nodes]
        assert [growth.made[node].score for node in layer] == sorted(scores, reverse=True)[:3]
    assert growth.fed(2) == growth.layers[0] + growth.layers[1]


def test_candidates_are_the_draft_of_a_chain_and_others() -> None:
    text = Text([11, 12, 13])
    growth = grow(text, 3, depth=2, topk=3, agree=1, kept=2)
    choice = text.token(3)
    assert [node.token for node in growth.made[:3]] == [choice, alternative(choice, 1), alternative(choice, 2)]
    choice = text.token(4)
    assert growth.made[3].token == disagree(choice)
    off = choose(text.reading(3).after(growth.made[1].token).digest)
    assert growth.made[6].token == disagree(off)
    assert growth.made[7].token == alternative(off, 1)


def test_scores_fall_with_depth_and_rank_and_differ_by_token() -> None:
    growth = grow(Text([11, 12, 13]), 3, depth=2, topk=3, agree=2, kept=2)
    first, second, third = growth.made[:3]
    assert (first.score, growth.made[3].score) == (-1, -2)
    assert second.score == -1 - 1024 - second.token % 512
    assert third.score == -1 - 2048 - third.token % 512
    assert growth.made[7].score == second.score - 1 - 1024 - growth.made[7].token % 512


def test_the_first_two_candidates_of_the_last_layer_change_places() -> None:
    text = Text([11, 12, 13])
    odd = next(n for n in range(3, 40) if text.token(n) % 2)
    even = next(n for n in range(3, 40) if text.token(n) % 2 == 0)
    for known, agree in ((odd, 1), (odd, 0), (even, 1)):
        choice = text.token(known)
        first = choice if agree else disagree(choice)
        (one, two, three) = grow(text, known, depth=1, topk=3, agree=agree, kept=2).made
        expected = [alternative(choice, 1), first] if known == odd else [first, alternative(choice, 1)]
        assert [one.token, two.token, three.token] == [*expected, alternative(choice, 2)]
        assert (one.score, two.score > -10, three.score < -2048) == (-1, known == odd, True)
    # Not where there is room for one path alone, and not before the last layer.
    assert grow(text, odd, depth=1, topk=3, agree=1, kept=1).made[0].token == text.token(odd)
    assert grow(text, odd, depth=2, topk=3, agree=2, kept=9).made[0].token == text.token(odd)


@pytest.mark.parametrize(("depth", "topk"), [(1, 2), (3, 2), (4, 3)])
def test_the_path_that_agrees_is_kept_with_its_end_for_a_first_or_second_child(depth: int, topk: int) -> None:
    places = []
    for i in range(40):
        text = Text([i, 12, 13])
        tree = grow(text, 3, depth, topk, agree=depth, kept=depth + 1)
        nodes = tree.kept(depth + 1)
        right = [[tree.made[nodes[n]].token for n in path] for path in paths(tree.parents(nodes))]
        assert text.tokens(3, 3 + depth) in right
        end = nodes[right.index(text.tokens(3, 3 + depth))]
        places.append([n for n, node in enumerate(tree.made) if node.parent == tree.made[end].parent].index(end))
    assert set(places) == {0, 1}


def test_the_best_nodes_are_kept_in_the_order_in_which_they_were_made() -> None:
    reading = Text([5]).reading(1)
    scores = [-1, -9, -3, -9, -4, -9]
    parents = [-1, -1, 0, 0, 2, 2]
    growth = Growth(reading, [Node(7, p, s, reading) for p, s in zip(parents, scores, strict=True)], [])
    # Of equal scores the earliest made.
    assert growth.kept(4) == [0, 1, 2, 4]
    assert growth.parents([0, 1, 2, 4]) == [-1, -1, 0, 2]
    assert growth.kept(5) == [0, 1, 2, 3, 4]


def test_trees_differ_from_request_to_request() -> None:
    trees = [grow(Text([i, 12, 13]), 3, depth=3, topk=2, agree=3, kept=6) for i in range(20)]
    assert len({tuple(tree.parents(tree.kept(6))) for tree in trees}) > 2


def test_a_tree_may_hold_all_nodes_that_were_made() -> None:
    config = Config(worker=EAGLE3_TREE, max_draft_len=2, dynamic_tree_max_topK=2, max_total_draft_tokens=6)
    steps = [Step(draft_len=2, contexts=(Context(request=0, chunk=2),))]
    steps += [Step(draft_len=2, generations=(Generation(request=0),))] * 2
    prepared = at(last_step(config, (Request(id=0, prompt_len=2),), *steps), "prepared")
    assert prepared[MASK] == [[[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 6]]]
    assert prepared["position_ids"] == [3, 4, 4, 5, 5, 5, 5]
