"""The commands behind the command line: each prints one report and returns an exit status."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import typer

from fuzz import acceptance, alone, doctor, listing
from fuzz import leaks as triage
from fuzz.alone import Caller, Died, Here, elsewhere
from fuzz.campaign import CampaignPlan, Lanes, campaign
from fuzz.display import coloured, escaped, watch
from fuzz.engines import PORTABLE
from fuzz.events import CampaignStarted, Event
from fuzz.executors import Executor, Spawned
from fuzz.explain import Line, explain, recorded_lines, scenario_lines
from fuzz.export import export
from fuzz.files import write_text
from fuzz.interrupt import interruptible
from fuzz.museum_report import MuseumSummary
from fuzz.options import Target, folder
from fuzz.provenance import misread_rows, provenance_lines
from fuzz.replay import Replay, replay_apart
from fuzz.report import ERROR, FINDINGS, NOTHING_FOUND, Summary, interrupted_line
from fuzz.scope import Scope, Slice, asks, slices
from fuzz.store import Store
from fuzz.subject import Subject, find_subject, read_subject
from fuzz.sweep_plan import UNIT_POINTS, Slices
from fuzz.sweep_report import SweepSummary
from fuzz.unit import Unit
from invariants import all_invariants, find
from scenarios import Finding, UsageError, finding_to_json

RUN_CASES: Final = 100
"""Scenarios of each worker in a bounded run."""
BUG_CASES: Final = 2000
"""Scenarios after which a seeded defect counts as not found."""
UNIT_CASES: Final = 1000
"""Most scenarios of one unit in a campaign that ends by time."""
SHARES: Final = 4
"""Units that each lane of such a campaign gets at least, so that no worker waits long for its turn."""
SHORTEST, LONGEST = 0.5, 30.0
"""Seconds of such a unit, at the least and at the most."""
_SEED_OF_REPLICA: Final = 101


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where results go: a person or a program at standard output, and a folder for a build to keep."""

    as_json: bool = False
    report_dir: Path | None = None

    @classmethod
    def asked(cls, as_json: bool, report_dir: str | None) -> Output:
        """As ``--json`` and ``--report-dir`` say; ``UsageError`` for a folder in which nothing can be made."""
        return cls(as_json=as_json, report_dir=folder("--report-dir", report_dir))

    def write(self, document: Any, lines: Iterable[Line | str], findings: Sequence[Finding] = ()) -> None:
        """Print one of the two; keep both in the folder, as report.json and report.txt, and the findings."""
        page = [
            Line(escaped(line.text), line.marked) if isinstance(line, Line) else Line(escaped(line)) for line in lines
        ]
        text = json.dumps(document, indent=1)
        if self.as_json:
            typer.echo(text)
        else:
            for line in page:
                striking = line.marked and coloured()
                typer.secho(line.text, bold=striking, fg=typer.colors.RED if striking else None)
        if self.report_dir is not None:
            self._keep("report.json", text)
            self._keep("report.txt", "\n".join(line.text for line in page))
            for finding in findings:
                self._keep(f"findings/{finding.id}.json", json.dumps(finding_to_json(finding), indent=1))

    def _keep(self, name: str, text: str) -> None:
        assert self.report_dir is not None
        write_text(self.report_dir / name, text + "\n", "--report-dir")


def executor(processes: int, running: Path) -> Executor:
    """Who runs the units of a campaign: other processes, even if it is one, as this one has to say how that ended."""
    return Spawned(processes, running)


class Listener(Protocol):
    """Adds up the events of a campaign."""

    interrupted: list[str]

    def feed(self, event: Event) -> None:
        """Take note of an event."""
        ...


def run(target: Target, *, cases: int | None, processes: int, output: Output) -> int:
    """A bounded campaign: the same scenarios every time."""
    each = RUN_CASES if cases is None else -(-cases // len(target.workers))
    plan = Lanes([_unit(target, worker, each) for worker in target.workers], cases=each)
    start = _start("run", target, cases=each * len(target.workers))
    return _report(target, start, plan, processes, output)


def fuzz(target: Target, *, seconds: float, processes: int, output: Output) -> int:
    """A campaign that ends by time."""
    replicas = -(-processes // len(target.workers))
    share = seconds * processes / (replicas * len(target.workers) * SHARES)
    units = [
        _unit(target, worker, UNIT_CASES, replica, max_seconds=min(max(share, SHORTEST), LONGEST))
        for replica in range(replicas)
        for worker in target.workers
    ]
    start = _start("fuzz", target, seconds=seconds)
    return _report(target, start, Lanes(units, seconds=seconds), processes, output)


def sweep(
    target: Target,
    scope: Scope,
    *,
    points: int | None,
    seconds: float | None,
    again: bool,
    processes: int,
    output: Output,
) -> int:
    """Run every point of a small scope, or as many as the limits allow; another run goes on from there."""
    units = [
        _unit(target, worker, UNIT_POINTS, slice=Slice(scope=scope, number=0, of=slices(scope, worker)))
        for worker in target.workers
    ]
    asked = [find(slug) for slug in target.invariants] or [i for i in all_invariants() if asks(i)]
    plan = Slices(units, Store(), points=points, seconds=seconds, again=again)
    summary = SweepSummary(asked, named=bool(target.invariants), plan=plan)
    _hunt(_start("sweep", target, cases=points, seconds=seconds), plan, processes, summary)
    output.write(summary.to_json(), summary.lines(), [event.finding for event in summary.found])
    return summary.status


def museum(
    target: Target, *, bugs: Sequence[str], cases: int | None, processes: int, output: Output, baseline: bool = False
) -> int:
    """Hunt each seeded defect until it is found; ``FINDINGS`` if one escapes.

    With a ``baseline`` they are hunted again, within the same budget, by scenarios drawn without aim.
    """
    from museum import BUGS

    budget = cases or BUG_CASES
    units = [_unit(target, BUGS[id].worker, budget, bug=id, first=True) for id in bugs]
    summary = MuseumSummary([BUGS[id] for id in bugs])
    start = _start("museum", target, cases=budget * len(bugs))
    _hunt(start, Lanes(units, cases=budget), processes, summary)
    if baseline:
        summary.baseline = MuseumSummary(summary.bugs)
        _hunt(start, Lanes([replace(u, plain=True) for u in units], cases=budget), processes, summary.baseline)
    output.write(summary.to_json(), summary.lines(), [event.finding for event in summary.found.values()])
    return summary.status


def leaks(target: Target, output: Output) -> int:
    """Triage what failed steps leave behind; ``FINDINGS`` if any of it is read."""
    if not target.faults:
        raise UsageError("--faults: without a family nothing can fail; write for instance 'seams'")
    failed = elsewhere(triage.triage_all, target.engine, target.device, target.workers, target.faults)
    output.write(triage.document(failed), triage.lines(failed))
    return triage.status(failed)


def replay_all(
    sources: Iterable[Callable[[], Subject]],
    *,
    invariants: tuple[str, ...],
    output: Output,
    interrupted: Sequence[Path] = (),
    store: Store | None = None,
    provenance: bool = False,
    here: bool = False,
) -> int:
    """Run each again; a finding that is gone holds. What cannot be run gets a line, and the rest is run all the same.

    interrupted  cases that are mentioned only, as each may end its process, or hang it
    store        where interrupted cases that hold are let go; None to leave them
    provenance   whether rows are followed from request to request
    here         whether to run them in this process, for a debugger
    """
    replays: list[Replay] = []
    problems: list[str] = []
    followed: list[list[str] | None] = []
    with closing(Here() if here else alone.caller()) as caller:
        for source in sources:
            try:
                done = replay_apart(caller, source(), only=invariants)
                followed.append(_misread(caller, done) if provenance else None)
                replays.append(done)
            except UsageError as error:
                problems.append(str(error))
    for problem in problems:
        typer.echo(f"specfuzz: {problem}", err=True)
    if problems and not replays:
        return ERROR
    failed = sum(bool(done.violations) for done in replays)
    results = [
        done.to_json() | ({} if rows is None else {"misread_rows": rows}) for done, rows in zip(replays, followed)
    ]
    pages = [line for page in map(_replay_lines, replays, followed) for line in page]
    lines = pages or [Line(_nothing_stored(Store()))]
    lines += [Line(f"not run here, {interrupted_line(str(path))}") for path in interrupted]
    # With only some of the invariants asked, a case has not been replayed whole.
    gone = [] if store is None or invariants else list(_let_go(replays, store))
    lines += [Line(f"interrupted before, and holds: no longer listed, and kept as {path}") for path in gone]
    document = {"total": len(replays), "failed": failed, "results": results, "problems": problems}
    passed_over = {"interrupted": [str(path) for path in interrupted], "held": [str(path) for path in gone]}
    output.write(document | passed_over, lines)
    if problems:
        return ERROR
    if failed:
        return FINDINGS
    sound = replays and all(done.unsound is None for done in replays)
    return NOTHING_FOUND if sound else ERROR


def _let_go(replays: Sequence[Replay], store: Store) -> Iterator[Path]:
    """New paths of the interrupted cases that hold now, on the engine and under the defect of which they are."""
    for path in store.interrupted():
        runs = [done for done in replays if done.subject.path and done.subject.path.resolve() == path.resolve()]
        if runs and all(done.status == NOTHING_FOUND and _as_filed(done.subject, path) for done in runs):
            yield store.let_go(path)


def _as_filed(subject: Subject, path: Path) -> bool:
    filed = read_subject(path)
    return (filed.engine, filed.device, filed.bug) == (subject.engine, subject.device, subject.active_bug)


def _misread(caller: Caller, done: Replay) -> list[str] | None:
    """Rows that were read as another request's; None if the process ends before that is known."""
    if done.verdict is None:
        return None
    try:
        return caller.call(misread_rows, done.subject)
    except Died as died:
        raise UsageError(f"{done.subject.name}: {died}; leave out --provenance") from died


def _nothing_stored(store: Store) -> str:
    seeded = store.seeded()
    if not seeded:
        return "no findings are stored; name a scenario file, or run `specfuzz run` first"
    return (
        f"no findings are stored of the engine as it is; {seeded[0].parent} has {len(seeded)} under seeded defects: "
        f"name one, for instance specfuzz replay {seeded[0].stem}"
    )


def export_file(subject: Subject, *, invariant: str | None, path: Path | None) -> int:
    """Write the stand-alone test of a subject to a file, or print it."""
    with closing(alone.caller()) as apart:
        try:
            text = apart.call(export, subject, invariant)
        except Died as died:
            raise UsageError(
                f"{subject.name}: cannot be exported: {died}; use `specfuzz replay {subject.name}`"
            ) from died
    if path is None:
        typer.echo(text, nl=False)
    else:
        write_text(path, text, "--output")
        typer.echo(f"{path}: written; `pytest {path}` fails where tensorrt_llm has the bug")
    return NOTHING_FOUND


def sources(names: Sequence[str], store: Store) -> list[Callable[[], Subject]]:
    """Readers of what is named, or else of every finding in the engine as it is."""
    if names:
        return [partial(find_subject, name, store) for name in names]
    return [partial(read_subject, path, path.stem) for path in store.findings()]


def show_acceptance(asked: acceptance.Asked, engine: str, device: str, output: Output) -> int:
    """Print how often drafts are accepted, by depth."""
    if asked.bug is not None and engine != PORTABLE:
        raise UsageError(f"--with-bug: defects are seeded into the portable engine; leave out --engine {engine}")
    rows = elsewhere(acceptance.measure_on, engine, device, asked)
    document = [{"engine": name, **cell.to_json()} for name, cell in rows]
    output.write(document, acceptance.lines(rows))
    return NOTHING_FOUND


def list_rows(rows: listing.Rows, output: Output) -> int:
    """Print what there is to choose from."""
    width = max((len(row["name"]) for row in rows), default=0)
    output.write(rows, (f"{row['name'].ljust(width)}  {row['summary']}{_with(row)}" for row in rows))
    return NOTHING_FOUND


def _with(row: dict[str, Any]) -> str:
    """The invariants that notice a seeded defect, the predicates that an invariant holds."""
    names = row.get("caught_by") or row.get("predicates")
    return f" ({', '.join(names)})" if names else ""


def diagnose(output: Output) -> int:
    """Print what this machine can test."""
    rows = doctor.diagnose(Store())
    width = max(len(row["name"]) for row in rows)
    output.write(rows, (f"{r['name'].ljust(width)}  {'yes' if r['ok'] else 'no '}  {r['summary']}" for r in rows))
    return NOTHING_FOUND if doctor.can_test(rows) else ERROR


def _unit(target: Target, worker: str, cases: int, replica: int = 0, **options: Any) -> Unit:
    return Unit(
        engine=target.engine,
        device=target.device,
        worker=worker,
        seed=target.seed + _SEED_OF_REPLICA * replica,
        max_cases=cases,
        faults=target.faults,
        invariants=target.invariants,
        max_draft_len=target.max_draft_len,
        **options,
    )


def _start(command: str, target: Target, *, cases: int | None = None, seconds: float | None = None) -> CampaignStarted:
    return CampaignStarted(
        command=command,
        engine=target.engine,
        device=target.device,
        workers=target.workers,
        seed=target.seed,
        cases=cases,
        seconds=seconds,
    )


def _hunt(start: CampaignStarted, plan: CampaignPlan, processes: int, listener: Listener) -> None:
    """Run a campaign; Ctrl-C or SIGTERM ends it early, and what it has found so far stands."""
    store = Store()
    store.prepare()
    for sentence in store.misplaced():
        typer.echo(f"specfuzz: {sentence}", err=True)
    listener.interrupted += map(str, store.take_interrupted())
    listener.feed(start)
    events = watch(store.record(campaign(start, plan, executor(processes, store.running))))
    with suppress(KeyboardInterrupt), interruptible(), closing(events):
        for event in events:
            listener.feed(event)
    # Those of this campaign.
    listener.interrupted += map(str, store.take_interrupted())


def _report(target: Target, start: CampaignStarted, plan: Lanes, processes: int, output: Output) -> int:
    asked = [find(slug) for slug in target.invariants] or all_invariants()
    summary = Summary(asked, named=bool(target.invariants))
    _hunt(start, plan, processes, summary)
    output.write(summary.to_json(), summary.lines(), [event.finding for event in summary.found])
    return summary.status


def _replay_lines(done: Replay, misread: list[str] | None) -> Iterable[Line]:
    subject = done.subject
    followed = () if misread is None else provenance_lines(misread)
    if subject.title:
        yield Line(subject.title)
    yield from map(Line, subject.story.splitlines())
    if done.unsound is not None:
        yield Line(f"{subject.name}: {done.unsound.message}", marked=True)
    finding = done.finding
    if finding is not None:
        yield from explain(finding, done.verdict, subject.name)
        yield from followed
        yield Line("")
        yield Line(f"{subject.name}: fails")
    elif done.unsound is None:
        if subject.finding is not None:
            yield from recorded_lines(subject.finding)
        yield from scenario_lines(subject.scenario)
        yield from followed
        yield Line("")
        yield Line(f"{subject.name}: holds, {done.reached} invariant{'s' * (done.reached != 1)} had something to say")
