"""How often a draft is accepted, by its depth: what a fault that costs only acceptance looks like from outside.

PR #17240 describes one so: with a stale map of tokens to requests, acceptance is flat at batch size 1 and at draft
length 1, and falls with the depth at batch size 8; once the map is rebuilt it is flat everywhere.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engines.base import Engine, run
from fuzz.engines import load
from fuzz.report import table
from museum import seeded
from scenarios import BACKENDS, Config, Context, Generation, Request, Scenario, Step, Trace, UsageError, check

_PROMPT = 40
_TOPK = 8
_BLOCK = 16
_WINDOW = 8
_RATIOS = (1, 2, 4)


@dataclass(frozen=True)
class Acceptance:
    """Counts by depth of the draft, 1..draft_len: how often all before it were accepted, and how often it was too."""

    batch: int
    draft_len: int
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def rates(self) -> list[float | None]:
        """Conditional acceptance per depth; None where a depth was never reached."""
        return [a / r if r else None for a, r in zip(self.accepted, self.reached)]

    def to_json(self) -> dict[str, object]:
        """JSON object of the row."""
        return {"batch": self.batch, "draft_len": self.draft_len, "rates": self.rates, "length": self.length}

    @property
    def length(self) -> float:
        """Tokens per step and request, the target's own included."""
        return 1 + sum(self.accepted) / self.reached[0]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to measure: a row for each batch size and draft length, with the defect too if there is one.

    drafts     generations behind a row, over all steps
    agreement  probability with which a draft is right, each for itself
    """

    worker: str
    backend: str
    batches: tuple[int, ...]
    draft_lens: tuple[int, ...]
    drafts: int
    agreement: float
    seed: int
    bug: str | None


Row = tuple[str, Acceptance]
"""What is measured, and the counts."""


def measure_on(name: str, device: str, asked: Asked) -> list[Row]:
    """``measure`` on the engine of that name."""
    return measure(load(name, device), asked)


def measure(engine: Engine, asked: Asked) -> list[Row]:
    """Serve each batch for as many steps as it takes: first on the engine as it is, then with the defect, if any."""
    rows = []
    for bug in dict.fromkeys((None, asked.bug)):
        for batch in asked.batches:
            for draft_len in asked.draft_lens:
                scenario = _scenario(asked, batch, draft_len)
                with seeded(bug):
                    trace = run(engine, scenario)
                rows.append((bug or "as it is", _count(trace, batch, draft_len, len(scenario.steps))))
    return rows


def _scenario(asked: Asked, batch: int, draft_len: int) -> Scenario:
    steps = max(2, -(-asked.drafts // batch))
    longest = _PROMPT + batch + (steps + 2) * (2 * draft_len + 1)
    backend = BACKENDS[asked.backend]
    block = longest + draft_len if backend.one_page else _BLOCK
    config = Config(
        worker=asked.worker,
        max_draft_len=draft_len,
        tokens_per_block=block,
        num_blocks=batch * (longest // block + 2),
        max_num_requests=batch,
        max_num_tokens=batch * longest,
        max_seq_len=longest,
        seed=asked.seed,
        attention_backend=asked.backend,
        index_topk=_TOPK if backend.sparse else 0,
        window_size=_WINDOW if backend.compressed else 0,
        compress_ratios=_RATIOS if backend.compressed else (),
    )
    draws = random.Random(asked.seed)

    def agree() -> int:
        return next((depth for depth in range(draft_len) if draws.random() >= asked.agreement), draft_len)

    contexts = tuple(
        Context(request=i, chunk=_PROMPT + i, agree=agree() if config.traits.drafts_for_contexts else 0)
        for i in range(batch)
    )
    taken = [Step(draft_len=draft_len, contexts=contexts)]
    for _ in range(steps):
        rows = tuple(Generation(request=i, agree=agree()) for i in range(batch))
        taken.append(Step(draft_len=draft_len, generations=rows))
    requests = tuple(Request(id=i, prompt_len=_PROMPT + i) for i in range(batch))
    return check(Scenario(config=config, requests=requests, steps=tuple(taken)))


def _count(trace: Trace, batch: int, draft_len: int, steps: int) -> Acceptance:
    """The first generation is left out: not every worker drafts for a context."""
    reached: Counter[int] = Counter()
    for step in trace.steps[2:]:
        updated = step.find("updated")
        if updated is None:
            break
        for drafts in updated["py_num_accepted_draft_tokens"].values():
            reached.update(range(drafts + 1))
    if len(trace.steps) < steps or trace.steps[-1].outcome != "ok" or not reached:
        raise UsageError(
            f"acceptance: a step of batch {batch} failed, so there is nothing to count; see `specfuzz run`"
        )
    counts = [reached[depth] for depth in range(draft_len + 1)]
    return Acceptance(batch, draft_len, tuple(counts[:-1]), tuple(counts[1:]))


def lines(cells: Sequence[Row]) -> Iterator[str]:
    """The table, one row per engine, batch and draft length."""
    deepest = max(cell.draft_len for _, cell in cells)
    head = ("engine", "batch", "K", *(f"depth {depth}" for depth in range(1, deepest + 1)), "length")
    rows: list[tuple[object, ...]] = []
    for engine, cell in cells:
        rates = ["-" if rate is None else f"{rate:.3f}" for rate in cell.rates]
        rows.append(
            (engine, cell.batch, cell.draft_len, *rates, *[""] * (deepest - cell.draft_len), f"{cell.length:.2f}")
        )
    return table(head, rows)
