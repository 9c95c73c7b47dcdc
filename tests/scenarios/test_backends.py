"""What attention backends ask of a configuration, and the integers of compressed attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scenarios import BACKENDS, WORKERS, Config, Phase, ScenarioError, dumps, loads, tracer
from scenarios.backends import check_phase, runs_on
from scenarios.schedule import check_config
from tests.museum.backend_cases import COMPRESSED, VIEWED, compressed

EAGLE3, SA = "Eagle3OneModelWorker", "SAWorker"


@pytest.mark.parametrize(
    ("worker", "change", "message"),
    [
        (EAGLE3, {"compress_ratios": (1, 3)}, r"compress_ratios\[1\]: 3 does not divide tokens_per_block 4, .*divisor"),
        (EAGLE3, {"compress_ratios": (2, 4)}, r"compress_ratios: \[2, 4\] is not 1 and one or two larger ratios, 128"),
        (EAGLE3, {"compress_ratios": (1, 4, 2)}, r"compress_ratios: \[1, 4, 2\] is not .* in ascending order"),
        (EAGLE3, {"window_size": 0}, "window_size: 0 is too small for DEEPSEEK_V4; write 1 or more"),
        (EAGLE3, {"attention_backend": "DSA"}, "window_size: DSA compresses no tokens; leave it out"),
        (EAGLE3, {**VIEWED, "index_topk": 0}, "window_size: FLASHINFER compresses no tokens; leave it out"),
        ("PARDWorker", VIEWED, "index_topk: 2 does not fit attention_backend FLASHINFER; leave it out"),
    ],
)
def test_what_does_not_fit_is_refused(worker: str, change: dict[str, Any], message: str) -> None:
    config = Config(worker=worker, max_draft_len=3, **COMPRESSED)
    check_config(config)
    with pytest.raises(ScenarioError, match=f"^config.{message}"):
        check_config(replace(config, **change))


def test_a_worker_that_does_not_run_on_a_backend_is_told_which_ones_it_runs_on() -> None:
    with pytest.raises(ScenarioError, match="PARDWorker does not run on VANILLA; .* TRTLLM, DSA, DEEPSEEK_V4$"):
        check_config(Config(worker="PARDWorker", max_draft_len=1, attention_backend="VANILLA", tokens_per_block=256))
    assert all(runs_on(worker, "TRTLLM") for worker in WORKERS)
    assert [w for w in WORKERS if runs_on(w, "FLASHINFER")] == [EAGLE3, "MTPEagleWorker", SA]


def test_one_page_holds_the_longest_sequence_and_the_drafts_of_a_step() -> None:
    vanilla = Config(worker=SA, max_draft_len=3, attention_backend="VANILLA", max_seq_len=32, tokens_per_block=35)
    check_config(vanilla)
    with pytest.raises(ScenarioError, match="tokens_per_block: 34 is too small for VANILLA, .*; write 35 or more"):
        check_config(replace(vanilla, tokens_per_block=34))
    check_phase(vanilla, Phase.WARMUP, "steps[0]")
    with pytest.raises(ScenarioError, match=r"^steps\[0\].phase: VANILLA reads lengths on the host, .*; write 'eager'"):
        check_phase(vanilla, Phase.CAPTURE, "steps[0]")


def test_a_drafter_without_a_cache_needs_no_room_and_is_asked_for_plain_chains() -> None:
    shared = Config(worker=EAGLE3, max_draft_len=3, **VIEWED)
    apart = replace(shared, use_separate_draft_kv_cache=True, draft_num_blocks=8, draft_tokens_per_block=4)
    assert (shared.shares_target_kv, shared.num_extra_kv_tokens) == (True, 0)
    assert (apart.shares_target_kv, apart.num_extra_kv_tokens) == (False, 2)
    assert not Config(worker=SA, max_draft_len=3, **VIEWED).shares_target_kv
    for variant in ({"sa_threshold": 2}, {"guided_decoding": True}):
        check_config(replace(apart, **variant))
        with pytest.raises(ScenarioError, match="not combined with a drafter that reads the target's KV cache"):
            check_config(replace(shared, **variant))


def test_ratios_survive_json() -> None:
    scenario = compressed(EAGLE3)
    assert loads(dumps(scenario)) == scenario
    assert '"compress_ratios": [1, 2, 4]' in dumps(scenario)
    assert BACKENDS["DEEPSEEK_V4"].compressed


def test_the_digest_sums_windows_and_compressed_tokens_of_each_layer() -> None:
    entries = [tracer.entry(i, 7 + i) for i in range(5)]
    window = sum(tracer.term(i, entries[i]) for i in (3, 4))
    pairs = [tracer.term(i, tracer.compress(2 * i, entries[2 * i : 2 * i + 2])) for i in range(2)]
    four = tracer.term(0, tracer.compress(0, entries[:4]))
    assert tracer.compressed_digest(entries, 2, (1, 2, 4), 1) == (3 * window + max(pairs) + four) % tracer.PRIME
    assert tracer.compressed_digest(entries, 2, (1, 2), 8) == (2 * window + sum(pairs)) % tracer.PRIME


def test_nothing_empty_is_seen_or_compressed() -> None:
    empty = [tracer.EMPTY] * 4
    own = tracer.entry(4, 9)
    assert tracer.compress(4, [tracer.EMPTY, own]) == tracer.compress(5, [own])
    assert tracer.compress(0, empty) == tracer.EMPTY
    alone = tracer.compressed_digest([*empty, own], 8, (1, 2), 8)
    assert alone == 2 * tracer.term(4, own) % tracer.PRIME


@pytest.mark.parametrize("accept", [1, 2, 3])
def test_dummies_have_as_many_tokens_accepted_as_they_say(accept: int) -> None:
    drafts = tracer.dummy_drafts(5, 2, accept, 1, 3, (1, 2))
    entries, agreed = [tracer.EMPTY] * 5, 0
    for depth, token in enumerate((tracer.DUMMY_TOKEN, *drafts)):
        entries.append(tracer.entry(5 + depth, token))
        choice = tracer.choose(tracer.compressed_digest(entries, 3, (1, 2), 1))
        if agreed == depth and depth < len(drafts):
            agreed += drafts[depth] == choice
    assert 1 + agreed == accept
