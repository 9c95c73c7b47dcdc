"""Where upstream's classes come from: a source checkout (no build needed) or an installed package."""

from __future__ import annotations

import ast
import importlib.util
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scenarios import UsageError

PACKAGE = "tensorrt_llm"
SOURCE_VARIABLE = "SPECFUZZ_TRTLLM_SOURCE"
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
    """A checkout: ``root`` is the directory that holds ``tensorrt_llm/``; ``layout`` its attention package."""

    root: Path
    layout: str

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
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    found[node.name] = f"{SPECULATIVE}.{path.stem}"
        return found


def open_source(directory: str | os.PathLike[str]) -> Source:
    """The checkout in ``directory``; ``UsageError`` says what is missing from it."""
    root = Path(directory).expanduser().resolve()
    if not (root / PACKAGE / "_torch").is_dir():
        raise UsageError(f"{root}: no {PACKAGE}/_torch in this directory; {HOW_TO_PROVIDE}")
    for layout in ATTENTION_PACKAGES:
        source = Source(root, layout)
        if source.attention_file.is_file():
            break
    else:
        raise UsageError(f"{root}: neither of {', '.join(ATTENTION_PACKAGES)} has an interface.py; {HOW_TO_PROVIDE}")
    if not source.interface_file.is_file():
        raise UsageError(f"{root}: {source.interface_file.relative_to(root)} is missing; {HOW_TO_PROVIDE}")
    return source


def find(directory: str | os.PathLike[str] | None = None) -> Source | None:
    """The checkout that was asked for (argument, else the environment variable), None for the installed package.

    Raises ``UsageError`` when there is neither.
    """
    asked = directory or os.environ.get(SOURCE_VARIABLE)
    if asked:
        return open_source(asked)
    if importlib.util.find_spec(PACKAGE) is None:
        raise UsageError(f"{PACKAGE} is not installed and no checkout was named; {HOW_TO_PROVIDE}")
    return None
