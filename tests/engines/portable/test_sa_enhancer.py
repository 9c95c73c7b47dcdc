"""Suffix automata beside a draft model: which texts they extend, and whose drafts they override."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.portable.speculative.sa_enhancer import SADraftEnhancer
from scenarios import WORKERS, Generation, Phase, Step
from scenarios.tracer import disagree, prompt_token
from tests.engines.portable.scripts import context, dummies, generations, go, scenario, updated
from tests.engines.portable.support import CPU, ints
from tests.engines.portable.test_sa_worker import continued

ENHANCED = [name for name, traits in WORKERS.items() if traits.sa_enhancer]
SPARSE: dict[str, Any] = {"attention_backend": "DSA", "index_topk": 3}
CASES = [(name, {}) for name in ENHANCED] + [(name, SPARSE) for name in ENHANCED if WORKERS[name].sparse]
PROMPTS = 5, 6, 7


class Automata:
    """Finds matches of 2, 3, 4 tokens and drafts 101, 102, ... in the first text, 201, ... in the second, and so on."""

    def __init__(self) -> None:
        self.extended: list[Any] = []

    def extend(self, accepted: torch.Tensor, counts: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert accepted.is_contiguous()
        self.extended.append((accepted.tolist(), counts.tolist()))
        rows = torch.arange(len(accepted)).unsqueeze(1)
        return rows.squeeze(1) + 2, ((rows + 1) * 100 + torch.arange(draft_len) + 1).int()


def test_rows_whose_match_is_long_enough_are_overridden() -> None:
    automata: Any = Automata()
    enhancer = SADraftEnhancer(3, 4, 3, CPU)
    buffers = enhancer.match_len, enhancer.draft_tokens
    # A context, two generations; rows are padded beyond K + 1.
    accepted = ints([[10, 0, 0, 0], [11, 12, 13, 0], [21, 22, 23, 0]])
    enhancer.extend_and_prepare(automata, accepted, ints([1, 2, 3]), 2, 1, 2)
    assert automata.extended == [([[11, 12, 13], [21, 22, 23]], [2, 3])]
    drafts = ints([[1, 2], [3, 4]])
    assert enhancer.maybe_override_all_draft_tokens(drafts).tolist() == [[1, 2], [201, 202]]
    assert enhancer.match_len is buffers[0]
    assert enhancer.draft_tokens is buffers[1]


def test_without_generations_nothing_is_extended_or_overridden() -> None:
    automata: Any = Automata()
    enhancer = SADraftEnhancer(1, 4, 3, CPU)
    enhancer.extend_and_prepare(automata, ints([[10, 0]]), ints([1]), 0, 1, 1)
    assert automata.extended == []
    assert enhancer.maybe_override_all_draft_tokens(ints([[1]])[:0]).shape == (0, 1)


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize(("worker", "options"), CASES, ids=str)
def test_long_matches_draft_as_the_text_goes_on(worker: str, options: dict[str, Any]) -> None:
    rows = Generation(request=1, agree=2, match=4), Generation(request=0, agree=3, match=3)
    steps = (
        Step(phase=Phase.CAPTURE, draft_len=3, generations=dummies(5, 4)),
        Step(draft_len=3, contexts=(context(worker, 0, 5, 1), context(worker, 1, 6))),
        Step(draft_len=3, contexts=(context(worker, 2, 7),), generations=rows),
        Step(draft_len=3, generations=rows[::-1], phase=Phase.REPLAY),
        Step(draft_len=3, generations=generations([2, 0, 1])),
    )
    trace = go(scenario(worker, PROMPTS, *steps, sa_threshold=4, **options))
    topk = options.get("index_topk", 0)
    texts = {i: [prompt_token(0, i, p) for p in range(n)] for i, n in enumerate(PROMPTS)}
    assert trace.steps[1].substeps[-1]["automaton"] == {0: texts[0], 1: texts[1]}
    for step, overridden in ((2, 1), (3, 1)):
        emitted = trace.steps[step].substeps[-1]["emitted"][1]
        first, second, third = continued(texts[1] + emitted, 3, topk)
        returned = trace.steps[step].find("restored")
        assert returned is not None
        assert returned["next_draft_tokens"][overridden][:3] == [first, second, disagree(third)]
        assert returned["sa_match_len"] == ([4, 3] if step == 2 else [3, 4])
    # The other row had the model's own drafts, and those were right.
    assert trace.steps[3].substeps[-1]["py_num_accepted_draft_tokens"] == {0: 3, 1: 2}
    assert trace.steps[4].substeps[-1]["py_num_accepted_draft_tokens"] == {2: 0, 0: 3, 1: 2}
    emitted = updated(trace, "emitted")
    assert updated(trace, "automaton") == {i: text + emitted[i] for i, text in texts.items()}
    assert all(emitted[i] == continued(text, len(emitted[i]), topk) for i, text in texts.items())
    assert updated(trace, "sa_requests") == [0, 1, 2]
    assert trace.steps[0].substeps[-1]["sa_requests"] == []
