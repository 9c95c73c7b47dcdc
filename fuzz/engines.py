"""Engines by name, imported only when asked for: neither torch nor TensorRT-LLM is needed to read a finding."""

from __future__ import annotations

import gc
import importlib
import os
import warnings
from typing import Final, cast

from engines.base import Engine
from engines.upstream import DRIVEN
from scenarios import WORKERS, UsageError, closest

PORTABLE: Final = "portable"
TENSORRT_LLM: Final = "tensorrt_llm"
ENGINES: Final = {
    PORTABLE: "engines.portable:PortableEngine",
    TENSORRT_LLM: "engines.tensorrt_llm:TensorrtLlmEngine",
}
"""Name -> ``module:class``. A name with a colon is taken as such a place itself."""
DEVICES: Final = ("cpu", "cuda")
_REMEDY: Final = "name a class like engines.base.Engine"


def check_name(name: str, device: str) -> None:
    """Raise ``UsageError`` unless the names are known. Imports nothing."""
    if name not in ENGINES and ":" not in name:
        raise UsageError(f"--engine: no engine is called {name!r}; {closest(name, ENGINES)}")
    if device not in DEVICES:
        raise UsageError(f"--device: no device is called {device!r}; write {' or '.join(DEVICES)}")


def workers(name: str) -> tuple[str, ...]:
    """Workers that the engine of that name drives. Imports nothing."""
    return DRIVEN if name == TENSORRT_LLM else tuple(WORKERS)


def load(name: str, device: str) -> Engine:
    """The engine of that name on that device; ``UsageError`` says why it cannot run here."""
    check_name(name, device)
    module, _, attribute = ENGINES.get(name, name).partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--engine: {name!r} cannot be loaded here ({error}); see `specfuzz doctor` for what this machine can test"
        ) from error
    try:
        engine = factory(device=device)
    except UsageError as error:
        # An engine names its parameter.
        raise UsageError(f"--{error}" if str(error).startswith("device: ") else str(error)) from error
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--engine: {name}(device={device!r}) raises {type(error).__name__}: {error}; {_REMEDY}"
        ) from error
    missing = [field for field in ("name", "device", "backends", "open") if not hasattr(engine, field)]
    if missing:
        raise UsageError(f"--engine: {name!r} is no engine, as it has no {missing[0]!r}; {_REMEDY}")
    return cast(Engine, engine)


def settle_process() -> None:
    """Settings of a process that does nothing but search: one thread, and few collections.

    Tensors here hold a few numbers; a thread pool of torch's would only spin, at 40% more CPU time. Traces are many
    small lists without cycles, which the collector would look through in vain, at 15%.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gc.set_threshold(20_000, 20, 20)


def quieten() -> None:
    """Keep torch from saying, at some time, that NumPy is missing: nothing here needs it."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
