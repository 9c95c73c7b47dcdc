"""Counters, setters, save and restore, graph copies, and what ``prepare`` writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.portable.attention.backends.interface import KVCacheParams
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.speculative.interface import SpecMetadata
from engines.portable.speculative.mode import SpeculativeDecodingMode
from tests.engines.portable.support import CPU, attention_metadata, ints, kv_cache_manager


def counters(attn: Any) -> tuple[int, int, int]:
    return attn.num_ctx_tokens, attn.num_generations, attn.num_tokens


@pytest.fixture
def attn() -> Any:
    """Rows of 4, 1 and 1 tokens, the first a context; 0, 9 and 20 tokens cached; 2 extra tokens."""
    manager = kv_cache_manager()
    gens = tuple(LlmRequest(i, [1] * n, generated=[1]) for i, n in ((1, 9), (2, 20)))
    context = LlmRequest(0, [1] * 4)
    manager.add_dummy_requests(gens)
    manager.prepare_resources(ScheduledRequests((context,), gens))
    attn: Any = attention_metadata(manager)
    attn.seq_lens = ints([4, 1, 1])
    attn.num_contexts = 1
    attn.request_ids, attn.prompt_lens = [0, 1, 2], [4, 9, 20]
    attn.kv_cache_params = KVCacheParams(True, [0, 9, 20], 2)
    return attn


def test_counters_follow_lengths_and_contexts(attn: Any) -> None:
    assert counters(attn) == (4, 2, 6)
    attn._seq_lens.fill_(1)
    attn.on_update()
    assert counters(attn) == (1, 2, 3)
    attn.num_contexts = 0
    assert counters(attn) == (0, 3, 3)


def test_counters_keep_their_value_when_contexts_exceed_rows(attn: Any) -> None:
    attn.num_contexts = 4
    assert counters(attn) == (4, 2, 6)


def test_host_and_device_lengths_are_two_tensors(attn: Any) -> None:
    attn._seq_lens_cuda.fill_(1)
    assert attn.seq_lens.tolist() == [4, 1, 1]


def test_prepare_writes_lengths_with_and_without_extra_tokens(attn: Any) -> None:
    attn.prepare()
    assert attn.kv_lens_cuda[:3].tolist() == attn.kv_lens_runtime.tolist() == [4, 10, 21]
    assert attn.kv_lens[:3].tolist() == [6, 12, 23]
    assert attn.host_total_kv_lens.tolist() == [4, 31]
    assert attn.host_request_types[:3].tolist() == [0, 1, 1]
    assert attn.prompt_lens_cpu[:3].tolist() == attn.prompt_lens_cuda[:3].tolist() == [4, 9, 20]
    pages = [attn.kv_cache_manager.get_block_ids(i) for i in range(3)]
    tables = attn.kv_cache_block_offsets[0, :3, 0].tolist()
    assert [table[: len(owned)] for table, owned in zip(tables, pages)] == pages
    assert attn.kv_cache_block_offsets[0, :3, 1].tolist() == tables


def test_prepare_refuses_a_length_beyond_the_limit(attn: Any) -> None:
    attn.kv_cache_params = KVCacheParams(True, [0, 9, 61], 2)
    attn.prepare()
    attn.kv_cache_params = KVCacheParams(True, [0, 9, 62], 2)
    with pytest.raises(AssertionError, match="65, extra tokens included, exceeds 64"):
        attn.prepare()


@pytest.mark.parametrize("hook", ["on_update_kv_lens", "update_for_spec_dec", "prepare"])
def test_running_totals_are_rebuilt_once_a_hook_was_called(attn: Any, hook: str) -> None:
    attn.prepare()
    assert [t.tolist() for t in attn.mla_scheduler_buffers()] == [[0, 4, 5, 6], [0, 4, 14, 35]]
    attn.kv_lens_cuda.add_(1)
    assert attn.mla_scheduler_buffers()[1].tolist() == [0, 4, 14, 35]
    getattr(attn, hook)()
    expected = [0, 4, 14, 35] if hook == "prepare" else [0, 5, 16, 38]
    assert attn.mla_scheduler_buffers()[1].tolist() == expected


def test_drafting_writes_on_clones_and_originals_come_back(attn: Any) -> None:
    host, device = attn._seq_lens, attn._seq_lens_cuda
    attn.prepare_for_spec_dec("_seq_lens", "_seq_lens_cuda")
    assert attn.has_spec_dec_saved_state
    assert attn._seq_lens is not host
    attn._seq_lens.fill_(1)
    attn._seq_lens_cuda.fill_(1)
    attn.restore_from_spec_dec()
    assert attn._seq_lens is host
    assert attn._seq_lens_cuda is device
    assert host.tolist() == device.tolist() == [4, 1, 1]
    assert not attn.has_spec_dec_saved_state


def test_saving_twice_names_the_fields(attn: Any) -> None:
    attn.prepare_for_spec_dec("_seq_lens", "_seq_lens_cuda")
    with pytest.raises(AssertionError, match="_seq_lens, _seq_lens_cuda of an earlier call not restored"):
        attn.prepare_for_spec_dec("kv_lens_cuda")


def test_saving_names_a_field_that_is_no_tensor(attn: Any) -> None:
    with pytest.raises(AssertionError, match="all_rank_num_tokens is no tensor"):
        attn.prepare_for_spec_dec("_seq_lens", "all_rank_num_tokens")
    assert list(attn._saved_tensors) == ["_seq_lens"]


def test_a_clone_that_fails_leaves_the_original_in_place(attn: Any) -> None:
    class Failing(torch.Tensor):
        def clone(self, **kwargs: Any) -> Any:
            raise torch.OutOfMemoryError("no")

    attn.kv_lens_cuda = failing = attn.kv_lens_cuda.as_subclass(Failing)
    with pytest.raises(torch.OutOfMemoryError):
        attn.prepare_for_spec_dec("kv_lens_cuda")
    attn.restore_from_spec_dec()
    assert attn.kv_lens_cuda is failing


def test_graph_metadata_has_fixed_lengths_and_buffers_of_its_own(attn: Any) -> None:
    graph = attn.create_cuda_graph_metadata(3, max_draft_tokens=2)
    assert graph.create_cuda_graph_metadata(1) is graph
    assert graph.seq_lens.tolist() == graph.seq_lens_cuda.tolist() == [3, 3, 3]
    assert (graph.num_contexts, *counters(graph)) == (0, 0, 3, 9)
    for name in ("kv_lens_cuda", "kv_cache_block_offsets", "host_request_types", "_saved_tensors"):
        assert getattr(graph, name) is not getattr(attn, name)
    assert counters(attn) == (4, 2, 6)


def test_graph_metadata_is_written_in_place(attn: Any) -> None:
    graph = attn.create_cuda_graph_metadata(3)
    captured = graph.seq_lens_cuda
    graph.seq_lens = ints([5, 5, 5])
    assert graph.seq_lens_cuda is captured
    assert captured.tolist() == [5, 5, 5]
    eager = attn.seq_lens_cuda
    attn.seq_lens = ints([5, 5, 5])
    assert attn.seq_lens_cuda is not eager


def test_spec_dec_tables_have_the_width_of_the_step(attn: Any) -> None:
    mode = SpeculativeDecodingMode.EAGLE3_ONE_MODEL
    spec = SpecMetadata(max_num_requests=4, max_num_tokens=64, spec_dec_mode=mode, max_total_draft_tokens=3, device=CPU)
    spec.runtime_tokens_per_gen_step = 3
    attn.update_spec_dec_param(True, spec)
    assert attn.use_spec_decoding
    assert attn.spec_decoding_generation_lengths.tolist() == [3] * 4
    assert attn.spec_decoding_position_offsets.tolist() == [[0, 1, 2]] * 4
    assert attn.spec_decoding_packed_mask.tolist() == [[[1], [3], [7]]] * 4
    attn.update_spec_dec_param(False, spec)
    assert not attn.use_spec_decoding
