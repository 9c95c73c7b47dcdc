"""What becomes of state that a step leaves behind: is it read before it is rewritten?

After a step some fields of an object, for instance the attention metadata, differ from what they should be. Whether
that matters is measured, not argued: what comes next runs with every access to these fields watched. A field that is
read first is *live* (something depends on the left-over value), one that is rewritten first is *dead*. Upstream's
classes and the portable engine's are watched alike.

A tensor is followed element by element: obtaining it or taking a view of it is no access, writing over an element
rewrites that element, any other use of an element that still holds a left-over value reads it. ``on_update`` only
hands ``num_contexts`` on to counters, which are watched as well: there it neither reads a left-over value nor
rewrites a counter with one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from engines.portable import copies

FIELDS: Final = (
    "num_contexts",
    "num_generations",
    "num_ctx_tokens",
    "num_tokens",
    "_seq_lens",
    "_seq_lens_cuda",
    "kv_lens_cuda",
    "host_request_types",
    "use_spec_decoding",
    "all_rank_num_tokens",
    "force_prepare_spec_dec_tree_mask",
)
"""Fields that are compared; all but the last three depend on the batch."""

READ: Final = "read"
REWRITTEN: Final = "rewritten"
UNTOUCHED: Final = "untouched"

_STORED_AS: Final = {name: f"_{name}" for name in FIELDS[:4]}
_COUNTERS: Final = ("num_generations", "num_ctx_tokens")
_TRANSPARENT: Final = [__file__, copies.__file__]
"""Files whose frames are no place of an access: the watch's own and what stands between, see ``see_through``."""
_OBSERVATION: Final = "observation.py"
"""How the names of the files end that look at an engine for the suite."""
_OVERWRITES: Final = ("copy_", "fill_", "zero_", "__setitem__")
_VIEWS: Final = ("__getitem__", "__get__", "view", "narrow", "data_ptr", "storage_offset", "stride", "size", "dim")


def see_through(file: str) -> None:
    """Let accesses that pass through this file count as those of its callers."""
    if file not in _TRANSPARENT:
        _TRANSPARENT.append(file)


@dataclass(frozen=True)
class Leftover:
    """A field that a step left different from what it should be.

    prepared  what it should be, for instance what the step had been prepared with
    left      what it is
    fate      "read": live; "rewritten": dead; "untouched": neither happened while it was watched
    where     file:line of that first access, None if untouched
    by        the function that made it, likewise
    """

    field: str
    prepared: Any
    left: Any
    fate: str = UNTOUCHED
    where: str | None = None
    by: str | None = None


class _Accesses:
    """First access to each watched field. A tensor's left-over elements are offsets into its storage."""

    def __init__(self) -> None:
        self.first: dict[str, tuple[str, str, str]] = {}
        self.attributes: dict[str, str] = {}
        self.elements: dict[str, tuple[int, set[int]]] = {}

    def note(self, field: str, fate: str) -> None:
        """Keep an access, ``READ`` or ``REWRITTEN``, if it is the field's first and not the suite's own."""
        if field not in self.first and not _observing():
            frame = next(_frames())
            code = frame.f_code
            self.first[field] = fate, f"{code.co_filename}:{frame.f_lineno}", code.co_name

    def holds(self, field: str) -> bool:
        """Whether an attribute still has its left-over value."""
        return field in self.attributes.values() and field not in self.first

    def use(self, tensor: torch.Tensor, index: Any, overwrites: bool) -> None:
        """Note that the elements of ``tensor[index]`` are read, or written over."""
        storage = tensor.untyped_storage().data_ptr()
        for field, (watched, left) in self.elements.items():
            if field in self.first or watched != storage:
                continue
            touched = left.intersection(_offsets(tensor, index))
            if not touched or _observing():
                continue
            if not overwrites:
                self.note(field, READ)
            left -= touched
            if not left:
                self.note(field, REWRITTEN)


def _offsets(tensor: torch.Tensor, index: Any) -> list[int]:
    """Offsets into its storage of the elements of ``tensor[index]``, whatever kind of index it is."""
    offsets = [int(tensor.storage_offset())]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = [o + i * stride for o in offsets for i in range(size)]
    if index is ...:
        return offsets
    # On the host: a graph may be under capture, which numbers and slices must not disturb.
    with torch._C.DisableTorchFunction():
        parts = index if isinstance(index, tuple) else (index,)
        on_host = tuple(part.cpu() if isinstance(part, torch.Tensor) else part for part in parts)
        chosen: list[int] = torch.tensor(offsets).reshape(tensor.shape)[on_host].flatten().tolist()
        return chosen


def _frames() -> Iterator[FrameType]:
    """Frames of the access, innermost first, without torch's and those of the watch and of the device rewriting."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename not in _TRANSPARENT and frame.f_globals.get("__name__", "")[:6] != "torch.":
            yield frame
        frame = frame.f_back


def _in_on_update() -> bool:
    """Whether the access comes from ``on_update``, directly or through a property."""
    return any(frame.f_code.co_name == "on_update" for frame in islice(_frames(), 2))


def _observing() -> bool:
    """Whether it is the suite that looks."""
    return any(frame.f_code.co_filename.endswith(_OBSERVATION) for frame in _frames())


class _TensorUse(TorchFunctionMode):
    def __init__(self, accesses: _Accesses) -> None:
        super().__init__()
        self._accesses = accesses

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _VIEWS:
            operands = [*args, *(kwargs or {}).values()]
            for position, value in enumerate(operands):
                if isinstance(value, torch.Tensor):
                    index = args[1] if name == "__setitem__" and position == 0 else ...
                    self._accesses.use(value, index, overwrites=position == 0 and name in _OVERWRITES)
        return func(*args, **(kwargs or {}))


@contextmanager
def _watched(metadata: Any, accesses: _Accesses) -> Iterator[None]:
    """Give ``metadata`` a class that notes accesses to the attributes under watch."""
    original: Any = type(metadata)

    class Watched(original):
        def __getattribute__(self, name: str) -> Any:
            field = accesses.attributes.get(name)
            if field is not None and not _in_on_update():
                accesses.note(field, READ)
            return super().__getattribute__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            field = accesses.attributes.get(name) or (name if name in accesses.elements else None)
            if field is not None and not (field in _COUNTERS and accesses.holds("num_contexts") and _in_on_update()):
                accesses.note(field, REWRITTEN)
            super().__setattr__(name, value)

        def __reduce_ex__(self, protocol: Any) -> Any:
            # The metadata of a graph starts as a shallow copy, which is of the class itself.
            make, arguments, *state = super().__reduce_ex__(protocol)
            return (make, (original, *arguments[1:]), *state)

    metadata.__class__ = Watched
    try:
        with _TensorUse(accesses):
            yield
    finally:
        metadata.__class__ = original


def snapshot(metadata: Any) -> dict[str, Any]:
    """Values of ``FIELDS`` now, tensors as lists of their first ``num_seqs`` elements; None before the first step."""
    if getattr(metadata, "_seq_lens", None) is None:
        return dict.fromkeys(FIELDS)
    values = {name: getattr(metadata, name, None) for name in FIELDS}
    return {
        name: value[: metadata.num_seqs].tolist() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def differing(metadata: Any, expected: Mapping[str, Any]) -> list[Leftover]:
    """Fields of ``metadata`` whose values are not those that are ``expected``, a snapshot or a part of one."""
    now = snapshot(metadata)
    return [Leftover(name, value, now[name]) for name, value in expected.items() if now[name] != value]


@contextmanager
def follow(metadata: Any, leftovers: list[Leftover]) -> Iterator[list[Leftover]]:
    """Watch what happens to ``leftovers`` while inside; the list that is yielded is complete afterwards."""
    accesses = _Accesses()
    for item in leftovers:
        value = getattr(metadata, item.field)
        if isinstance(value, torch.Tensor):
            wrong = {i for i, value in enumerate(item.left) if item.prepared[i : i + 1] != [value]}
            first = int(value.storage_offset())
            accesses.elements[item.field] = (value.untyped_storage().data_ptr(), {first + i for i in wrong})
        else:
            accesses.attributes[_STORED_AS.get(item.field, item.field)] = item.field
    followed: list[Leftover] = []
    try:
        with _watched(metadata, accesses):
            yield followed
    finally:
        for item in leftovers:
            fate, where, by = accesses.first.get(item.field, (UNTOUCHED, None, None))
            followed.append(Leftover(item.field, item.prepared, item.left, fate, where, by))
