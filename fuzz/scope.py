"""The enumeration behind ``specfuzz sweep``: every small scenario of a worker, with every single fault in it.

A *cell* is a step under test without what fails in it: worker, draft length, phase and layout. A *point* is one
scenario: a cell as it is, or with one fault at one occurrence of one site. Which sites a cell passes only a run can
tell, so cells are enumerated here, and points once the sites are known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, product
from typing import Any, Final

from engines.base import Engine
from invariants.registry import RELATION, Invariant
from scenarios import (
    BACKENDS,
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
    WorkerTraits,
    kept_in_step,
)
from scenarios.backends import runs_on
from scenarios.trees import most_nodes
from strategies.acceptance import least_agreement, most_agreement

ONE, MOST, MIXED = "one", "most", "mixed"
ACCEPTANCES: Final = (MIXED, ONE, MOST)
"""How many tokens the rows of a batch accept: one each, as many as can be, or more from row to row."""
DENSE: Final = ("TRTLLM",)
"""The backend that all workers run on."""
SWEPT: Final = ("TRTLLM", "DSA")
"""Backends that are enumerated: on the others faults strike in the same places, and each costs as much again."""
KINDS: Final = {
    Phase.WARMUP: FaultKind.OOM,
    Phase.CAPTURE: FaultKind.OOM,
    Phase.EAGER: FaultKind.ERROR,
    Phase.REPLAY: FaultKind.ERROR,
}
"""What fails in each phase: what the run survives, if there is such a kind."""
FATAL: Final = (FaultKind.ERROR, FaultKind.CUDA)
"""What else fails in one cell of general warm-up, and ends the run."""
USUAL: Final = ""
"""Stands for the configuration without any variant."""
_THRESHOLD: Final = 3
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "force_num_accepted_tokens": {"force_num_accepted_tokens": 1.0},
    "guided_decoding": {"guided_decoding": True},
    "attention_dp_size": {"attention_dp_size": 2, "attention_dp_rank": 1},
    "sa_threshold": {"sa_threshold": _THRESHOLD},
    "use_separate_draft_kv_cache": {"use_separate_draft_kv_cache": True, "draft_tokens_per_block": 3},
    "overlap": {"overlap": True},
    "recurrent": {"recurrent": True},
    "rejection_sampling": {"rejection_sampling": True},
    "tp_size": {"tp_size": 2, "tp_rank": 1},
    "enable_block_reuse": {"enable_block_reuse": True, "tokens_per_block": 1},
    "ragged_verify": {"ragged_verify": True},
}
"""Variants that have a cell of their own, by the field of ``Config`` that asks for them."""
_PEERS: Final = (Peer(contexts=(3,), generations=1),)
"""What the other rank runs in each served step."""
TWIN: Final = "next-step-equals-never-failed-twin"
"""The one relation that is asked: the others are about clean runs, and cost another one each."""
_TREE_TOPK: Final = 2
_INDEX_TOPK: Final = 2
"""Fewer than any prompt has, so that there is something to select."""
_LEAST_PROMPT: Final = 3
"""Prompts of a batch have so many tokens and one more from row to row: with pages of 4, around a border."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """How far everything is enumerated.

    max_batch      most rows of the step under test
    max_draft_len  largest draft length
    steps          served steps from the one under test on: those after it read what it has left behind
    """

    max_batch: int
    max_draft_len: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A residue class of the points of a worker: every ``of``-th, so that each slice goes through all cells.

    done  points of it that earlier units have run
    """

    scope: Scope
    number: int
    of: int
    done: int = 0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A step under test, whatever fails in it; ``number`` counts the cells of its worker."""

    scope: Scope
    number: int
    worker: str
    backend: str
    max_draft_len: int
    draft_len: int
    phase: Phase
    contexts: int
    generations: int
    variant: str = USUAL

    @cached_property
    def config(self) -> Config:
        """The smallest configuration that holds all scenarios of the cell, in the suite's usual size otherwise."""
        depth = self.max_draft_len
        topk = _TREE_TOPK if self.traits.tree else 0
        usual = Config(
            worker=self.worker,
            max_draft_len=depth,
            attention_backend=self.backend,
            index_topk=_INDEX_TOPK if BACKENDS[self.backend].sparse else 0,
            dynamic_tree_max_topK=topk,
            max_total_draft_tokens=min(topk * depth, most_nodes(depth, topk)),
        )
        rows, fed = self.scope.max_batch, usual.tokens_per_gen_step(depth)
        prompt = self._prompt_len(rows)
        # Two steps may lead to the one under test, and each may commit all that it feeds.
        longest = prompt + (self.scope.steps + 3) * fed + usual.num_extra_kv_tokens
        config = replace(
            usual,
            max_num_requests=max(rows, usual.max_num_requests),
            max_num_tokens=max(rows * max(prompt, fed), usual.max_num_tokens),
            max_seq_len=max(longest, usual.max_seq_len),
            num_blocks=max(rows * -(-longest // usual.tokens_per_block), usual.num_blocks),
        )
        asked = VARIANTS.get(self.variant, {})
        if "tokens_per_block" in asked:
            blocks = -(-config.num_blocks * config.tokens_per_block // asked["tokens_per_block"])
            config = replace(config, num_blocks=blocks)
        if "draft_tokens_per_block" in asked:
            blocks = -(-config.num_blocks * config.tokens_per_block // asked["draft_tokens_per_block"])
            return replace(config, **asked, draft_num_blocks=blocks)
        return replace(config, **asked)

    @property
    def traits(self) -> WorkerTraits:
        """Traits of its worker."""
        return WORKERS[self.worker]

    @property
    def kinds(self) -> tuple[FaultKind, ...]:
        """What fails in it: in the mixed batch of general warm-up with the longest drafts each kind, else one."""
        usual = KINDS[self.phase]
        longest = self.draft_len == self.scope.max_draft_len
        every = self.phase is Phase.WARMUP and longest and self.contexts == self.generations == 1
        return (usual, *FATAL) if every else (usual,)

    @property
    def lead(self) -> int:
        """Steps before the one under test."""
        return len(self._leading(ONE))

    def scenario(self, acceptance: str, fault: Fault | None = None) -> Scenario:
        """The step under test with what leads to it, and, unless it is the end, the steps that follow.

        After a failure these serve a fresh batch; a batch that did not fail goes on.
        """
        rows = self.contexts + self.generations
        steps = [*self._leading(acceptance), self._under_test(acceptance, fault)]
        if not self._is_end(fault):
            if self.phase.is_startup:
                after = self._serving(0, rows, acceptance)
            elif fault is not None:
                after = self._serving(rows, rows, acceptance)
            else:
                after = self._generating(0, rows, acceptance)
            steps += islice(after, self.scope.steps - 1)
        if self.config.attention_dp_size > 1:
            steps = [kept_in_step(self.config, replace(step, peers=_PEERS)) for step in steps]
        served = {row.request for step in steps for row in step.rows if row.request is not None}
        requests = tuple(self._request(i, self._prompt_len(i % rows)) for i in sorted(served))
        return Scenario(config=self.config, requests=requests, steps=tuple(steps))

    def _request(self, request: int, prompt_len: int) -> Request:
        """The request of that id; all prompts begin alike where pages can be reused."""
        if not request or not self.config.enable_block_reuse:
            return Request(id=request, prompt_len=prompt_len)
        return Request(id=request, prompt_len=prompt_len, prefix_of=0, prefix_len=_LEAST_PROMPT)

    def _is_end(self, fault: Fault | None) -> bool:
        """Whether the run ends with it: start-up survives lack of memory outside captures, serving all but CUDA."""
        if fault is None:
            return False
        survived = fault.kind is FaultKind.OOM if self.phase.is_startup else fault.kind is not FaultKind.CUDA
        return self.phase is Phase.CAPTURE or not survived

    def _prompt_len(self, row: int) -> int:
        least = self.max_draft_len if self.traits.feeds_history else 0
        return max(least, _LEAST_PROMPT) + row

    def _leading(self, acceptance: str) -> tuple[Step, ...]:
        """Capture of the graph to replay; prompts of the generations, and drafts for them to verify."""
        if self.phase.is_startup or not self.generations:
            return ()
        captured = (self._dummies(Phase.CAPTURE, acceptance),) if self.phase is Phase.REPLAY else ()
        # Where contexts get no drafts, only a generation step makes some.
        count = 1 if self.traits.drafts_for_contexts else 2
        return (*captured, *islice(self._serving(0, self.generations, acceptance), count))

    def _under_test(self, acceptance: str, fault: Fault | None) -> Step:
        if self.phase.is_startup:
            return self._dummies(self.phase, acceptance, fault)
        return Step(
            phase=self.phase,
            draft_len=self.draft_len,
            contexts=self._prompts(self.generations, self.contexts, acceptance),
            generations=self._rows(0, self.generations, acceptance),
            fault=fault,
        )

    def _dummies(self, phase: Phase, acceptance: str, fault: Fault | None = None) -> Step:
        deepest = 0 if self.traits.tree else self.draft_len
        contexts = tuple(Context(request=None, chunk=self._prompt_len(i)) for i in range(self.contexts))
        generations = tuple(
            Generation(request=None, past=self._prompt_len(i), accept=1 + _agree(acceptance, i, deepest))
            for i in range(self.generations)
        )
        return Step(phase=phase, draft_len=self.draft_len, contexts=contexts, generations=generations, fault=fault)

    def _serving(self, first: int, rows: int, acceptance: str) -> Iterator[Step]:
        """A batch of new requests from ``first`` on, step by step."""
        yield Step(draft_len=self.draft_len, contexts=self._prompts(first, rows, acceptance))
        yield from self._generating(first, rows, acceptance)

    def _generating(self, first: int, rows: int, acceptance: str) -> Iterator[Step]:
        while True:
            yield Step(draft_len=self.draft_len, generations=self._rows(first, rows, acceptance))

    def _prompts(self, first: int, rows: int, acceptance: str) -> tuple[Context, ...]:
        deepest = self.draft_len if self.traits.drafts_for_contexts else 0
        most = self.contexts + self.generations
        return tuple(
            Context(request=i, chunk=self._prompt_len(i % most), agree=self._agree(acceptance, i, deepest))
            for i in range(first, first + rows)
        )

    def _rows(self, first: int, rows: int, acceptance: str) -> tuple[Generation, ...]:
        turn = ACCEPTANCES.index(acceptance)
        matches = (_THRESHOLD, 0, _THRESHOLD - 1) if self.config.sa_threshold else (0,)
        return tuple(
            Generation(
                request=i,
                agree=self._agree(acceptance, i, self.draft_len),
                match=matches[(i + turn) % len(matches)],
                verify=(i + turn) % self.draft_len if self.config.ragged_verify else None,
            )
            for i in range(first, first + rows)
        )

    def _agree(self, acceptance: str, row: int, deepest: int) -> int:
        """As the function below, within what the configuration allows; 0 where nothing is drafted."""
        if not deepest:
            return 0
        least, most = least_agreement(self.config, deepest), most_agreement(self.config, deepest)
        return min(max(_agree(acceptance, row, deepest), least), most)


def _agree(acceptance: str, row: int, deepest: int) -> int:
    """How many of ``deepest`` drafts the target agrees with."""
    return {ONE: 0, MOST: deepest, MIXED: row % (deepest + 1)}[acceptance]


@dataclass(frozen=True)
class Point:
    """A cell with one fault, or none."""

    cell: Cell
    acceptance: str
    fault: Fault | None = None

    @property
    def scenario(self) -> Scenario:
        """What is run for it."""
        return self.cell.scenario(self.acceptance, self.fault)


def cells(scope: Scope, worker: str, backends: Collection[str], variants: Collection[str] = ()) -> Iterator[Cell]:
    """All cells of a worker on those of the swept attention backends that it runs on, always in the same order.

    A worker that follows a runtime draft length has its largest fixed; for another each length is the largest.
    Then, with the longest drafts, one served batch of a context and a generation for each of the ``variants`` that it
    has, on the first backend.
    """
    traits = WORKERS[worker]
    fitting = [name for name in BACKENDS if name in SWEPT and name in backends and runs_on(worker, name)]
    shapes = [
        (phase, contexts, generations)
        for phase in Phase
        for contexts, generations in layouts(scope.max_batch)
        if not contexts or phase not in (Phase.CAPTURE, Phase.REPLAY)
    ]
    draft_lens = range(traits.min_draft_len, scope.max_draft_len + 1)
    usual = ((USUAL, *cell) for cell in product(fitting, draft_lens, shapes))
    longest, mixed = scope.max_draft_len, (Phase.EAGER, 1, 1)
    offered = [name for name in VARIANTS if name in variants and _has(traits, name)] if scope.max_batch > 1 else []
    others = ((name, fitting[0], longest, mixed) for name in offered)
    for number, (variant, backend, draft_len, (phase, contexts, generations)) in enumerate(chain(usual, others)):
        yield Cell(
            scope=scope,
            number=number,
            worker=worker,
            backend=backend,
            max_draft_len=draft_len if traits.fixed_draft_len else scope.max_draft_len,
            draft_len=draft_len,
            phase=phase,
            contexts=contexts,
            generations=generations,
            variant=variant,
        )


def _has(traits: WorkerTraits, variant: str) -> bool:
    """Whether a worker has a variant."""
    return {
        "force_num_accepted_tokens": traits.drafts_for_contexts,
        "guided_decoding": not traits.tree,
        "attention_dp_size": True,
        "sa_threshold": traits.sa_enhancer,
        "use_separate_draft_kv_cache": traits.separate_draft_kv_cache,
        "overlap": True,
        "recurrent": traits.recurrent,
        "rejection_sampling": traits.rejection_sampling,
        "tp_size": traits.shares_draft_head,
        "enable_block_reuse": traits.reuses_blocks,
        "ragged_verify": traits.ragged_verify,
    }[variant]


def variants_of(engine: Engine) -> tuple[str, ...]:
    """The variants that an engine offers."""
    plain = getattr(engine, "plain_caches", False)
    return (*getattr(engine, "variants", ()), *(() if plain else ("use_separate_draft_kv_cache",)))


def layouts(max_batch: int) -> Iterator[tuple[int, int]]:
    """Contexts and generations of each batch of 1 to ``max_batch`` rows."""
    for rows in range(1, max_batch + 1):
        for contexts in range(rows + 1):
            yield contexts, rows - contexts


def points(cell: Cell, sites: Mapping[str, int]) -> Iterator[Point]:
    """The clean scenario of a cell, then each occurrence of each site; acceptance changes from point to point."""
    faults = [
        Fault(site=site, occurrence=occurrence, kind=kind)
        for kind in cell.kinds
        for site in sorted(sites)
        for occurrence in range(1, sites[site] + 1)
    ]
    for number, fault in enumerate((None, *faults), cell.number):
        yield Point(cell, ACCEPTANCES[number % len(ACCEPTANCES)], fault)


def slices(scope: Scope, worker: str) -> int:
    """Into how many slices the points of a worker are cut: as many as it has cells, so that a slice is small."""
    return sum(1 for _ in cells(scope, worker, DENSE))


def sliced(part: Slice, cells: Iterable[Cell], sites: Callable[[Cell], Mapping[str, int]]) -> Iterator[Point]:
    """The points of a slice. ``sites`` says how often a cell passes each site."""
    for cell in cells:
        for number, point in enumerate(points(cell, sites(cell)), cell.number):
            if number % part.of == part.number:
                yield point


def asks(invariant: Invariant) -> bool:
    """Whether the points of a scope are judged by it."""
    return invariant.kind != RELATION or invariant.slug == TWIN
