"""Torch functions as fault sites, reached by a torch function mode. Imports torch: import it on demand only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch.overrides import TorchFunctionMode

from faults.bracket import Visitor
from faults.sites import torch_site

_QUERIES = (
    "size dim ndimension numel nelement stride storage_offset element_size data_ptr get_device is_contiguous "
    "is_floating_point is_complex is_signed is_pinned is_shared is_tensor has_names requires_grad_ type "
    "untyped_storage storage __get__ __set__ __delete__ __len__ __hash__ __repr__ __format__ __iter__ __reversed__"
)
_VIEWS = (
    "view view_as expand expand_as unsqueeze squeeze transpose t permute movedim narrow select detach alias "
    "split chunk tensor_split unbind unflatten swapaxes diagonal"
)
_HARMLESS = frozenset(f"{_QUERIES} {_VIEWS}".split())


@cache
def site_of(function: Callable[..., Any]) -> str | None:
    """The site of a torch function, None for one that neither allocates nor launches nor waits.

    Indexing is a site although a plain slice is a view: only its arguments tell.
    """
    name = function.__name__
    return None if name in _HARMLESS else torch_site(name)


class TorchSites(TorchFunctionMode):
    """Calls ``visit`` ahead of every torch function that can fail, while entered and on this thread."""

    def __init__(self, visit: Visitor) -> None:
        super().__init__()
        self._visit = visit

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        site = site_of(func)
        if site is not None:
            self._visit(site)
        return func(*args, **kwargs) if kwargs else func(*args)
