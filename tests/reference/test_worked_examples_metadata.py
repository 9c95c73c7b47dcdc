"""The oracle against the worked examples of the attention metadata, by their numbers.

Some of them are steps, which the oracle shows as a trace; the others are asked of its functions one by one.
"""

from __future__ import annotations

import pytest

from reference.attention_metadata import metadata
from reference.context_mla import chunk_plan
from reference.dense_selection import dense
from reference.flash_infer import FlashInferRow, last_page_len, num_pages, page_tables, shared_kv_lens
from reference.indexer_cache import IndexerPages
from reference.indexer_prefill import Chunk, longest_chunk, new_keys, prefill_chunks, windows
from reference.indexer_schedule import split
from reference.overlap import OverlappedRow
from reference.sparse_attention import derived
from reference.spec_decoding_tables import linear_mask, seen
from reference.workers import DraftCall
from scenarios import Config, Generation, Phase, Step, Substep
from tests import worked_examples as examples
from tests.reference.cases import EAGLE3, LINEAR, PARD, at, configuration, last_step, serve

LONG = {"num_blocks": 512, "max_num_tokens": 2048, "max_seq_len": 256}


def counters(fields: Substep | dict[str, object]) -> tuple[object, ...]:
    return fields["num_ctx_tokens"], fields["num_generations"], fields["num_tokens"]


def owners(example_written: list[tuple[int, int]]) -> list[list[int]]:
    return [list(pair) for pair in example_written]


def test_1_counters() -> None:
    example = examples.COUNTERS
    step = serve(EAGLE3, contexts=(4,), past=(9, 20), acc=(1, 1), draft_len=0, max_draft_len=example.extra + 1)
    prepared = at(step, "prepared")
    assert (prepared["_seq_lens"], counters(prepared)) == (example.seq_lens, example.counters)
    assert prepared["prompt_lens_cpu"] == prepared["prompt_lens_cuda"] == [4, 9, 20]
    assert prepared["kv_lens_cuda"] == prepared["kv_lens_runtime"] == example.kv
    for name in ("kv_lens", "host_total_kv_lens", "host_request_types"):
        assert prepared[name] == getattr(example, name)
    ones = [1] * len(example.seq_lens)
    assert counters(metadata(ones, example.kv, example.num_contexts)) == example.filled_with_1
    assert counters(metadata(ones, example.kv, 0)) == example.then_no_contexts
    assert counters(at(step, "restored")) == example.restored != example.restored_upstream


def test_2_layout() -> None:
    example = examples.LAYOUT
    step = serve(EAGLE3, contexts=(example.prompt,), past=tuple(example.past), draft_len=example.draft_len)
    prepared = at(step, "prepared")
    assert prepared["_seq_lens"] == example.seq_lens
    assert prepared["position_ids"] == example.positions
    assert prepared["gather_ids"] == example.gather_ids
    assert prepared["kv_lens_cuda"] == example.kv
    assert len(prepared["draft_tokens"]) == sum(example.draft_lens)
    assert prepared["draft_tokens"] == prepared["input_ids"][6:9] + prepared["input_ids"][10:13]
    assert (prepared["runtime_draft_len"], prepared["runtime_tokens_per_gen_step"]) == (3, 4)


def test_3_overlap() -> None:
    example = examples.OVERLAP
    row = OverlappedRow(example.last_token, example.accepted, example.width, example.width)
    assert (row.host_past, row.host_kv) == (example.host_cached, example.host_kv)
    assert list(row.host_positions) == example.host_positions
    assert (row.kv_offset, row.position_offset) == (example.kv_offset, example.position_offset)
    assert row.host_kv + row.kv_offset == row.kv == example.device_kv
    corrected = [position + row.position_offset for position in row.host_positions]
    assert corrected == list(row.positions) == example.device_positions


@pytest.mark.parametrize("worker", LINEAR)
def test_4_draft_loop(worker: str) -> None:
    example = examples.DRAFT_LOOP
    step = serve(
        worker,
        contexts=(example.prompt,),
        past=(example.past,),
        acc=(example.accepted,),
        draft_len=example.draft_len,
    )
    assert [call["kv_lens_cuda"] for call in step.named("draft")] == example.kv
    assert at(step, "restored")["kv_lens_cuda"] == example.after


@pytest.mark.parametrize("worker", LINEAR)
def test_5_map_of_tokens(worker: str) -> None:
    example = examples.STALE_MAP
    step = serve(
        worker,
        contexts=(),
        past=tuple(example.past),
        acc=tuple(example.accepted),
        draft_len=example.draft_len,
        index_topk=64,
        **LONG,
    )
    call = at(step, "draft[1]")
    assert call["kv_lens_cuda"] == example.kv
    assert call["req_idx_per_token"] == example.right != example.stale
    assert [index for _, index in call["slot_owners"]] == example.right_positions != example.stale_positions
    assert at(step, "prepared")["req_idx_per_token"][: len(example.stale)] == example.stale
    for seq_lens, tokens, rows in examples.STALE_MAP.maps:
        found = derived(forward(seq_lens, [9] * len(seq_lens)), configuration(EAGLE3, 4, index_topk=8), updated=False)
        assert found["req_idx_per_token"] == rows
        assert len(rows) == tokens


def forward(seq_lens: list[int], kv_lens: list[int], num_contexts: int = 0) -> DraftCall:
    return DraftCall([], [], seq_lens, kv_lens, num_contexts)


@pytest.mark.parametrize("keys", ["fp8", "fp4"])
def test_6_slots(keys: str) -> None:
    example = examples.SLOTS
    pages = IndexerPages(
        example.tokens_per_block, example.index_head_dim, example.quant_block_size, fp4=keys == "fp4"
    )  # fmt: skip
    slots = [pages.slot(example.pages, position) for position in example.positions]
    assert [key for key, _ in slots] == getattr(example, keys)
    assert [scale for _, scale in slots] == getattr(example, f"{keys}_scales")
    assert pages.page_bytes == getattr(example, f"{keys}_page_bytes")


def test_6_no_two_slots_of_a_page_overlap() -> None:
    pages = IndexerPages(4, 8, 4)
    spans = [
        range(start, start + size)
        for position in range(4)
        for start, size in zip(pages.slot([0], position), (pages.key_bytes, pages.scale_bytes), strict=True)
    ]  # fmt: skip
    taken = sorted(byte for span in spans for byte in span)
    assert taken == list(range(pages.page_bytes))


def test_7_linear_masks() -> None:
    example = examples.LINEAR_MASK
    assert linear_mask(4) == example.of_4_rows
    assert linear_mask(32)[31] == example.row_31_of_32
    assert linear_mask(33)[31:] == example.rows_31_and_32_of_33
    # Up to 32 tokens a mask is causal; the token after them sees itself alone.
    assert [seen(words) for words in linear_mask(32)] == [list(range(i + 1)) for i in range(32)]
    assert seen(linear_mask(33)[32]) == [32]


@pytest.mark.parametrize(("draft_len", "reserved", "drafts", "moves", "net"), examples.REWIND)
def test_8_rewind(draft_len: int, reserved: int, drafts: int, moves: list[int], net: int) -> None:
    # A parallel drafter reserves 2K - 1 slots; one that reserves any other number has the same net.
    worker = EAGLE3 if reserved == draft_len else PARD
    step = serve(worker, contexts=(), past=(10,), acc=(drafts + 1,), draft_len=draft_len)
    updated = at(step, "updated")
    width = configuration(worker, draft_len).tokens_per_gen_step(draft_len) - 1
    extra = configuration(worker, draft_len).num_extra_kv_tokens
    before = 10 + extra + width if worker == EAGLE3 else 9 + extra + width + 1
    assert updated["kv_tokens"] == {0: before + net}
    assert updated["py_rewind_len"] == {0: width - drafts}
    assert sum(moves) == net


@pytest.mark.parametrize(("length", "pages", "last"), examples.LAST_PAGE.lengths)
def test_9_last_page(length: int, pages: int, last: int) -> None:
    size = examples.LAST_PAGE.page_size
    assert (num_pages(length, size), last_page_len(length, size)) == (pages, last)


def test_9_page_tables() -> None:
    tables = page_tables([FlashInferRow(64, 2), FlashInferRow(0, 3), FlashInferRow(127, 1)], 2, 64)
    assert tables.qo_indptr == [0, 2, 5, 6]
    assert (tables.paged_kv_indptr_prefill, tables.paged_kv_indptr_decode) == ([0, 2, 3], [0, 2])
    assert tables.paged_kv_last_page_len == [2, 3, 64]
    assert tables.cached_token_lens == [64, 0, 127]
    assert list(zip(tables.batch_indices, tables.positions, strict=True)) == [
        (0, 64), (0, 65), (1, 0), (1, 1), (1, 2), (2, 127),
    ]  # fmt: skip


def test_10_shared_kv_view() -> None:
    example = examples.SHARED_KV_VIEW
    rows = [FlashInferRow(kv - query, query) for kv, query in zip(example.kv, example.seq_lens, strict=True)]
    assert shared_kv_lens(rows, example.accepted, example.num_contexts) == example.view


@pytest.mark.parametrize(("next_n", "generations", "pick"), examples.DSL_SPLIT.picks)
def test_11_split(next_n: int, generations: int, pick: tuple[int, int]) -> None:
    example = examples.DSL_SPLIT
    found = split(next_n, (1, 2, 3), generations=generations, longest=example.max_kv, num_sms=example.num_sms)
    assert found == pick


def test_11_rows_of_four_tokens_take_fewer_waves() -> None:
    assert split(4, (1, 2, 3, 4), generations=32, longest=4096, num_sms=148) == (1, 4)


def test_12_dummy_of_a_graph() -> None:
    example = examples.GRAPH_DUMMY
    dummy = Generation(request=None, past=example.cached)
    config = Config(worker=EAGLE3, max_draft_len=example.draft_len)
    capture = Step(phase=Phase.CAPTURE, draft_len=example.draft_len, generations=(dummy,))
    prepared = at(last_step(config, (), capture), "prepared")
    assert prepared["_seq_lens"] == [example.seq_len]
    assert prepared["prompt_lens_cpu"] == [example.prompt_len]
    assert prepared["kv_lens_cuda"] == [example.kv]
    assert prepared["kv_lens"] == [example.kv + example.extra] == [example.granted]


@pytest.mark.parametrize("example", examples.CHUNK_PLANS)
def test_14_chunk_plan(example: examples.Example) -> None:
    plan = chunk_plan(example.cached, example.total)
    assert plan.lengths == example.chunked_seq_len
    assert plan.offsets == example.chunked_global_offset
    assert plan.merges == example.merge_op
    assert [max(row) for row in plan.lengths] == example.max_chunk_len_per_loop


@pytest.mark.parametrize("worker", LINEAR)
@pytest.mark.parametrize("example", examples.DSA_LOOPS)
def test_15_slots_in_the_draft_loop(worker: str, example: examples.Example) -> None:
    contexts = len(example.prompts)
    step = serve(
        worker,
        contexts=tuple(example.prompts),
        past=tuple(example.past),
        acc=tuple(example.accepted[contexts:]),
        draft_len=example.draft_len,
        index_topk=8,
    )
    calls = list(step.named("draft"))
    assert [call["kv_lens_cuda"] for call in calls] == example.kv
    assert [call["slot_owners"] for call in calls] == [owners(written) for written in example.written]
    assert example.written[0] == example.stale[0]
    assert example.written[1:] != example.stale[1:]


def test_15_rows_of_two_tokens() -> None:
    example = examples.DSA_TREE_LIKE
    config = configuration(EAGLE3, 4, index_topk=8)
    fields = derived(forward(example.seq_lens, example.kv), config, updated=False)
    assert fields["req_idx_per_token"] == example.map != example.stale_map
    assert [index for _, index in fields["slot_owners"]] == example.positions != example.stale_positions


def test_16_swap_under_overlap() -> None:
    example = examples.SWAP_UNDER_OVERLAP
    rows = [
        OverlappedRow(cached - example.width, accepted, example.width, example.width)
        for cached, accepted in zip(example.host_cached, example.accepted, strict=True)
    ]
    assert [row.kv for row in rows] == example.device_kv
    assert [(i, position) for i, row in enumerate(rows) for position in row.positions] == example.written
    from_host = [
        (i, row.host_past + k) for i, row in enumerate(rows) for k in range(example.width)
    ]  # fmt: skip
    assert from_host == example.from_host != example.written
    everything = OverlappedRow(10, example.width, example.width, example.width)
    assert everything.host_past == everything.past


@pytest.mark.parametrize("worker", LINEAR)
def test_17_skip_flags(worker: str) -> None:
    example = examples.SKIP_FLAGS
    step = serve(
        worker,
        contexts=(example.context,),
        past=tuple(example.past),
        acc=(example.accepted,) * 2,
        draft_len=example.draft_len,
        index_topk=example.index_topk,
    )
    for substep in step.named("prepared", "entered", "draft[0]"):
        assert (substep["skip_indexer_for_ctx_reqs"], substep["skip_indexer_for_gen_reqs"]) == example.flags
        of_contexts, of_generations = (
            substep["topk_indices_buffer"][: example.context],
            substep["topk_indices_buffer"][-6:],
        )
        assert of_contexts == [None] * example.context
        assert of_generations == [list(range(kv)) for kv in (5, 6, 7, 7, 8, 9)]
    call = at(step, "draft[1]")
    assert call["kv_lens_cuda"] == example.draft_kv
    assert (False, call["skip_indexer_for_gen_reqs"]) == example.flags_in_the_loop
    assert call["topk_indices_buffer"] == [None] * 3
    columns = [dense(kv - 1, example.index_topk) for kv in example.draft_kv]
    assert [len(row) for row in columns] == example.upstream_dense_columns
    assert [n for n in range(example.draft_kv[0]) if n not in columns[0]] == example.upstream_missing_in_row_0


def test_18_prefill_chunks() -> None:
    example = examples.PREFILL_CHUNKS
    contexts = [Chunk(*pair) for pair in zip(example.cached, example.seq_lens, strict=True)]
    pieces = prefill_chunks(contexts, example.max_chunk_size)
    assert [(piece.tokens, piece.keys) for piece in pieces] == example.chunks
    assert pieces[2].windows == list(zip(*example.third, strict=True))
    # One piece has every context's windows, as long as nothing is cut.
    (whole,) = prefill_chunks(contexts, 99)
    assert (whole.windows, whole.keys) == (windows(contexts), (0, 22))


@pytest.mark.parametrize(
    ("keys", "longest"), [(2**18 - 1, 32768), (2**18, 16384), (2**19, 16384), (2**19 + 1, 8192)]
)  # fmt: skip
def test_18_chunks_shrink_with_the_keys(keys: int, longest: int) -> None:
    assert longest_chunk(32768, keys) == longest
    assert longest_chunk(4, keys) == 4


def test_19_compressed_keys() -> None:
    example = examples.COMPRESSED
    for query, past, positions in example.new:
        assert list(new_keys(Chunk(past, query), example.ratio)) == positions
    contexts = [Chunk(*pair) for pair in zip(example.cached, example.seq_lens, strict=True)]
    assert windows(contexts, example.ratio) == list(zip(example.ks, example.ke, strict=True))
    for kv, keys in example.generation_kv:
        assert len(new_keys(Chunk(0, kv), example.ratio)) == keys
