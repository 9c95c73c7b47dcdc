"""Scenarios that show wrong rules of the oracle which no scenario of a seeded defect shows."""

from __future__ import annotations

from typing import Any

from scenarios import (
    Config,
    Context,
    Fault,
    FaultKind,
    Generation,
    Peer,
    Phase,
    Request,
    Scenario,
    Step,
    check,
    kept_in_step,
)
from tests.invariants.cases import (
    beside,
    hybrid,
    on_backend,
    overlapped,
    overlapping,
    ragged,
    ranked,
    sharing,
    sparse,
    started_up,
)
from tests.museum.scenario_of import SCENARIOS as OF_DEFECTS

K = 3


def _scenario(worker: str, *steps: Step, prompts: tuple[int, ...], **config: Any) -> Scenario:
    requests = tuple(Request(id=i, prompt_len=n) for i, n in enumerate(prompts))
    return check(Scenario(config=Config(worker=worker, max_draft_len=K, **config), requests=requests, steps=steps))


def shrinking(worker: str) -> Scenario:
    """Three drafts, of which one is verified, on either backend."""
    steps = (
        Step(draft_len=K, contexts=(Context(request=0, chunk=4, agree=K),)),
        Step(draft_len=1, generations=(Generation(request=0, agree=1),)),
    )
    return _scenario(worker, *steps, prompts=(4,), attention_backend="DSA", index_topk=2)


def in_chunks(worker: str) -> Scenario:
    """A prompt in two chunks, after each of which a match is found."""
    steps = (
        Step(draft_len=K, contexts=(Context(request=0, chunk=2, agree=1),)),
        Step(draft_len=K, contexts=(Context(request=0, chunk=3, agree=1),)),
    )
    return _scenario(worker, *steps, prompts=(5,))


def just_selected(worker: str) -> Scenario:
    """A context that the draft loop may make exactly as long as the selection is wide."""
    step = Step(draft_len=K, contexts=(Context(request=0, chunk=4),))
    topk = 4 + Config(worker=worker, max_draft_len=K).num_extra_kv_tokens
    return _scenario(worker, step, prompts=(4,), attention_backend="DSA", index_topk=topk)


def beside_a_failure(worker: str) -> Scenario:
    """A request stands aside while the step of another one fails."""
    fault = Fault(site="target_model.forward", occurrence=1, kind=FaultKind.ERROR)
    steps = (
        Step(draft_len=K, contexts=(Context(request=0, chunk=4),)),
        Step(draft_len=K, contexts=(Context(request=1, chunk=3),), fault=fault),
        Step(draft_len=K, contexts=(Context(request=2, chunk=2),)),
    )
    return _scenario(worker, *steps, prompts=(4, 3, 2))


def thinking_in_chunks(worker: str) -> Scenario:
    """The prompt of a request that is going to think takes two steps."""
    steps = (
        Step(draft_len=K, contexts=(Context(request=0, chunk=2),)),
        Step(draft_len=K, contexts=(Context(request=0, chunk=2),)),
    )
    relaxed = {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 2, "relaxed_delta": 0.5}
    config = Config(worker=worker, max_draft_len=K, **relaxed)
    requests = (Request(id=0, prompt_len=4, thinking=True),)
    return check(Scenario(config=config, requests=requests, steps=steps))


def giving_way(worker: str) -> Scenario:
    """In 8 pages three prompts of which each takes half or more, then one like the first, which fails, and another."""
    whole = [Context(request=i, chunk=n) for i, n in enumerate((9, 9, 14, 10, 10))]
    fault = Fault(site="target_model.forward", occurrence=1, kind=FaultKind.ERROR)
    steps = [Step(draft_len=K, contexts=(row,), finish=(row.request or 0,)) for row in whole[:3]]
    steps += [Step(draft_len=K, contexts=(whole[3],), fault=fault), Step(draft_len=K, contexts=(whole[4],))]
    requests = tuple(
        Request(id=i, prompt_len=row.chunk, prefix_of=0 if i > 2 else None, prefix_len=9 if i > 2 else 0)
        for i, row in enumerate(whole)
    )
    config = Config(worker=worker, max_draft_len=K, num_blocks=8, enable_block_reuse=True)
    return check(Scenario(config=config, requests=requests, steps=tuple(steps)))


def known_in_two_caches(worker: str) -> Scenario:
    """A prompt in two chunks fills pages of 4 and of 3 tokens; one like it starts before and one after the second."""
    likes = [Request(id=i, prompt_len=14, prefix_of=0, prefix_len=9) for i in (1, 2)]
    chunks = (Context(request=0, chunk=9), Context(request=0, chunk=4))
    steps = (
        Step(draft_len=K, contexts=chunks[:1]),
        Step(draft_len=K, contexts=(chunks[1], Context(request=1, chunk=14))),
        Step(draft_len=K, contexts=(Context(request=2, chunk=14),)),
    )
    pages = {"use_separate_draft_kv_cache": True, "draft_tokens_per_block": 3, "draft_num_blocks": 40}
    config = Config(worker=worker, max_draft_len=K, enable_block_reuse=True, **pages)
    return check(Scenario(config=config, requests=(Request(id=0, prompt_len=13), *likes), steps=steps))


def ragged_beside_a_prompt(worker: str) -> Scenario:
    """A generation verifies two drafts in a step with a context, on a sparse backend."""
    steps = (
        Step(draft_len=K, contexts=(Context(request=0, chunk=4, agree=1),)),
        Step(draft_len=K, contexts=(Context(request=1, chunk=3),), generations=(Generation(request=0, verify=2),)),
    )
    changes: dict[str, Any] = {"ragged_verify": True, "attention_backend": "DSA", "index_topk": 2}
    return _scenario(worker, *steps, prompts=(4, 3), **changes)


def waiting(worker: str) -> Scenario:
    """Between two generations an iteration has nothing to launch, and one draft is accepted by force, or two."""
    row = Generation(request=0, agree=K)
    steps = (
        Step(draft_len=K, contexts=(Context(request=0, chunk=4, agree=K),)),
        *(Step(draft_len=K, generations=(row,)), Step(draft_len=K)) * 2,
    )
    return _scenario(worker, *steps, prompts=(4,), overlap=True, force_num_accepted_tokens=1.5)


def padded_beside_known_pages(worker: str) -> Scenario:
    """In 5 pages a prompt has left 2 behind; a graph with two dummies of 6 tokens each needs one of them."""
    config = Config(worker=worker, max_draft_len=K, num_blocks=5, enable_block_reuse=True, attention_dp_size=2)
    idle = Step(phase=Phase.REPLAY, draft_len=K, peers=(Peer(generations=2),))
    prompt = Step(draft_len=K, contexts=(Context(request=0, chunk=9),), finish=(0,), peers=(Peer(),))
    steps = (
        Step(phase=Phase.CAPTURE, draft_len=K, generations=(Generation(request=None, past=1),) * 2),
        *(kept_in_step(config, step) for step in (prompt, idle)),
    )
    return check(Scenario(config=config, requests=(Request(id=0, prompt_len=9),), steps=steps))


SCENARIOS = {
    **OF_DEFECTS,
    "shrinking": shrinking,
    "in chunks": in_chunks,
    "just selected": just_selected,
    "beside a failure": beside_a_failure,
    "overlapped": overlapped,
    "hybrid": lambda worker: hybrid(overlapped(worker)),
    "hybrid start-up": lambda worker: hybrid(started_up(worker)),
    "hybrid in chunks": lambda worker: hybrid(in_chunks(worker)),
    "thinking in chunks": thinking_in_chunks,
    "sharing": sharing,
    "giving way": giving_way,
    "ragged": ragged,
    "ragged in flight": lambda worker: ragged(worker, overlap=True),
    "ragged on DSA": lambda worker: sparse(ragged(worker)),
    "ragged beside a prompt": ragged_beside_a_prompt,
    "hybrid ragged": lambda worker: hybrid(ragged(worker)),
    "known in two caches": known_in_two_caches,
    "ranks overlapped": lambda worker: overlapping(ranked(worker)),
    "pages overlapped": lambda worker: on_backend(overlapped(worker), "FLASHINFER"),
    "sharing beside a rank": lambda worker: beside(sharing(worker)),
    "waiting, forced": waiting,
    "padded beside known pages": padded_beside_known_pages,
}
"""Name, or museum entry -> scenario for a worker."""
