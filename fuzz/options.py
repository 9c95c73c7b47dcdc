"""From what a person writes on the command line to what a campaign needs. Errors name the option."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import fuzz.engines
from engines.base import INJECTORS, LINES
from scenarios import WORKERS, UsageError, closest

NO_FAULTS: Final = "none"
_DURATION: Final = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?")


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
    worker: Sequence[str] | None,
    invariant: Sequence[str] | None,
    faults: str,
    max_draft_len: int | None,
    seed: int,
) -> Target:
    """The checked options; raises ``UsageError``."""
    fuzz.engines.check_name(engine, device)
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


def workers(names: Iterable[str]) -> tuple[str, ...]:
    """Class names, however their letters are cased; none stands for all that the engine drives."""
    return tuple(dict.fromkeys(_match("--worker", "worker", name, WORKERS) for name in names))


def invariants(slugs: Iterable[str]) -> tuple[str, ...]:
    """Slugs of registered invariants; none stands for all."""
    slugs = tuple(slugs)
    if not slugs:
        return ()
    from invariants import all_invariants

    known = [i.slug for i in all_invariants()]
    return tuple(dict.fromkeys(_match("--invariant", "invariant", slug, known) for slug in slugs))


def bugs(names: Iterable[str]) -> tuple[str, ...]:
    """Ids of seeded defects: ``TRT-01`` stands for all its variants; all defects if none is named."""
    from museum import BUGS

    chosen: dict[str, None] = {}
    for name in names:
        variants = [id for id in BUGS if f"{id}/".lower().startswith(f"{name}/".lower())]
        chosen.update(dict.fromkeys(variants or (bug(name),)))
    return tuple(chosen) or tuple(BUGS)


def bug(name: str, option: str = "--bug") -> str:
    """Id of one seeded defect."""
    from museum import BUGS

    return _match(option, "defect", name, BUGS)


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
    if total <= 0:
        raise UsageError(f"--max-time: {text!r} is not a duration; write for instance 90s, 10m or 1h30m")
    return total


def processes(wanted: int | None, useful: int) -> int:
    """How many processes to run: as asked, else one per core as long as there is work for it."""
    if wanted is None:
        return max(1, min(os.cpu_count() or 1, useful))
    at_least("--workers", wanted, 1)
    return wanted


def at_least(option: str, value: int, low: int) -> None:
    """Raise ``UsageError`` for a value that is too small."""
    if value < low:
        raise UsageError(f"{option}: {value} is too small; write {low} or more")


def _match(option: str, kind: str, name: str, known: Iterable[str]) -> str:
    by_lower = {k.lower(): k for k in known}
    if name.lower() not in by_lower:
        raise UsageError(f"{option}: no {kind} is called {name!r}; {closest(name, by_lower.values())}")
    return by_lower[name.lower()]
