"""Members that a worker module wants from an older base than its own.

Files of a checkout belong together; single files of different dates need not. What a newer worker module names
and the base at hand lacks is added to the loaded base (never exchanged, except for a method that lacks a keyword,
which is wrapped), and reported: a trace of such a combination says which members were the suite's.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch

from engines.tensorrt_llm.stand_ins import INVALID_PROMPT_LOOKAHEAD_TOKEN, is_dsa_cache_manager


def _allocate_context_prompt_lookahead(self: Any) -> None:
    self.context_prompt_lookahead_tokens = torch.full(
        (self.max_num_requests,), INVALID_PROMPT_LOOKAHEAD_TOKEN, dtype=torch.int, device="cuda"
    )


def _with_lookahead(prepare: Any) -> Any:
    """The base's ``_prepare_context_input_ids`` with the keyword of PR #18295."""

    @functools.wraps(prepare)
    def _prepare_context_input_ids(
        self: Any,
        input_ids: torch.Tensor,
        num_ctx_tokens: int,
        gather_ids: torch.Tensor,
        accepted_tokens: torch.Tensor,
        num_contexts: int,
        prompt_lookahead_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        ids: torch.Tensor = prepare(self, input_ids, num_ctx_tokens, gather_ids, accepted_tokens, num_contexts)
        if num_ctx_tokens > 0 and prompt_lookahead_tokens is not None:
            tail = prompt_lookahead_tokens[:num_contexts]
            known = tail != INVALID_PROMPT_LOOKAHEAD_TOKEN
            ids[gather_ids[:num_contexts]] = torch.where(known, tail, accepted_tokens[:num_contexts, 0])
        return ids

    return _prepare_context_input_ids


def _prepare_position_ids_and_last_tokens(
    self: Any, position_ids: torch.Tensor, seq_lens_cuda: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions without the batch's dimension, and the last row of each sequence."""
    return position_ids.squeeze(0), torch.cumsum(seq_lens_cuda, dim=0, dtype=torch.long) - 1


def supplement(interface: ModuleType, wanted_by: str) -> tuple[str, ...]:
    """Add to the loaded ``speculative.interface`` what the source text ``wanted_by`` names and it lacks.

    Returns the names of the members that were added.
    """
    added: list[str] = []
    metadata, worker = interface.SpecMetadata, interface.SpecWorkerBase

    def add(owner: Any, name: str, value: Any) -> None:
        if name in wanted_by and not hasattr(owner, name):
            setattr(owner, name, value)
            added.append(f"{owner.__name__.rpartition('.')[2]}.{name}")

    add(interface, "INVALID_PROMPT_LOOKAHEAD_TOKEN", INVALID_PROMPT_LOOKAHEAD_TOKEN)
    add(metadata, "allocate_context_prompt_lookahead", _allocate_context_prompt_lookahead)
    add(metadata, "context_prompt_lookahead_tokens", None)
    add(worker, "_auxiliary_state_handlers", ())
    # Only a tree's worker still calls this one of the linear worker's below it.
    add(worker, "prepare_position_ids_and_last_tokens", _prepare_position_ids_and_last_tokens)
    if "prompt_lookahead_tokens=" in wanted_by:
        prepare = worker._prepare_context_input_ids
        if "prompt_lookahead_tokens" not in inspect.signature(prepare).parameters:
            worker._prepare_context_input_ids = _with_lookahead(prepare)
            added.append("SpecWorkerBase._prepare_context_input_ids(prompt_lookahead_tokens=)")
    return tuple(added)


def supplement_sparse_package(package: ModuleType) -> tuple[str, ...]:
    """Add to the module of an older sparse metadata what newer workers ask it; returns the names that were added."""
    name = is_dsa_cache_manager.__name__
    if hasattr(package, name):
        return ()
    setattr(package, name, is_dsa_cache_manager)
    return (name,)
