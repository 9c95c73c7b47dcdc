"""What can be driven and what cannot, found out by looking at features and never at a version."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from engines.tensorrt_llm.loader import Upstream, raised_by_guard
from engines.tensorrt_llm.source import SPECULATIVE, Source, find, open_source
from scenarios import WORKERS, UsageError

METADATA_CLASSES = {
    "Eagle3OneModelWorker": "Eagle3OneModelSpecMetadata",
    "MTPEagleWorker": "Eagle3OneModelSpecMetadata",
    "DraftTargetOneModelWorker": "DraftTargetOneModelSpecMetadata",
    "PARDWorker": "PARDSpecMetadata",
}
"""Worker -> its metadata class, which is in the same module."""


class Verdict(NamedTuple):
    """One class of upstream: whether the suite can drive it, why (not), and its file."""

    name: str
    drivable: bool
    reason: str
    where: str


class Package(Protocol):
    """Modules under test, from a checkout or from an installed package."""

    attention: ModuleType
    interface: ModuleType


@dataclass(frozen=True)
class Capabilities:
    """Features of a worker class and its bases.

    template_method     the base's ``forward`` cleans up around ``_forward_impl``
    saved_state         the metadata says whether something is saved
    paired_save         the worker stores and restores ``num_contexts`` as well (PR #17381)
    dynamic_draft_len   the worker reads ``runtime_draft_len``; otherwise every step needs K = Kmax
    acceptance          name of the method that verifies drafts, its argument names in order
    forward_defined_in  classes whose own body or later assignment defines ``forward``, most derived first
    """

    template_method: bool
    saved_state: bool
    paired_save: bool
    dynamic_draft_len: bool
    acceptance: tuple[str, ...]
    forward_defined_in: tuple[str, ...]


def capabilities(worker: type, base: type, attention_metadata: type) -> Capabilities:
    """Look at ``worker``, its base ``SpecWorkerBase`` and ``AttentionMetadata``."""
    code = {name for cls in worker.__mro__[: worker.__mro__.index(base)] for name in _names_in_code(cls)}
    verify = getattr(worker, "sample_and_accept_draft_tokens", None)
    return Capabilities(
        template_method="_forward_impl" in vars(base),
        saved_state=hasattr(attention_metadata, "has_spec_dec_saved_state"),
        paired_save=bool({"num_contexts", "_num_contexts"} & _stored_by(base, "_restore_attn_metadata_from_spec_dec")),
        dynamic_draft_len="runtime_draft_len" in code,
        acceptance=("sample_and_accept_draft_tokens", *_parameters(verify)) if verify else (),
        forward_defined_in=tuple(
            cls.__name__ for cls in worker.__mro__[: worker.__mro__.index(base) + 1] if "forward" in vars(cls)
        ),
    )


def _names_in_code(cls: type) -> Iterator[str]:
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else inspect.unwrap(member) if callable(member) else None
        code = getattr(function, "__code__", None)
        if code is not None:
            yield from code.co_names


def _stored_by(cls: type, method: str) -> set[str]:
    """Attributes that a method of ``cls`` assigns."""
    import dis

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
