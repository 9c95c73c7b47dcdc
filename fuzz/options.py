"""From what a person writes on the command line to what a campaign needs. Errors name the option."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import fuzz.engines
from engines.base import INJECTORS, LINES
from fuzz.files import check_writable
from fuzz.scope import Scope, asks
from scenarios import BACKENDS, WORKERS, UsageError, closest
from scenarios.backends import runs_on

NO_FAULTS: Final = "none"
LONGEST: Final = 30 * 24 * 3600
"""Most seconds of a campaign."""
MOST_PROCESSES: Final = 256
MOST_CASES: Final = 10**9
"""Most scenarios of a campaign or a sweep."""
MOST_ROWS: Final = 16
"""Most rows of a batch in a sweep."""
MOST_STEPS: Final = 16
"""Most served steps of a scenario in a sweep."""
_DURATION: Final = re.compile(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9}(?:\.\d+)?)s?)?")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is tested and with what; see ``Unit`` for the fields."""

    engine: str
    device: str
    workers: tuple[str, ...]
    invariants: tuple[str, ...]
    faults: tuple[str, ...]
    max_draft_len: int | None
    seed: int


def target(
    *,
    engine: str,
    device: str,
    faults: str,
    worker: Sequence[str] | None = None,
    invariant: Sequence[str] | None = None,
    max_draft_len: int | None = None,
    seed: int = 0,
    source: Path | None = None,
) -> Target:
    """The checked options, the rest as in a command that lacks them; raises ``UsageError``."""
    fuzz.engines.check_name(engine, device)
    check_source(source, engine)
    if max_draft_len is not None and not 1 <= max_draft_len <= 31:
        raise UsageError(f"--max-draft-len: {max_draft_len} is outside 1..31; write a value in that range")
    at_least("--seed", seed, 0)
    if seed >= 2**63:
        raise UsageError(f"--seed: {seed} is too large; write at most {2**63 - 1}")
    return Target(
        engine=engine,
        device=device,
        workers=workers(worker or ()) or fuzz.engines.workers(engine),
        invariants=invariants(invariant or ()),
        faults=families(faults),
        max_draft_len=max_draft_len,
        seed=seed,
    )


def scope(*, max_batch: int, max_draft_len: int, steps: int, target: Target) -> Scope:
    """The checked scope of a sweep of that target."""
    within("--max-batch", max_batch, 1, MOST_ROWS)
    within("--steps", steps, 1, MOST_STEPS)
    from invariants import find

    for slug in target.invariants:
        if not asks(find(slug)):
            raise UsageError(f"--invariant: a sweep does not ask {slug}; leave it out, or ask it in `specfuzz run`")
    return Scope(max_batch=max_batch, max_draft_len=max_draft_len, steps=steps)


def workers(names: Iterable[str]) -> tuple[str, ...]:
    """Class names, however their letters are cased; none stands for all that the engine drives."""
    return tuple(dict.fromkeys(_match("--worker", "worker", name, WORKERS) for name in names))


def invariants(slugs: Iterable[str]) -> tuple[str, ...]:
    """Slugs of registered invariants; none stands for all."""
    slugs = tuple(slugs)
    if not slugs:
        return ()
    from invariants import all_invariants
    from invariants.registry import LISTED

    known = [i.slug for i in all_invariants()]
    return tuple(dict.fromkeys(_match("--invariant", "invariant", slug, known, listed=LISTED) for slug in slugs))


def bugs(names: Iterable[str], option: str = "--bug") -> tuple[str, ...]:
    """Ids of seeded defects: ``TRT-01`` stands for all that begin so; all defects if none is named."""
    from museum import BUGS, nearest

    chosen: dict[str, None] = {}
    for name in names:
        variants = [id for id in BUGS if f"{id}/".lower().startswith(f"{name.lower()}/")]
        if not variants:
            raise UsageError(f"{option}: no defect is called {name!r}; {nearest(name)}")
        chosen.update(dict.fromkeys(variants))
    return tuple(chosen) or tuple(BUGS)


def bug(name: str, option: str, worker: str) -> str:
    """Id of the one seeded defect of this worker that is called so, or that begins so."""
    from museum import BUGS

    called = bugs([name], option)
    called = tuple(id for id in called if id.lower() == name.lower()) or called
    fitting = [id for id in called if BUGS[id].worker == worker]
    if not fitting:
        others = ", ".join(dict.fromkeys(BUGS[id].worker for id in called))
        remedy = f"see `specfuzz list bugs --worker {worker}`"
        raise UsageError(f"{option}: {name} is a defect of {others}, not of {worker}; {remedy}")
    if len(fitting) > 1:
        raise UsageError(f"{option}: {name!r} may be any of {', '.join(fitting)}; write one of them")
    return fitting[0]


def folder(option: str, text: str | None) -> Path | None:
    """A folder in which files can be made. It is made itself."""
    if text is None:
        return None
    if not text:
        raise UsageError(f"{option}: is empty; name a folder")
    check_writable(Path(text), option)
    return Path(text)


def file(option: str, text: str | None) -> Path | None:
    """A file that can be written: a regular one, or none as yet."""
    if text is None:
        return None
    path = Path(text)
    if not text or path.is_symlink() or (path.exists() and not path.is_file()):
        raise UsageError(f"{option}: {text!r} is not a file; name one, or leave the option out to print the text")
    return path


def families(text: str) -> tuple[str, ...]:
    """Families of fault sites in a list with commas; ``none`` for runs without faults."""
    names = [name.strip() for name in text.split(",")]
    if names == [NO_FAULTS]:
        return ()
    found = tuple(dict.fromkeys(_match("--faults", "family of fault sites", n, (*INJECTORS, NO_FAULTS)) for n in names))
    if NO_FAULTS in found:
        raise UsageError(f"--faults: {NO_FAULTS!r} excludes the others; write it alone or leave it out")
    if LINES in found and sys.version_info < (3, 12):
        raise UsageError(f"--faults: {LINES!r} needs Python 3.12 or newer; leave it out or run a newer Python")
    return found


def duration(text: str) -> float:
    """Seconds in ``90``, ``90s``, ``10m`` or ``1h30m``."""
    match = _DURATION.fullmatch(text.strip())
    hours, minutes, seconds = match.groups(default="0") if match else ("0", "0", "0")
    total = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    if total > LONGEST:
        raise UsageError(f"--max-time: {text!r} is more than 30 days; write at most {LONGEST // 3600}h")
    if total <= 0:
        raise UsageError(f"--max-time: {text!r} is not a duration; write for instance 90s, 10m or 1h30m")
    return total


def processes(wanted: int | None, useful: int) -> int:
    """How many processes to run: as asked, else one per core as long as there is work for it."""
    if wanted is None:
        return max(1, min(os.cpu_count() or 1, useful))
    at_least("--workers", wanted, 1)
    if wanted > MOST_PROCESSES:
        raise UsageError(f"--workers: {wanted} is too large; write at most {MOST_PROCESSES}")
    return wanted


def numbers(option: str, text: str, low: int, high: int) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"{option}: {text!r} is no list of whole numbers; write for instance 1,8")
    return tuple(dict.fromkeys(within(option, int(part), low, high) for part in parts))


def within(option: str, value: int, low: int, high: int) -> int:
    """``value`` itself if it is within its limits."""
    at_least(option, value, low)
    if value > high:
        raise UsageError(f"{option}: {value} is too large; write at most {high}")
    return value


def probability(option: str, value: float) -> float:
    """``value`` itself if it is one."""
    if not 0 <= value <= 1:
        raise UsageError(f"{option}: {value} is no probability; write a value from 0 to 1")
    return value


def backend(name: str, worker: str) -> str:
    """An attention backend that the worker runs on."""
    option = "--attention-backend"
    backend = _match(option, "attention backend", name, BACKENDS)
    if not runs_on(worker, backend):
        others = ", ".join(name for name in BACKENDS if runs_on(worker, name))
        raise UsageError(f"{option}: {worker} does not run on {backend}; choose one that it runs on: {others}")
    return backend


def check_source(source: Path | None, engine: str) -> None:
    """Raise ``UsageError`` for a checkout of upstream that nothing would be made of."""
    if source is not None and engine == fuzz.engines.PORTABLE:
        raise UsageError(
            f"--trtllm-source: the engine {engine} is not made of it; add --engine {fuzz.engines.TENSORRT_LLM}"
        )


def at_least(option: str, value: int, low: int) -> None:
    """Raise ``UsageError`` for a value that is too small."""
    if value < low:
        raise UsageError(f"{option}: {value} is too small; write {low} or more")


def _match(option: str, kind: str, name: str, known: Iterable[str], *, listed: str = "") -> str:
    by_lower = {k.lower(): k for k in known}
    if name.lower() not in by_lower:
        raise UsageError(f"{option}: no {kind} is called {name!r}; {closest(name, by_lower.values(), listed=listed)}")
    return by_lower[name.lower()]
