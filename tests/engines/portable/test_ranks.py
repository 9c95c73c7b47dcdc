"""Several ranks: what is exchanged, how rows are gathered, who is padded."""

from __future__ import annotations

import pytest
import torch

from engines.base import run
from engines.portable import PortableEngine
from engines.portable.distributed import Distributed, FusedMoE, PeerBatch
from engines.portable.pyexecutor.attention_dp import AttentionDPPadding
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from scenarios import Config, Context, Fault, FaultKind, Peer, Request, Scenario, Step
from scenarios.tracer import MOE_MAX_NUM_TOKENS

MTP_EAGLE = "MTPEagleWorker"


def test_experts_return_the_rows_of_this_rank_in_rounds_of_the_largest() -> None:
    dist = Distributed(3, 1)
    rows = torch.arange(10, 15).unsqueeze(1)
    assert FusedMoE(dist, "moe")(rows, [2, 5, 2 * MOE_MAX_NUM_TOKENS + 1]).equal(rows)
    assert dist.calls == [("moe", [1, 2, 11]), ("moe", [1, 2, 11]), ("moe", [0, 1, 11])]


@pytest.mark.parametrize("counts", [[2, 4, 3], [2, 6, 3]])
def test_experts_refuse_a_count_that_is_not_that_of_the_rows(counts: list[int]) -> None:
    with pytest.raises(RuntimeError, match=r"^moe: rank 1 has 5 rows and all_rank_num_tokens says [46]$"):
        FusedMoE(Distributed(3, 1), "moe")(torch.zeros(5, 1), counts)


def test_experts_ask_for_counts_only_among_several() -> None:
    rows = torch.ones(2, 1)
    assert FusedMoE(Distributed(), "moe")(rows, None) is rows
    with pytest.raises(RuntimeError, match="^moe: all_rank_num_tokens is not set$"):
        FusedMoE(Distributed(2, 0), "moe")(rows, None)


@pytest.mark.parametrize(
    ("real", "others", "use_cuda_graph", "size"),
    [(0, (0, 2), False, 1), (0, (3, 2), True, 3), (1, (0, 0), True, 1), (2, (1, 4), True, 4), (2, (1, 4), False, 2)],
)
def test_a_batch_is_padded_as_the_ranks_need_it(
    real: int, others: tuple[int, ...], use_cuda_graph: bool, size: int
) -> None:
    dist = Distributed(3, 2)
    dist.begin([PeerBatch((), n) for n in others], [])
    padding = AttentionDPPadding(Config(worker=MTP_EAGLE, max_draft_len=2), dist)
    batch = ScheduledRequests((), tuple(LlmRequest(i, [7], generated=[7]) for i in range(real)))
    rows = padding.pad(batch, 2, use_cuda_graph=use_cuda_graph).all_requests()
    assert [row.is_dummy for row in rows] == [False] * real + [True] * (size - real)
    assert len({row.py_request_id for row in rows}) == size
    assert dist.calls == [("executor.batch", [*others, real])]


def test_a_dummy_is_one_object_that_goes_on_from_nothing() -> None:
    dist = Distributed(2, 0)
    dist.begin([PeerBatch((), 2)], [])
    padding = AttentionDPPadding(Config(worker=MTP_EAGLE, max_draft_len=3), dist)
    first, second = padding.pad(ScheduledRequests(), 3, use_cuda_graph=True).generation_requests
    first.py_batch_idx = 0
    (again,) = padding.pad(ScheduledRequests(), 1, use_cuda_graph=False).generation_requests
    assert again is first
    assert (again.previous_row, again.num_cached_tokens) == (None, 0)
    assert (len(again.py_draft_tokens), len(second.py_draft_tokens)) == (1, 3)


@pytest.mark.parametrize(
    ("worker", "first", "later"),
    [("Eagle3OneModelWorker", [6, 2, 5], [6, 1, 1]), (MTP_EAGLE, [18, 2, 5], [6, 1, 1])],
)
def test_draft_calls_are_given_the_counts_of_their_rows(worker: str, first: list[int], later: list[int]) -> None:
    config = Config(worker=worker, max_draft_len=2, attention_dp_size=3, attention_dp_rank=1)
    peers = Peer(generations=6), Peer(contexts=(5,))
    step = Step(draft_len=2, contexts=(Context(request=0, chunk=2),), peers=peers)
    case = Scenario(config=config, requests=(Request(id=0, prompt_len=2),), steps=(step,))
    (seen,) = run(PortableEngine(), case).steps
    assert [s["draft_all_rank_num_tokens"] for s in seen.named("draft")] == [first, later]
    assert {tuple(s["all_rank_num_tokens"]) for s in seen.substeps if "num_tokens" in s} == {(18, 2, 5)}


def test_counts_are_the_targets_again_when_a_draft_forward_fails() -> None:
    config = Config(worker=MTP_EAGLE, max_draft_len=2, attention_dp_size=2)
    fault = Fault(site="dist.allgather_rows", occurrence=3, kind=FaultKind.ERROR)
    step = Step(draft_len=2, contexts=(Context(request=0, chunk=2),), peers=(Peer(generations=1),), fault=fault)
    case = Scenario(config=config, requests=(Request(id=0, prompt_len=2),), steps=(step,))
    (seen,) = run(PortableEngine(), case).steps
    failed = seen.find("failed")
    assert failed is not None
    assert seen.injected
    assert failed["all_rank_num_tokens"] == [2, 3]
