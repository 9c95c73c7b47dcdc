"""What metadata is besides that of a decoder's step: of cross attention, of encoders, of graphs that share a pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.portable.attention.backends.interface import AttentionMetadata
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from engines.portable.attention.backends.vanilla import VanillaAttentionMetadata
from engines.portable.memory_buffer_utils import Buffers
from engines.portable.pyexecutor.resource_manager import KVCacheManager
from tests.engines.portable.metadata import cache, dsa, made, prepare, trtllm
from tests.engines.portable.support import CPU, ints


def test_cross_attention_has_the_decoders_queries_and_the_encoders_keys() -> None:
    attn = trtllm([2, 1, 1], [0, 4, 7], 1)
    encoder = cache(KVCacheManager, [6, 1, 1], [0, 5, 9], 1, extra=0)
    cross = attn.create_cross_metadata(ints([6, 0, 0]), encoder, [0, 5, 9])
    assert attn.cross is cross
    assert (cross.is_cross, attn.is_cross, attn.has_cross_sub_metadata, cross.has_cross_sub_metadata) == (
        True, False, True, False,
    )  # fmt: skip
    assert (cross._seq_lens is attn._seq_lens, cross.request_ids is attn.request_ids) == (True, True)
    assert cross._saved_tensors is not attn._saved_tensors
    assert cross.kv_lens_cuda is not attn.kv_lens_cuda
    assert (cross.num_tokens, cross.num_ctx_tokens, cross.num_generations) == (6, 2, 2)
    cross.prepare()
    assert cross.kv_lens_cuda[:3].tolist() == [6, 5, 9]
    assert attn.kv_lens_cuda[:3].tolist() == [2, 5, 8]
    assert (attn.seq_lens_kv is attn.seq_lens, attn.seq_lens_kv_cuda is attn.seq_lens_cuda) == (True, True)


def test_cross_attention_follows_the_steps_of_the_decoder() -> None:
    attn = trtllm([2, 1], [0, 4], 1)
    with pytest.raises(RuntimeError, match="no cross metadata; call create_cross_metadata first"):
        attn.update_cross_metadata(ints([3, 0]), attn.kv_cache_manager)
    cross = attn.create_cross_metadata(ints([3, 0]), attn.kv_cache_manager, [0, 5])
    attn.seq_lens = ints([1, 1])
    assert (cross._seq_lens, cross._seq_lens_cuda) == (attn._seq_lens, attn._seq_lens_cuda)
    attn.num_contexts = 0
    attn.update_cross_metadata(ints([0, 0]), attn.kv_cache_manager, [3, 5])
    assert (cross.num_tokens, cross.num_contexts, cross.kv_cache_params.num_cached_tokens_per_seq) == (0, 0, [3, 5])
    assert attn.cross is cross


def test_metadata_of_cross_attention_is_of_the_same_class() -> None:
    plain = AttentionMetadata(max_num_requests=1, max_num_tokens=1, device=CPU)
    with pytest.raises(AssertionError, match="a AttentionMetadata beside a TrtllmAttentionMetadata"):
        made(TrtllmAttentionMetadata, None, cross=plain)
    with pytest.raises(AssertionError, match="cross attention has no other"):
        made(AttentionMetadata, None, cross=plain, seq_lens_kv=ints([1]))


def test_the_graph_of_a_decoder_takes_its_cross_attention_along() -> None:
    attn = trtllm([1, 1], [4, 7], 0)
    cross = attn.create_cross_metadata(ints([0, 0]), attn.kv_cache_manager, [3, 5])
    graph: Any = attn.create_cuda_graph_metadata(2, max_draft_tokens=2, buffers=Buffers(CPU))
    copied = graph.cross
    assert copied is not cross
    assert (copied.is_cuda_graph, copied.cross is copied, cross.is_cuda_graph) == (True, True, False)
    assert copied._seq_lens is graph._seq_lens
    assert graph.seq_lens.tolist() == [3, 3]
    assert copied.seq_lens_kv.tolist() == [0, 0]
    known = copied.seq_lens_kv_cuda
    copied.seq_lens_kv = ints([4, 6])
    assert copied.seq_lens_kv_cuda is known
    assert (known.tolist(), copied.num_tokens) == ([4, 6], 10)


def test_graphs_of_one_pool_share_storage_and_their_original_does_not() -> None:
    attn = trtllm([1, 1], [4, 7], 0)
    pool = Buffers(CPU)
    large, small = (attn.create_cuda_graph_metadata(size, buffers=pool) for size in (2, 1))
    kept = [metadata.kv_lens_cuda.untyped_storage().data_ptr() for metadata in (attn, large, small)]
    assert kept[1] == kept[2] != kept[0]
    assert large.kv_lens_cuda is not small.kv_lens_cuda
    prepare(large, [1, 1], [4, 7], 0, 3)
    prepare(small, [1], [9], 0, 3)
    assert large.kv_lens_cuda[:2].tolist() == [10, 8]
    assert attn.kv_lens_cuda[:2].tolist() == [5, 8]
    assert large._seq_lens_cuda.untyped_storage().data_ptr() != small._seq_lens_cuda.untyped_storage().data_ptr()


def test_a_pool_hands_out_what_graphs_have_reserved_before_anything_else() -> None:
    pool = Buffers(CPU)
    free = pool.get_buffer((4,), torch.int32, "name", False)
    free.fill_(7)
    taken = pool.get_buffer((2, 1), torch.int32, "name", True)
    assert (taken.data_ptr(), taken.tolist()) == (free.data_ptr(), [[7], [7]])
    larger = pool.get_buffer((9,), torch.int64, "name", True)
    assert (larger.data_ptr() != free.data_ptr(), larger.tolist()) == (True, [0] * 9)
    assert pool.get_buffer((1,), torch.int32, "name", True).data_ptr() == free.data_ptr()
    assert pool.get_buffer((8,), torch.int64, "name", True).data_ptr() == larger.data_ptr()
    assert pool.get_buffer((1,), torch.int32, "other", True).data_ptr() != free.data_ptr()
    smaller = pool.get_buffer((1,), torch.int32, "name", False)
    assert smaller.data_ptr() not in (free.data_ptr(), larger.data_ptr())
    assert pool.get_buffer((1,), torch.int32, "name", True).data_ptr() == free.data_ptr()


def test_without_a_cache_there_are_contexts_of_their_own_length() -> None:
    attn = made(TrtllmAttentionMetadata, None)
    attn.seq_lens, attn.num_contexts = ints([3, 5]), 2
    attn.prepare()
    assert attn.kv_lens_cuda[:2].tolist() == attn.kv_lens[:2].tolist() == attn.prompt_lens_cuda[:2].tolist() == [3, 5]
    assert attn.kv_lens_runtime is attn._seq_lens
    assert not attn.kv_cache_params.use_cache


def test_views_of_the_runtime_do_not_see_what_is_saved_later() -> None:
    attn = trtllm([1, 1], [4, 7], 0)
    attn.kv_lens_cuda.add_(1)
    assert attn.kv_lens_cuda_runtime.tolist() == [6, 9]
    attn.prepare_for_spec_dec("kv_lens_cuda")
    attn.kv_lens_cuda.add_(1)
    assert attn.kv_lens_cuda_runtime.tolist() == [6, 9]
    assert attn.prompt_lens_cuda_runtime.tolist() == attn.prompt_lens_cpu_runtime.tolist() == [1, 1]
    assert attn.host_request_types_runtime.tolist() == [1, 1]


def test_flash_mla_has_the_generations_pages_from_row_0_on() -> None:
    attn = trtllm([5, 1, 1], [0, 9, 20], 1, enable_flash_mla=True)
    pages = [attn.kv_cache_manager.get_block_ids(i) for i in range(3)]
    assert [row[: len(p)] for row, p in zip(attn.kv_block_ids_per_seq.tolist(), pages)] == pages
    assert [row[: len(p)] for row, p in zip(attn.block_ids_per_seq.tolist(), pages[1:])] == pages[1:]
    attn.kv_block_ids_per_seq.fill_(5)
    prepare(attn, [1], [5], 0, 3)
    assert attn.block_ids_per_seq[0, : len(pages[0])].tolist() == pages[0]
    assert not attn.block_ids_per_seq[1:].any()
    assert not attn.kv_block_ids_per_seq[1:].any()


def test_an_encoder_reads_its_lengths_where_they_are() -> None:
    attn = made(TrtllmAttentionMetadata, None)
    attn.seq_lens, attn.num_contexts = ints([3, 5]), 2
    attn.host_request_types.fill_(1)
    attn.prepare_encoder_only()
    assert attn.kv_lens_cuda_runtime is attn.prompt_lens_cuda_runtime is attn._seq_lens_cuda
    assert attn.kv_lens_runtime is attn.prompt_lens_cpu_runtime is attn._seq_lens
    assert (attn.host_total_kv_lens[0].item(), attn.host_request_types_runtime.tolist()) == (8, [0, 0])


def test_the_graph_of_an_encoder_keeps_the_lengths_that_it_is_bound_to() -> None:
    attn = made(TrtllmAttentionMetadata, None)
    attn.seq_lens, attn.num_contexts = ints([3, 5]), 2
    graph: Any = attn.create_cuda_graph_metadata(2, encode_only=True)
    assert (graph.seq_lens.tolist(), graph.num_contexts) == ([1, 1], 2)
    host, device = ints([1, 1]), ints([1, 1])
    graph.bind_encoder_cuda_graph_seq_lens(host, device)
    assert (graph.num_contexts, graph.num_generations, graph.kv_lens_cuda_runtime is device) == (2, 0, True)
    graph.prepare_encoder_cuda_graph_replay(ints([3, 4]), 8)
    assert (graph._seq_lens is host, graph._seq_lens_cuda is device) == (True, True)
    assert host.tolist() == device.tolist() == [3, 4]
    assert (graph.num_tokens, graph.num_ctx_tokens, graph.host_total_kv_lens[0].item()) == (8, 8, 8)
    runtime = graph.kv_lens_runtime
    graph.prepare_encoder_only()
    assert graph.kv_lens_runtime is runtime is host


def test_vanilla_looks_pages_up_and_nothing_else() -> None:
    manager = cache(KVCacheManager, [5, 1], [0, 9], 1, extra=0)
    attn = prepare(made(VanillaAttentionMetadata, manager), [5, 1], [0, 9], 1, 0)
    assert attn.block_ids_per_seq == [manager.get_block_ids(0), manager.get_block_ids(1)]
    attn.kv_cache_manager = None
    attn.prepare()
    assert attn.block_ids_per_seq is None


def test_dense_rows_follow_lengths_and_layout() -> None:
    attn = dsa([2, 2], [3, 6], 0)
    attn.kv_lens_cuda[:2].sub_(1)
    attn.on_update_kv_lens()
    rows = [[i for i in row if i >= 0] for row in attn.topk_indices_buffer[:4].tolist()]
    assert [row[-1] for row in rows] == [2, 3, 5, 6]
    assert all(row == list(range(len(row))) for row in rows)
    assert attn.kv_lens_expanded_cuda[:10].tolist() == [4] * 5 + [7] * 5


def test_a_loop_that_shares_indices_leaves_the_kernels_plan_behind() -> None:
    attn = dsa([5, 5], [3, 6], 0)
    attn.in_mtp_draft_loop = True
    attn.kv_lens_cuda[:2].add_(1)
    attn.update_for_spec_dec()
    assert (attn.indexer_schedule_stale, attn.kv_lens_cuda_2d[:2, 0].tolist()) == (True, [8, 11])
    assert attn.gen_kv_indptr[:3].tolist() == [0, 9, 21]
    attn.on_update_kv_lens()
    assert (attn.indexer_schedule_stale, attn.kv_lens_cuda_2d[:2, 0].tolist()) == (False, [9, 12])
