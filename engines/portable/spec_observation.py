"""What the observer reads of what a worker keeps per request beside the KV cache."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engines.portable.pyexecutor.resource_manager import SpecResourceManager
from engines.portable.speculative.mtp import MTPHiddenStatesManager
from engines.portable.speculative.suffix_automaton import SuffixAutomatonManager


def spec_fields(manager: SpecResourceManager | None, requests: Collection[int]) -> dict[str, dict[int, Any]]:
    """Fields of the worker's own state, of these requests."""
    if isinstance(manager, MTPHiddenStatesManager):
        return _mtp_fields(manager, requests)
    if isinstance(manager, SuffixAutomatonManager):
        return _sa_fields(manager, requests)
    return {}


def _mtp_fields(manager: MTPHiddenStatesManager, requests: Collection[int]) -> dict[str, dict[int, Any]]:
    slots = [manager.slot_manager.get_slot(request) for request in requests]
    tokens = manager.mtp_past_tokens_pool[slots].tolist()
    hidden_states = manager.mtp_past_hidden_states_pool[slots, :, 0].tolist()
    return {
        "mtp_past_tokens": dict(zip(requests, tokens)),
        "mtp_past_hidden_states": dict(zip(requests, hidden_states)),
    }


def _sa_fields(manager: SuffixAutomatonManager, requests: Collection[int]) -> dict[str, dict[int, Any]]:
    slots = manager.slot_manager.get_slots(requests)
    texts, lens = manager.text[slots].tolist(), manager.text_lens[slots].tolist()
    return {"automaton": {i: text[:n] for i, text, n in zip(requests, texts, lens)}}
