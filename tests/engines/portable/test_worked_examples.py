"""The specification's worked examples of attention metadata, by number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.portable.attention.backends.context_mla import plan_chunks
from engines.portable.attention.backends.flashinfer import last_page_lens
from engines.portable.attention.backends.interface import AttentionRuntimeFeatures
from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
from engines.portable.attention.backends.sparse.dsa.dsl_topk import pick_split
from engines.portable.attention.backends.sparse.dsa.indexer import Indexer, slots_of
from engines.portable.attention.backends.sparse.dsa.metadata import build_req_idx_per_token
from engines.portable.attention.backends.sparse.dsa.params import DSAMetadataParams
from engines.portable.attention.backends.sparse.dsa.prefill import IndexerParams, split_prefill_chunks
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata, linear_packed_mask
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.speculative.interface import SpecWorkerBase
from tests import worked_examples as examples
from tests.engines.portable.metadata import collapse, dsa, flashinfer, step_of, trtllm, written
from tests.engines.portable.support import ints, kv_cache_manager


def counters(attn: Any) -> tuple[int, int, int]:
    return attn.num_ctx_tokens, attn.num_generations, attn.num_tokens


class Worker(SpecWorkerBase):
    """A worker of nothing but the base's save and restore."""

    max_draft_len = 3  # type: ignore[assignment]

    def _forward_impl(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("no step is run")


def test_1_counters() -> None:
    example = examples.COUNTERS
    attn, worker = trtllm(example.seq_lens, example.cached, example.num_contexts, extra=example.extra), Worker()
    assert counters(attn) == example.counters
    assert attn.kv_lens_cuda[:3].tolist() == attn.kv_lens_runtime.tolist() == example.kv
    assert attn.kv_lens[:3].tolist() == example.kv_lens
    assert attn.host_total_kv_lens.tolist() == example.host_total_kv_lens
    assert attn.host_request_types[:3].tolist() == example.host_request_types
    worker._prepare_attn_metadata_for_spec_dec(attn)
    attn._seq_lens.fill_(1)
    attn.on_update()
    assert counters(attn) == example.filled_with_1
    attn.num_contexts = 0
    assert counters(attn) == example.then_no_contexts
    worker._restore_attn_metadata_from_spec_dec(attn)
    assert counters(attn) == example.restored


# 2, the layout of a mixed batch: test_model_engine.


def overlapped(example: Any, past: list[int]) -> Any:
    """Metadata of a step whose host counts all of the last one's tokens, and the device those accepted."""
    attn = dsa([example.width] * len(past), past, 0)
    accepted = ints(example.accepted if isinstance(example.accepted, list) else [example.accepted])
    attn.kv_lens_cuda[: len(past)].add_(accepted - example.width)
    attn.on_update_kv_lens()
    return attn


def test_3_overlap() -> None:
    example = examples.OVERLAP
    attn = overlapped(example, [example.host_cached])
    assert attn.kv_lens_runtime.tolist() == [example.host_kv]
    assert attn.kv_lens_cuda[:1].tolist() == [example.device_kv]
    assert written(attn) == [(0, position) for position in example.device_positions]
    assert example.host_cached == example.last_token + example.width


# 4, what a loop sees: test_worked_examples_workers.


@pytest.mark.parametrize(("seq_lens", "tokens", "rows"), examples.STALE_MAP.maps)
def test_5_map(seq_lens: list[int], tokens: int, rows: list[int]) -> None:
    assert build_req_idx_per_token(ints(seq_lens), tokens).tolist() == rows


def test_5_second_forward_of_a_loop() -> None:
    example = examples.STALE_MAP
    n = len(example.past)
    attn = dsa([1 + example.draft_len] * n, example.past, 0)
    collapse(attn, example.kv)
    assert attn.req_idx_per_token[:n].tolist() == example.right
    assert written(attn) == list(enumerate(example.right_positions))


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_6_slots(kind: str) -> None:
    example = examples.SLOTS
    cache = DSACacheManager(
        num_layers=1, num_blocks=10, tokens_per_block=example.tokens_per_block, max_seq_len=64,
        max_total_draft_tokens=1, num_extra_kv_tokens=1, device=torch.device("cpu"), use_fp4=kind == "fp4",
    )  # fmt: skip
    assert cache.index_page_bytes == getattr(example, f"{kind}_page_bytes")
    positions = ints(example.positions, torch.int64)
    data, scales = slots_of(positions, ints([example.pages]), torch.zeros_like(positions), cache)
    assert data.tolist() == getattr(example, kind)
    assert scales.tolist() == getattr(example, f"{kind}_scales")
    places = [example.pages[p // 64] * 64 + p % 64 for p in example.positions]
    assert cache.get_indexer_slots(data).tolist() == places


def test_7_linear_mask() -> None:
    example = examples.LINEAR_MASK
    assert linear_packed_mask(4).tolist() == example.of_4_rows
    assert linear_packed_mask(32)[31].tolist() == example.row_31_of_32
    assert linear_packed_mask(33)[31:].tolist() == example.rows_31_and_32_of_33


@pytest.mark.parametrize(("draft_len", "reserved", "accepted", "changes", "net"), examples.REWIND)
def test_8_rewind(draft_len: int, reserved: int, accepted: int, changes: list[int], net: int) -> None:
    manager = kv_cache_manager()
    manager.kv_reserve_draft_tokens = reserved
    request = LlmRequest(0, [1] * 9, generated=[1], py_draft_tokens=[0] * draft_len)
    batch = ScheduledRequests((), (request,))
    manager.add_dummy_requests([request])
    before = manager.get_num_tokens(0)
    manager.prepare_resources(batch)
    assert manager.get_num_tokens(0) - before == changes[0]
    request.py_rewind_len, request.py_num_accepted_draft_tokens = draft_len - accepted, accepted
    manager.update_resources(batch)
    assert manager.get_num_tokens(0) - before == net == sum(changes)


def test_9_last_page() -> None:
    example = examples.LAST_PAGE
    lens, pages, last = (list(column) for column in zip(*example.lengths))
    assert last_page_lens(ints(lens), example.page_size).tolist() == last
    attn = flashinfer([1] * len(lens), [n - 1 for n in lens], 0, tokens_per_block=example.page_size)
    assert attn.num_blocks == pages
    assert attn._paged_kv_last_page_len[: len(lens)].tolist() == last


def test_10_shared_kv_view() -> None:
    example = examples.SHARED_KV_VIEW
    cached = [kv - q for kv, q in zip(example.kv, example.seq_lens)]
    attn = flashinfer(example.seq_lens, cached, example.num_contexts)
    view = attn.get_draft_metadata()
    assert view._draft_kv_runtime_lens[:3].tolist() == example.kv
    view.update_shared_kv_draft_lengths(attn, ints(example.accepted), example.num_contexts)
    assert view._draft_kv_runtime_lens[:3].tolist() == example.view
    assert attn._cached_token_lens[:3].tolist() == cached


@pytest.mark.parametrize(("next_n", "generations", "split"), examples.DSL_SPLIT.picks)
def test_11_dsl_split(next_n: int, generations: int, split: tuple[int, int]) -> None:
    example = examples.DSL_SPLIT
    assert pick_split(next_n, example.atoms, generations, example.max_kv, example.num_sms) == split


def test_11_where_it_is_chosen() -> None:
    params = DSAMetadataParams(index_topk=8, use_cute_dsl_topk=True, num_sms=1)
    attn = dsa([5, 5], [3, 4], 0, sparse_metadata_params=params)
    assert attn.dsl_split == (5, 1)
    assert pick_split(6, (1, 2, 3), None, None, 1) == (2, 3)


# 12, a graph's dummy: test_worked_examples_workers. 13, ranks: what each rank adds to the lists.


@pytest.mark.parametrize("rank", [0, 1])
def test_13_ranks(rank: int) -> None:
    example = examples.RANKS
    prompts, generations = example.ranks[rank]
    width = 1 + example.draft_len
    attn = trtllm([*prompts, *[width] * generations], [0] * len(prompts) + [7] * generations, len(prompts))
    assert attn.num_tokens == example.all_rank_num_tokens[rank]
    assert attn.num_seqs == example.all_rank_num_seqs[rank] == example.subseq_all_rank_num_tokens[rank]


@pytest.mark.parametrize("example", examples.CHUNK_PLANS)
def test_14_chunk_plan(example: Any) -> None:
    plan = plan_chunks(example.cached, example.total)
    for name in ("chunked_seq_len", "chunked_global_offset", "merge_op", "max_chunk_len_per_loop"):
        assert getattr(plan, name) == getattr(example, name)


def test_14_where_it_is_made() -> None:
    features = AttentionRuntimeFeatures(chunked_prefill=True, chunk_size=4, chunked_prefill_buffer_batch_size=2)
    example = examples.CHUNK_PLANS[0]
    options = {"enable_context_mla_with_cached_kv": True, "runtime_features": features}
    attn = trtllm([2, 1, 3, 4, 1], [*example.cached, 9], 4, **options)
    assert attn.chunk_plan == plan_chunks(example.cached, example.total)
    assert attn.chunk_plan.cu_chunked_seq_len[0] == [0, 3, 8, 8, 8]
    assert attn.ctx_cached_token_indptr[:5].tolist() == [0, 3, 23, 25, 25]
    assert attn.ctx_uncached_token_indptr[:5].tolist() == [0, 2, 3, 6, 10]
    assert attn.ctx_kv_indptr[:5].tolist() == [0, 5, 26, 31, 35]
    longest = attn.num_ctx_cached_tokens, attn.max_ctx_cached_token_len, attn.max_ctx_kv_len, attn.max_ctx_seq_len
    assert longest == (25, 20, 21, 4)
    assert trtllm([1], [9], 0, **options).chunk_plan is None


@pytest.mark.parametrize("example", examples.DSA_LOOPS)
def test_15_loop(example: Any) -> None:
    contexts = len(example.prompts)
    query = [*example.prompts, *[1 + example.draft_len] * len(example.past)]
    attn = dsa(query, [0] * contexts + example.past, contexts)
    seen = [(attn.kv_lens_cuda[: len(query)].tolist(), written(attn))]
    for kv in example.kv[1:]:
        (collapse if not attn.has_spec_dec_saved_state else step_of)(attn, kv)
        seen.append((kv, written(attn)))
    assert seen == list(zip(example.kv, example.written))


def test_15_rows_of_two_tokens() -> None:
    example = examples.DSA_TREE_LIKE
    attn = dsa(example.before, [kv - 2 for kv in example.kv], 0)
    collapse(attn, example.kv, tokens=2)
    assert attn.req_idx_per_token[:6].tolist() == example.map
    assert [position for _, position in written(attn)] == example.positions


def test_16_swap_under_overlap() -> None:
    example = examples.SWAP_UNDER_OVERLAP
    attn = overlapped(example, example.host_cached)
    assert attn.kv_lens_cuda[:2].tolist() == example.device_kv
    assert written(attn) == example.written
    Indexer.recompute_slot_mappings(attn)
    assert written(attn) == example.from_host
    attn.update_for_spec_dec()
    assert written(attn) == example.written


def test_17_skip_flags() -> None:
    example = examples.SKIP_FLAGS
    params = DSAMetadataParams(index_topk=example.index_topk)
    query = [example.context, *[1 + example.draft_len] * 2]
    attn = dsa(query, [0, *example.past], 1, extra=example.extra, sparse_metadata_params=params)
    assert (attn.skip_indexer_for_ctx_reqs, attn.skip_indexer_for_gen_reqs) == example.flags
    dense = attn.topk_indices_buffer[example.context : attn.num_tokens].tolist()
    assert [sum(i >= 0 for i in row) for row in dense] == [5, 6, 7, 7, 8, 9]
    collapse(attn, example.draft_kv)
    assert (attn.skip_indexer_for_ctx_reqs, attn.skip_indexer_for_gen_reqs) == example.flags_in_the_loop


def test_18_prefill_chunks() -> None:
    example = examples.PREFILL_CHUNKS
    params = IndexerParams(ints(example.seq_lens, torch.int64), ints(example.cached, torch.int64))
    chunks = split_prefill_chunks(params, len(example.seq_lens), example.max_chunk_size)
    limits = [((c.token_start, c.token_end), (c.k_token_start, c.k_token_end)) for c in chunks]
    assert limits == example.chunks
    assert (chunks[2].cu_seqlen_ks.tolist(), chunks[2].cu_seqlen_ke.tolist()) == example.third


def test_18_where_they_are_made() -> None:
    example = examples.PREFILL_CHUNKS
    params = DSAMetadataParams(index_topk=8, indexer_max_chunk_size=example.max_chunk_size)
    n = len(example.seq_lens)
    attn = dsa(example.seq_lens, example.cached, n, sparse_metadata_params=params)
    assert len(attn.indexer_prefill_chunks) == len(example.chunks)
    assert dsa(example.seq_lens, example.cached, n).indexer_prefill_chunks is None


@pytest.mark.parametrize(("longest", "size"), [(262143, 32768), (262144, 16384), (524288, 16384), (524289, 8192)])
def test_18_long_sequences_have_smaller_chunks(longest: int, size: int) -> None:
    params = IndexerParams(ints([40000], torch.int64), ints([longest - 40000], torch.int64))
    first, *_ = split_prefill_chunks(params, 1, 1 << 20)
    assert first.token_end == size


@pytest.mark.parametrize(("new", "cached", "positions"), examples.COMPRESSED.new)
def test_19_compressed_positions(new: int, cached: int, positions: list[int]) -> None:
    params = IndexerParams(ints([new], torch.int64), ints([cached], torch.int64), examples.COMPRESSED.ratio)
    assert params.positions()[1].tolist() == positions


def test_19_compressed_lengths_and_windows() -> None:
    example = examples.COMPRESSED
    params = DSAMetadataParams(index_topk=8, compress_ratios=(1, example.ratio))
    attn = dsa(example.seq_lens, example.cached, 2, sparse_metadata_params=params)
    assert attn.cu_seqlen_ks[: attn.num_tokens].tolist() == example.ks
    assert attn.cu_seqlen_ke[: attn.num_tokens].tolist() == example.ke
    kv = [tokens for tokens, _ in example.generation_kv]
    attn = dsa([1, 1], [tokens - 1 for tokens in kv], 0, sparse_metadata_params=params)
    assert attn.kv_lens_cuda_2d[:2, 0].tolist() == [keys for _, keys in example.generation_kv]


def test_static_trees_and_devices_without_masks() -> None:
    attn = trtllm([3], [4], 0)
    tree = SimpleNamespace(
        spec_dec_position_offsets=ints([[0, 1, 1]]), spec_dec_packed_mask=ints([[[1], [3], [5]]])
    )  # fmt: skip
    attn.update_spec_dec_param(True, None, batch_size=1, spec_tree_manager=tree)
    assert attn.spec_decoding_position_offsets[0].tolist() == [0, 1, 1]
    assert attn.spec_decoding_packed_mask[0].tolist() == [[1], [3], [5]]
    assert attn.spec_decoding_generation_lengths[0] == 3
    assert not attn.force_prepare_spec_dec_tree_mask
    assert isinstance(attn, TrtllmAttentionMetadata)
    for sm_version, enabled in ((100, False), (120, True)):
        attn.sm_version = sm_version
        attn.update_spec_dec_param(True, None, batch_size=1, spec_tree_manager=tree)
        assert attn.use_spec_decoding is attn.is_spec_decoding_enabled is enabled
