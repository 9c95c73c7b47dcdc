"""Short scenarios, and the text that a right engine emits in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engines.base import run
from engines.portable import PortableEngine
from scenarios import WORKERS, Config, Context, Generation, Phase, Request, Scenario, Step, Trace, check
from scenarios.tracer import PRIME, choose, entry, prompt_token, term
from tests.engines.portable.support import tree_options

ENGINE = PortableEngine()


def context(worker: str, request: int | None, chunk: int, agree: int = 0) -> Context:
    """A context row; ``agree`` is dropped where the worker makes no drafts for it."""
    return Context(request=request, chunk=chunk, agree=agree if WORKERS[worker].drafts_for_contexts else 0)


def generations(requests: Sequence[int], agree: int = 0) -> tuple[Generation, ...]:
    """Generation rows of requests, all as good."""
    return tuple(Generation(request=request, agree=agree) for request in requests)


def dummies(*pasts: int, accept: int = 1) -> tuple[Generation, ...]:
    """Generation rows of dummies."""
    return tuple(Generation(request=None, past=past, accept=accept) for past in pasts)


def scenario(worker: str, prompts: Sequence[int], *steps: Step, **options: Any) -> Scenario:
    """A valid scenario of requests 0, 1, ..."""
    requests = tuple(Request(id=i, prompt_len=n) for i, n in enumerate(prompts))
    depth = options.setdefault("max_draft_len", 3)
    config = Config(worker=worker, **tree_options(worker, depth) | options)
    return check(Scenario(config=config, requests=requests, steps=steps))


def mixed(worker: str, draft_len: int, *, replay: bool = False, agree: int | None = None) -> Scenario:
    """Prefill, chunked prefill and generations in one batch, joining one by one; then generations alone.

    A worker that takes no chunks computes the second prompt at once, in the second step.
    """
    k = draft_len if agree is None else agree
    dummy_rows = dummies(3, 9, accept=1 if WORKERS[worker].tree else 2)
    startup = (Step(phase=Phase.CAPTURE, draft_len=draft_len, generations=dummy_rows),) if replay else ()
    first, rest = ((context(worker, 1, 4, k),), 3) if WORKERS[worker].chunked_prefill else ((), 7)
    last = Phase.REPLAY if replay else Phase.EAGER
    return scenario(
        worker,
        (5, 7, 6),
        *startup,
        Step(draft_len=draft_len, contexts=(context(worker, 0, 5, k), *first)),
        Step(draft_len=draft_len, contexts=(context(worker, 1, rest, k),), generations=generations([0], k)),
        Step(draft_len=draft_len, contexts=(context(worker, 2, 6, k),), generations=generations([1, 0], k)),
        Step(draft_len=draft_len, generations=generations([0, 2, 1], k), finish=(1,)),
        Step(draft_len=draft_len, generations=generations([2, 0], k), phase=last),
        Step(draft_len=draft_len, generations=generations([0, 2], k), phase=last),
        max_draft_len=draft_len,
    )


def believed(worker: str, draft_len: int) -> list[list[int]]:
    """What each row of each served step of ``mixed`` accepts when the drafter always agrees."""
    full = draft_len + 1
    # A drafter that makes none for contexts is believed one step later.
    first = full if WORKERS[worker].drafts_for_contexts else 1
    prefill = [1, 1] if WORKERS[worker].chunked_prefill else [1]
    return [prefill, [1, first], [1, first, full], [full, first, full], [full] * 2, [full] * 2]


def accepted(trace: Trace) -> list[list[int]]:
    """Accepted counts of the rows, per served step."""
    served = [step for step in trace.steps if not step.phase.is_startup]
    return [step.substeps[-2]["new_tokens_lens"] for step in served]


def updated(trace: Trace, field: str) -> Any:
    """A field after the last step."""
    return trace.steps[-1].substeps[-1][field]


def results(trace: Trace) -> dict[str, Any]:
    """What the last step leaves: text, what requests own but for which pages and slots, all that is kept of them."""
    steps = ("py_rewind_len", "py_num_accepted_draft_tokens", "kv_blocks", "connector_block_ids", "spec_slots")
    return {name: value for name, value in trace.steps[-1].substeps[-1].fields.items() if name not in steps}


def go(case: Scenario, **options: Any) -> Trace:
    """Run on the portable engine."""
    return run(ENGINE, case, **options)


def greedy(seed: int, request: int, prompt_len: int, count: int) -> list[int]:
    """What the target alone says after a prompt, token by token."""
    digest, tokens = 0, [prompt_token(seed, request, i) for i in range(prompt_len)]
    for i in range(prompt_len + count):
        if i >= prompt_len:
            tokens.append(choose(digest))
        digest = (digest + term(i, entry(i, tokens[i]))) % PRIME
    return tokens[prompt_len:]
