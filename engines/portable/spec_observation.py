"""What the observer reads of a worker, of its metadata, and of what it keeps per request beside the KV cache."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from engines.portable.distributed import Distributed
from engines.portable.pyexecutor.resource_manager import SlotManager, SpecResourceManager
from engines.portable.speculative.capture import CapturingSpecMetadata
from engines.portable.speculative.eagle3 import Eagle3ResourceManager
from engines.portable.speculative.interface import SpecMetadata
from engines.portable.speculative.mtp import MTPHiddenStatesManager, MTPSpecMetadata
from engines.portable.speculative.suffix_automaton import SuffixAutomatonManager


def prepared_fields(spec: Any, rows: int) -> dict[str, Any]:
    """What the worker's own metadata says of a step of so many rows; another engine's versions differ in it."""
    if not isinstance(spec, SpecMetadata):
        return {}
    fields: dict[str, Any] = {"spec_num_tokens": spec.num_tokens, **_all_rank_fields(spec)}
    if isinstance(spec, CapturingSpecMetadata):
        fields["num_capture_tokens"] = spec.num_capture_tokens
    manager = getattr(spec, "spec_resource_manager", None)
    if isinstance(spec, MTPSpecMetadata) or isinstance(manager, Eagle3ResourceManager):
        slot_ids: Tensor = vars(spec)["slot_ids"]
        fields["slot_ids"] = slot_ids[:rows].tolist()
    return fields


def _all_rank_fields(spec: SpecMetadata) -> dict[str, list[int]]:
    """What the ranks of attention data parallelism have told each other; nothing with a single one."""
    lists = {
        "spec_all_rank_num_tokens": spec.all_rank_num_tokens,
        "all_rank_num_seqs": spec.all_rank_num_seqs,
        "all_rank_num_gens": spec.all_rank_num_gens,
        "subseq_all_rank_num_tokens": spec.subseq_all_rank_num_tokens,
    }
    return {name: list(counts) for name, counts in lists.items() if counts is not None}


def collectives(dist: Distributed) -> dict[str, list[Any]]:
    """What this rank did together with others in the step; nothing with a single one."""
    return {"collectives": [[name, list(counts)] for name, counts in dist.calls]} if dist.enable_attention_dp else {}


def force_accept_counter(worker: Any) -> dict[str, int | None]:
    """How often forced acceptance has drawn; nothing for a worker whose forced number needs no drawing."""
    # Workers from before that number have none.
    force = getattr(worker, "force_num_accepted_tokens", 0.0)
    if force == int(force):
        return {}
    counter = worker._force_accept_rng_counter
    return {"force_accept_counter": None if counter is None else int(counter)}


def spec_slots(manager: Any) -> dict[str, dict[int, int]]:
    """Who holds which slot of what the worker keeps; nothing for a worker that keeps nothing in slots."""
    slots = getattr(manager, "slot_manager", None)
    return {"spec_slots": slots.taken()} if isinstance(slots, SlotManager) else {}


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
