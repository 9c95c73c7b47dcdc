"""The tree workers on the whole engine: the worked example, and what a wrong bit does; trees while they grow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from engines.portable.speculative.eagle3_dynamic_tree import DraftNodes
from scenarios import Scenario, Step, StepTrace, Substep
from tests.engines.portable.scripts import context, generations, go, greedy, scenario
from tests.engines.portable.support import TREES

EAGLE3, MTP = TREES


def worked_example(worker: str) -> Scenario:
    """A context of 5, generations with 10 and 20 cached that accept 3 and 2 tokens; depth 3, two candidates, T = 6."""
    drafting = replace(generations([0])[0], agree=2), replace(generations([1])[0], agree=1)
    return scenario(
        worker,
        (9, 19, 5),
        Step(draft_len=3, contexts=(context(worker, 0, 9), context(worker, 1, 19))),
        Step(draft_len=3, generations=drafting),
        Step(draft_len=3, contexts=(context(worker, 2, 5),), generations=generations([0, 1], 3)),
        Step(draft_len=3, generations=generations([0, 2, 1], 3)),
    )


def find(step: StepTrace, name: str) -> Substep:
    substep = step.find(name)
    assert substep is not None
    return substep


@pytest.mark.parametrize("worker", TREES)
def test_worked_example(worker: str) -> None:
    step = go(worked_example(worker)).steps[2]
    prepared, verified, restored = (find(step, name) for name in ("prepared", "verified", "restored"))
    drafts = [find(step, f"draft[{i}]") for i in range(3)]
    assert prepared["kv_lens_cuda"] == [5, 17, 27]
    assert verified["num_accepted_tokens"] == [1, 3, 2]
    assert [d["kv_lens_cuda"] for d in drafts] == [[5, 14, 24], [7, 15, 24], [9, 17, 26]]
    assert [d["_seq_lens"] for d in drafts] == [[5, 4, 4], [2, 2, 2], [4, 4, 4]]
    assert [d["num_contexts"] for d in drafts] == [1, 0, 0]
    assert [d["use_spec_decoding"] for d in drafts] == [True] * 3
    assert drafts[0]["position_ids"] == [*range(5), *range(10, 14), *range(20, 24)]
    assert drafts[1]["position_ids"] == [5, 5, 13, 13, 22, 22]
    assert drafts[2]["position_ids"] == [5, 5, 6, 6, 13, 13, 14, 14, 22, 22, 23, 23]
    assert [d["spec_decoding_generation_lengths"] for d in drafts] == [[4, 4], [2, 2, 2], [4, 4, 4]]
    assert drafts[0]["spec_decoding_packed_mask"] == [[[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]] * 2
    assert drafts[1]["spec_decoding_position_offsets"] == [[0, 0]] * 3
    assert restored["kv_lens_cuda"] == ([11, 19, 28] if worker == EAGLE3 else [5, 17, 27])
    for field in ("spec_decoding_packed_mask", "spec_decoding_position_offsets", "_seq_lens", "num_contexts"):
        assert restored[field] == prepared[field]
    assert restored["next_draft_tokens"][0] == [0] * 6


@pytest.mark.parametrize("worker", TREES)
def test_the_accepted_path_is_fed_and_moved(worker: str) -> None:
    trace = go(worked_example(worker))
    before, step, after = trace.steps[1:]
    accepted = find(step, "verified")["accepted_tokens"]
    fed = find(step, "draft[0]")["input_ids"]
    assert fed[5:] == [*accepted[1], 0, *accepted[2], 0, 0]
    tree = find(before, "updated")["draft_tree"][0]
    assert tree != list(range(-1, 5)), "a chain would have nothing to move"
    emitted = find(after, "updated")["emitted"]
    assert emitted[0] == greedy(0, 0, 9, len(emitted[0]))
    assert len(emitted[0]) == 1 + 1 + 3 + 4


@pytest.mark.parametrize("worker", TREES)
def test_a_wrong_bit_of_a_mask_changes_tokens(worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of each sequence sees the one before it as well: a sibling, in all but chains."""
    right = find(go(worked_example(worker)).steps[2], "restored")["next_draft_tokens"]
    set_rows = TrtllmAttentionMetadata.set_spec_decoding_rows

    def set_spec_decoding_rows(self: Any, packed_mask: Any, position_offsets: Any) -> None:
        wrong = packed_mask.clone()
        wrong[:, -1, 0] |= 1 << (packed_mask.shape[1] - 2)
        set_rows(self, wrong, position_offsets)

    monkeypatch.setattr(TrtllmAttentionMetadata, "set_spec_decoding_rows", set_spec_decoding_rows)
    wrong = find(go(worked_example(worker)).steps[2], "restored")["next_draft_tokens"]
    assert wrong != right


def test_the_first_of_equal_scores_is_kept() -> None:
    nodes = DraftNodes(torch.tensor([4]), torch.zeros(1, 1, dtype=torch.int64), topk=2)
    nodes.grow(torch.tensor([[[7, 8]]], dtype=torch.int32), torch.tensor([[[-1.0, -2.0]]]), torch.tensor([[[5]]]))
    candidates = torch.tensor([[[11, 12], [13, 14]]], dtype=torch.int32)
    nodes.grow(candidates, torch.tensor([[[-2.0, -2.0], [-1.0, -1.0]]]), torch.tensor([[[50], [60]]]))
    assert nodes.history_scores.tolist() == [[-1, -2, -3, -3, -3, -3]]
    assert nodes.tokens.tolist() == [[7, 8, 11, 12]]
    assert nodes.history_parents.tolist() == [[-1, 0, 1]]
    assert nodes.hidden_states.flatten().tolist() == [5, 5, 50, 50]
    assert nodes.positions.tolist() == [[5, 5, 6, 6]]
    assert nodes.last_rows().tolist() == [2, 3]


def test_a_node_sees_the_path_of_its_parent() -> None:
    nodes = DraftNodes(torch.tensor([4]), torch.zeros(1, 1, dtype=torch.int64), topk=2)
    nodes.grow(torch.tensor([[[7, 8]]], dtype=torch.int32), torch.tensor([[[-1.0, -2.0]]]), torch.tensor([[[5]]]))
    candidates = torch.tensor([[[11, 12], [13, 14]]], dtype=torch.int32)
    nodes.grow(candidates, torch.tensor([[[-9.0, -9.5], [-1.0, -2.0]]]), torch.tensor([[[50], [60]]]))
    assert nodes.tokens.tolist() == [[7, 8, 13, 14]]
    assert nodes.hidden_states.flatten().tolist() == [5, 5, 60, 60]
    assert nodes.mask[0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]]
