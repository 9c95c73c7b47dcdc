"""Stand-ins of trees of drafts: scores through a softmax, and how nodes are chosen by them."""

from __future__ import annotations

import torch

from engines.tensorrt_llm.trees import probability_logits, relocation, resample_final_tokens, select_topk_draft_tokens

NONE = -torch.inf


def probabilities(*scores):
    return torch.softmax(probability_logits(torch.tensor(scores)), dim=-1)


def test_scores_become_probabilities_and_what_has_none_is_less_likely():
    offered = [NONE] * 1000
    offered[3], offered[7] = -1.0, -1700.0
    likely = probabilities(offered)[0]
    assert likely.topk(2).indices.tolist() == [3, 7]
    assert torch.isclose(likely.sum(), torch.tensor(1.0, dtype=torch.float64))


def test_equal_sums_are_a_tie_however_the_products_are_rounded():
    offered = [NONE] * 1000
    offered[:4] = -1.0, -300.0, -1001.0, -1300.0
    first, second, third, fourth = probabilities(offered)[0, :4].float().tolist()
    previous, scores = torch.tensor([[second, first]]), torch.tensor([[[third, fourth], [fourth, first]]])
    tokens = torch.tensor([[[10, 11], [12, 13]]])
    kept = select_topk_draft_tokens(tokens, scores, previous, 2)
    assert kept[0].tolist() == [[13, 10]]
    assert kept[3].tolist() == [[1, 0]]


def test_layers_are_compared_by_their_scores_alone_and_the_order_is_that_of_making():
    offered = [NONE] * 1000
    offered[:3] = -1.0, -500.0, -2.0
    best, poor, good = probabilities(offered)[0, :3].float().tolist()
    scores = torch.tensor([[best, poor, best * good, best * poor, poor * best, poor * good]])
    tokens, selected = resample_final_tokens(scores, torch.arange(10, 16).unsqueeze(0), 3)
    assert selected.tolist() == [[0, 1, 2]]
    assert tokens.tolist() == [[10, 11, 12]]


def test_the_operator_is_there_only_while_it_is_asked_for():
    before = dict(vars(torch.ops))
    with relocation():
        assert callable(torch.ops.tensorrt_llm.update_kv_cache_draft_token_location_2d)
    assert dict(vars(torch.ops)) == before
