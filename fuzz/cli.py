"""The command line: what can be written, and errors in one line."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fuzz import engines
from fuzz.audit import unexpected
from fuzz.cli_app import (
    OWN,
    PROGRAM,
    DeviceOption,
    DraftLenOption,
    EngineOption,
    FaultsOption,
    FoundArgument,
    FoundDeviceOption,
    FoundEngineOption,
    InvariantOption,
    JsonOption,
    OptionalBug,
    ReportOption,
    SeedOption,
    SourceOption,
    WorkerOption,
    WorkersOption,
    app,
)
from scenarios import BACKENDS, UsageError, closest

if TYPE_CHECKING:
    from fuzz.subject import Subject

CLOSED_PIPE: Final = 141
"""Exit status of whoever writes to a pipe that nobody reads any more, as shells have it."""
INTERRUPTED: Final = 130
"""Exit status of whoever is ended by Ctrl-C, as shells have it."""
_SEEDS: Final = 2**31


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            number = version(PROGRAM)
        except PackageNotFoundError:
            number = "of a checkout that is not installed"
        typer.echo(f"{PROGRAM} {number}")
        raise typer.Exit


@app.callback()
def _program(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Say which version this is.")
    ] = False,
) -> None:
    """Hunts for departures of a speculative-decoding engine from its specification."""


@app.command()
def run(
    engine: EngineOption = "portable",
    device: DeviceOption = "cpu",
    trtllm_source: SourceOption = None,
    worker: WorkerOption = None,
    invariant: InvariantOption = None,
    faults: FaultsOption = "seams",
    max_draft_len: DraftLenOption = None,
    seed: SeedOption = 0,
    max_cases: Annotated[
        int | None,
        typer.Option("--max-cases", metavar="N", help="Scenarios, shared by the workers. [default: 100 each]"),
    ] = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    report_dir: ReportOption = None,
) -> int:
    """Verify every worker, the same way each time: what CI calls."""
    from fuzz import commands, options

    target = options.target(
        engine=engine,
        device=device,
        worker=worker,
        invariant=invariant,
        faults=faults,
        max_draft_len=max_draft_len,
        seed=seed,
        source=trtllm_source,
    )
    if max_cases is not None:
        options.within("--max-cases", max_cases, 1, options.MOST_CASES)
    processes = options.processes(workers, len(target.workers))
    output = commands.Output.asked(as_json, report_dir)
    return commands.run(target, cases=max_cases, processes=processes, output=output)


@app.command()
def fuzz(
    max_time: Annotated[
        str, typer.Option("--max-time", metavar="TIME", help="For instance 90s, 10m or 1h30m.")
    ] = "10m",
    engine: EngineOption = "portable",
    device: DeviceOption = "cpu",
    trtllm_source: SourceOption = None,
    worker: WorkerOption = None,
    invariant: InvariantOption = None,
    faults: FaultsOption = "seams",
    max_draft_len: DraftLenOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seed of the search. [default: another each time]")
    ] = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    report_dir: ReportOption = None,
) -> int:
    """Search until the time is over."""
    from fuzz import commands, options

    target = options.target(
        engine=engine,
        device=device,
        worker=worker,
        invariant=invariant,
        faults=faults,
        max_draft_len=max_draft_len,
        seed=secrets.randbelow(_SEEDS) if seed is None else seed,
        source=trtllm_source,
    )
    seconds = options.duration(max_time)
    processes = options.processes(workers, os.cpu_count() or 1)
    output = commands.Output.asked(as_json, report_dir)
    return commands.fuzz(target, seconds=seconds, processes=processes, output=output)


@app.command()
def sweep(
    max_batch: Annotated[int, typer.Option("--max-batch", metavar="N", help="Most rows of the step under test.")] = 3,
    max_draft_len: Annotated[int, typer.Option("--max-draft-len", metavar="N", help="Largest draft length.")] = 3,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Served steps from the one under test on.")] = 2,
    max_time: Annotated[
        str | None, typer.Option("--max-time", metavar="TIME", help="When to stop; another run goes on.")
    ] = None,
    max_points: Annotated[
        int | None, typer.Option("--max-points", metavar="N", help="Most scenarios; another run goes on.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Start over instead of going on.")] = False,
    engine: EngineOption = "portable",
    device: DeviceOption = "cpu",
    trtllm_source: SourceOption = None,
    worker: WorkerOption = None,
    invariant: InvariantOption = None,
    faults: FaultsOption = "seams",
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    report_dir: ReportOption = None,
) -> int:
    """Run every small scenario with every single fault in it. Goes on where an earlier run stopped."""
    from fuzz import commands, options

    target = options.target(
        engine=engine,
        device=device,
        worker=worker,
        invariant=invariant,
        faults=faults,
        max_draft_len=max_draft_len,
        source=trtllm_source,
    )
    scope = options.scope(max_batch=max_batch, max_draft_len=max_draft_len, steps=steps, target=target)
    if max_points is not None:
        options.within("--max-points", max_points, 1, options.MOST_CASES)
    return commands.sweep(
        target,
        scope,
        points=max_points,
        seconds=None if max_time is None else options.duration(max_time),
        again=again,
        processes=options.processes(workers, os.cpu_count() or 1),
        output=commands.Output.asked(as_json, report_dir),
    )


@app.command(cls=OptionalBug)
def replay(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="ID|FILE", help="Findings or scenario files. [default: findings]")
    ] = None,
    with_bug: Annotated[
        str | None,
        typer.Option("--with-bug", metavar="[BUG]", help="Seed a defect; alone: the one that the file names."),
    ] = None,
    engine: FoundEngineOption = None,
    device: FoundDeviceOption = None,
    trtllm_source: SourceOption = None,
    invariant: InvariantOption = None,
    here: Annotated[
        bool,
        typer.Option("--here", help="Run in this process, for breakpoint() and debuggers. What ends it ends replay."),
    ] = False,
    as_json: JsonOption = False,
    report_dir: ReportOption = None,
) -> int:
    """Run findings or scenario files again. Says whether they hold."""
    from fuzz import commands, options
    from fuzz.store import Store

    if with_bug not in (None, OWN):
        options.bugs([str(with_bug)], "--with-bug")

    def prepare(read: Callable[[], Subject]) -> Subject:
        subject = read()
        named = with_bug not in (None, OWN)
        bug = options.bug(str(with_bug), "--with-bug", subject.scenario.config.worker) if named else None
        subject = subject.on(engine, device, bug=bug, seed_bug=with_bug is not None)
        options.check_source(trtllm_source, subject.engine)
        return subject

    store = Store()
    with suppress(UsageError):  # where nothing can be written, what was left behind stays where it is
        store.take_interrupted()
    return commands.replay_all(
        [partial(prepare, read) for read in commands.sources(names or (), store)],
        invariants=options.invariants(invariant or ()),
        output=commands.Output.asked(as_json, report_dir),
        interrupted=() if names else store.interrupted(),
        # Whoever steps through a scenario may leave out some of it.
        store=None if here else store,
        here=here,
    )


@app.command()
def explain(
    name: FoundArgument,
    engine: FoundEngineOption = None,
    device: FoundDeviceOption = None,
    trtllm_source: SourceOption = None,
    provenance: Annotated[
        bool, typer.Option("--provenance", help="Say which request's row was read as whose (portable engine, CPU).")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Show the failing step of a finding, expected beside actual."""
    from fuzz import commands, options
    from fuzz.store import Store
    from fuzz.subject import find_subject

    def source() -> Subject:
        subject = find_subject(name, Store()).on(engine, device)
        options.check_source(trtllm_source, subject.engine)
        return subject

    output = commands.Output(as_json=as_json)
    return commands.replay_all([source], invariants=(), output=output, provenance=provenance)


@app.command()
def export(
    name: FoundArgument,
    output: Annotated[
        str | None, typer.Option("--output", metavar="FILE", help="Where to write it. [default: standard output]")
    ] = None,
    invariant: Annotated[
        str | None,
        typer.Option(
            "--invariant", metavar="SLUG", help="Invariant to show. [default: as found, else the first violated]"
        ),
    ] = None,
    engine: FoundEngineOption = None,
    device: FoundDeviceOption = None,
    trtllm_source: SourceOption = None,
) -> int:
    """Write a finding as a stand-alone pytest file for TensorRT-LLM."""
    from fuzz import commands, options
    from fuzz.store import Store
    from fuzz.subject import find_subject

    slug = None if invariant is None else options.invariants([invariant])[0]
    path = options.file("--output", output)
    subject = find_subject(name, Store()).on(engine, device)
    options.check_source(trtllm_source, subject.engine)
    return commands.export_file(subject, invariant=slug, path=path)


@app.command()
def museum(
    bug: Annotated[
        list[str] | None, typer.Option("--bug", metavar="ID", help="Seeded defect, repeatable. [default: all]")
    ] = None,
    faults: FaultsOption = "seams",
    seed: SeedOption = 0,
    max_cases: Annotated[
        int | None, typer.Option("--max-cases", metavar="N", help="Scenarios per defect. [default: 2000]")
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Hunt them again with scenarios drawn without aim, for comparison.")
    ] = False,
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Processes to search with.")] = 1,
    as_json: JsonOption = False,
    report_dir: ReportOption = None,
) -> int:
    """Hunt the seeded defects. Exit status 1 if one escapes."""
    from fuzz import commands, options

    bugs = options.bugs(bug or ())
    if max_cases is not None:
        options.within("--max-cases", max_cases, 1, options.MOST_CASES)
    target = options.target(engine="portable", device="cpu", faults=faults, seed=seed)
    output = commands.Output.asked(as_json, report_dir)
    processes = options.processes(workers, len(bugs))
    return commands.museum(target, bugs=bugs, cases=max_cases, processes=processes, output=output, baseline=baseline)


@app.command()
def leaks(
    engine: EngineOption = "portable",
    device: DeviceOption = "cpu",
    trtllm_source: SourceOption = None,
    worker: WorkerOption = None,
    faults: FaultsOption = "seams",
    as_json: JsonOption = False,
    report_dir: ReportOption = None,
) -> int:
    """Say what failed steps leave behind, and whether it is read. Exit status 1 if anything is."""
    from fuzz import commands, options

    target = options.target(engine=engine, device=device, faults=faults, worker=worker, source=trtllm_source)
    output = commands.Output.asked(as_json, report_dir)
    return commands.leaks(target, output)


@app.command()
def acceptance(
    worker: Annotated[str, typer.Option("--worker", metavar="CLASS", help="Worker that drafts.")] = "MTPEagleWorker",
    attention_backend: Annotated[
        str, typer.Option("--attention-backend", metavar="NAME", help=f"One that it runs on of {', '.join(BACKENDS)}.")
    ] = "DSA",
    with_bug: Annotated[
        str | None, typer.Option("--with-bug", metavar="ID", help="Also with this seeded defect, for comparison.")
    ] = None,
    batch: Annotated[str, typer.Option("--batch", metavar="SIZES", help="Batch sizes, with commas.")] = "1,8",
    draft_len: Annotated[str, typer.Option("--draft-len", metavar="KS", help="Draft lengths, with commas.")] = "1,4",
    drafts: Annotated[
        int, typer.Option("--drafts", metavar="N", help="Generations per row of the table, over all steps.")
    ] = 240,
    agreement: Annotated[
        float, typer.Option("--agreement", metavar="P", help="Probability with which the drafter is right.")
    ] = 0.85,
    engine: EngineOption = "portable",
    device: DeviceOption = "cpu",
    trtllm_source: SourceOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> int:
    """Show how often drafts are accepted, by depth. Shows what a silent loss of acceptance looks like."""
    from fuzz import acceptance as table
    from fuzz import commands, options

    options.check_source(trtllm_source, engine)
    (worker,) = options.workers([worker])
    asked = table.Asked(
        worker=worker,
        backend=options.backend(attention_backend, worker),
        batches=options.numbers("--batch", batch, 1, 64),
        draft_lens=options.numbers("--draft-len", draft_len, 1, 31),
        drafts=options.within("--drafts", drafts, 1, 100_000),
        agreement=options.probability("--agreement", agreement),
        seed=options.within("--seed", seed, 0, 2**31 - 1),
        bug=None if with_bug is None else options.bug(with_bug, "--with-bug", worker),
    )
    return commands.show_acceptance(asked, engine, device, commands.Output(as_json=as_json))


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="workers, metadata, invariants, sites or bugs.")],
    engine: EngineOption = "portable",
    device: DeviceOption = "cpu",
    trtllm_source: SourceOption = None,
    worker: WorkerOption = None,
    faults: FaultsOption = "seams",
    as_json: JsonOption = False,
) -> int:
    """List workers, metadata, invariants, fault sites or defects."""
    from fuzz import commands, listing, options

    target = options.target(engine=engine, device=device, faults=faults, worker=worker, source=trtllm_source)
    given = {
        "--engine": engine != "portable",
        "--trtllm-source": trtllm_source is not None,
        "--device": device != "cpu",
        "--worker": bool(worker),
        "--faults": faults != "seams",
    }
    rows = listing.rows(what, target, [option for option, is_given in given.items() if is_given])
    return commands.list_rows(rows, commands.Output(as_json=as_json))


@app.command()
def doctor(trtllm_source: SourceOption = None, as_json: JsonOption = False) -> int:
    """Say what this machine can test, and why not."""
    from fuzz import commands

    return commands.diagnose(commands.Output(as_json=as_json))


@app.command()
def gate(
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="REV", help="Revision to compare with. [default: where origin/main was left]"),
    ] = None,
) -> int:
    """Judge whether tests cover the lines that a branch changes."""
    from fuzz import gate as gates

    result = gates.gate(base)
    typer.echo(str(result))
    return 0 if result.passed else 1


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; ends the process with the exit status."""
    engines.settle_process()
    sys.exit(invoke(sys.argv[1:] if argv is None else argv))


def invoke(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit status. Errors are one line on standard error."""
    engines.quieten()
    try:
        if not argv:
            raise UsageError(f"COMMAND: is missing; write for instance `{PROGRAM} run`, or see `{PROGRAM} --help`")
        return int(typer.main.get_command(app).main(list(argv), prog_name=PROGRAM, standalone_mode=False) or 0)
    except UsageError as error:
        message = str(error)
    except typer.Abort:
        # Ctrl-C outside a campaign, or a second one.
        typer.echo(f"{PROGRAM}: interrupted", err=True)
        return INTERRUPTED
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):
            return CLOSED_PIPE  # Typer has seen to the rest
        message = unexpected(ended)
    except OSError as error:
        if error.filename is not None:
            message = unexpected(error)
        else:
            # What it holds back is dropped, or Python would complain at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                return CLOSED_PIPE  # whoever was reading has seen enough
            message = f"standard output: cannot be written ({error.strerror}); write to another place"
    except Exception as error:
        message = _usage(error) if hasattr(error, "format_message") else unexpected(error)
    typer.echo(f"{PROGRAM}: {message}", err=True)
    return 2


def _usage(error: Any) -> str:
    """Typer's objection to a command line, in one line."""
    context = getattr(error, "ctx", None)
    command = f"{PROGRAM} {context.info_name}" if context is not None and context.parent else PROGRAM
    option = getattr(error, "option_name", None)
    if option is not None and context is not None:
        known = [name for param in context.command.params for name in param.opts if name.startswith("--")]
        return f"{option}: is not an option of `{command}`; {closest(option, known)}"
    param = getattr(error, "param", None)
    if param is not None:
        option = param.opts[0] if param.param_type_name == "option" else param.metavar
    text = (
        error.message.removeprefix(f"Option '{option}' ").partition(", unable to parse")[0].rstrip(".") or "is missing"
    )
    refused = getattr(error.__cause__, "errors", None)
    if refused is not None:
        # Newer releases of Typer leave out the value, which older ones repeat.
        text = text.replace("Input should be", f"{refused()[0]['input']!r} is not", 1)
    return f"{option or command}: {text[0].lower()}{text[1:]}; see `{command} --help`"
