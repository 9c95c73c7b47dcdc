"""Cases for the tests of the oracle: one step made by hand, and scenarios drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from reference import trace
from scenarios import (
    WORKERS,
    Config,
    Context,
    Fault,
    Generation,
    Phase,
    Request,
    Scenario,
    Step,
    StepTrace,
    Substep,
    check,
)
from scenarios.trees import most_nodes

EAGLE3, MTP_EAGLE, DRAFT_TARGET = LINEAR = [
    name
    for name, of in WORKERS.items()
    if of.draft_model and not (of.parallel or of.feeds_history or of.keeps_context or of.tree)
]
PARD, MTP, SA = "PARDWorker", "MTPWorker", "SAWorker"
DFLASH, DSPARK = CONTEXT = [name for name, of in WORKERS.items() if of.keeps_context]
EAGLE3_TREE, MTP_EAGLE_TREE = TREES = [name for name, of in WORKERS.items() if of.tree]
ALL = sorted(WORKERS)
ENHANCED = [worker for worker in ALL if WORKERS[worker].sa_enhancer]
"""Workers that may have a suffix automaton beside their model."""
SPARSE = [worker for worker in ALL if WORKERS[worker].sparse]
"""Workers that run on a sparse backend."""
SEPARATE = [worker for worker, of in WORKERS.items() if of.separate_draft_kv_cache]
"""Workers whose drafter may have a KV cache of its own."""


def configuration(worker: str, max_draft_len: int, index_topk: int = 0, **sizes: int) -> Config:
    """A sparse one where ``index_topk`` is given; two candidates per node and two nodes per layer of a tree."""
    backend = "DSA" if index_topk else "TRTLLM"
    if WORKERS[worker].tree:
        sizes = {"dynamic_tree_max_topK": 2, "max_total_draft_tokens": 2 * max_draft_len} | sizes
    return Config(worker=worker, max_draft_len=max_draft_len, attention_backend=backend, index_topk=index_topk, **sizes)


def last_step(config: Config, requests: tuple[Request, ...], *steps: Step) -> StepTrace:
    """What the oracle says of the last of these steps."""
    return trace(check(Scenario(config=config, requests=requests, steps=steps))).steps[-1]


def serve(
    worker: str,
    *,
    contexts: tuple[int, ...] = (5,),
    past: tuple[int, ...] = (10, 20),
    acc: tuple[int, ...] = (3, 2),
    draft_len: int = 3,
    max_draft_len: int | None = None,
    index_topk: int = 0,
    fault: Fault | None = None,
    **sizes: int,
) -> StepTrace:
    """One eager step with contexts of these prompts and generations of these cached and accepted lengths."""
    config = configuration(worker, max_draft_len or draft_len, index_topk, **sizes)
    first_draft_len = max(draft_len, config.min_draft_len)
    # Where a context gets no drafts, its generations take one more step to have some.
    ahead = 0 if config.traits.drafts_for_contexts else 1
    ids = range(len(contexts), len(contexts) + len(past))
    requests = tuple(Request(id=i, prompt_len=n) for i, n in enumerate(contexts))
    requests += tuple(Request(id=i, prompt_len=n - ahead) for i, n in zip(ids, past, strict=True))
    agreed = [n - 1 for n in acc]
    rows = [
        Context(request=i, chunk=n - ahead, agree=0 if ahead else a) for i, n, a in zip(ids, past, agreed, strict=True)
    ]
    steps = [Step(draft_len=first_draft_len, contexts=tuple(rows))] if rows else []
    if ahead and rows:
        drafting = tuple(Generation(request=i, agree=a) for i, a in zip(ids, agreed, strict=True))
        steps.append(Step(draft_len=first_draft_len, generations=drafting))
    served = Step(
        draft_len=draft_len,
        contexts=tuple(Context(request=i, chunk=n) for i, n in enumerate(contexts)),
        generations=tuple(Generation(request=i) for i in ids),
        fault=fault,
    )
    return last_step(config, requests, *steps, served)


def at(step: StepTrace, name: str, run: int = 0) -> Substep:
    substep = step.find(name, run)
    assert substep is not None, name
    return substep


@st.composite
def scenarios(
    draw: st.DrawFn,
    workers: Sequence[str] = ALL,
    *,
    eager_drafter: bool = False,
    enhanced: bool = False,
    index_topk: int | None = None,
    ragged: bool = True,
) -> Scenario:
    """Start-up with dummies, then up to three requests in chunks; ``eager_drafter`` always agrees to all drafts.

    With ``enhanced`` there are suffix automata beside the model of each worker that may have some. Dense for
    ``index_topk`` 0, sparse for others, either when it is None and the worker can. With ``ragged`` generations
    verify fewer drafts than were made in half of the scenarios whose worker lets them.
    """
    traits = WORKERS[draw(st.sampled_from([name for name in workers if WORKERS[name].sparse or not index_topk]))]
    longest = draw(st.integers(1, 4))
    topk = draw(st.just(0) | st.integers(1, 8)) if index_topk is None and traits.sparse else index_topk or 0
    sizes = draw(_tree_sizes(longest)) if traits.tree else {}
    if enhanced and traits.sa_enhancer:
        sizes["sa_threshold"] = draw(st.integers(1, 3))
    config = configuration(traits.name, longest, topk, graph_warmup_runs=draw(st.integers(0, 1)), **sizes)
    if ragged and traits.ragged_verify and not config.sa_threshold:
        config = replace(config, ragged_verify=draw(st.booleans()))
    prompt_lens = st.integers(max(1, config.least_history), 7)
    requests = [Request(id=i, prompt_len=draw(prompt_lens)) for i in range(draw(st.integers(1, 3)))]
    left = {request.id: request.prompt_len for request in requests}
    steps = draw(st.lists(_startup(config), max_size=2))
    for _ in range(draw(st.integers(2, 6))):
        k = draw(st.integers(config.min_draft_len, longest))

        def agree(k: int = k) -> int:
            return k if eager_drafter else draw(st.integers(0, k))

        contexts, generations = [], []
        for i in draw(st.permutations(sorted(left))):
            if left[i] and draw(st.integers(0, 3)):
                whole = not traits.chunked_prefill or draw(st.booleans())
                chunk = left[i] if whole else draw(st.integers(1, left[i]))
                left[i] -= chunk
                contexts.append(Context(request=i, chunk=chunk, agree=agree() if traits.drafts_for_contexts else 0))
            elif not left[i]:
                match = draw(st.integers(0, 4)) if config.sa_threshold else 0
                verify = draw(_verified(k)) if config.ragged_verify else None
                generations.append(Generation(request=i, agree=agree(), match=match, verify=verify))
        if contexts or generations:
            steps.append(Step(draft_len=k, contexts=tuple(contexts), generations=tuple(generations)))
    if not steps:
        steps = [draw(_startup(config))]
    return check(Scenario(config=config, requests=tuple(requests), steps=tuple(steps)))


def _verified(draft_len: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(0, draft_len)


@st.composite
def _tree_sizes(draw: st.DrawFn, depth: int) -> dict[str, int]:
    topk = draw(st.integers(2, 3))
    nodes = draw(st.integers(depth, most_nodes(depth, topk)))
    return {"dynamic_tree_max_topK": topk, "max_total_draft_tokens": nodes, "num_blocks": 128}


@st.composite
def _startup(draw: st.DrawFn, config: Config) -> Step:
    k = draw(st.integers(config.min_draft_len, config.max_draft_len))
    phase = draw(st.sampled_from([Phase.WARMUP, Phase.CAPTURE]))
    chunks = draw(st.lists(st.integers(1, 4), max_size=2)) if phase is Phase.WARMUP else []
    dummy = st.builds(
        Generation,
        request=st.none(),
        agree=st.integers(0, k),
        past=st.integers(config.least_history, 6),
        accept=st.just(1) if config.traits.tree else st.integers(1, k + 1),
    )
    generations = draw(st.lists(dummy, min_size=0 if chunks else 1, max_size=2))
    contexts = tuple(Context(request=None, chunk=chunk) for chunk in chunks)
    return Step(phase=phase, draft_len=k, contexts=contexts, generations=tuple(generations))
