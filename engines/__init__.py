"""Systems under test: ``portable`` (torch, embedded) and ``tensorrt_llm`` (upstream's real classes)."""

from engines.base import INJECTORS, LINES, SEAMS, TORCH, Engine, Session, run

__all__ = ["INJECTORS", "LINES", "SEAMS", "TORCH", "Engine", "Session", "run"]
