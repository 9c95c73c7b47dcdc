"""Which tables of the managers still have an entry of a request that has ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from engines.portable.pyexecutor.py_executor import PyExecutor

FIRST_DUMMY_ID: Final = 1 << 31
"""Ids from here on are those of dummies; requests have smaller ones."""

KEYED_BY_REQUEST: Final = ("_block_ids", "_num_tokens", "_slots")
"""Names of the tables whose keys are ids of requests, in any manager."""


def held_for_nobody(executor: PyExecutor) -> list[str]:
    """Tables with an entry of a request that is neither active nor in flight, as ``Manager.table``, sorted."""
    held = set(executor.held_requests)
    managers = (
        *executor.kv_cache_managers,
        executor.kv_connector,
        executor.spec_resource_manager,
        executor.guided_decoder,
        executor.seq_slot_manager,
    )
    tables = (table for manager in managers for table in _tables(type(manager).__name__, manager))
    return sorted({name for name, ids in tables if any(i < FIRST_DUMMY_ID and i not in held for i in ids)})


def _tables(name: str, owner: Any) -> Iterator[tuple[str, dict[int, Any]]]:
    """Tables of a manager and of the managers that are its own."""
    for attribute, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
        if attribute in KEYED_BY_REQUEST and isinstance(value, dict):
            yield f"{name}.{attribute}", value
        elif attribute in ("slot_manager", "sa_manager"):
            yield from _tables(f"{name}.{attribute}", value)
