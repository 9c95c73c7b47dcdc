"""Further attention backends: compressed tokens, page tables as arrays, views of them, sequences of one page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reference import trace
from reference.attention import Sight, compressed
from reference.compressed_attention import added, most, seen_compressed
from reference.indexer_prefill import Chunk
from reference.workers import DraftCall
from scenarios import Config, Context, Generation, Phase, Request, Scenario, Step, StepTrace, check
from scenarios.tracer import EMPTY, PRIME, compress, compressed_digest, entry
from tests.reference.cases import EAGLE3, LINEAR, MTP_EAGLE, PARD, SA, at

V4 = {"attention_backend": "DEEPSEEK_V4", "index_topk": 2, "window_size": 3, "compress_ratios": (1, 2, 4)}
OF_TRTLLM = {"kv_lens_cuda", "kv_lens", "kv_lens_runtime", "host_total_kv_lens", "host_request_types"}


def on(step: str, worker: str, **sizes: object) -> StepTrace:
    """The last step of a short run: "served" after prompts of 5 and 7 tokens, accepting one and three drafts, or so.

    "undrafted" has draft length 0, and "captured" is a graph instead.
    """
    config = Config(worker=worker, max_draft_len=3, **sizes)  # type: ignore[arg-type]
    dummies = (Generation(request=None, past=5, accept=2), Generation(request=None, past=8, accept=4))
    prompts = (Context(request=0, chunk=5, agree=1), Context(request=1, chunk=7, agree=3))
    both = (Generation(request=0), Generation(request=1))
    served = Step(draft_len=3, contexts=(Context(request=2, chunk=4),), generations=both)
    steps = [Step(draft_len=3, contexts=prompts), replace(served, draft_len=0 if step == "undrafted" else 3)]
    if step == "captured":
        steps = [Step(phase=Phase.CAPTURE, draft_len=3, generations=dummies)]
    requests = tuple(Request(id=i, prompt_len=n) for i, n in enumerate((5, 7, 4)))
    return trace(check(Scenario(config=config, requests=requests, steps=tuple(steps)))).steps[-1]


# Compressed tokens


@pytest.mark.parametrize(
    ("past", "query", "ratio", "new"),
    [(5, 3, 4, [1]), (0, 9, 4, [0, 1]), (10, 1, 4, []), (11, 1, 4, [2]), (10, 3, 1, [10, 11, 12]), (127, 1, 128, [0])],
)
def test_a_step_adds_the_tokens_that_it_completes(past: int, query: int, ratio: int, new: list[int]) -> None:
    assert added([Chunk(past, query)], ratio) == [[0, i] for i in new]


def test_upstreams_sizes() -> None:
    """Ratios 1, 4 and 128, a window of 128 and 512 selected tokens: positions 2, 200 and 3,000."""
    config = Config(
        worker=EAGLE3, max_draft_len=1, attention_backend="DEEPSEEK_V4", index_topk=512, window_size=128,
        compress_ratios=(1, 4, 128), tokens_per_block=128, max_seq_len=4096,
    )  # fmt: skip
    fields = seen_compressed(DraftCall([], [], [1, 1, 1], [3, 201, 3001], 0), config)
    assert fields["sparse_mla_topk_lens"] == {1: [3, 128, 128], 4: [128, 178, 640], 128: [128, 129, 151]}
    assert fields["swa_local_indices"][0] == [0, 1, 2, *[-1] * 125]
    assert fields["swa_local_indices"][1] == list(range(73, 201))
    assert [row[:24].count(-1) for row in fields["compressed_local_indices"]] == [24, 23, 1]
    assert len(fields["compressed_local_indices"][0]) == 32
    assert fields["new_comp_kv_lens"] == {1: [1, 1, 1], 4: [0, 0, 0], 128: [0, 0, 0]}
    assert fields["cached_token_lens"] == [2, 200, 3000]


@pytest.mark.parametrize(("longest", "ratio", "columns"), [(4096, 128, 32), (4097, 128, 64), (128, 4, 32), (3, 8, 1)])
def test_columns_for_the_longest_request(longest: int, ratio: int, columns: int) -> None:
    assert most(longest, ratio) == columns


def test_what_is_made_of_nothing_is_empty() -> None:
    slots = [EMPTY, EMPTY, EMPTY, entry(3, 7), entry(4, 8)]
    assert compressed(slots, 2) == [EMPTY, compress(2, slots[2:4])]


@pytest.mark.parametrize("ratios", [(1, 2), (1, 4), (1, 2, 4), (1, 3, 5)])
@pytest.mark.parametrize("holes", [0, 3])
def test_reading_on_is_the_digest_of_all_slots(ratios: tuple[int, ...], holes: int) -> None:
    sight = Sight(2, 3, ratios)
    slots = [EMPTY] * holes + [entry(n, 7 + n * n) for n in range(holes, 24)]
    reading, digests = sight.reading(), [0]
    for n, slot in enumerate(slots, 1):
        digests.append(reading.see(slot))
        assert digests[-1] == compressed_digest(slots[:n], 3, ratios, 2) < PRIME
    assert [reading.fork(n, digests[n]).see(slots[n]) for n in range(24)] == digests[1:]


def test_counts_follow_the_lengths_of_each_forward() -> None:
    """Contexts of 4 tokens, generations from 5 and 7 on, of which 2 and 4 tokens are accepted."""
    step = on("served", MTP_EAGLE, **V4)
    target, later = at(step, "entered"), at(step, "draft[2]")
    assert target["new_comp_kv_lens"] == {1: [4, 4, 4], 2: [2, 2, 2], 4: [1, 1, 1]}
    assert target["compressed_position_ids"] == {2: [0, 2, 4, 6, 6, 8], 4: [0, 4, 4]}
    assert target["slot_owners"] == [[0, 0], [0, 1], [1, 2], [1, 3], [2, 3], [2, 4]]
    assert (later["kv_lens_cuda"], later["cached_token_lens"]) == ([6, 9, 13], [5, 8, 12])
    assert later["new_comp_kv_lens"] == {1: [1, 1, 1], 2: [1, 0, 0], 4: [0, 0, 0]}
    assert later["kv_lens_cuda_2d"] == [[3] * 4, [4] * 4, [6] * 4]
    assert "slot_owners" not in later


def test_caches_of_compressed_tokens_hold_what_is_committed() -> None:
    updated = at(on("served", LINEAR[2], **V4), "updated")
    slots = updated["target_kv"]
    assert {i: len(held) for i, held in slots.items()} == {0: 7, 1: 11, 2: 4}
    assert updated["target_compressed_kv"] == {
        ratio: {i: compressed(held, ratio) for i, held in slots.items()} for ratio in (2, 4)
    }
    assert updated["target_indexer_kv"] == updated["target_compressed_kv"][2]
    assert "draft_indexer_kv" not in updated


@pytest.mark.parametrize("worker", [*LINEAR, PARD, SA])
@pytest.mark.parametrize("ratios", [(1, 2), (1, 2, 4)])
def test_dummies_accept_what_they_are_told_to(worker: str, ratios: tuple[int, ...]) -> None:
    step = on("captured", worker, **V4 | {"compress_ratios": ratios})
    assert [s["num_accepted_tokens"] for s in step.named("verified")] == [[2, 4]] * 3


# Page tables and views


def test_pages_of_the_target() -> None:
    step = on("served", MTP_EAGLE, attention_backend="FLASHINFER")
    for substep in step.named("prepared", "entered"):
        assert substep["num_blocks"] == [1, 3, 3]
        assert substep["_paged_kv_indptr_prefill"] == [0, 1]
        assert substep["_paged_kv_indptr_decode"] == [0, 3, 6]
        # 4 of 4, 9 and 11 tokens.
        assert substep["_paged_kv_last_page_len"] == [4, 1, 3]
        assert substep["_cached_token_lens"] == [0, 5, 7]
    for substep in step.substeps:
        assert not OF_TRTLLM & substep.fields.keys()


def test_a_view_of_the_targets_cache_knows_what_is_committed() -> None:
    step = on("served", MTP_EAGLE, attention_backend="FLASHINFER")
    calls = list(step.named("draft"))
    assert [s.name for s in step.substeps if s.name == "saved"] == []
    assert len(calls) == 3
    for i, call in enumerate(calls):
        assert call["_draft_kv_runtime_lens"] == call["position_ids"] == call["_cached_token_lens"] == [4, 7, 11]
        assert call["_paged_kv_last_page_len"] == [4, 3, 3]
        assert [b // PRIME for _, b in call["hidden_states"]] == [i] * 3
    assert calls[0]["input_ids"] == [row[-1] for row in at(step, "restored")["new_tokens"]]
    assert set(at(step, "updated")["draft_kv"][1]) == {EMPTY}


def test_a_view_of_a_cache_of_its_own_moves_on() -> None:
    own = {"use_separate_draft_kv_cache": True, "draft_num_blocks": 64, "draft_tokens_per_block": 3}
    step = on("served", EAGLE3, attention_backend="FLASHINFER", **own)
    lens = [at(step, f"draft[{i}]")["_draft_kv_runtime_lens"] for i in range(3)]
    assert lens == [[4, 9, 11], [5, 8, 12], [6, 9, 13]]
    last = at(step, "draft[2]")
    assert last["_paged_kv_last_page_len"] == [3, 3, 1]
    assert last["_positions"] == last["_cached_token_lens"] == [5, 8, 12]
    assert (last["_seq_lens"], at(step, "restored")["_seq_lens"]) == ([1, 1, 1], [4, 4, 4])
    assert "kv_lens_cuda" not in at(step, "restored")


@pytest.mark.parametrize("worker", LINEAR[:2])
def test_views_draft_what_other_backends_draft(worker: str) -> None:
    """Nothing that a request is given depends on how its cache is described."""
    own = {"use_separate_draft_kv_cache": True, "draft_num_blocks": 64, "draft_tokens_per_block": 3}
    kept = ("new_tokens", "next_draft_tokens", "use_spec_decoding", "_seq_lens", "num_contexts")
    dense = on("served", worker)
    for sizes in ({}, own):
        step = on("served", worker, attention_backend="FLASHINFER", **sizes)
        assert {f: at(step, "restored")[f] for f in kept} == {f: at(dense, "restored")[f] for f in kept}


def test_without_drafts_a_view_is_not_asked() -> None:
    step = on("undrafted", EAGLE3, attention_backend="FLASHINFER")
    assert [s.name for s in step.substeps] == ["prepared", "entered", "restored", "updated"]


def test_a_sequence_of_one_page_has_its_length_on_the_host() -> None:
    step = on("served", SA, attention_backend="VANILLA", tokens_per_block=256)
    for substep in step.substeps[:-1]:
        assert substep["num_cached_tokens_per_seq"] == [0, 5, 7]
        assert not OF_TRTLLM & substep.fields.keys()
