"""What can be driven and what cannot, found out by looking at features and never at a version."""

from __future__ import annotations

import dataclasses
import dis
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from engines.tensorrt_llm.loader import Upstream, raised_by_guard
from engines.tensorrt_llm.source import SPECULATIVE, UNGUARDED_VARIABLE, find
from engines.upstream import DRIVEN, DRIVEN_BACKENDS
from scenarios import BACKENDS, UsageError

_NO_DRIVER: Final = "the suite has no driver for it"

_VERIFYING: Final = ("sample_and_accept_draft_tokens", "_accept_draft_tokens")
"""Methods that verify drafts; parallel workers called the second before there were hooks that reshape drafts."""

NO_VERIFICATION: Final = f"it verifies drafts by no method that the suite knows ({', '.join(_VERIFYING)})"

METADATA_CLASSES: Final = {
    "Eagle3OneModelWorker": "Eagle3OneModelSpecMetadata",
    "MTPEagleWorker": "Eagle3OneModelSpecMetadata",
    "DraftTargetOneModelWorker": "DraftTargetOneModelSpecMetadata",
    "PARDWorker": "PARDSpecMetadata",
    "MTPWorker": "MTPSpecMetadata",
    "DFlashWorker": "DFlashSpecMetadata",
    "MTPEagleDynamicTreeWorker": "Eagle3OneModelSpecMetadata",
}
"""Worker -> its metadata class, which is in the module of the worker or of a base of it."""


class Verdict(NamedTuple):
    """One class of upstream: whether the suite can drive it, why (not), and its file."""

    name: str
    drivable: bool
    reason: str
    where: str


@dataclass(frozen=True)
class Capabilities:
    """Features of a worker class and its bases.

    template_method     the base's ``forward`` cleans up around ``_forward_impl``
    saved_state         the metadata says whether something is saved
    paired_save         the worker stores and restores ``num_contexts`` as well (PR #17381)
    dynamic_draft_len   the worker reads ``runtime_draft_len``; otherwise every step needs K = Kmax
    acceptance          name of the method that verifies drafts, then its argument names in order; empty if unknown
    forward_defined_in  classes whose own body or later assignment defines ``forward``, most derived first
    """

    template_method: bool
    saved_state: bool
    paired_save: bool
    dynamic_draft_len: bool
    acceptance: tuple[str, ...]
    forward_defined_in: tuple[str, ...]


@lru_cache(maxsize=32)
def capabilities(worker: type, base: type, attention_metadata: type) -> Capabilities:
    """Look at ``worker``, its base ``SpecWorkerBase`` and ``AttentionMetadata``."""
    own = worker.__mro__[: worker.__mro__.index(base)]
    code = {name for cls in own for name in _names_in_code(cls)}
    verify = next((name for name in _VERIFYING if name in code), "")
    return Capabilities(
        template_method="_forward_impl" in vars(base),
        saved_state=hasattr(attention_metadata, "has_spec_dec_saved_state"),
        paired_save=bool({"num_contexts", "_num_contexts"} & _stored_by(base, "_restore_attn_metadata_from_spec_dec")),
        dynamic_draft_len="runtime_draft_len" in code,
        acceptance=(verify, *_parameters(getattr(worker, verify))) if verify else (),
        forward_defined_in=tuple(cls.__name__ for cls in (*own, base) if "forward" in vars(cls)),
    )


def _names_in_code(cls: type) -> Iterator[str]:
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else inspect.unwrap(member) if callable(member) else None
        code = getattr(function, "__code__", None)
        if code is not None:
            yield from code.co_names


def _stored_by(cls: type, method: str) -> set[str]:
    """Attributes that a method of ``cls`` assigns."""
    function = vars(cls).get(method)
    if function is None:
        return set()
    return {i.argval for i in dis.get_instructions(function) if i.opname == "STORE_ATTR"}


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


def arguments_for(function: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that ``function`` takes by name; a required parameter without a value is an error."""
    chosen: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in values:
            chosen[name] = values[name]
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            raise UsageError(f"{function.__qualname__} asks for {name!r}, which the suite does not know how to provide")
    return chosen


def fields_for(cls: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that are constructor fields of the dataclass ``cls``."""
    names = {f.name for f in dataclasses.fields(cls) if f.init}
    return {name: value for name, value in values.items() if name in names}


def doctor(source: str | os.PathLike[str] | None = None) -> list[Verdict]:
    """Each class of upstream that was looked for or found, and whether it can be driven here.

    Raises ``UsageError`` when there is neither a checkout nor an installed package.
    """
    unguarded = bool(os.environ.get(UNGUARDED_VARIABLE))
    upstream = Upstream(find(source), emulated=not torch.cuda.is_available(), unguarded=unguarded)
    driven = [_base(upstream, "attention", "AttentionMetadata"), _base(upstream, "interface", "SpecWorkerBase")]
    driven += [_metadata(upstream, backend) for backend in BACKENDS]
    driven += [_worker(upstream, name) for name in DRIVEN]
    return driven + _not_driven(upstream)


def _metadata(upstream: Upstream, backend: str) -> Verdict:
    name, place = BACKENDS[backend].metadata, upstream.places.get(backend)
    if backend not in DRIVEN_BACKENDS:
        return Verdict(name, False, _NO_DRIVER, str(upstream.source.attention_file.parent))
    where = str(upstream.source.file(place.module) if place else upstream.source.attention_file.parent)
    if place and backend in upstream.metadata and name not in upstream.fallbacks:
        added = upstream.supplements.get(place.module)
        return Verdict(name, True, f"as it is; the suite adds {', '.join(added)}" if added else "as it is", where)
    untried = "not tried in an installed package" if upstream.source.installed else "no file defines it"
    reason = upstream.fallbacks.get(name, untried)
    if not BACKENDS[backend].sparse:
        reason = f"{reason}; the suite's own, below the real AttentionMetadata, is driven instead"
    return Verdict(name, False, reason, where)


def _base(upstream: Upstream, module: str, name: str) -> Verdict:
    cls = getattr(getattr(upstream, module), name)
    reason = "as it is"
    if name == "SpecWorkerBase":
        fixed = "_forward_impl" in vars(cls)
        reason = "post-fix: forward cleans up and may not be overridden" if fixed else "pre-fix: workers define forward"
    return Verdict(name, True, reason, upstream.where(cls))


def _worker(upstream: Upstream, name: str) -> Verdict:
    cls = upstream.load(name)
    if cls is not None:
        features = capabilities(cls, upstream.interface.SpecWorkerBase, upstream.attention.AttentionMetadata)
        if not features.acceptance:
            return Verdict(name, False, NO_VERIFICATION, upstream.where(cls))
        reasons = ["post-fix" if features.forward_defined_in[:1] == ("SpecWorkerBase",) else "pre-fix"]
        if name in upstream.unguarded:
            reasons.append("driven without the guard of its base, which rejects it")
        if not features.dynamic_draft_len:
            reasons.append("with draft_len = max_draft_len only, as it does not read runtime_draft_len")
        added = upstream.supplements.get(cls.__module__)
        if added:
            reasons.append(f"the suite adds {', '.join(added)} to an older base")
        return Verdict(name, True, "; ".join(reasons), upstream.where(cls))
    error = upstream.rejected.get(name)
    module = upstream.source.classes.get(name)
    where = str(upstream.source.file(module)) if module else str(upstream.source.interface_file.parent)
    if error is None:
        return Verdict(name, False, "no file defines it", where)
    if raised_by_guard(error):
        reason = f"pre-fix, and the base's guard rejects it: {error} (set {UNGUARDED_VARIABLE}=1 to drive it so)"
        return Verdict(name, False, reason, where)
    return Verdict(name, False, f"its module does not load: {type(error).__name__}: {error}", where)


def _not_driven(upstream: Upstream) -> list[Verdict]:
    """Workers that the checkout has and the suite has no driver for."""
    source = upstream.source
    return [
        Verdict(name, False, _NO_DRIVER, str(source.file(module)))
        for name, module in sorted(source.classes.items())
        if name.endswith("Worker") and name not in DRIVEN and module != f"{SPECULATIVE}.interface"
    ]
