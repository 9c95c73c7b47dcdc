"""Where upstream's classes come from: a source checkout (no build needed) or an installed package."""

from __future__ import annotations

import ast
import importlib.util
import os
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from engines.upstream import SOURCE_VARIABLE
from scenarios import UsageError

PACKAGE = "tensorrt_llm"
UNGUARDED_VARIABLE = "SPECFUZZ_TRTLLM_UNGUARDED"
"""Set to anything: drive workers that the guard of their base rejects."""
HOW_TO_PROVIDE = (
    f"install {PACKAGE}, or point --trtllm-source or {SOURCE_VARIABLE} at a checkout of NVIDIA/TensorRT-LLM "
    "(a directory that holds tensorrt_llm/_torch; no build is needed)"
)

ATTENTION_PACKAGES = ("attention.backends", "attention_backend")
"""The package of the attention metadata under ``tensorrt_llm/_torch``, newest name first."""

SPECULATIVE = f"{PACKAGE}._torch.speculative"


def attention_package(layout: str) -> str:
    """Full module name of the attention package in ``layout``, one of ``ATTENTION_PACKAGES``."""
    return f"{PACKAGE}._torch.{layout}"


@dataclass(frozen=True)
class Source:
    """A checkout, or the directory that the package is installed in.

    root       the directory that holds ``tensorrt_llm/``
    layout     its attention package, one of ``ATTENTION_PACKAGES``
    installed  whether its modules are imported as they are, instead of one by one among stand-ins
    """

    root: Path
    layout: str
    installed: bool = False

    @property
    def attention_file(self) -> Path:
        """File of ``AttentionMetadata``."""
        return self.file(f"{attention_package(self.layout)}.interface")

    @property
    def interface_file(self) -> Path:
        """File of ``SpecWorkerBase`` and ``SpecMetadata``."""
        return self.file(f"{SPECULATIVE}.interface")

    def file(self, module: str) -> Path:
        """Where ``module`` would be in the checkout."""
        return self.root.joinpath(*module.split(".")).with_suffix(".py")

    @cached_property
    def classes(self) -> dict[str, str]:
        """Class name -> module, for each class that a file of ``speculative/`` defines at its top level."""
        found: dict[str, str] = {}
        for path in sorted(self.interface_file.parent.glob("*.py")):
            found.update(dict.fromkeys(_class_names(path.read_text(encoding="utf-8")), f"{SPECULATIVE}.{path.stem}"))
        return found


@cache
def _class_names(text: str) -> tuple[str, ...]:
    """Classes at the top level of a file, which each engine that is made asks for again; parsing is slow."""
    return tuple(node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef))


def open_source(directory: str | os.PathLike[str], *, installed: bool = False) -> Source:
    """The checkout in ``directory``; ``UsageError`` says what is missing from it."""
    root = Path(directory).expanduser().resolve()
    if not (root / PACKAGE / "_torch").is_dir():
        raise UsageError(f"{root}: no {PACKAGE}/_torch in this directory; {HOW_TO_PROVIDE}")
    sources = [Source(root, layout, installed) for layout in ATTENTION_PACKAGES]
    found = [source for source in sources if source.attention_file.is_file()]
    if not found:
        raise UsageError(f"{root}: neither of {', '.join(ATTENTION_PACKAGES)} has an interface.py; {HOW_TO_PROVIDE}")
    if not found[0].interface_file.is_file():
        missing = found[0].interface_file.relative_to(root)
        raise UsageError(f"{root}: {missing} is missing; {HOW_TO_PROVIDE}")
    return found[0]


def find(directory: str | os.PathLike[str] | None = None) -> Source:
    """The checkout that was asked for (argument, else the environment variable), else the installed package.

    Raises ``UsageError`` when there is neither.
    """
    asked = directory or os.environ.get(SOURCE_VARIABLE)
    if asked:
        return open_source(asked)
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"{PACKAGE} is not installed and no checkout was named; {HOW_TO_PROVIDE}")
    return open_source(Path(next(iter(spec.submodule_search_locations))).parent, installed=True)
