"""Runs code that is written for ``tensorrt_llm`` against the portable engine.

    python -m engines.portable.alias -m pytest FILE ARGS...
    python -m engines.portable.alias FILE ARGS...

Inside ``as_tensorrt_llm()`` upstream's module paths lead to the portable classes, with the attention package under
either of its names, ``attention_backend`` and ``attention.backends``. Without a CUDA device "cuda" means the CPU.
"""

from __future__ import annotations

import dis
import importlib
import importlib.util
import pkgutil
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

import torch

from engines.portable import _utils
from engines.process import replaced, take_out
from engines.tensorrt_llm.cpu import CudaOnCpu, is_emulated_stream_capturing
from engines.tensorrt_llm.source import ATTENTION_PACKAGES, PACKAGE, SPECULATIVE, attention_package
from scenarios import UsageError

USAGE: Final = "usage: python -m engines.portable.alias -m MODULE ARGS... (or: FILE ARGS...)"

_PORTABLE: Final = "engines.portable"
_TORCH: Final = f"{PACKAGE}._torch"
_COUNTERPARTS: Final = {
    f"{_TORCH}.metadata": f"{_PORTABLE}.attention.backends.interface",
    f"{_TORCH}.memory_buffer_utils": f"{_PORTABLE}.memory_buffer_utils",
    f"{_TORCH}.pyexecutor.scheduler": f"{_PORTABLE}.pyexecutor.llm_request",
    f"{SPECULATIVE}.spec_sampler_base": f"{_PORTABLE}.pyexecutor.sampler",
    **{attention_package(name): f"{_PORTABLE}.attention.backends" for name in ATTENTION_PACKAGES},
    SPECULATIVE: f"{_PORTABLE}.speculative",
    f"{_TORCH}.pyexecutor": f"{_PORTABLE}.pyexecutor",
}
"""Upstream's module, with all below it, -> the portable one. The first that fits counts."""

_PARENTS: Final = (PACKAGE, _TORCH, f"{_TORCH}.attention")
"""Packages that are nothing but the way to others."""


def _counterpart(name: str) -> str | None:
    """Portable module that upstream's module ``name`` leads to; None when there is none."""
    for upstream, portable in _COUNTERPARTS.items():
        if name == upstream or name.startswith(f"{upstream}."):
            path = portable + name[len(upstream) :]
            # Parents first: of a module that is no package, find_spec asks for one.
            parent = importlib.import_module(path.rpartition(".")[0])
            return path if hasattr(parent, "__path__") and importlib.util.find_spec(path) else None
    return None


def _imports_from(frame: FrameType) -> bool:
    """Whether ``frame`` is just taking a name out of a module: ``from module import name``."""
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]


class _View(ModuleType):
    """A portable module under upstream's name: names are read, replaced and deleted where they are defined.

    A package has the names of the modules below it too, which upstream's packages import. A name that is missing is
    an ``ImportError`` for an import statement and an ``AttributeError`` for whoever else asks.
    """

    def __init__(self, name: str, original: ModuleType | None) -> None:
        super().__init__(name)
        own = _own(self)
        own["_modules"] = tuple(_modules(original)) if original else ()
        own["_owners"] = {}

    def _owner(self, name: str) -> ModuleType | None:
        """The portable module that has ``name``; it stays the owner while the name is deleted."""
        if name not in self._owners:
            having = [module for module in self._modules if _has(module, name)]
            defining = (m for m in having if getattr(vars(m)[name], "__module__", None) == m.__name__)
            self._owners[name] = next(defining, having[0] if having else None)
        owner: ModuleType | None = self._owners[name]
        return owner

    @property
    # A module has it as an attribute; `mock.patch` asks for it by that name.
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """Own names and those of the portable modules: what is replaced for a while is looked up here and put back."""
        names = {name for module in self._modules for name in vars(module) if _has(module, name)}
        owners = {name: self._owner(name) for name in names}
        return {name: vars(owner)[name] for name, owner in owners.items() if owner and name in vars(owner)} | _own(self)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            module = f"{self.__name__}.{name}"
            if module in _PARENTS or _counterpart(module):
                return importlib.import_module(module)
            owner = self._owner(name)
            if owner and name in vars(owner):
                return vars(owner)[name]
        text = f"{name} of {self.__name__} is missing: the portable engine has no counterpart of this name"
        if _imports_from(sys._getframe(1)):
            raise ImportError(text, name=self.__name__)
        raise AttributeError(text)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets the module's own attributes, and modules below it.
        owner = None if name.startswith("__") or isinstance(value, _View) else self._owner(name)
        if owner:
            setattr(owner, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        owner = None if name in _own(self) else self._owner(name)
        if owner:
            delattr(owner, name)
        else:
            super().__delattr__(name)


def _own(module: ModuleType) -> dict[str, Any]:
    """The attributes of a module itself, whatever its class says that ``__dict__`` is."""
    attributes: dict[str, Any] = vars(ModuleType)["__dict__"].__get__(module)
    return attributes


def _modules(original: ModuleType) -> Iterator[ModuleType]:
    """``original`` and, of a package, the modules below it."""
    yield original
    for info in pkgutil.walk_packages(getattr(original, "__path__", ()), f"{original.__name__}."):
        yield importlib.import_module(info.name)


def _has(module: ModuleType, name: str) -> bool:
    """Whether ``module`` has ``name`` for others; portable modules that it imports have views of their own."""
    value = vars(module).get(name)
    is_portable = isinstance(value, ModuleType) and value.__name__.startswith("engines.")
    return name in vars(module) and not name.startswith("__") and not is_portable


class _Finder(MetaPathFinder, Loader):
    """Serves views under all names of ``tensorrt_llm`` that lead to a portable module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a view; ``ModuleNotFoundError`` where the portable engine has no counterpart."""
        if fullname.partition(".")[0] != PACKAGE:
            return None
        if fullname not in _PARENTS and not _counterpart(fullname):
            text = f"{fullname} is missing: the portable engine has no counterpart of this module"
            raise ModuleNotFoundError(text, name=fullname)
        # All are packages, so that this finder is asked for what is missing below any of them.
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A view of the counterpart; an empty one where there are only modules below it."""
        portable = _counterpart(spec.name)
        return _View(spec.name, importlib.import_module(portable) if portable else None)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


@contextmanager
def as_tensorrt_llm() -> Iterator[None]:
    """Have imports of ``tensorrt_llm`` lead to the portable engine while inside; an installed one is set aside.

    Without a CUDA device torch says that there is one: tests ask before they name it.
    """
    finder, outside = _Finder(), take_out((PACKAGE,))
    sys.meta_path.insert(0, finder)
    try:
        with ExitStack() as stack:
            if not torch.cuda.is_available():
                stack.enter_context(_emulated_cuda())
            yield
    finally:
        sys.meta_path.remove(finder)
        take_out((PACKAGE,))
        sys.modules.update(outside)


@contextmanager
def _emulated_cuda() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, "is_available", lambda: True))
        stack.enter_context(replaced(torch.cuda, "synchronize", lambda device=None: None))
        query = "is_current_stream_capturing"
        stack.enter_context(replaced(torch.cuda, query, is_emulated_stream_capturing))
        # Tests replace torch's answer, and the engine asks torch only where CUDA is in use.
        stack.enter_context(replaced(_utils, query, lambda: torch.cuda.is_current_stream_capturing()))
        stack.enter_context(CudaOnCpu())
        yield


def _runner(arguments: Sequence[str]) -> tuple[str, bool]:
    """What to run, and whether it is a module; ``UsageError`` when it cannot be run."""
    if not arguments or (arguments[0] == "-m" and len(arguments) == 1):
        raise UsageError(f"nothing to run; {USAGE}")
    if arguments[0] == "-m":
        module = arguments[1]
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise UsageError(f"no module named {module!r}; {USAGE}")
        return module, True
    if arguments[0].startswith("-"):
        raise UsageError(f"{arguments[0]}: unknown option; {USAGE}")
    if not Path(arguments[0]).is_file():
        raise UsageError(f"{arguments[0]}: no such file; {USAGE}")
    return arguments[0], False


def main(arguments: Sequence[str]) -> None:
    """Run a module or a file as ``python`` would; ``UsageError`` when the arguments do not say what."""
    name, is_module = _runner(arguments)
    rest = list(arguments[2:] if is_module else arguments[1:])
    beside = [] if is_module else [str(Path(name).resolve().parent)]
    with as_tensorrt_llm(), replaced(sys, "argv", [name, *rest]), replaced(sys, "path", [*beside, *sys.path]):
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"engines.portable.alias: {error}", file=sys.stderr)
        sys.exit(2)
