"""Recurrent states and proposals: which configurations may have them, and what the tracer makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from scenarios import WORKERS, Config, ScenarioError
from scenarios.limits import check_config
from scenarios.tracer import NO_PROPOSAL, PRIME, RECURRENT_START, entry, proposal, recurrent_state, term

SPARSE: dict[str, Any] = {"attention_backend": "DSA", "index_topk": 2}
TREE: dict[str, Any] = {"dynamic_tree_max_topK": 2, "max_total_draft_tokens": 6}


def _check(worker: str, **options: Any) -> None:
    check_config(Config(worker=worker, max_draft_len=3, **options))


@pytest.mark.parametrize(
    ("worker", "options", "message"),
    [
        ("PARDWorker", {"recurrent": True}, "config.recurrent: PARDWorker makes no recurrent state live"),
        ("Eagle3OneModelDynamicTreeWorker", {"recurrent": True, **TREE}, "config.recurrent: Eagle3OneModelDynamicTree"),
        ("SAWorker", {"recurrent": True, **SPARSE}, "config.recurrent: is not combined with attention_backend DSA"),
        ("SAWorker", {"rejection_sampling": True}, "config.rejection_sampling: SAWorker has no drafts of a model"),
        ("MTPEagleDynamicTreeWorker", {"rejection_sampling": True, **TREE}, "config.rejection_sampling: MTPEagleDyn"),
        (
            "Eagle3OneModelWorker",
            {"rejection_sampling": True, "force_num_accepted_tokens": 1.0},
            "config.force_num_accepted_tokens: is not combined with rejection_sampling",
        ),
        (
            "DFlashWorker",
            {"rejection_sampling": True, "sa_threshold": 2},
            "config.sa_threshold: is not combined with rejection_sampling",
        ),
    ],
)
def test_what_is_not_combined_is_refused(worker: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        _check(worker, **options)
    assert str(refused.value).startswith(message)


def test_both_are_combined_with_each_other_and_with_most_of_the_rest() -> None:
    for name, traits in WORKERS.items():
        if traits.recurrent and traits.rejection_sampling:
            _check(name, recurrent=True, rejection_sampling=True, overlap=True, kv_cache_manager="V2")
            _check(name, recurrent=True, rejection_sampling=True, guided_decoding=True, host_offload=True)
    _check("MTPEagleWorker", rejection_sampling=True, **SPARSE)


def test_a_state_is_the_digest_of_what_was_fed() -> None:
    tokens, state = [5, 900, 17], RECURRENT_START
    for position, token in enumerate(tokens):
        state = recurrent_state(state, position, token)
    assert state == sum(term(i, entry(i, token)) for i, token in enumerate(tokens)) % PRIME


def test_a_proposal_belongs_to_one_depth_and_one_digest() -> None:
    made = {proposal(depth, digest) for depth in range(8) for digest in (0, 1, 2, PRIME - 1)}
    assert len(made) == 32
    assert min(made) > max(NO_PROPOSAL, 0)
