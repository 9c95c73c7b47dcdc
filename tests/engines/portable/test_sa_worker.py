"""Suffix automata: what is appended to a text, and what is drafted from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engines.portable.heads import Steering
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.speculative.suffix_automaton import SuffixAutomatonManager
from engines.tracer import SparseTracer, Tracer
from scenarios import Phase, Step
from scenarios.tracer import PAD_TOKEN, PRIME, choose, disagree, entry, prompt_token, term
from tests.engines.portable.scripts import context, dummies, generations, go, greedy, scenario, updated
from tests.engines.portable.support import CPU, ints

SA = "SAWorker"


def continued(text: Sequence[int], count: int, topk: int = 0) -> list[int]:
    """How a target that attends to everything, or to ``topk`` tokens, goes on."""
    tokens = list(text)
    for _ in range(count):
        terms = sorted(term(n, entry(n, token)) for n, token in enumerate(tokens))
        tokens.append(choose(sum(terms[-topk:] if topk else terms) % PRIME))
    return tokens[len(text) :]


@pytest.mark.parametrize("topk", [0, 1, 3, 100])
def test_the_tracer_continues_texts(topk: int) -> None:
    tracer = SparseTracer(16, CPU, topk) if topk else Tracer(16, CPU)
    texts = [[5, 6, 7, 8, 9, 11], [20], [3, 3, 3]]
    padded = ints([[*text, *[99] * (8 - len(text))] for text in texts])
    lens = ints([len(text) for text in texts], torch.int64)
    assert tracer.continue_text(padded, lens, 4).tolist() == [continued(text, 4, topk) for text in texts]
    assert tracer.continue_text(padded, lens, 0).shape == (3, 0)


class Automata:
    """Texts of three requests, the first two in the batch, the other way round; max_seq_len 10."""

    def __init__(self) -> None:
        self.steering = Steering(4, CPU)
        self.manager = SuffixAutomatonManager(Tracer(16, CPU), self.steering, 3, 6, 4, 10, CPU)
        requests = tuple(LlmRequest(i, text, context_chunk_size=1) for i, text in enumerate(([1, 2], [7, 8, 9], [4])))
        self.manager.prepare_resources(ScheduledRequests(requests))
        self.manager.prepare([1, 0])

    def text(self, request: int) -> list[int]:
        (slot,) = self.manager.slot_manager.get_slots([request])
        return self.manager.text[slot, : self.manager.text_lens[slot]].tolist()  # type: ignore[no-any-return]


def test_accepted_tokens_are_appended_and_drafts_are_steered() -> None:
    automata = Automata()
    automata.steering.steer_automata([2, 0], [4, 0])
    match_len, drafts = automata.manager.extend(ints([[31, 32, 33, 34], [41, 42, 43, 44]]), ints([3, 1]), 3)
    assert [automata.text(i) for i in range(3)] == [[1, 2, 41], [7, 8, 9, 31, 32, 33], [4]]
    assert match_len.tolist() == [4, 0]
    first, second, third = continued(automata.text(1), 3)
    assert drafts[0].tolist() == [first, second, disagree(third)]
    assert (drafts.dtype, drafts.shape) == (torch.int32, (2, 3))


def test_a_text_that_is_full_stays_in_its_row() -> None:
    """Each forward of a graph's warm-up appends to the texts of its dummies."""
    automata = Automata()
    for _ in range(5):
        automata.manager.extend(ints([[31, 32, 33, 34], [41, 42, 43, 44]]), ints([4, 4]), 3)
    assert len(automata.text(0)) == len(automata.text(1)) == automata.manager.text.shape[1] == 14
    # Drafting goes on from the length, which must not say more than there is.
    assert automata.manager.text_lens.max() == 14
    assert automata.text(2) == [4]


def test_beside_a_model_the_host_brings_along_what_it_knows_and_the_device_the_rest() -> None:
    """The first request's prompt is in flight; the second one's has been processed, and the third one goes on."""
    automata = Automata()
    automata.manager.with_contexts = False
    first, second, third = LlmRequest(0, [1, 2]), LlmRequest(1, [7, 8, 9], generated=[5]), LlmRequest(2, [4])
    third.generated, third.py_batch_idx = [6], 0
    automata.manager.prepare_resources(ScheduledRequests((), (second, first, third)))
    automata.manager.prepare([1, 0, 2])
    automata.manager.append_first_tokens(ints([31, 41, 51]))
    assert [automata.text(i) for i in range(3)] == [[1, 2, 41], [7, 8, 9, 5], [4]]


def test_a_slot_begins_with_the_text_of_its_new_owner() -> None:
    automata = Automata()
    automata.manager.free_resources(LlmRequest(1, []))
    dummy = LlmRequest(9, [6], is_dummy=True, generated=[5])
    automata.manager.add_dummy_requests([dummy])
    automata.manager.prepare([9])
    assert automata.text(9) == [6, 5]
    assert automata.manager.slot_manager.get_slots([9]) == [1]


@pytest.mark.parametrize("options", [{}, {"attention_backend": "DSA", "index_topk": 3}])
def test_the_text_follows_the_request(options: dict[str, Any]) -> None:
    """Through chunks, a step without drafts and one in which it is not in the batch, from whatever it drafts."""
    steps = (
        Step(phase=Phase.CAPTURE, draft_len=2, generations=dummies(4, accept=2)),
        Step(draft_len=2, contexts=(context(SA, 0, 3, 1), context(SA, 1, 2, 2))),
        Step(draft_len=1, contexts=(context(SA, 0, 2),)),
        Step(draft_len=3, generations=generations([1, 0], 3)),
        Step(draft_len=0, generations=generations([0])),
        Step(phase=Phase.REPLAY, draft_len=2, generations=generations([0], 1)),
        Step(draft_len=2, generations=generations([0, 1], 2)),
    )
    trace = go(scenario(SA, (5, 2), *steps, **options))
    chunk = trace.steps[1].find("restored")
    prompt = [prompt_token(0, 0, i) for i in range(5)]
    first, second = continued(prompt, 2, options.get("index_topk", 0))
    assert chunk is not None
    assert chunk["next_draft_tokens"][0] == [first, disagree(second)]
    assert trace.steps[1].substeps[-1]["automaton"][0] == prompt
    without_match = trace.steps[2].find("restored")
    assert without_match is not None
    assert without_match["next_draft_tokens"] == [[PAD_TOKEN]]
    for request, prompt_len in ((0, 5), (1, 2)):
        tokens = [prompt_token(0, request, i) for i in range(prompt_len)]
        emitted = updated(trace, "emitted")[request]
        assert updated(trace, "automaton")[request] == tokens + emitted
        assert emitted == continued(tokens, len(emitted), options.get("index_topk", 0))
        assert not any(updated(trace, "draft_kv")[request])
    if not options:
        assert updated(trace, "emitted")[0] == greedy(0, 0, 5, len(updated(trace, "emitted")[0]))
    assert [step.substeps[1].name for step in trace.steps[1:]] == ["entered"] * 6
    assert [s.name for s in trace.steps[4].substeps] == ["prepared", "entered", "restored", "updated"]
