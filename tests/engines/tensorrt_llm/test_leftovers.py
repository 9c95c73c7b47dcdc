"""Live or dead: what happens first to a value that was left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.leftovers import READ, REWRITTEN, UNTOUCHED, differing, follow, snapshot
from engines.portable import observation
from engines.tensorrt_llm import TensorrtLlmEngine
from engines.tensorrt_llm.leftovers import evidence
from engines.tensorrt_llm.loader import Upstream
from engines.tensorrt_llm.source import open_source
from tests.engines.tensorrt_llm.cases import failing, life


@pytest.fixture
def upstream(tree):
    return Upstream(open_source(tree("post-fix")), emulated=True)


@pytest.fixture
def metadata(upstream):
    with upstream.active():
        made = upstream.metadata["TRTLLM"](max_num_requests=4, max_num_tokens=64)
        made.seq_lens = torch.tensor([5, 4, 4], dtype=torch.int32)
        made.num_contexts = 1
    made.kv_lens_cuda[:3] = torch.tensor([5, 14, 24], dtype=torch.int32)
    made.host_request_types[:3] = torch.tensor([0, 1, 1], dtype=torch.int32)
    return made


def fates(metadata, prepared, use):
    with follow(metadata, differing(metadata, prepared)) as followed:
        use()
    return {item.field: item.fate for item in followed}


def test_what_is_the_same_is_no_leftover(metadata):
    assert differing(metadata, snapshot(metadata)) == []


def test_values_before_and_after_are_reported(metadata):
    prepared = snapshot(metadata)
    metadata.kv_lens_cuda[1] = 13
    (item,) = differing(metadata, prepared)
    assert (item.field, item.prepared, item.left) == ("kv_lens_cuda", [5, 14, 24], [5, 13, 24])


def test_an_attribute_that_is_read_first_is_live(metadata):
    prepared = snapshot(metadata)
    metadata.use_spec_decoding = not metadata.use_spec_decoding
    with follow(metadata, differing(metadata, prepared)) as followed:
        assert metadata.use_spec_decoding
        metadata.use_spec_decoding = False
    (item,) = followed
    assert item.fate == READ
    assert item.where.startswith(__file__)


def test_an_attribute_that_is_rewritten_first_is_dead(metadata):
    prepared = snapshot(metadata)
    metadata.use_spec_decoding = True

    def use():
        metadata.use_spec_decoding = False
        assert not metadata.use_spec_decoding

    assert fates(metadata, prepared, use) == {"use_spec_decoding": REWRITTEN}


def test_on_update_hands_num_contexts_on_and_its_results_are_followed(metadata):
    prepared = snapshot(metadata)
    metadata.num_contexts = 0

    def use():
        metadata.on_update()
        assert metadata.num_ctx_tokens == 0
        metadata.num_contexts = 2

    def use_nothing_but_the_setters():
        metadata.on_update()
        metadata.num_contexts = 2
        assert metadata.num_ctx_tokens == 9

    assert fates(metadata, prepared, use) == {
        "num_contexts": REWRITTEN,
        "num_generations": REWRITTEN,
        "num_ctx_tokens": READ,
    }
    metadata.num_contexts = 0
    assert set(fates(metadata, prepared, use_nothing_but_the_setters).values()) == {REWRITTEN}


def test_elements_of_a_tensor_are_followed_one_by_one(metadata):
    prepared = snapshot(metadata)
    metadata.host_request_types[:1] = 1

    def use():
        view = metadata.host_request_types[:3]
        assert view[1:].sum() == 2
        view[0] = 0
        assert view[0].item() == 0

    assert fates(metadata, prepared, use) == {"host_request_types": REWRITTEN}


def test_an_element_that_is_used_before_it_is_written_is_live(metadata):
    prepared = snapshot(metadata)
    metadata.kv_lens_cuda[:3] += 1
    assert fates(metadata, prepared, lambda: metadata.kv_lens_cuda[2:3].add_(1)) == {"kv_lens_cuda": READ}


def test_a_tensor_is_dead_once_every_element_is_overwritten(metadata):
    prepared = snapshot(metadata)
    metadata.kv_lens_cuda[:3] += 1

    def use():
        metadata.kv_lens_cuda[:2].copy_(torch.tensor([1, 2]))
        metadata.kv_lens_cuda[2:].fill_(0)
        assert metadata.kv_lens_cuda.tolist() == [1, 2, 0, 0]

    assert fates(metadata, prepared, use) == {"kv_lens_cuda": REWRITTEN}


@pytest.mark.parametrize(("mask", "fate"), [([True, True, False], REWRITTEN), ([True, False, False], READ)])
def test_a_mask_rewrites_what_it_selects_and_nothing_else(metadata, mask, fate):
    prepared = snapshot(metadata)
    metadata.kv_lens_cuda[1] += 1

    def use():
        metadata.kv_lens_cuda[:3][torch.tensor(mask)] = 7
        assert metadata.kv_lens_cuda.sum() > 0

    assert fates(metadata, prepared, use) == {"kv_lens_cuda": fate}


def test_another_tensor_in_its_place_is_a_rewrite(metadata, upstream):
    prepared = snapshot(metadata)
    metadata._seq_lens[0] = 1

    def use():
        with upstream.active():
            metadata.seq_lens = torch.tensor([5, 4, 4], dtype=torch.int32)

    assert fates(metadata, prepared, use) == {"_seq_lens": REWRITTEN}


def test_what_the_suite_reads_is_no_use(metadata, monkeypatch):
    monkeypatch.setattr(observation, "__file__", "observation.py")
    names: dict[str, Any] = {}
    exec(compile("def look(m): return m.use_spec_decoding, m.kv_lens_cuda.tolist()", "observation.py", "exec"), names)
    prepared = snapshot(metadata)
    metadata.use_spec_decoding = True
    metadata.kv_lens_cuda[0] += 1

    def use():
        names["look"](metadata)
        metadata.use_spec_decoding = False
        assert metadata.kv_lens_cuda.sum() > 0

    assert fates(metadata, prepared, use) == {"use_spec_decoding": REWRITTEN, "kv_lens_cuda": READ}


def test_the_metadata_of_a_graph_is_another_object(metadata, upstream):
    prepared = snapshot(metadata)
    metadata.use_spec_decoding = not metadata.use_spec_decoding
    graphs = []

    def use():
        with upstream.active():
            graphs.append(metadata.create_cuda_graph_metadata(2))
        graphs[0].use_spec_decoding = False

    assert fates(metadata, prepared, use) == {"use_spec_decoding": UNTOUCHED}
    assert type(graphs[0]) is type(metadata)


@pytest.mark.parametrize(
    ("era", "expected"),
    [
        ("post-fix", {"num_contexts", "num_generations", "num_ctx_tokens", "host_request_types", "kv_lens_cuda"}),
        ("settled", {"kv_lens_cuda"}),
    ],
)
def test_what_a_success_leaves_behind_is_rewritten_before_it_is_read(tree, era, expected):
    scenario = life("MTPEagleWorker")
    found = evidence(TensorrtLlmEngine(tree(era), device="cpu"), scenario)
    assert {item.field for item in found[2]} == expected
    assert {item.fate for item in found[2]} == {REWRITTEN}


def test_what_a_tolerated_failure_leaves_behind_is_rewritten_before_it_is_read(tree):
    scenario = failing(life("MTPEagleWorker"), 3, "draft_model.forward", 2)
    found = evidence(TensorrtLlmEngine(tree("post-fix"), device="cpu"), scenario)
    left = {item.field: item for item in found[3]}
    assert left["use_spec_decoding"].left is False
    assert left["kv_lens_cuda"].left != left["kv_lens_cuda"].prepared
    assert {left[field].fate for field in left if field != "kv_lens_cuda"} == {REWRITTEN}
    # The next batch has one row: the lengths beyond it are neither read nor rewritten.
    assert left["kv_lens_cuda"].fate == UNTOUCHED


def test_evidence_ends_with_the_run(tree):
    scenario = failing(life("MTPEagleWorker"), 3, "draft_model.forward", 1, "cuda")
    assert max(evidence(TensorrtLlmEngine(tree("post-fix"), device="cpu"), scenario)) <= 3


def test_what_nobody_touches_is_said_to_be_untouched_and_the_class_comes_back(metadata):
    prepared, cls = snapshot(metadata), type(metadata)
    metadata.all_rank_num_tokens = [3]
    assert fates(metadata, prepared, lambda: None) == {"all_rank_num_tokens": UNTOUCHED}
    assert type(metadata) is cls
