"""Guided decoding: who tells a matcher what, and when; what a mask leaves of a head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.portable import PortableEngine
from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.speculative.interface import SpecWorkerBase
from engines.tracer import two_choices
from scenarios import WORKERS, Config, Context, Request, Step
from scenarios.tracer import GRAMMAR_START, VOCAB_SIZE, d2t, disagree, draft_id, grammar_allows, grammar_state, guided

HOOKS = ("execute", "add_draft_batch", "execute_draft_batch", "rollback_rejected_batch")
GUIDED = [name for name, traits in WORKERS.items() if not traits.tree]


@pytest.mark.parametrize("worker", GUIDED)
def test_order_of_the_hooks(worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def spy(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, kwargs["draft_step"]) if "draft_step" in kwargs else name)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    for hook in HOOKS:
        spy(CapturableGuidedDecoder, hook)
    spy(SpecWorkerBase, "_apply_force_accepted_tokens")
    traits = WORKERS[worker]
    config = Config(worker=worker, max_draft_len=2, guided_decoding=True)
    session = PortableEngine().open(config, (Request(id=0, prompt_len=3), Request(id=1, prompt_len=3)), observe=False)
    session.step(Step(draft_len=2, contexts=(Context(request=0, chunk=3),)))
    steps = [(hook, i) for i in (0, 1) for hook in ("add_draft_batch", "execute_draft_batch")]
    after = steps if traits.guides_drafts else ["rollback_rejected_batch"]
    assert calls == ["execute", "_apply_force_accepted_tokens", *after]
    if traits.min_draft_len == 0 and not traits.fixed_draft_len:
        calls.clear()
        session.step(Step(draft_len=0, contexts=(Context(request=1, chunk=3),)))
        assert calls == ["execute"]


def _decoder(request: LlmRequest) -> CapturableGuidedDecoder:
    decoder = CapturableGuidedDecoder(
        num_slots=2, max_num_requests=2, width=3, max_tokens=20, device=torch.device("cpu")
    )
    decoder._add_slot(request)
    return decoder


def test_a_step_advances_by_what_is_fed_and_keeps_what_is_accepted() -> None:
    request = LlmRequest(0, [7, 8], context_current_position=2, generated=[5], py_draft_tokens=[6, 9])
    decoder = _decoder(request)
    decoder.add_batch(ScheduledRequests((), (request,)), 2)
    decoder.feed(torch.tensor([[5, 6, 9]], dtype=torch.int32))
    logits = two_choices(torch.tensor([10, 20, 30]))
    decoder.execute(logits)
    states = [grammar_state(GRAMMAR_START, 5)]
    states += [grammar_state(states[0], 6)]
    states += [grammar_state(states[1], 9)]
    assert logits.argmax(1).tolist() == [guided(t, s) for t, s in zip((10, 20, 30), states)]
    assert decoder.num_advanced_tokens.tolist() == [3, 0, 0]
    for step, token in enumerate((11, 12)):
        decoder.add_draft_batch(torch.tensor([token]), torch.tensor([2]), draft_step=step)
        decoder.execute_draft_batch(two_choices(torch.tensor([1])), draft_step=step)
    assert decoder.num_advanced_tokens.tolist() == [2, 0, 0]
    assert decoder.matcher_states[0, :3].tolist() == [GRAMMAR_START, *states[:2]]


def test_dummies_and_draft_vocabularies() -> None:
    request = LlmRequest(0, [7], context_chunk_size=1)
    dummy = LlmRequest(9, [1], is_dummy=True, context_chunk_size=1)
    decoder = _decoder(request)
    decoder.add_batch(ScheduledRequests((dummy, request)), 1)
    tokens = [4, 4]
    mapped = torch.tensor([d2t(i) for i in range(VOCAB_SIZE)])
    of_drafts = two_choices(torch.tensor(tokens)).index_select(1, mapped + torch.arange(VOCAB_SIZE))
    decoder.add_draft_batch(torch.tensor([3, 3]), torch.tensor([1, 1]))
    decoder.execute_draft_batch(of_drafts, mapped)
    state = grammar_state(GRAMMAR_START, 3)
    assert of_drafts.argmax(1).tolist() == [draft_id(4), draft_id(guided(4, state))]


def test_a_mask_leaves_a_choice_and_keeps_agreement_apart() -> None:
    for token in range(1, VOCAB_SIZE - 1):
        for state in range(8):
            assert grammar_allows(state, guided(token, state))
            assert guided(token, state) != guided(disagree(token), state)
