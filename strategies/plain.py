"""Scenarios without a thought: what the other strategies of this room are measured against.

Every number is uniform in its range and every choice as likely as any other, whatever has been found there before. A
fault strikes at a site whose name is known, at an occurrence that may never come; then the step is one that does not
fail. What could not happen is drawn again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

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
    ScenarioError,
    Schedule,
    Step,
    kept_in_step,
)
from scenarios.backends import runs_on
from scenarios.limits import check_config
from scenarios.trees import most_nodes
from strategies.composer import Record

_PROMPT: Final = 40
"""Tokens of the longest prompt, and most that are cached for a dummy."""
_OCCURRENCES: Final = 8
_TRIES: Final = 50
"""Proposals for a step, then the scenario ends, or a new one is begun where it has none."""
_DEEPEST_TREE: Final = 4
_ONE_PAGE: Final = 256
"""Tokens of a page that holds any sequence."""


def plain_scenario(
    random: Random,
    *,
    worker: str,
    backends: Collection[str],
    variants: Collection[str] = (),
    max_draft_len: int = 7,
    max_batch: int = 8,
    max_steps: int = 8,
    sites: Sequence[str] = (),
    record: Record | None = None,
) -> Scenario:
    """A valid scenario of ``worker``, its numbers from ``random``.

    sites   names of fault sites to draw from
    record  as in ``faulted_scenarios``; None for scenarios without faults
    """
    while True:
        config = _config(random, worker, backends, variants, max_draft_len, max_batch)
        made = _Plain(random, config, sites, record)
        for _ in range(random.randint(1, max_steps)):
            if not made.add_step():
                break
        if made.steps:
            return made.scenario()


def _config(
    random: Random,
    worker: str,
    backends: Collection[str],
    variants: Collection[str],
    max_draft_len: int,
    max_batch: int,
) -> Config:
    traits = WORKERS[worker]
    while True:
        backend = random.choice([b for b in backends if runs_on(worker, b)])
        draft_len = random.randint(1, min(max_draft_len, _DEEPEST_TREE) if traits.tree else max_draft_len)
        topk = random.randint(2, 4) if traits.tree else 0
        config = Config(
            worker=worker,
            max_draft_len=draft_len,
            tokens_per_block=_ONE_PAGE if BACKENDS[backend].one_page else random.randint(1, 64),
            max_num_requests=random.randint(1, max_batch),
            graph_warmup_runs=random.randint(1, 3),
            seed=random.randrange(1 << 16),
            attention_backend=backend,
            index_topk=random.randint(1, 64) if BACKENDS[backend].sparse else 0,
            **_compression(random) if BACKENDS[backend].compressed else {},
            dynamic_tree_max_topK=topk,
            max_total_draft_tokens=random.randint(draft_len, most_nodes(draft_len, topk)) if traits.tree else 0,
            kv_cache_manager=random.choice(("V1", "V2")),
            host_offload=random.random() < 0.5,
            **_caches(random, traits.separate_draft_kv_cache),
            **_variant(random, random.choice(["", *variants])),
        )
        try:
            check_config(config)
        except ScenarioError:
            continue
        return config


def _compression(random: Random) -> dict[str, Any]:
    """A window, and one ratio or two."""
    ratio = random.randint(2, 16)
    third = (random.randint(2, 4) * ratio,) if random.random() < 0.5 else ()
    return {"window_size": random.randint(1, 64), "compress_ratios": (1, ratio, *third)}


def _caches(random: Random, may_be_apart: bool) -> dict[str, Any]:
    """Whether the drafter has a cache of its own."""
    if not may_be_apart or random.random() < 0.5:
        return {}
    size = random.randint(1, 64)
    blocks = Config.num_blocks
    return {"use_separate_draft_kv_cache": True, "draft_tokens_per_block": size, "draft_num_blocks": blocks}


def _variant(random: Random, name: str) -> dict[str, Any]:
    """One variant at most, with numbers in its range."""
    if name == "use_relaxed_acceptance_for_thinking":
        return {name: True, "relaxed_topk": random.randint(1, 8), "relaxed_delta": random.uniform(0.01, 0.6)}
    if name == "attention_dp_size":
        size = random.randint(1, 4)
        return {name: size, "attention_dp_rank": random.randrange(size)}
    if name == "tp_size":
        size = random.randint(2, 4)
        return {name: size, "tp_rank": random.randrange(size)}
    numbers: dict[str, Any] = {
        "force_num_accepted_tokens": random.uniform(0, 8),
        "sa_threshold": random.randint(1, 16),
        "draft_vocab_map": True,
        "guided_decoding": True,
        "overlap": True,
        "enable_block_reuse": True,
        "recurrent": True,
        "rejection_sampling": True,
        "ragged_verify": True,
    }
    return {name: numbers[name]} if name in numbers else {}


class _Plain:
    """A scenario while it is being drawn."""

    def __init__(self, random: Random, config: Config, sites: Sequence[str], record: Record | None) -> None:
        self.random = random
        self.config = config
        self.sites = sites
        self.record = record
        self.schedule = Schedule(config)
        self.requests: list[Request] = []
        self.steps: list[Step] = []

    def scenario(self, *more: Step) -> Scenario:
        """What has been drawn so far, with ``more`` steps behind it."""
        return Scenario(config=self.config, requests=tuple(self.requests), steps=(*self.steps, *more))

    def add_step(self) -> bool:
        """Draw until a step could come next; False if none of many could."""
        for _ in range(_TRIES):
            if self.schedule.over:
                return False
            phase = self.random.choice(list(Phase))
            draft_len = self.random.randint(self.config.min_draft_len, self.config.max_draft_len)
            arrived = self._arrivals() if phase is Phase.EAGER else []
            step = self._dummies(phase, draft_len) if phase.is_startup else self._served(phase, draft_len, arrived)
            trial = self.schedule.fork()
            try:
                for request in arrived:
                    trial.add(request)
                trial.advance(step)
            except ScenarioError:
                continue
            self.requests += arrived
            self._take(step)
            return True
        return False

    def _take(self, step: Step) -> None:
        fault = self._fault(step)
        step = replace(step, finish=(), fault=fault) if fault is not None else step
        for request in self.requests:
            if request.id not in self.schedule.requests:
                self.schedule.add(request)
        self.schedule.advance(step)
        self.steps.append(step)

    def _fault(self, step: Step) -> Fault | None:
        """One of the sites in one of two steps; None where the step does not pass it so often."""
        if self.record is None or not step.rows or self.random.random() < 0.5:
            return None
        site, occurrence = self.random.choice(self.sites), self.random.randint(1, _OCCURRENCES)
        kind = self.random.choice(list(FaultKind))
        passed = self.record(self.scenario(replace(step, finish=()))).get(site, 0)
        return Fault(site=site, occurrence=occurrence, kind=kind) if occurrence <= passed else None

    def _arrivals(self) -> list[Request]:
        count, first = self.random.randint(0, self.config.max_num_requests), len(self.requests)
        return [self._request(first + i) for i in range(count)]

    def _request(self, number: int) -> Request:
        random, prompt_len = self.random, self.random.randint(1, _PROMPT)
        thinking = self.config.use_relaxed_acceptance_for_thinking and random.random() < 0.5
        shares = self.config.enable_block_reuse and number > 0 and random.random() < 0.5
        source, length = (random.randrange(number), random.randint(1, prompt_len)) if shares else (None, 0)
        return Request(id=number, prompt_len=prompt_len, thinking=thinking, prefix_of=source, prefix_len=length)

    def _drafter(self, draft_len: int) -> dict[str, int]:
        """How many drafts of a row agree, and how many after these nearly do, where that may count."""
        agree = self.random.randint(0, draft_len)
        nearly = self.config.use_relaxed_acceptance_for_thinking
        return {"agree": agree, "near": self.random.randint(0, draft_len - agree) if nearly else 0}

    def _dummies(self, phase: Phase, draft_len: int) -> Step:
        random, most = self.random, self.config.max_num_requests
        count = 0 if phase is Phase.CAPTURE else random.randint(0, most)
        contexts = tuple(Context(request=None, chunk=random.randint(1, _PROMPT)) for _ in range(count))
        deepest = 0 if self.config.traits.tree else draft_len
        generations = tuple(
            Generation(
                request=None,
                past=random.randint(1, _PROMPT),
                accept=random.randint(1, 1 + deepest),
                verify=self._verify(draft_len),
            )
            for _ in range(random.randint(0, most))
        )
        return Step(phase=phase, draft_len=draft_len, contexts=contexts, generations=generations)

    def _verify(self, draft_len: int) -> int | None:
        """How many drafts a generation verifies, where that may differ."""
        return self.random.randint(0, draft_len) if self.config.ragged_verify else None

    def _served(self, phase: Phase, draft_len: int, arrived: Sequence[Request]) -> Step:
        random, state = self.random, self.schedule.requests
        left = {i: state[i].prompt_len - state[i].past for i in self.schedule.waiting if phase is Phase.EAGER}
        left |= {request.id: request.prompt_len for request in arrived}
        deepest = draft_len if self.config.traits.drafts_for_contexts else 0
        contexts = tuple(
            Context(request=i, chunk=random.choice((tokens, random.randint(1, tokens))), **self._drafter(deepest))
            for i, tokens in left.items()
        )
        ready = self.schedule.generating
        chosen = random.sample(ready, random.randint(0, len(ready)))
        match = self.config.max_seq_len if self.config.sa_threshold else 0
        generations = tuple(
            Generation(
                request=i,
                **self._drafter(draft_len),
                match=random.randint(0, match),
                verify=self._verify(draft_len),
            )
            for i in chosen
        )
        started = [*left, *ready]
        finish = tuple(random.sample(started, random.randint(0, len(started)))) if random.random() < 0.5 else ()
        step = Step(phase=phase, draft_len=draft_len, contexts=contexts, generations=generations, finish=finish)
        peers = tuple(Peer(generations=random.randint(0, 3)) for _ in range(self.config.attention_dp_size - 1))
        return kept_in_step(self.config, replace(step, peers=peers)) if peers else step
