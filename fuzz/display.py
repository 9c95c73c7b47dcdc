"""What a terminal is shown: progress while a campaign runs, colours, and no character that steers it."""

from __future__ import annotations

import os
from contextlib import closing

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fuzz.events import BatchFinished, CampaignStarted, Events, FindingFound


def coloured() -> bool:
    """Whether a terminal is to be sent colours at all, see https://no-color.org."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def escaped(text: str) -> str:
    """``text`` in one line of printable characters, the others as Python writes them: it may come from a stranger."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def watch(events: Events, console: Console | None = None) -> Events:
    """Pass events on and show on standard error what they amount to; nothing in CI or without a terminal."""
    console = console or Console(stderr=True)
    with closing(events):
        if not console.is_terminal or console.is_dumb_terminal or os.environ.get("CI"):
            yield from events
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[cases]} scenarios  {task.fields[findings]} findings"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=None, cases=0, findings=0)
            cases = findings = 0
            by_time = False
            for event in events:
                if isinstance(event, CampaignStarted):
                    by_time = event.seconds is not None
                    total = event.seconds if by_time else event.cases
                    progress.update(task, total=total, description=event.command)
                elif isinstance(event, BatchFinished):
                    cases += event.tally.cases
                    done = progress.tasks[task].elapsed if by_time else cases
                    progress.update(task, cases=cases, completed=done)
                elif isinstance(event, FindingFound):
                    findings += 1
                    progress.update(task, findings=findings)
                    progress.console.print(f"{event.finding.id}  {event.finding.invariant}", highlight=False)
                yield event
