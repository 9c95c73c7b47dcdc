"""Which request an element of a tensor belongs to, carried beside the values through every operation.

A tag lies beside each element of a storage. Operations that move elements move tags; arithmetic keeps a tag that all
of its operands agree on, and an element of which several requests have a part is ``MIXED`` from then on; an operation
of which nothing is known leaves no tags on what it writes. So a tag that arrives somewhere has come from that request,
and where it is missing nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

UNTAGGED: Final = -1
MIXED: Final = -2
"""Of an element that several requests have a part in, so that it is nobody's."""
_LARGEST: Final = torch.iinfo(torch.int32).max
_PLACES: Final = frozenset({"index", "indices", "mask", "condition"})
"""What torch calls arguments that say where elements are; all other tensors hold elements."""

Arguments = dict[str, Any]
"""The arguments of a call by the names that torch gives them, with defaults."""
Rule = Callable[["RowTags", Any, Arguments, Any], Tensor | None]
"""From an operation, its arguments and its result to the tags of each result, which expand to its shape; or None."""


class RowTags(TorchDispatchMode):
    """While it is active, tags follow the elements of all tensors."""

    _rules: ClassVar[dict[str, Rule]] = {}
    """By the name of an operation, without the underscore of the form that works in place."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here is compiled.
        return False

    def __init__(self) -> None:
        super().__init__()
        self._beside: dict[int, tuple[StorageWeakRef, Tensor]] = {}
        """Storage -> int32, a tag per element. Its address is not given away again while it is referred to."""
        self._most = 1000

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # In inference mode operations that are made of others, such as `to` and `repeat_interleave`, arrive whole.
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        # Of what has no tags nothing has any: most of what only the host prepares.
        if any(_key(tensor) in self._beside for tensor in _tensors((*args, *kwargs.values()))):
            with torch.inference_mode():
                self._follow(func, _named(func, args, kwargs), result)
        return result

    def of(self, tensor: Tensor) -> Tensor:
        """Tags of a tensor: int32 of its shape; those of elements that nobody tagged are ``UNTAGGED``."""
        with torch.inference_mode():
            beside = self._all_of(tensor)
            if beside is None:
                return torch.full(tensor.shape, UNTAGGED, dtype=torch.int32, device=tensor.device)
            return beside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def put(self, tensor: Tensor, tags: Tensor) -> None:
        """Tag the elements of a tensor, with int32 tags that fit its shape."""
        with torch.inference_mode():
            if self._all_of(tensor) is None:
                self._drop_freed()
                none = torch.full((_size(tensor),), UNTAGGED, dtype=torch.int32, device=tensor.device)
                self._beside[_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), none
            # Where one element stands for several, its first place has the tag.
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
            self.of(tensor)[once].copy_(tags.expand(tensor.shape)[once])

    def _all_of(self, tensor: Tensor) -> Tensor | None:
        """Tags of a tensor's whole storage; None without any, or if they lie beside elements of another width."""
        _, beside = self._beside.get(_key(tensor), (None, None))
        return None if beside is None or len(beside) != _size(tensor) else beside

    def _drop_freed(self) -> None:
        if len(self._beside) > self._most:
            self._beside = {key: held for key, held in self._beside.items() if not held[0].expired()}
            self._most = 2 * len(self._beside) + 1000

    def _follow(self, func: Any, given: Arguments, result: Any) -> None:
        """Tag what an operation has made and written; without a rule that is nobody's, and views are as they were."""
        rule = self._rules.get(_name(func), _agree if torch.Tag.pointwise in func.tags else None)
        tags = rule(self, func, given, result) if rule is not None else None
        for written in _written(func, given):
            if _key(written) in self._beside:
                self.put(written, torch.tensor(UNTAGGED, dtype=torch.int32))
        if tags is not None:
            for output in _tensors([result]):
                # A reduction has left out dimensions, or has made their sizes 1.
                fitting = tags if tags.dim() <= output.dim() else tags.reshape(output.shape)
                self.put(output, fitting)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size(tensor: Tensor) -> int:
    """Elements of its storage."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::").removesuffix("_")


def _named(func: Any, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    given: Arguments = {}
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else argument.default_value
        given[argument.name] = kwargs.get(argument.name, value)
    return given


def _written(func: Any, given: Arguments) -> Iterator[Tensor]:
    """The arguments whose elements an operation may have written; not where it only looks at them in another way."""
    if torch.Tag.inplace_view in func.tags:
        return
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors([given[argument.name]])


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values, which nest in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for name in names:
            RowTags._rules[name] = rule
        return rule

    return register


def _common(first: Tensor, second: Tensor) -> Tensor:
    """What both say, or what one says where the other says nothing."""
    agreed = torch.where(first == second, first, MIXED)
    return torch.where(second == UNTAGGED, first, torch.where(first == UNTAGGED, second, agreed))


def _open(tags: Tensor) -> Tensor:
    """The same with what says nothing above all others, to look for the lowest one."""
    return torch.where(tags == UNTAGGED, _LARGEST, tags)


def _between(highest: Tensor, lowest: Tensor) -> Tensor:
    """What all tags say that an element is made of, by the highest of them and the lowest of those made ``_open``."""
    agreed = torch.where(highest == lowest, highest, MIXED)
    return torch.where(lowest == _LARGEST, UNTAGGED, agreed)


@_rule("_to_copy", "floor_divide", "rsub")
def _agree(tags: RowTags, func: Any, given: Arguments, result: Any) -> Tensor | None:
    """Arithmetic, element by element; what a factor of 0 leaves of an element is nobody's."""
    if not isinstance(result, Tensor):
        return None
    common = torch.tensor(UNTAGGED, dtype=torch.int32)
    for operand in _tensors(value for name, value in given.items() if name != "out"):
        common = _common(common, tags.of(operand))
    if _name(func) in ("mul", "bitwise_and", "logical_and"):
        common = torch.where(result == 0, UNTAGGED, common)
    return common


@_rule(
    "block_diag", "cat", "constant_pad_nd", "copy", "diag_embed", "diagonal_scatter", "embedding", "fill", "flip",
    "gather", "index", "index_copy", "index_fill", "index_put", "index_select", "masked_fill", "masked_scatter",
    "masked_select", "put", "repeat", "roll", "rot90", "select_scatter", "slice_scatter", "stack", "take",
    "tril", "triu", "where",
)  # fmt: skip
def _moved(tags: RowTags, func: Any, given: Arguments, result: Any) -> Tensor | None:
    """Elements are elsewhere: the same is done to their tags, which count from 1, as torch fills up with 0."""
    added = given.get("accumulate", False)

    def moved(name: str, value: Any) -> Any:
        if name in _PLACES:
            return value
        if name == "out":
            return torch.empty(result.shape, dtype=torch.int32, device=result.device)
        if isinstance(value, Tensor):
            # Who else has added something to the same place is not looked into.
            return (torch.full_like(tags.of(value), MIXED) if added and name != "self" else tags.of(value)) + 1
        if isinstance(value, (list, tuple)):
            return [moved(name, item) for item in value]
        return {"value": 0, "accumulate": False}.get(name, value)

    done: Tensor = func(
        *(moved(a.name, given[a.name]) for a in func._schema.arguments if not a.kwarg_only),
        **{a.name: moved(a.name, given[a.name]) for a in func._schema.arguments if a.kwarg_only},
    )
    return done - 1


@_rule("scatter", "scatter_add", "scatter_reduce", "index_add")
def _scattered(tags: RowTags, func: Any, given: Arguments, result: Any) -> Tensor | None:
    """Elements are written or added to places. A number that is written belongs to whoever said where."""
    held, dim, index = tags.of(given["self"]), given["dim"], given["index"]
    source = given.get("src", given.get("source"))
    said = tags.of(index if source is None else source)
    if _name(func) == "scatter" and given.get("reduce") is None:
        return held.scatter(dim, index, said)
    if _name(func) == "index_add":
        shape = [1] * said.dim()
        shape[dim] = -1
        index = index.reshape(shape).expand_as(said)
    highest = held.scatter_reduce(dim, index, said, "amax")
    return _between(highest, _open(held).scatter_reduce(dim, index, _open(said), "amin"))


@_rule(
    "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "logsumexp", "_log_softmax", "max",
    "mean", "median", "min", "mode", "prod", "_softmax", "sort", "std", "sum", "topk", "var",
)  # fmt: skip
def _reduced(tags: RowTags, func: Any, given: Arguments, result: Any) -> Tensor | None:
    """What is made of a row, or of another dimension, belongs to whom all of it belongs that belongs to anyone."""
    held, dim = tags.of(given["self"]), given.get("dim")
    if not held.numel():
        return None
    dims = tuple(range(held.dim())) if dim is None or dim == [] else dim
    return _between(held.amax(dims, keepdim=True), _open(held).amin(dims, keepdim=True))


@_rule("cummax", "cummin", "cumprod", "cumsum", "logcumsumexp")
def _running(tags: RowTags, func: Any, given: Arguments, result: Any) -> Tensor | None:
    """Running totals and their like, likewise of what they have been made of so far."""
    held, dim = tags.of(given["self"]), given["dim"]
    return _between(held.cummax(dim).values, _open(held).cummin(dim).values)
