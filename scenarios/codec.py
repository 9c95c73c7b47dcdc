"""JSON for scenarios and findings: strict when reading, short when writing. No pickle, no code.

``loads(dumps(s)) == s``. Fields at their defaults are left out when writing. Reading names the offending field
and, for an unknown one, the closest that exists; it ends with ``schedule.check``.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from scenarios.errors import ScenarioError, closest
from scenarios.model import FORMAT_VERSION, Scenario
from scenarios.schedule import check

T = TypeVar("T")

_MAX_DIGITS = 4000
"""Of a number in a text; from 4,300 on Python's own refusal would come, which names no field."""
_MAX_DEPTH = 32
"""A scenario needs 4 levels, a finding a few more for the values that it shows."""


def to_json(value: Any) -> Any:
    """JSON value of a frozen dataclass, recursively; fields at their defaults are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value) if not _is_default(f, value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    return value


def _is_default(f: Field[Any], owner: Any) -> bool:
    default = f.default if f.default_factory is MISSING else f.default_factory()
    return default is not MISSING and bool(getattr(owner, f.name) == default)


def from_json(cls: type[T], value: Any) -> T:
    """Build a value of dataclass ``cls``; ``ScenarioError`` names what does not fit."""
    read: T = _read(cls, value)
    return read


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _read(kind: Any, value: Any) -> Any:
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        return _read_dataclass(kind, value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [m.value for m in kind]
        if value not in names:
            raise ScenarioError("", f"{value!r} is not known", closest(str(value), names))
        return kind(value)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        inner = [k for k in get_args(kind) if k is not type(None)]
        return None if value is None else _read(inner[0], value)
    if origin is tuple:
        if not isinstance(value, list):
            raise ScenarioError("", f"is {_type_name(value)}", "write a list")
        return tuple(_at(f"[{i}]", get_args(kind)[0], v) for i, v in enumerate(value))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ScenarioError("", f"is {_type_name(value)}", "write an object")
        return value
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    # bool is an int in Python; a scenario that says true where a number belongs is a mistake.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ScenarioError("", f"is {_type_name(value)}", f"write {_article(kind.__name__)}")
    if kind is int and not -(2**63) <= value < 2**63:
        raise ScenarioError("", "is a number of more than 64 bits", "write a smaller one")
    return value


def _read_dataclass(cls: type, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ScenarioError("", f"is {_type_name(value)}", "write an object")
    known = {f.name: f for f in fields(cls)}
    for name in value:
        if name not in known:
            raise ScenarioError(str(name), "is not a field", closest(str(name), known))
    for name, f in known.items():
        if name not in value and f.default is MISSING and f.default_factory is MISSING:
            raise ScenarioError(name, "is missing", "add it")
    hints = _hints(cls)
    return cls(**{name: _at(name, hints[name], v) for name, v in value.items()})


def _at(place: str, kind: Any, value: Any) -> Any:
    try:
        return _read(kind, value)
    except ScenarioError as error:
        raise error.within(place) from None


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    if type(value) in names:
        return names[type(value)]
    short = isinstance(value, float) or abs(value) < 2**64
    return f"the number {value!r}" if short else "a number of more than 64 bits"


def _article(name: str) -> str:
    return {"int": "a whole number", "str": "a text", "bool": "true or false", "float": "a number"}.get(name, name)


def parse(text: str, what: str = "file") -> dict[str, Any]:
    """The JSON object in ``text``; ``ScenarioError`` if there is none, with line and column where it is not JSON."""
    if text.startswith("\ufeff"):
        raise ScenarioError(what, "begins with a byte-order mark", "save it without a BOM")
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_int=_whole, object_pairs_hook=_object)
        too_deep = _is_deeper(value, _MAX_DEPTH)
    except ScenarioError as error:
        raise (error.within(what) if what else error) from None
    except ValueError as error:
        raise ScenarioError(what, f"is not JSON ({error})", "restore it from its source") from None
    except RecursionError:
        too_deep = True
    if too_deep:
        raise ScenarioError(what, f"is nested more than {_MAX_DEPTH} deep", "restore it from its source")
    if not isinstance(value, dict):
        raise ScenarioError(what, f"holds {_type_name(value)}", "write a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _whole(digits: str) -> int:
    """A number in a text. Python counts thousands of digits as an attack; nothing here needs a fraction of that."""
    if len(digits) > _MAX_DIGITS:
        raise ScenarioError("", f"has a number of {len(digits)} digits", "write one of at most 64 bits")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in a text, whose names differ: of two equal ones Python would forget the first."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ScenarioError(twice, "is there twice", "leave one of them out")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested in more than ``depth`` levels. Does not recurse itself."""
    level = [value]
    for _ in range(depth + 1):
        inner = [v for v in level if isinstance(v, (list, dict))]
        level = [each for v in inner for each in (v.values() if isinstance(v, dict) else v)]
    return bool(inner)


def check_version(value: dict[str, Any]) -> dict[str, Any]:
    """``value`` without its ``version``, which must be this format's."""
    rest = dict(value)
    if "version" not in rest:
        raise ScenarioError("version", "is missing", f"add it; this release reads version {FORMAT_VERSION}")
    version = rest.pop("version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ScenarioError("version", f"is {version!r}", f"this release reads version {FORMAT_VERSION}")
    return rest


def scenario_to_json(scenario: Scenario) -> dict[str, Any]:
    """JSON object of a scenario, with the format version."""
    return {"version": FORMAT_VERSION, **to_json(scenario)}


def scenario_from_json(value: dict[str, Any]) -> Scenario:
    """The valid scenario in a JSON object; ``ScenarioError`` otherwise."""
    return check(from_json(Scenario, check_version(value)))


def dumps(scenario: Scenario, *, indent: int | None = None) -> str:
    """JSON text of a scenario, stable for equal scenarios."""
    return json.dumps(scenario_to_json(scenario), indent=indent)


def loads(text: str) -> Scenario:
    """The valid scenario in a JSON text; ``ScenarioError`` otherwise."""
    return scenario_from_json(parse(text, "scenario"))
