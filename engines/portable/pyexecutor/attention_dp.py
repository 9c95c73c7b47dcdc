"""Batches of several ranks: dummies that keep them in step, and the requests that dummies are."""

from __future__ import annotations

from dataclasses import replace

from engines.portable.distributed import Distributed
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from scenarios import Config
from scenarios import forced_acceptance as forced
from scenarios.tracer import DUMMY_TOKEN, dummy_drafts


def dummy_context(row: int, chunk: int) -> LlmRequest:
    """A dummy of one row of the batch whose prompt is ``chunk`` tokens."""
    return LlmRequest(_dummy_id(row), [DUMMY_TOKEN] * chunk, is_dummy=True)


def dummy_generation(
    config: Config, row: int, draft_len: int, past: int, accept: int, verify: int | None = None
) -> LlmRequest:
    """A dummy of one row of the batch that has ``past`` cached tokens; the target accepts ``accept`` of its tokens.

    ``verify`` is how many of its drafts it verifies, None for all.
    """
    # Without a tree of its own a dummy's drafts are placeholders.
    made = 0 if config.traits.tree else draft_len
    drafts = dummy_drafts(past, made, accept, config.index_topk, config.window_size, config.compress_ratios)
    request = LlmRequest(_dummy_id(row), [DUMMY_TOKEN] * past, is_dummy=True, py_draft_tokens=drafts)
    request.py_verify_len = verify
    request.generated.append(DUMMY_TOKEN)
    return request


def _dummy_id(row: int) -> int:
    """Id of the dummy in a row: no user's request has it, as upstream counts them down from the largest."""
    return (1 << 64) - 1 - row


class AttentionDPPadding:
    """What an executor adds to its batches so that all ranks run one, and a graph of the same size.

    The dummies are the same in all steps, one per place. Each has pages of its own; upstream's, one object that is
    repeated, share theirs.
    """

    def __init__(self, config: Config, dist: Distributed) -> None:
        self.config = config
        self.dist = dist
        self._dummies: list[LlmRequest] = []

    def pad(self, batch: ScheduledRequests, draft_len: int, *, use_cuda_graph: bool) -> ScheduledRequests:
        """``batch`` with one dummy if it is empty; for a graph, with dummies up to the size of the largest rank's."""
        if not self.dist.enable_attention_dp:
            return batch
        rows = len(batch.all_requests())
        sizes = self.dist.tp_allgather("executor.batch", rows, [peer.num_seqs for peer in self.dist.scheduled])
        size = max(1, *sizes) if use_cuda_graph else max(1, rows)
        dummies = (self._dummy(place, draft_len) for place in range(size - rows))
        return replace(batch, generation_requests=(*batch.generation_requests, *dummies))

    def _dummy(self, place: int, draft_len: int) -> LlmRequest:
        """The dummy of this place, with the drafts of a step."""
        force = self.config.force_num_accepted_tokens
        accept = forced.most(force, draft_len) if force else 1
        drafted = dummy_generation(self.config, place, draft_len, self.config.least_history, accept)
        if place == len(self._dummies):
            self._dummies.append(replace(drafted, is_attention_dp_dummy=True))
        dummy = self._dummies[place]
        dummy.py_draft_tokens = drafted.py_draft_tokens
        return dummy
