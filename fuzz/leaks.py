"""Leak triage: what a failed step leaves behind in the metadata, and whether anything depends on it.

Each site of a step fails once. Whatever differs then from what the same step leaves when it does not fail is watched
through the steps that follow, until it is read (*live*, a defect) or rewritten (*dead*, of no consequence).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from engines.base import Engine, run
from fuzz.engines import load
from fuzz.report import ERROR, FINDINGS, NOTHING_FOUND, counted, table
from fuzz.scope import ACCEPTANCES, KINDS, USUAL, Cell, Scope, cells, points, variants_of
from scenarios import Phase, Scenario, UsageError

if TYPE_CHECKING:
    from engines.leftovers import Leftover

SCOPE: Final = Scope(max_batch=2, max_draft_len=2, steps=3)
"""Batches of a context and a generation, drafts of two; two steps that follow."""
_RANKS: Final = "attention_dp_size"
STEPS: Final = {(Phase.WARMUP, USUAL): "warm-up", (Phase.EAGER, USUAL): "serving", (Phase.EAGER, _RANKS): "two ranks"}
"""What fails, by phase and variant of a cell."""
FIELDS: Final = (
    "num_contexts",
    "host_request_types",
    "kv_lens_cuda",
    "use_spec_decoding",
    "all_rank_num_tokens",
    "force_prepare_spec_dec_tree_mask",
)
"""What the table shows: what reviews of upstream argued about, or might (PR #16325). The document has the rest."""
VERDICTS: Final = {"read": "live", "rewritten": "dead", "untouched": "untouched"}
"""Fates of ``engines.leftovers`` as they are shown."""


@dataclass(frozen=True)
class Failed:
    """A step that failed, of ``STEPS``, and what became of what it left behind."""

    worker: str
    step: str
    site: str
    occurrence: int
    left: Sequence[Leftover]


def triage_all(name: str, device: str, workers: Sequence[str], families: Collection[str]) -> list[Failed]:
    """The triage of these workers on the engine of that name."""
    engine = load(name, device)
    return [one for worker in workers for one in triage(engine, worker, families)]


def triage(engine: Engine, worker: str, families: Collection[str]) -> Iterator[Failed]:
    """Fail a step of each kind of ``STEPS`` at each of its sites; ``UsageError`` for an engine without metadata."""
    for cell in cells(SCOPE, worker, list(engine.backends)[:1], variants_of(engine)):
        mixed = cell.contexts == cell.generations == 1 and cell.draft_len == SCOPE.max_draft_len
        if mixed and (cell.phase, cell.variant) in STEPS:
            yield from _triage(engine, cell, families)


def _triage(engine: Engine, cell: Cell, families: Collection[str]) -> Iterator[Failed]:
    sites = run(engine, _led(cell, ACCEPTANCES[0]), observe=False, record=families).steps[-1].sites
    expected: dict[str, Mapping[str, Any]] = {}
    for point in points(cell, sites):
        fault = point.fault
        if fault is not None and fault.kind is KINDS[cell.phase]:
            if point.acceptance not in expected:
                expected[point.acceptance] = _after(engine, _led(cell, point.acceptance))
            left = _left(engine, point.scenario, cell.lead + 1, expected[point.acceptance])
            yield Failed(cell.worker, STEPS[cell.phase, cell.variant], fault.site, fault.occurrence, left)


def _led(cell: Cell, acceptance: str) -> Scenario:
    """The step of a cell without a failure, and what leads to it."""
    scenario = cell.scenario(acceptance)
    return replace(scenario, steps=scenario.steps[: cell.lead + 1])


def _metadata(session: Any, engine: Engine) -> Any:
    metadata = getattr(session, "attn_metadata", None)
    if metadata is None:
        raise UsageError(f"--engine: {engine.name!r} has no attn_metadata in its session that could be watched")
    return metadata


def _after(engine: Engine, scenario: Scenario) -> Mapping[str, Any]:
    """The metadata after the last step."""
    session: Any = engine.open(scenario.config, scenario.requests, observe=False)
    try:
        for step in scenario.steps:
            session.step(step)
        metadata = _metadata(session, engine)
        # Torch is needed from here on.
        from engines.leftovers import snapshot

        return snapshot(metadata)
    finally:
        session.close()


def _is_stale(item: Leftover) -> bool:
    """Whether there is a wrong value, and not just none yet, or fewer rows."""
    if isinstance(item.left, list) and isinstance(item.prepared, list):
        return bool(item.left != item.prepared[: len(item.left)])
    return item.left is not None


def _left(engine: Engine, scenario: Scenario, until: int, expected: Mapping[str, Any]) -> Sequence[Leftover]:
    """What the failed step leaves behind, with its fate in the steps after it."""
    from engines.leftovers import differing, follow

    session: Any = engine.open(scenario.config, scenario.requests, observe=False)
    try:
        for step in scenario.steps[:until]:
            session.step(step)
        metadata = _metadata(session, engine)
        left = [item for item in differing(metadata, expected) if _is_stale(item)]
        with follow(metadata, left) as followed:
            for step in scenario.steps[until:]:
                session.step(step)
        return followed
    finally:
        session.close()


def status(failed: Sequence[Failed]) -> int:
    """Exit status: a value that is read is a finding, and nothing that failed no proof."""
    if any(item.fate == "read" for one in failed for item in one.left):
        return FINDINGS
    return NOTHING_FOUND if failed else ERROR


def document(failed: Sequence[Failed]) -> list[dict[str, Any]]:
    """JSON of the triage: each failure with the fields that it leaves behind."""
    return [{**asdict(one), "left": {item.field: _row(item) for item in one.left}} for one in failed]


def _row(item: Leftover) -> dict[str, Any]:
    fate = VERDICTS[item.fate]
    return {"verdict": fate, "expected": item.prepared, "left": item.left, "where": item.where, "by": item.by}


def lines(failed: Sequence[Failed]) -> Iterator[str]:
    """The table: per worker and step how many failures leave what in which field, and who ends it."""
    groups: dict[tuple[str, str], list[Failed]] = {}
    for one in failed:
        groups.setdefault((one.worker, one.step), []).append(one)
    rows: list[tuple[object, ...]] = [
        (*group, len(ones), *(_verdicts(ones, name) for name in FIELDS)) for group, ones in groups.items()
    ]
    yield from table(("worker", "step", "failures", *FIELDS), rows)
    yield ""
    items = [item for one in failed for item in one.left]
    for name in dict.fromkeys(item.field for item in items):
        ends = sorted({f"{item.by} ({item.fate})" for item in items if item.field == name and item.by})
        yield f"{name}: {', '.join(ends) or 'nobody'}"
    yield ""
    live = sum(item.fate == "read" for item in items)
    yield f"{counted(len(failed), 'failure')}, {counted(len(items), 'value')} left behind, {live} of them live"


def _verdicts(failed: Sequence[Failed], field: str) -> str:
    counts = Counter(VERDICTS[item.fate] for one in failed for item in one.left if item.field == field)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS.values() if counts[verdict]) or "-"
