"""Scenarios that between them reach every invariant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scenarios import (
    WORKERS,
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

EAGLE, PARD, DRAFT_TARGET = "Eagle3OneModelWorker", "PARDWorker", "DraftTargetOneModelWorker"
MTP_EAGLE = "MTPEagleWorker"
MTP, SA, DFLASH = "MTPWorker", "SAWorker", "DFlashWorker"
EAGLE_TREE, MTP_TREE = "Eagle3OneModelDynamicTreeWorker", "MTPEagleDynamicTreeWorker"


def _config(worker: str) -> Config:
    tree = {"dynamic_tree_max_topK": 2, "max_total_draft_tokens": 7} if WORKERS[worker].tree else {}
    return Config(worker=worker, max_draft_len=3, num_blocks=40, **tree)


def _dummy(worker: str, past: int, accept: int = 1) -> Generation:
    """A dummy generation with a history as long as it must be; one that drafts trees has none to accept."""
    past = max(past, _config(worker).least_history)
    return Generation(request=None, past=past, accept=1 if WORKERS[worker].tree else accept)


def _agree(worker: str, count: int) -> int:
    """``agree`` of a context row."""
    return count if WORKERS[worker].drafts_for_contexts else 0


def sparse(scenario: Scenario, index_topk: int = 3) -> Scenario:
    """The same scenario on the DSA backend: with 3, every row has more tokens than it selects; with 12, some have."""
    return check(replace(scenario, config=replace(scenario.config, attention_backend="DSA", index_topk=index_topk)))


def on_backend(scenario: Scenario, name: str) -> Scenario:
    """The same scenario on another attention backend, with sizes that make every request outgrow what it sees."""
    sizes: dict[str, dict[str, Any]] = {
        "DEEPSEEK_V4": {"index_topk": 2, "window_size": 3, "compress_ratios": (1, 2, 4)},
        "VANILLA": {"tokens_per_block": 2 * scenario.config.max_seq_len},
    }
    config = replace(scenario.config, attention_backend=name, **sizes.get(name, {}))
    return check(replace(scenario, config=config))


def enhanced(scenario: Scenario) -> Scenario:
    """The same scenario with suffix automata, whose match is long enough in every other generation of a request."""
    steps = [
        replace(
            step,
            generations=tuple(
                row if row.request is None else replace(row, match=1 + (row.request + index) % 2 * 2)
                for row in step.generations
            ),
        )
        for index, step in enumerate(scenario.steps)
    ]
    return check(replace(scenario, config=replace(scenario.config, sa_threshold=2), steps=tuple(steps)))


def hybrid(scenario: Scenario) -> Scenario:
    """The same scenario with recurrent layers and rejection sampling, as far as its worker has them."""
    traits = scenario.config.traits
    config = replace(scenario.config, recurrent=traits.recurrent, rejection_sampling=traits.rejection_sampling)
    return check(replace(scenario, config=config))


def separate(scenario: Scenario, **changes: Any) -> Scenario:
    """The same scenario with smaller pages for the drafter alone."""
    pages = {"draft_num_blocks": 60, "draft_tokens_per_block": 3}
    config = replace(scenario.config, use_separate_draft_kv_cache=True, **pages, **changes)
    return check(replace(scenario, config=config))


def served(worker: str) -> Scenario:
    """Two requests, one of them in chunks, at changing draft lengths; then one ends and a third joins.

    No chunks and no changes where the worker has none.
    """
    config, traits = _config(worker), WORKERS[worker]
    lowest, low = config.min_draft_len, max(2, config.min_draft_len)
    last = max(2, config.least_history)
    head = (Context(request=1, chunk=3),) if traits.chunked_prefill else ()
    return check(
        Scenario(
            config=config,
            requests=tuple(Request(id=i, prompt_len=n) for i, n in enumerate((5, 7, last))),
            steps=(
                Step(
                    draft_len=3,
                    contexts=(Context(request=0, chunk=5, agree=_agree(worker, 3)), *head),
                ),
                Step(
                    draft_len=3,
                    contexts=(Context(request=1, chunk=4 if head else 7, agree=_agree(worker, 2)),),
                    generations=(Generation(request=0, agree=3),),
                ),
                Step(draft_len=3, generations=(Generation(request=1, agree=1), Generation(request=0, agree=3))),
                Step(draft_len=lowest, generations=(Generation(request=0), Generation(request=1))),
                Step(draft_len=low, generations=(Generation(request=0, agree=2), Generation(request=1)), finish=(0,)),
                Step(
                    draft_len=low,
                    contexts=(Context(request=2, chunk=last),),
                    generations=(Generation(request=1, agree=2),),
                ),
                Step(draft_len=3, generations=(Generation(request=2), Generation(request=1))),
            ),
        )
    )


def started_up(worker: str) -> Scenario:
    """General warm-up, capture of a graph, its replay."""
    config = _config(worker)
    return check(
        Scenario(
            config=config,
            requests=(Request(id=0, prompt_len=5), Request(id=1, prompt_len=3)),
            steps=(
                Step(
                    phase=Phase.WARMUP,
                    draft_len=3,
                    contexts=(Context(request=None, chunk=9),),
                    generations=(_dummy(worker, 2, 3),),
                ),
                Step(
                    phase=Phase.CAPTURE,
                    draft_len=3,
                    generations=(_dummy(worker, 3, 4), _dummy(worker, 5)),
                ),
                Step(
                    draft_len=3,
                    contexts=(
                        Context(request=0, chunk=5, agree=_agree(worker, 3)),
                        Context(request=1, chunk=3, agree=_agree(worker, 1)),
                    ),
                ),
                Step(
                    phase=Phase.REPLAY,
                    draft_len=3,
                    generations=(Generation(request=0, agree=3), Generation(request=1, agree=2)),
                ),
                Step(draft_len=3, generations=(Generation(request=1), Generation(request=0))),
            ),
        )
    )


def forced(worker: str) -> Scenario:
    """Accepts one draft or two, whatever the target agrees with, in every phase; the last step fails."""
    fault = Fault(site="draft_model.forward", occurrence=2, kind=FaultKind.OOM)
    both = (Generation(request=0, agree=3), Generation(request=1, agree=2))
    return check(
        Scenario(
            config=replace(_config(worker), force_num_accepted_tokens=1.5),
            requests=(Request(id=0, prompt_len=5), Request(id=1, prompt_len=3)),
            steps=(
                Step(
                    phase=Phase.WARMUP,
                    draft_len=3,
                    contexts=(Context(request=None, chunk=9),),
                    generations=(_dummy(worker, 2, 3),),
                ),
                Step(phase=Phase.CAPTURE, draft_len=3, generations=(_dummy(worker, 3, 4), _dummy(worker, 5, 3))),
                Step(
                    draft_len=3,
                    contexts=(Context(request=0, chunk=5, agree=3), Context(request=1, chunk=3, agree=2)),
                ),
                Step(phase=Phase.REPLAY, draft_len=3, generations=both),
                Step(draft_len=3, generations=both[::-1]),
                Step(draft_len=3, generations=both, fault=fault),
            ),
        )
    )


def _judged(config: Config, *, thinking: bool = False, near: int = 0) -> Scenario:
    """Start-up; three requests, one in chunks and one in the slot of another; without drafts once; a failure."""
    worker = config.worker
    few = 2 if config.traits.guides_drafts else 0
    fault = Fault(site="target_model.forward", occurrence=1, kind=FaultKind.OOM)
    chunks = (3, 4) if config.traits.chunked_prefill else (7,)
    both = (Generation(request=0, agree=few), Generation(request=1, agree=min(few, 1), near=near))
    return check(
        Scenario(
            config=config,
            requests=(
                Request(id=0, prompt_len=5, thinking=thinking),
                Request(id=1, prompt_len=7, thinking=thinking),
                Request(id=2, prompt_len=4),
            ),
            steps=(
                Step(phase=Phase.CAPTURE, draft_len=3, generations=(_dummy(worker, 3, 4), _dummy(worker, 5, 3))),
                Step(
                    draft_len=3,
                    contexts=(
                        Context(request=0, chunk=5, agree=_agree(worker, few), near=near),
                        Context(request=1, chunk=chunks[0], agree=_agree(worker, 1 if few else 0)),
                    ),
                ),
                Step(
                    draft_len=config.min_draft_len,
                    contexts=tuple(Context(request=1, chunk=chunk) for chunk in chunks[1:]),
                    generations=(Generation(request=0),),
                ),
                Step(draft_len=3, generations=both),
                Step(phase=Phase.REPLAY, draft_len=3, generations=both, finish=(0,)),
                Step(
                    draft_len=3,
                    contexts=(Context(request=2, chunk=4, agree=_agree(worker, few)),),
                    generations=(Generation(request=1, agree=few),),
                ),
                Step(draft_len=3, generations=(Generation(request=1), Generation(request=2)), fault=fault),
            ),
        )
    )


def guided(worker: str) -> Scenario:
    """A grammar masks what is chosen, and what is drafted where the worker lets it."""
    return _judged(replace(_config(worker), guided_decoding=True))


def relaxed(worker: str) -> Scenario:
    """The target takes its second choice from requests that think."""
    asked = {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 2, "relaxed_delta": 0.5}
    return _judged(replace(_config(worker), **asked), thinking=True, near=1)


def failing(worker: str) -> Scenario:
    """A warm-up that runs out of memory, a served step that does, and what comes after each."""
    config, traits = _config(worker), WORKERS[worker]
    calls = 1 if traits.parallel or traits.keeps_context or not traits.draft_model else 2
    site = "draft_model.forward" if traits.draft_model else "sa_manager.extend"
    fault = Fault(site=site, occurrence=calls, kind=FaultKind.OOM)
    return check(
        Scenario(
            config=config,
            requests=tuple(Request(id=i, prompt_len=n) for i, n in enumerate((5, 3, 4))),
            steps=(
                Step(
                    phase=Phase.WARMUP,
                    draft_len=3,
                    contexts=(Context(request=None, chunk=9),),
                    generations=(_dummy(worker, 2, 3),),
                    fault=fault,
                ),
                Step(draft_len=3, contexts=(Context(request=0, chunk=5, agree=_agree(worker, 3)),)),
                Step(
                    draft_len=3,
                    contexts=(Context(request=1, chunk=3),),
                    generations=(Generation(request=0, agree=3),),
                    fault=fault,
                ),
                Step(draft_len=3, contexts=(Context(request=2, chunk=4, agree=_agree(worker, 3)),)),
                Step(draft_len=3, generations=(Generation(request=2),)),
            ),
        )
    )


def ranked(worker: str) -> Scenario:
    """Rank 1 of three, beside long contexts and idle ranks: a graph, a prompt each, a replay with a dummy, no work.

    A context of 20 tokens takes the experts two rounds.
    """
    config = replace(_config(worker), attention_dp_size=3, attention_dp_rank=1)
    idle = Generation(request=None, past=config.least_history)
    generations = (Generation(request=0, agree=2), Generation(request=1))
    return check(
        Scenario(
            config=config,
            requests=(Request(id=0, prompt_len=5), Request(id=1, prompt_len=4)),
            steps=(
                Step(phase=Phase.CAPTURE, draft_len=3, generations=(_dummy(worker, 3, 2),) * 3),
                Step(
                    draft_len=3,
                    contexts=(
                        Context(request=0, chunk=5, agree=_agree(worker, 3)),
                        Context(request=1, chunk=4, agree=_agree(worker, 1)),
                    ),
                    peers=(Peer(generations=2), Peer(contexts=(20,), generations=3)),
                ),
                Step(draft_len=3, generations=generations, peers=(Peer(), Peer(contexts=(4, 3)))),
                Step(
                    phase=Phase.REPLAY,
                    draft_len=3,
                    generations=(*generations, idle),
                    peers=(Peer(generations=3), Peer(generations=1)),
                ),
                Step(draft_len=3, generations=(idle,), peers=(Peer(generations=1), Peer())),
                Step(
                    draft_len=3,
                    generations=(Generation(request=1), Generation(request=0)),
                    peers=(Peer(contexts=(3,)), Peer(generations=6)),
                ),
            ),
        )
    )


def replicated(scenario: Scenario) -> Scenario:
    """The same scenario on the second of three ranks that share the draft head."""
    return check(replace(scenario, config=replace(scenario.config, tp_size=3, tp_rank=1)))


def overlapping(scenario: Scenario) -> Scenario:
    """The same scenario under the overlap scheduler."""
    return check(replace(scenario, config=replace(scenario.config, overlap=True)))


def overlapped(worker: str) -> Scenario:
    """Rows that change places, leave and come back, a wasted one in a replay, and an iteration that only waits.

    At changing draft lengths, where the worker has such. Step 4 has a row of request 0, which ends with step 3; request
    2 starts in step 5, which request 1 is not in.
    """
    config = replace(_config(worker), overlap=True)
    low, last = max(2, config.min_draft_len), max(2, config.least_history)
    first, second = Generation(request=0, agree=1), Generation(request=1, agree=2)
    return check(
        Scenario(
            config=config,
            requests=tuple(Request(id=i, prompt_len=n) for i, n in enumerate((5, 4, last))),
            steps=(
                Step(phase=Phase.CAPTURE, draft_len=3, generations=(_dummy(worker, 3, 2), _dummy(worker, 4))),
                Step(
                    draft_len=3,
                    contexts=(
                        Context(request=0, chunk=5, agree=_agree(worker, 2)),
                        Context(request=1, chunk=4, agree=_agree(worker, 1)),
                    ),
                ),
                Step(draft_len=low, generations=(first, second)),
                Step(draft_len=3, generations=(second, first), finish=(0,)),
                Step(phase=Phase.REPLAY, draft_len=3, generations=(first, second)),
                Step(draft_len=3, contexts=(Context(request=2, chunk=last, agree=_agree(worker, 3)),)),
                Step(draft_len=3, generations=(Generation(request=2, agree=1), second)),
                Step(draft_len=3),
                Step(draft_len=low, generations=(second, Generation(request=2))),
            ),
        )
    )


def beside(scenario: Scenario) -> Scenario:
    """The same scenario on rank 1 of two, the other of which has one generation in each step that launches anything."""
    config = replace(scenario.config, attention_dp_size=2, attention_dp_rank=1)
    steps = tuple(kept_in_step(config, step) if step.rows else step for step in scenario.steps)
    return check(replace(scenario, config=config, steps=steps))


def sharing(worker: str, **changes: Any) -> Scenario:
    """Prompts that begin with 9, and with 5, tokens of the first one, in pages of 4, and one that does not.

    Request 1 reuses two pages, request 2 one, which it shares with request 1 only; then all of them end, and only the
    first two pages stay known.
    """
    config = replace(_config(worker), enable_block_reuse=True, **changes)
    agree = _agree(worker, 2)
    return check(
        Scenario(
            config=config,
            requests=(
                Request(id=0, prompt_len=9),
                Request(id=1, prompt_len=10, prefix_of=0, prefix_len=9),
                Request(id=2, prompt_len=6, prefix_of=0, prefix_len=5),
                Request(id=3, prompt_len=3),
            ),
            steps=(
                Step(draft_len=3, contexts=(Context(request=0, chunk=9, agree=agree),)),
                Step(
                    draft_len=3,
                    contexts=(Context(request=1, chunk=10, agree=agree),),
                    generations=(Generation(request=0),),
                ),
                Step(draft_len=3, generations=(Generation(request=0), Generation(request=1, agree=1)), finish=(0,)),
                Step(
                    draft_len=3,
                    contexts=(Context(request=2, chunk=6, agree=agree),),
                    generations=(Generation(request=1),),
                ),
                Step(draft_len=3, generations=(Generation(request=1), Generation(request=2)), finish=(1,)),
                Step(draft_len=3, generations=(Generation(request=2),), finish=(2,)),
                Step(draft_len=3, contexts=(Context(request=3, chunk=3),)),
            ),
        )
    )


def ragged(worker: str, **changes: Any) -> Scenario:
    """Generations that verify different numbers of drafts: a graph that is replayed with other widths of its sum.

    Rows change places in step 3; request 0 is left out in step 4, and is given more drafts than were made in step 5.
    """
    config = replace(_config(worker), ragged_verify=True, **changes)
    dummies = (replace(_dummy(worker, 3, 2), verify=1), replace(_dummy(worker, 4), verify=2))
    return check(
        Scenario(
            config=config,
            requests=(Request(id=0, prompt_len=5), Request(id=1, prompt_len=4)),
            steps=(
                Step(phase=Phase.CAPTURE, draft_len=3, generations=dummies),
                Step(
                    draft_len=3,
                    contexts=(
                        Context(request=0, chunk=5, agree=_agree(worker, 3)),
                        Context(request=1, chunk=4, agree=_agree(worker, 2)),
                    ),
                ),
                Step(
                    phase=Phase.REPLAY,
                    draft_len=3,
                    generations=(
                        Generation(request=0, agree=2, verify=2),
                        Generation(request=1, agree=1, verify=1),
                    ),
                ),
                Step(
                    phase=Phase.REPLAY,
                    draft_len=3,
                    generations=(
                        Generation(request=1, agree=3, verify=3),
                        Generation(request=0, agree=2, verify=0),
                    ),
                ),
                Step(draft_len=2, generations=(Generation(request=1, agree=2, verify=1),)),
                Step(
                    draft_len=3,
                    generations=(Generation(request=0, verify=3), Generation(request=1, agree=3, verify=2)),
                ),
                Step(draft_len=3, generations=(Generation(request=0), Generation(request=1))),
            ),
        )
    )
