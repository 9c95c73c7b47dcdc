"""Loading modules from a checkout, and leaving the process as it was."""

from __future__ import annotations

import copy
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from engines.portable._utils import is_current_stream_capturing
from engines.portable.attention.backends.interface import KVCacheParams
from engines.portable.graphs import CpuGraph
from engines.tensorrt_llm.loader import Upstream, raised_by_guard
from engines.tensorrt_llm.source import open_source
from engines.upstream import DRIVEN
from scenarios import UsageError
from tests.fixtures.tensorrt_llm_tree import ERAS, LAYOUTS


@pytest.fixture
def upstream(tree):
    return Upstream(open_source(tree()), emulated=True)


def process_state():
    return dict(sys.modules), list(sys.meta_path), dict(vars(torch)), dict(vars(torch.cuda)), sys.dont_write_bytecode


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("era", ERAS)
def test_every_worker_loads_in_every_variant_and_leaves_no_trace(tree, era, layout):
    before = process_state()
    upstream = Upstream(open_source(tree(era, layout)), emulated=True)
    for name in DRIVEN:
        worker = upstream.load(name)
        assert worker is not None
        assert issubclass(worker, upstream.interface.SpecWorkerBase)
    assert process_state() == before
    assert not list(tree(era, layout).rglob("__pycache__"))


def test_both_package_names_lead_to_the_same_module(upstream):
    with upstream.active():
        from tensorrt_llm._torch.attention.backends.interface import AttentionMetadata as new
        from tensorrt_llm._torch.attention_backend.interface import AttentionMetadata as old
    assert old is new
    assert upstream.attention.__spec__.name == "tensorrt_llm._torch.attention.backends.interface"


def test_two_checkouts_take_turns(tree, upstream):
    other = Upstream(open_source(tree("pre-fix")), emulated=True)
    assert other.load("PARDWorker") is not upstream.load("PARDWorker")
    with upstream.active():
        assert sys.dont_write_bytecode
        assert sys.modules["tensorrt_llm._torch.speculative.interface"] is upstream.interface
    with other.active():
        assert sys.modules["tensorrt_llm._torch.speculative.interface"] is other.interface


def test_a_package_that_was_there_before_comes_back(upstream, monkeypatch):
    mine = ModuleType("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", mine)
    with upstream.active():
        assert sys.modules.get("flashinfer") is not mine
    assert sys.modules["flashinfer"] is mine


def test_state_is_put_back_when_the_body_fails(upstream):
    before = process_state()
    with pytest.raises(KeyError), upstream.active():
        raise KeyError
    assert process_state() == before


def test_the_guard_rejects_a_worker_that_overrides_forward(tree):
    source = open_source(tree("post-fix", pard="pre-fix"))
    upstream = Upstream(source, emulated=True)
    assert upstream.load("PARDWorker") is None
    assert raised_by_guard(upstream.rejected["PARDWorker"])
    unguarded = Upstream(source, emulated=True, unguarded=True)
    assert unguarded.load("PARDWorker").__name__ == "PARDWorker"
    assert unguarded.unguarded == {"PARDWorker"}
    with pytest.raises(TypeError, match="overrides forward"):
        type("Late", (unguarded.interface.SpecWorkerBase,), {"forward": lambda self: None})


def test_another_type_error_is_not_taken_for_the_guard():
    with pytest.raises(TypeError) as error:
        len(3)  # type: ignore[arg-type]
    assert not raised_by_guard(error.value)


def test_a_module_that_does_not_load_is_reported_with_its_error(tree, tmp_path):
    from tests.fixtures.tensorrt_llm_tree import build

    root = build(tmp_path)
    pard = root / "tensorrt_llm/_torch/speculative/pard.py"
    pard.write_text(pard.read_text() + "\nraise ImportError('no such thing')\n")
    upstream = Upstream(open_source(root), emulated=True)
    assert upstream.load("PARDWorker") is None
    assert "no such thing" in str(upstream.rejected["PARDWorker"])
    base = root / "tensorrt_llm/_torch/speculative/interface.py"
    base.write_text("raise RuntimeError('broken')\n")
    with pytest.raises(UsageError, match="does not load here"):
        Upstream(open_source(root), emulated=True)


def test_stand_ins_answer_with_the_same_object_and_refuse_what_they_cannot_do(upstream):
    with upstream.active():
        from tensorrt_llm._torch.pyexecutor.sampler.ops.flashinfer import sample_from_logits_op
        from tensorrt_llm.llmapi.llm_args import AdvancedSamplingMode
    assert AdvancedSamplingMode.FULL is AdvancedSamplingMode.FULL
    assert AdvancedSamplingMode.FULL != AdvancedSamplingMode.GREEDY
    with pytest.raises(AttributeError):
        _ = AdvancedSamplingMode.__missing__
    with pytest.raises(NotImplementedError, match="sample_from_logits_op"):
        sample_from_logits_op(None)


def test_what_upstream_logs_is_kept(upstream):
    with upstream.active():
        from tensorrt_llm.logger import logger
    logger.warning("restoring")
    assert upstream.logger.records == [("warning", "restoring")]


def test_device_arguments_are_rewritten_and_copies_stay_copies(upstream):
    host = torch.zeros(2, dtype=torch.int32)
    with upstream.active():
        device = host.cuda(non_blocking=True)
        moved, moved_too = host.to("cuda"), host.to(device="cuda")
        made = torch.ones(2, device="cuda")
        assert torch.zeros(1, device=torch.device("cuda", 0), pin_memory=False).device.type == "cpu"
        assert torch.zeros(1, pin_memory=True).pin_memory().device.type == "cpu"
        assert torch.tensor([1], device="cpu").device.type == "cpu"
    device += 1
    moved += 1
    moved_too += 1
    assert made.device.type == "cpu"
    assert host.tolist() == [0, 0]


def test_capture_is_emulated(upstream, monkeypatch):
    # As on a machine with CUDA, where another engine is using it.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with upstream.active(), CpuGraph().capture():
        assert torch.cuda.is_current_stream_capturing()
    with upstream.active():
        assert not torch.cuda.is_current_stream_capturing()
        assert not is_current_stream_capturing()


def test_memory_is_plenty_where_there_is_no_cuda(upstream):
    with upstream.active():
        free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total


def test_members_that_a_newer_worker_wants_are_added_and_named(tree):
    upstream = Upstream(open_source(tree("post-fix", draft_target="settled")), emulated=True)
    worker = upstream.load("DraftTargetOneModelWorker")
    assert upstream.supplements[worker.__module__] == (
        "SpecMetadata.allocate_context_prompt_lookahead",
        "SpecMetadata.context_prompt_lookahead_tokens",
        "SpecWorkerBase._prepare_context_input_ids(prompt_lookahead_tokens=)",
    )
    ids, gather, accepted = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 3]), torch.tensor([[8], [9]]).int()
    with upstream.active():
        shifted = worker._prepare_context_input_ids(
            None, ids, 4, gather, accepted, 2, prompt_lookahead_tokens=torch.tensor([-1, 5]).int()
        )
    assert shifted.tolist() == [2, 8, 4, 5]


def test_a_base_of_the_same_date_is_left_alone(tree):
    upstream = Upstream(open_source(tree("settled")), emulated=True)
    worker = upstream.load("DraftTargetOneModelWorker")
    assert upstream.supplements[worker.__module__] == ()


def test_metadata_of_the_backend_is_the_class_that_the_worker_base_checks_for(upstream):
    assert upstream.interface.TrtllmAttentionMetadata is upstream.metadata["TRTLLM"]
    made = _metadata(upstream)
    assert made.kv_lens_cuda.tolist() == [0, 0, 0]
    with upstream.active():
        graph = made.create_cuda_graph_metadata(2, max_draft_tokens=3)
    assert graph.kv_lens_cuda is not made.kv_lens_cuda
    assert graph.seq_lens.tolist() == [4, 4]
    assert copy.copy(graph).is_cuda_graph


def test_a_length_beyond_the_managers_limit_is_refused_extra_tokens_included(upstream):
    made = _metadata(upstream)
    made.kv_cache_manager = SimpleNamespace(max_seq_len=8, copy_batch_block_offsets=lambda table, ids: None)
    made.request_ids, made.prompt_lens = [0], [3]
    with upstream.active():
        made.seq_lens = torch.tensor([3], dtype=torch.int32)
        made.kv_cache_params = KVCacheParams(True, [4], num_extra_kv_tokens=1)
        made.prepare()
        made.kv_cache_params = KVCacheParams(True, [4], num_extra_kv_tokens=2)
        with pytest.raises(AssertionError, match="kv length 9 exceeds max_seq_len 8"):
            made.prepare()
    assert made.kv_lens.tolist() == [9, 0, 0]


def _metadata(upstream):
    with upstream.active():
        return upstream.metadata["TRTLLM"](max_num_requests=3, max_num_tokens=8)
