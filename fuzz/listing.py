"""What there is to choose from: workers, metadata classes, invariants, fault sites, seeded defects."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, Final

import fuzz.engines
from engines.base import run
from fuzz.alone import elsewhere
from fuzz.audit import PROCESS_SURVIVES, PROCESS_SURVIVES_STATEMENT
from fuzz.metadata_classes import CLASSES
from fuzz.options import Target
from fuzz.small import small_scenario
from scenarios import WORKERS, UsageError, closest

OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "workers": ("--engine", "--worker"),
    "metadata": (),
    "invariants": ("--engine", "--worker"),
    "sites": ("--engine", "--trtllm-source", "--device", "--worker", "--faults"),
    "bugs": ("--worker",),
}
"""Options that a list goes by."""

Rows = list[dict[str, Any]]


def rows(what: str, target: Target, given: Iterable[str] = ()) -> Rows:
    """The list of that name, of the workers and sites of ``target``.

    ``UsageError`` if there is no such list, or for an option, of those that are ``given``, that has no meaning for it.
    """
    if what not in OPTIONS:
        raise UsageError(f"WHAT: there is no list of {what!r}; {closest(what, OPTIONS)}")
    for option in given:
        if option not in OPTIONS[what]:
            raise UsageError(f"{option}: the list of {what} does not go by it; leave it out")
    if what == "sites":
        return elsewhere(sites, target)
    if what == "metadata":
        return metadata()
    return {"workers": workers, "invariants": invariants, "bugs": bugs}[what](target.workers)


def workers(names: Collection[str]) -> Rows:
    """Workers by class name, of those that are named."""
    return [{"name": w.name, "summary": w.summary} for w in WORKERS.values() if w.name in names]


def metadata() -> Rows:
    """Classes that hold what a step or a request is about, by what they are for.

    Those of the portable engine with what they are, then upstream's that it has not, and why.
    """
    try:
        package = import_module("engines.portable")
        interface = import_module("engines.portable.attention.backends.interface")
        speculative = import_module("engines.portable.speculative.interface")
        resources = import_module("engines.portable.pyexecutor.resource_manager")
        params = import_module("engines.portable.attention.backends.sparse.dsa.params")
        prefill = import_module("engines.portable.attention.backends.sparse.dsa.prefill")
    except ModuleNotFoundError as error:
        raise UsageError(f"WHAT: the list of metadata needs {error.name}; see `specfuzz doctor`") from error
    for module in walk_packages(package.__path__, "engines.portable."):
        import_module(module.name)
    roots: dict[str, tuple[type[Any], ...]] = {
        "attention": (interface.AttentionMetadata,),
        "parameters": (
            interface.KVCacheParams,
            interface.AttentionRuntimeFeatures,
            params.DSAMetadataParams,
            prefill.IndexerParams,
            prefill.IndexerPrefillChunkMetadata,
        ),
        "speculation": (speculative.SpecMetadata,),
        "per request": (resources.SlotManager, resources.SpecResourceManager),
        "KV cache": (resources.KVCacheManager,),
    }
    here: Rows = [
        {"name": c.__name__, "summary": (c.__doc__ or "").splitlines()[0], "kind": kind}
        for kind, classes in roots.items()
        for root in classes
        for c in _family(root)
    ]
    elsewhere: Rows = [
        {"name": name, "summary": f"not in the portable engine: {why}", "kind": kind}
        for kind, classes in CLASSES.items()
        for name, why in classes.items()
        if why
    ]
    return here + elsewhere


def _family(root: type[Any]) -> list[type[Any]]:
    """A class and all that derive from it, of the portable engine."""
    found = [root]
    for c in root.__subclasses__():
        found += [d for d in _family(c) if d not in found and d.__module__.startswith("engines.portable.")]
    return found


def invariants(workers: Collection[str]) -> Rows:
    """Invariants by slug with the predicates P1 to P14 that they hold, and the one that is asked of the process.

    Those that one of these workers at least can reach.
    """
    from invariants import all_invariants

    rows: Rows = [
        {
            "name": i.slug,
            "summary": i.statement,
            "kind": i.kind,
            "predicates": list(i.predicates),
            "museum": list(i.museum),
        }
        for i in all_invariants()
        if not i.trait or any(getattr(WORKERS[worker], i.trait) for worker in workers)
    ]
    process = {"name": PROCESS_SURVIVES, "summary": PROCESS_SURVIVES_STATEMENT, "kind": "process"}
    return [*rows, {**process, "predicates": [], "museum": []}]


def bugs(workers: Collection[str]) -> Rows:
    """Seeded defects of these workers by id, with the invariants that notice them."""
    from museum import BUGS

    return [
        {
            "name": b.id,
            "summary": b.title,
            "kind": b.kind,
            "worker": b.worker,
            "reference": b.reference,
            "caught_by": list(b.caught_by),
            "on_device": b.on_device,
        }
        for b in BUGS.values()
        if b.worker in workers
    ]


def sites(target: Target) -> Rows:
    """Fault sites that a small scenario of each worker passes, with how often it does in each phase."""
    if not target.faults:
        raise UsageError("--faults: without a family there are no sites; write for instance 'seams'")
    engine = fuzz.engines.load(target.engine, target.device)
    found: Rows = []
    for worker in target.workers:
        passes: dict[str, dict[str, int]] = {}
        for step in run(engine, small_scenario(worker), record=target.faults).steps:
            for site, occurrences in step.sites.items():
                in_phase = passes.setdefault(site, {})
                in_phase[step.phase.value] = max(occurrences, in_phase.get(step.phase.value, 0))
        for site, in_phase in passes.items():
            counts = ", ".join(f"{n} in {phase}" for phase, n in in_phase.items())
            summary = counts if len(target.workers) == 1 else f"{worker}: {counts}"
            found.append({"name": site, "summary": summary, "worker": worker, "occurrences": in_phase})
    return found
