"""The smallest scenario that shows each seeded defect, written by hand: museum entry and variant -> scenario.

``scenario_of`` is where further ones come in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from scenarios import (
    WORKERS,
    Config,
    Context,
    Fault,
    FaultKind,
    Generation,
    Phase,
    Request,
    Scenario,
    Step,
    check,
)

K: Final = 3
SEPARATE: Final = {"use_separate_draft_kv_cache": True, "draft_num_blocks": 40, "draft_tokens_per_block": 3}
TREE: Final = {"dynamic_tree_max_topK": 2, "max_total_draft_tokens": 7}


def _scenario(worker: str, *steps: Step, prompts: tuple[int, ...] = (), **config: Any) -> Scenario:
    requests = tuple(Request(id=i, prompt_len=n) for i, n in enumerate(prompts))
    tree = TREE if WORKERS[worker].tree else {}
    return check(
        Scenario(config=Config(worker=worker, max_draft_len=K, **tree | config), requests=requests, steps=steps)
    )


def _dummy(worker: str) -> Generation:
    """A generation of which all drafts are accepted, where a dummy has any."""
    return Generation(request=None, past=3, accept=1 if WORKERS[worker].tree else 1 + K)


def _fills(worker: str, request: int, chunk: int, agree: int = 0) -> Context:
    """A context; a drafter that drafts nothing for contexts is not asked to agree."""
    return Context(request=request, chunk=chunk, agree=agree if WORKERS[worker].drafts_for_contexts else 0)


def _short(worker: str) -> int:
    """A prompt of two tokens, or of as many as the worker needs."""
    return max(2, Config(worker=worker, max_draft_len=K).least_history)


def out_of_memory(worker: str) -> Scenario:
    """General warm-up fails in the draft loop, and a request is served."""
    traits = WORKERS[worker]
    calls = 1 if traits.parallel or traits.keeps_context else 2
    fault = Fault(site="draft_model.forward", occurrence=calls, kind=FaultKind.OOM)
    dummies = (Context(request=None, chunk=5),)
    return _scenario(
        worker,
        Step(phase=Phase.WARMUP, draft_len=K, contexts=dummies, generations=(_dummy(worker),), fault=fault),
        Step(draft_len=K, contexts=(_fills(worker, 0, _short(worker)),)),
        prompts=(_short(worker),),
    )


def drafting_fails(worker: str) -> Scenario:
    """The drafter fails for a request that generates."""
    fault = Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.ERROR)
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=K, generations=(Generation(request=0, agree=K),), fault=fault),
        prompts=(5,),
    )


def left_out(worker: str) -> Scenario:
    """A request is left out of the batch that a third one joins."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5), _fills(worker, 1, 2))),
        Step(draft_len=K, contexts=(_fills(worker, 2, 3),), generations=(Generation(request=1, agree=K),)),
        Step(draft_len=K, generations=(Generation(request=0, agree=K), Generation(request=1))),
        prompts=(5, 2, 3),
    )


def warm_up(worker: str) -> Scenario:
    """A general warm-up of one generation."""
    return _scenario(worker, Step(phase=Phase.WARMUP, draft_len=K, generations=(_dummy(worker),)))


def capture(worker: str) -> Scenario:
    """A graph is warmed up twice and captured."""
    return _scenario(worker, Step(phase=Phase.CAPTURE, draft_len=K, generations=(_dummy(worker),)), tokens_per_block=1)


def capture_fails(worker: str) -> Scenario:
    """A graph cannot be captured."""
    fault = Fault(site="target_model.forward", occurrence=1, kind=FaultKind.OOM)
    return _scenario(worker, Step(phase=Phase.CAPTURE, draft_len=K, generations=(_dummy(worker),), fault=fault))


def prompt(worker: str) -> Scenario:
    """A prompt at once."""
    return _scenario(worker, Step(draft_len=K, contexts=(_fills(worker, 0, 2),)), prompts=(2,))


def generate(worker: str) -> Scenario:
    """A prompt, then two steps of which the last accepts what it can."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=K, generations=(Generation(request=0, agree=K),)),
        Step(draft_len=K, generations=(Generation(request=0),)),
        prompts=(5,),
    )


def mixed(worker: str) -> Scenario:
    """A second prompt beside the generation of the first; then both generate, the other way round."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=K, contexts=(_fills(worker, 1, _short(worker)),), generations=(Generation(request=0, agree=K),)),
        Step(draft_len=K, generations=(Generation(request=0, agree=K), Generation(request=1, agree=1))),
        Step(draft_len=K, generations=(Generation(request=1), Generation(request=0))),
        prompts=(5, _short(worker)),
    )


def chunked(worker: str) -> Scenario:
    """A prompt in two chunks, the first of them ahead of another request."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 2), _fills(worker, 1, 3))),
        Step(draft_len=K, contexts=(_fills(worker, 0, 3),), generations=(Generation(request=1),)),
        prompts=(5, 3),
    )


def no_drafts_between(worker: str) -> Scenario:
    """A step without drafts between two that have some."""
    return _scenario(
        worker,
        Step(draft_len=0, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=0, generations=(Generation(request=0),)),
        Step(draft_len=K, generations=(Generation(request=0, agree=K),)),
        Step(draft_len=K, generations=(Generation(request=0),)),
        prompts=(5,),
    )


def replayed(worker: str) -> Scenario:
    """A graph is captured and replayed twice for a longer request."""
    again = Step(phase=Phase.REPLAY, draft_len=K, generations=(Generation(request=0, agree=K),))
    return _scenario(
        worker,
        Step(phase=Phase.CAPTURE, draft_len=K, generations=(_dummy(worker),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, 9, K),)),
        again,
        again,
        prompts=(9,),
    )


def replayed_for_another(worker: str) -> Scenario:
    """A graph is captured, and replayed for the second of two requests."""
    again = Step(phase=Phase.REPLAY, draft_len=K, generations=(Generation(request=1, agree=K),))
    return _scenario(
        worker,
        Step(phase=Phase.CAPTURE, draft_len=K, generations=(_dummy(worker),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, 5), _fills(worker, 1, 9))),
        again,
        again,
        prompts=(5, 9),
    )


def replayed_without_drafts(worker: str) -> Scenario:
    """The same with draft length 0."""
    return _scenario(
        worker,
        Step(phase=Phase.CAPTURE, draft_len=0, generations=(Generation(request=None),)),
        Step(draft_len=0, contexts=(_fills(worker, 0, 9),)),
        Step(phase=Phase.REPLAY, draft_len=0, generations=(Generation(request=0),)),
        prompts=(9,),
    )


def two_graphs(worker: str) -> Scenario:
    """Graphs of one batch size and two draft lengths; the longer one is replayed."""
    return _scenario(
        worker,
        Step(phase=Phase.CAPTURE, draft_len=0, generations=(Generation(request=None),)),
        Step(phase=Phase.CAPTURE, draft_len=K, generations=(_dummy(worker),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, 5, K),)),
        Step(phase=Phase.REPLAY, draft_len=K, generations=(Generation(request=0),)),
        prompts=(5,),
    )


def at_the_limit(worker: str) -> Scenario:
    """The longest prompt that max_seq_len admits."""
    longest = 16 - Config(worker=worker, max_draft_len=K).num_extra_kv_tokens
    step = Step(draft_len=K, contexts=(_fills(worker, 0, longest),))
    return _scenario(worker, step, prompts=(longest,), max_seq_len=16)


def long_prompt(worker: str) -> Scenario:
    """A prompt of twenty tokens, then a step that verifies its drafts."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 20, K),)),
        Step(draft_len=K, generations=(Generation(request=0),)),
        prompts=(20,),
    )


def full_pages(worker: str) -> Scenario:
    """A prompt of nine pages of one token, and what follows it."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 9),)),
        Step(draft_len=K, generations=(Generation(request=0),)),
        prompts=(9,),
        tokens_per_block=1,
    )


def one_page_each(worker: str) -> Scenario:
    """Pages of one token: whatever is rewound crosses a boundary."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=K, generations=(Generation(request=0),)),
        Step(draft_len=K, generations=(Generation(request=0),)),
        prompts=(5,),
        tokens_per_block=1,
    )


def warm_up_and_serve(worker: str) -> Scenario:
    """A general warm-up that rewinds pages, then a prompt."""
    return _scenario(
        worker,
        Step(phase=Phase.WARMUP, draft_len=K, generations=(Generation(request=None, past=3),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, _short(worker)),)),
        prompts=(_short(worker),),
        tokens_per_block=1,
    )


def finishing(worker: str) -> Scenario:
    """A request ends with drafts that were not accepted."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 2),)),
        Step(draft_len=K, generations=(Generation(request=0),), finish=(0,)),
        prompts=(2,),
    )


def outlived(worker: str) -> Scenario:
    """A request ends, and another one goes on."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 2), _fills(worker, 1, 2)), finish=(0,)),
        Step(draft_len=K, generations=(Generation(request=1),)),
        prompts=(2, 2),
    )


def _trees(worker: str, **config: Any) -> Scenario:
    """As ``mixed``, and one step more: both verify trees of their own, in another order."""
    each = Generation(request=0, agree=K), Generation(request=1, agree=2)
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 2),), generations=each[:1]),
        Step(draft_len=K, generations=each),
        Step(draft_len=K, generations=each[::-1]),
        Step(draft_len=K, generations=each),
        prompts=(5, 2),
        **config,
    )


def trees(worker: str) -> Scenario:
    """Two requests with trees of eight rows."""
    return _trees(worker)


def wide_trees(worker: str) -> Scenario:
    """Trees of fewer rows than their drafter feeds."""
    return _trees(worker, dynamic_tree_max_topK=4, max_total_draft_tokens=6)


def large_trees(worker: str) -> Scenario:
    """Trees of 33 rows: two words of the mask."""
    return _trees(worker, dynamic_tree_max_topK=4, max_total_draft_tokens=32)


def slot_changes_hands(worker: str) -> Scenario:
    """A request with a tree ends, and the next one takes its place."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=K, generations=(Generation(request=0, agree=K),), finish=(0,)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 2),)),
        Step(draft_len=K, generations=(Generation(request=1),)),
        prompts=(5, 2),
    )


def _on(make: Callable[[str], Scenario], **config: Any) -> Callable[[str], Scenario]:
    """The scenarios that ``make`` makes, in another configuration."""

    def configured(worker: str) -> Scenario:
        scenario = make(worker)
        return check(replace(scenario, config=replace(scenario.config, **config)))

    return configured


SCENARIOS: Final[dict[str, Callable[[str], Scenario]]] = {
    # A worker is named where it needs a scenario of its own.
    "SGL-01": warm_up_and_serve,
    "SGL-06": mixed,
    "SGL-06/history": mixed,
    "SGL-06/text": mixed,
    "SGL-06/verified-id": mixed,
    "SGL-06/trees": trees,
    "SGL-10": replayed,
    "TRT-01": out_of_memory,
    "TRT-01/masks": out_of_memory,
    "TRT-01/override": out_of_memory,
    "TRT-01/restore-only": out_of_memory,
    "TRT-01/rewind-only": out_of_memory,
    "TRT-01/rewind-restored": capture,
    "TRT-01/rewind-twice": warm_up,
    "TRT-01/nothing": mixed,
    "TRT-01/unpaired": mixed,
    "TRT-02": drafting_fails,
    "TRT-03": prompt,
    "TRT-04": capture,
    "TRT-06": prompt,
    "TRT-06/kv-lens": generate,
    "TRT-06/masks": generate,
    "TRT-06/request-types": prompt,
    "TRT-09": replayed,
    "TRT-09/saved": replayed,
    "TRT-10": slot_changes_hands,
    "TRT-17": generate,
    "TRT-19": prompt,
    "TRT-23": generate,
    "TRT-24": chunked,
    "TRT-25": mixed,
    "TRT-26": generate,
    "TRT-26/history": generate,
    "TRT-27": mixed,
    "TRT-29": wide_trees,
    "TRT-29/first-children": trees,
    "TRT-29/hidden-states": wide_trees,
    "TRT-32": prompt,
    "TRT-33": prompt,
    "TRT-35": finishing,
    "TRT-36": generate,
    "TRT-37": generate,
    "TRT-37/twice": generate,
    "TRT-39": generate,
    "TRT-40": capture_fails,
    "TRT-41": prompt,
    "TRT-42": at_the_limit,
    "TRT-45": one_page_each,
    "TRT-56": generate,
    "TRT-56/dummies": warm_up_and_serve,
    "TRT-56/failed": drafting_fails,
    "TRT-56/left-out": left_out,
    "TRT-50": large_trees,
    "TRT-50/mask-stride": wide_trees,
    "TRT-50/offset-stride": wide_trees,
    "TRT-62/block-offsets": _on(mixed, host_offload=True),
    "TRT-62/content": _on(mixed, host_offload=True),
    "TRT-65/failure": _on(drafting_fails, **SEPARATE),
    "TRT-65/block-offsets": _on(mixed, **SEPARATE),
    "TRT-68": _on(drafting_fails, **SEPARATE),
    "TRT-68/dummies": _on(replayed, **SEPARATE),
    "TRT-68/rewind": _on(generate, **SEPARATE),
    "TRT-69": one_page_each,
    "TRT-69/ended": outlived,
    "TRT-70": no_drafts_between,
    "TRT-73": no_drafts_between,
    "TRT-75": two_graphs,
    "TRT-77": generate,
    "TRT-77/worker": generate,
    "TRT-85": replayed,
    "TRT-85/slots": replayed_for_another,
    "TRT-88": replayed,
    "TRT-93": prompt,
    "TRT-94": chunked,
    "TRT-95": trees,
    "TRT-95/shifted": trees,
    "TRT-98": generate,
    "VLL-02": generate,
    "VLL-02/inputs": generate,
    "VLL-08": _on(mixed, **SEPARATE),
    "VLL-11": replayed,
    "VLL-11/Eagle3OneModelWorker": replayed_without_drafts,
    "VLL-12": replayed,
    "VLL-12/slots": replayed,
    "VLL-13": long_prompt,
    "VLL-20": full_pages,
    "VLL-22": no_drafts_between,
    "VLL-23": generate,
    "VLL-23/positions": generate,
    "VLL-23/text": generate,
    "VLL-23/placeholders": generate,
}
