"""Loading upstream's modules from a checkout, and taking them out again.

``Upstream.active()`` is the only place where process-wide state changes: inside it ``sys.modules`` holds this
checkout's modules and the stand-ins, an import finder serves further ones (upstream imports some inside
functions), and ``torch.compile`` and, on CPU, queries of CUDA are replaced. Outside everything is as before,
so several checkouts and an installed package can take turns.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType
from typing import Any, cast

import torch

from engines.process import replaced, take_out
from engines.tensorrt_llm.backend import attention_metadata_class
from engines.tensorrt_llm.cpu import CudaOnCpu, is_emulated_stream_capturing, mem_get_info
from engines.tensorrt_llm.real_metadata import Location, driven_class, locate, try_out
from engines.tensorrt_llm.source import (
    ATTENTION_PACKAGES,
    HOW_TO_PROVIDE,
    SPECULATIVE,
    Source,
    attention_package,
)
from engines.tensorrt_llm.stand_ins import ROOTS, Logger, StandInModule, behaviours
from engines.tensorrt_llm.supplements import supplement, supplement_sparse_package
from engines.tensorrt_llm.trees import relocation
from engines.upstream import DRIVEN
from scenarios import BACKENDS, WORKERS, UsageError


class _StandInLoader(Loader):
    """Makes modules up, with the behaviours that are known under their names."""

    def __init__(self, finder: _Finder) -> None:
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module that has a stand-in for any name."""
        return StandInModule(spec.name, self._finder.behaviours.get(spec.name, {}))

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class _AliasLoader(Loader):
    """Serves an existing module under a second name."""

    def __init__(self, original: ModuleType) -> None:
        self._original = original
        self._spec = original.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, no new one."""
        return self._original

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, over which the import system has just written the alias's."""
        module.__spec__ = self._spec


class _FileLoader(SourceFileLoader):
    """Compiles each text once per process: nothing is kept on disk, and every engine loads its modules anew."""

    # The signature is that of the class above, whose further parameter nobody gives.
    def source_to_code(self, data: Any, path: Any, **_: Any) -> CodeType:  # type: ignore[override]
        """The code of a file, for as long as its bytes are the same."""
        return _compiled(bytes(data), str(path))


@cache
def _compiled(source: bytes, path: str) -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Real files for the modules under test, an alias for the other attention package, stand-ins for the rest."""

    def __init__(self, source: Source, behaviours: dict[str, Any]) -> None:
        self.behaviours = behaviours
        self.served: set[str] = set()
        self._package = attention_package(source.layout)
        self._other = next(attention_package(p) for p in ATTENTION_PACKAGES if p != source.layout)
        self.real = {
            f"{self._package}.interface": source.attention_file,
            f"{SPECULATIVE}.interface": source.interface_file,
        }
        for name in DRIVEN:
            if name in source.classes:
                module = source.classes[name]
                self.real[module] = source.file(module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """How a module below ``ROOTS`` is loaded; None for all others, which the next finder is asked for."""
        if fullname.partition(".")[0] not in ROOTS:
            return None
        self.served.add(fullname)
        if fullname == self._other or fullname.startswith(self._other + "."):
            original = importlib.import_module(self._package + fullname[len(self._other) :])
            return ModuleSpec(fullname, _AliasLoader(original), is_package=True)
        if fullname in self.real:
            file = str(self.real[fullname])
            return spec_from_file_location(fullname, file, loader=_FileLoader(fullname, file))
        return ModuleSpec(fullname, _StandInLoader(self), is_package=True)


def _no_compile(model: Any = None, **_: Any) -> Any:
    """``torch.compile`` as a function and as a decorator factory that both leave the function alone."""
    return (lambda function: function) if model is None else model


class Upstream:
    """The modules under test of one checkout, loaded once.

    emulated     no CUDA: device arguments are rewritten and capture is emulated
    logger       what the modules under test have logged
    rejected     class name -> the exception that its module's loading ended with
    unguarded    classes that the base's guard rejects and that were loaded with the guard off
    supplements  module -> members that the suite added to the loaded base for it
    places       backend -> where the checkout has its metadata class
    metadata     backend -> the metadata class that is driven for it; without upstream's own, that of the dense
                 backend is the suite's and there is no sparse one
    fallbacks    upstream's metadata class -> why it is not driven
    suites_metadata  the suite's own class below upstream's base

    Raises ``UsageError`` when the base modules themselves do not load.
    """

    def __init__(self, source: Source, *, emulated: bool, unguarded: bool = False) -> None:
        # Without CUDA an installed package does not import, but its files can be read like a checkout's.
        self.source = source = replace(source, installed=source.installed and not emulated)
        self.emulated = emulated
        self.logger = Logger()
        self.rejected: dict[str, Exception] = {}
        self.unguarded: set[str] = set()
        self.supplements: dict[str, tuple[str, ...]] = {}
        self.places = {} if self.source.installed else locate(self.source)
        self.metadata: dict[str, type] = {}
        self.fallbacks: dict[str, str] = {}
        self._guard_off = unguarded
        self._finder = _Finder(source, behaviours(source.layout, self.logger, not emulated, attention_metadata_class))
        self._modules: dict[str, ModuleType] = {}
        self._depth = 0
        with self.active():
            try:
                self.attention = importlib.import_module(f"{attention_package(source.layout)}.interface")
                # Ahead of the workers' base, which looks for these classes.
                self._load_metadata()
                self.interface = importlib.import_module(f"{SPECULATIVE}.interface")
            except Exception as error:
                problem = f"tensorrt_llm does not load here ({type(error).__name__}: {error})"
                raise UsageError(f"{source.root}: {problem}; {HOW_TO_PROVIDE}") from error
            if not source.installed:
                self._supplement()

    def _supplement(self) -> None:
        # Ahead of every worker module, as these import one another.
        for name in sorted({self.source.classes[w] for w in DRIVEN if w in self.source.classes}):
            text = self.source.file(name).read_text(encoding="utf-8")
            self.supplements[name] = supplement(self.interface, text)

    def _load_metadata(self) -> None:
        for backend, place in self.places.items():
            # Sparse metadata is below the dense one.
            if BACKENDS[backend].sparse and "TRTLLM" not in self.metadata:
                name = BACKENDS["TRTLLM"].metadata
                self.fallbacks[BACKENDS[backend].metadata] = f"{name}, which it is below, cannot be driven"
            else:
                self._try_metadata(backend, place)
        if "TRTLLM" not in self.metadata:
            self.metadata = {"TRTLLM": self._suites_metadata()}
            self.suites_metadata = self.metadata["TRTLLM"]
        else:
            self.suites_metadata = attention_metadata_class(self.attention.AttentionMetadata)

    def _try_metadata(self, backend: str, place: Location) -> None:
        name, real = BACKENDS[backend].metadata, self._finder.real
        real.update((module, self.source.file(module)) for module in place.modules)
        try:
            driven = driven_class(getattr(importlib.import_module(place.module), name))
            try_out(driven, backend, torch.device("cpu" if self.emulated else "cuda"))
        except Exception as error:
            self.fallbacks[name] = f"{type(error).__name__}: {error}"
            for module in place.modules:
                del real[module]
                sys.modules.pop(module, None)
            return
        self.metadata[backend] = driven
        if BACKENDS[backend].sparse:
            package = importlib.import_module(f"{attention_package(self.source.layout)}.sparse.dsa")
            self.supplements[place.module] = supplement_sparse_package(package)

    def _suites_metadata(self) -> type:
        if self.source.installed:
            return attention_metadata_class(self.attention.AttentionMetadata)
        backend = importlib.import_module(f"{attention_package(self.source.layout)}.trtllm")
        return cast(type, backend.TrtllmAttentionMetadata)

    def module_of(self, cls: type) -> ModuleType:
        """Module that defines ``cls``."""
        with self.active():
            return sys.modules[cls.__module__]

    def where(self, cls: type) -> str:
        """File that defines ``cls``."""
        return str(self.source.file(cls.__module__))

    @property
    def files(self) -> dict[str, str]:
        """Module under test -> its file, for those loaded so far."""
        modules = sys.modules if self.source.installed else self._modules
        return {name: str(path) for name, path in self._finder.real.items() if name in modules}

    def forget(self) -> None:
        """Empty what functions of the modules under test have kept, as in a new process.

        Tables of the dense backend are made once in a process: a fault in the making would strike its first run only.
        """
        for name in self.files:
            module = sys.modules[name] if self.source.installed else self._modules[name]
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Install the modules, the finder and the torch replacements. Re-entrant, not thread-safe."""
        if self._depth or self.source.installed:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(self._in_place())
            stack.enter_context(replaced(torch, "compile", _no_compile))
            stack.enter_context(relocation())
            if self.emulated:
                name = "is_current_stream_capturing"
                stack.enter_context(replaced(torch.cuda, name, is_emulated_stream_capturing))
                stack.enter_context(replaced(torch.cuda, "mem_get_info", mem_get_info))
                stack.enter_context(CudaOnCpu())
            self._depth = 1
            try:
                yield
            finally:
                self._depth = 0

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        outside = take_out(ROOTS)
        sys.modules.update(self._modules)
        sys.meta_path.insert(0, self._finder)
        try:
            # No __pycache__ in somebody's checkout.
            with replaced(sys, "dont_write_bytecode", True):
                yield
        finally:
            sys.meta_path.remove(self._finder)
            self._modules = {n: sys.modules.pop(n) for n in self._finder.served if n in sys.modules}
            sys.modules.update(outside)

    def load(self, class_name: str) -> type | None:
        """The class under test called ``class_name``; None when it is missing or rejected (see ``rejected``)."""
        module_name = self.source.classes.get(class_name)
        if module_name is None or class_name in self.rejected:
            return None
        with self.active():
            module = sys.modules.get(module_name) or self._import(class_name, module_name)
            if module is not None and class_name in WORKERS and WORKERS[class_name].tree:
                # Before SM 100 the worker repacks the masks of trees, which the suite's kernels read padded.
                vars(module)["get_sm_version"] = lambda: 100
        worker = getattr(module, class_name, None)
        if worker is not None and not issubclass(worker, self.interface.SpecWorkerBase):
            self.rejected[class_name] = ImportError("no file defines a base of it")
            return None
        return cast("type | None", worker)

    def _import(self, class_name: str, module_name: str) -> ModuleType | None:
        try:
            return importlib.import_module(module_name)
        except Exception as error:
            if not (self._guard_off and raised_by_guard(error)):
                self.rejected[class_name] = error
                return None
        self.unguarded.add(class_name)
        with _guard_off(self.interface.SpecWorkerBase):
            module = importlib.import_module(module_name)
        # The class has its forward and will not write the method that the template calls.
        worker = getattr(module, class_name)
        worker.__abstractmethods__ -= {"_forward_impl"}
        return module


def raised_by_guard(error: BaseException) -> bool:
    """Whether ``error`` is the worker base refusing a class that overrides ``forward``."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return isinstance(error, TypeError) and trace is not None and trace.tb_frame.f_code.co_name == "__init_subclass__"


@contextmanager
def _guard_off(base: Any) -> Iterator[None]:
    """Let classes below ``base`` define ``forward`` while inside."""
    guard = base.__dict__["__init_subclass__"]
    del base.__init_subclass__
    try:
        yield
    finally:
        base.__init_subclass__ = guard
