"""Which request an element of a tensor belongs to, carried beside the values through every operation.

A tag lies beside each element of a storage. Operations that move elements move tags; arithmetic keeps a tag that all
of its operands agree on; whatever else happens leaves none. So a tag that arrives somewhere has come from that request,
and where it is missing nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

UNTAGGED: Final = -1
_LARGEST: Final = torch.iinfo(torch.int32).max

Rule = Callable[["RowTags", Any, tuple[Any, ...], Any], None]


class RowTags(TorchDispatchMode):
    """While it is active, tags follow the elements of all tensors."""

    _rules: ClassVar[dict[str, Rule]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here is compiled.
        return False

    def __init__(self) -> None:
        super().__init__()
        self._beside: dict[int, Tensor] = {}
        """Storage -> int32, a tag per element."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch.inference_mode():
            rule = self._rules.get(func._schema.name)
            if rule is None and torch.Tag.pointwise in func.tags:
                rule = _agree
            if rule is not None:
                rule(self, func, args, result)
            else:
                self._forget(func, args, result)
        return result

    def of(self, tensor: Tensor) -> Tensor:
        """Tags of a tensor: int32 of its shape; those of elements that nobody tagged are ``UNTAGGED``."""
        with torch.inference_mode():
            beside = self._beside.get(_key(tensor))
            # One of another size is of a storage that was freed and had the same address.
            if beside is None or len(beside) != _size(tensor):
                return torch.full(tensor.shape, UNTAGGED, dtype=torch.int32, device=tensor.device)
            return beside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def put(self, tensor: Tensor, tags: Tensor) -> None:
        """Tag the elements of a tensor, with int32 tags that fit its shape."""
        with torch.inference_mode():
            key, size = _key(tensor), _size(tensor)
            if key not in self._beside or len(self._beside[key]) != size:
                self._beside[key] = torch.full((size,), UNTAGGED, dtype=torch.int32, device=tensor.device)
            # Where one element stands for several, its first place has the tag.
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
            self.of(tensor)[once].copy_(tags.expand(tensor.shape)[once])

    def _forget(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """An operation that tags do not follow: its results have none, unless they are views of its arguments."""
        given = {_key(argument) for argument in _flat(args)}
        if func._schema.is_mutable:
            given -= {_key(args[0])} if args and isinstance(args[0], Tensor) else set()
        for output in _flat(result if isinstance(result, (list, tuple)) else (result,)):
            if func._schema.name == "aten::lift_fresh" or _key(output) not in given:
                self._beside.pop(_key(output), None)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size(tensor: Tensor) -> int:
    """Elements of its storage."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _flat(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, which nest at most in lists."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [item for item in value if isinstance(item, Tensor)]
    return tensors


def _tags(tags: RowTags, value: Any) -> Tensor:
    """Tags of an operand, which may be a number."""
    return tags.of(value) if isinstance(value, Tensor) else torch.tensor(UNTAGGED, dtype=torch.int32)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for name in names:
            RowTags._rules[f"aten::{name}"] = rule
        return rule

    return register


def _common(first: Tensor, second: Tensor) -> Tensor:
    """What both say, or what one says where the other says nothing."""
    agreed = torch.where(first == second, first, UNTAGGED)
    return torch.where(second == UNTAGGED, first, torch.where(first == UNTAGGED, second, agreed))


def _agree(tags: RowTags, func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Arithmetic, element by element; what a factor of 0 leaves of an element is nobody's."""
    common = torch.tensor(UNTAGGED, dtype=torch.int32)
    for operand in _flat(args):
        common = _common(common, tags.of(operand))
    if not isinstance(result, Tensor):
        return
    if func._schema.name in ("aten::mul", "aten::mul_", "aten::bitwise_and", "aten::logical_and"):
        common = torch.where(result == 0, UNTAGGED, common)
    tags.put(result, common.expand(result.shape))


@_rule("index_select", "gather", "index", "embedding", "roll", "repeat", "flip")
def _moved(tags: RowTags, func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Elements of the first argument are elsewhere."""
    tags.put(result, func._op(tags.of(args[0]), *args[1:]))


@_rule("clone", "_to_copy")
def _copied(tags: RowTags, func: Any, args: tuple[Any, ...], result: Any) -> None:
    tags.put(result, tags.of(args[0]))


@_rule("cat", "stack")
def _joined(tags: RowTags, func: Any, args: tuple[Any, ...], result: Any) -> None:
    tags.put(result, func._op([tags.of(part) for part in args[0]], *args[1:]))


@_rule("constant_pad_nd")
def _padded(tags: RowTags, func: Any, args: tuple[Any, ...], result: Any) -> None:
    tags.put(result, func._op(tags.of(args[0]), args[1], UNTAGGED))


@_rule("where")
def _chosen(tags: RowTags, func: Any, args: tuple[Any, ...], result: Any) -> None:
    if isinstance(result, Tensor):
        tags.put(result, torch.where(args[0], _tags(tags, args[1]), _tags(tags, args[2])))


@_rule("copy_")
def _written(tags: RowTags, func: Any, args: tuple[Any, ...], result: Any) -> None:
    tags.put(args[0], tags.of(args[1]).expand(args[0].shape))


@_rule("fill_", "zero_")
def _filled(tags: RowTags, func: Any, args: tuple[Any, ...], result: Any) -> None:
    tags.put(args[0], torch.tensor(UNTAGGED, dtype=torch.int32))


@_rule("masked_fill", "masked_fill_")
def _masked(tags: RowTags, func: Any, args: tuple[Any, ...], result: Any) -> None:
    tags.put(result, torch.where(args[1], UNTAGGED, tags.of(args[0])))


@_rule("index_copy", "index_copy_")
def _rows_written(tags: RowTags, func: Any, args: tuple[Any, ...], result: Any) -> None:
    _, dim, index, source = args
    tags.put(result, tags.of(args[0]).clone().index_copy_(dim, index, tags.of(source)))


@_rule("index_put", "index_put_")
def _places_written(tags: RowTags, func: Any, args: tuple[Any, ...], result: Any) -> None:
    tags.put(result, tags.of(args[0]).clone().index_put_(args[1], tags.of(args[2])))


@_rule("scatter", "scatter_")
def _scattered(tags: RowTags, func: Any, args: tuple[Any, ...], result: Any) -> None:
    """A number that is written belongs to whoever said where."""
    _, dim, index, source = args[:4]
    said = tags.of(source if isinstance(source, Tensor) else index)
    tags.put(result, tags.of(args[0]).clone().scatter_(dim, index, said))


@_rule("argmax", "amax", "amin", "max", "min", "sum", "any", "all", "topk", "sort")
def _reduced(tags: RowTags, func: Any, args: tuple[Any, ...], result: Any) -> None:
    """What is made of a row, or of another dimension, belongs to whom all of it belongs that belongs to anyone."""
    outputs = _flat(result if isinstance(result, (list, tuple)) else (result,))
    if not isinstance(args[0], Tensor) or (func._schema.name in ("aten::max", "aten::min") and len(_flat(args)) > 1):
        _agree(tags, func, args, result)
        return
    given = tags.of(args[0])
    by_place = func._schema.name in ("aten::topk", "aten::sort")
    dims: Any = -1
    if func._schema.name == "aten::topk" and len(args) > 2:
        dims = args[2]
    elif not by_place:
        dims = args[1] if len(args) > 1 and args[1] is not None else tuple(range(given.dim()))
    highest = given.amax(dims, keepdim=True)
    lowest = torch.where(given == UNTAGGED, _LARGEST, given).amin(dims, keepdim=True)
    common = torch.where(highest == lowest, highest, UNTAGGED)
    for output in outputs:
        fitting = common if common.dim() == output.dim() else common.reshape(output.shape)
        tags.put(output, fitting.expand(output.shape))
