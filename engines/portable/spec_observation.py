"""What the observer reads of a worker, of its metadata, and of what it keeps per request beside the KV cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from engines.portable.distributed import Distributed
from engines.portable.ownership_observation import FIRST_DUMMY_ID
from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder
from engines.portable.pyexecutor.llm_request import LlmRequest
from engines.portable.pyexecutor.resource_manager import SlotManager, SpecResourceManager
from engines.portable.speculative.capture import CapturingSpecMetadata
from engines.portable.speculative.eagle3 import Eagle3ResourceManager
from engines.portable.speculative.interface import SpecMetadata
from engines.portable.speculative.mtp import MTPHiddenStatesManager, MTPSpecMetadata
from engines.portable.speculative.relaxed_acceptance import RelaxedDeltaManager
from engines.portable.speculative.suffix_automaton import SuffixAutomatonManager, sa_manager_of

_DIGITS = 6
"""Of a float32, as far as numbers that are no sums of powers of two are told apart from what was configured."""


def prepared_fields(spec: Any, rows: int) -> dict[str, Any]:
    """What the worker's own metadata says of a step of ``rows``; nothing of upstream's, whose versions differ in it."""
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


def collectives(dist: Distributed, graph_key: list[int] | None) -> dict[str, Any]:
    """What this rank did together with others in the step, if there are any, and in which graph."""
    fields: dict[str, Any] = {"graph_key": graph_key}
    if dist.enable_attention_dp:
        fields["collectives"] = [[name, list(counts)] for name, counts in dist.calls]
    return fields


def force_accept_counter(worker: Any) -> dict[str, int | None]:
    """How often forced acceptance has drawn; nothing for a worker whose forced number needs no drawing."""
    # Workers from before that number have none.
    force = getattr(worker, "force_num_accepted_tokens", 0.0)
    if force == int(force):
        return {}
    counter = worker._force_accept_rng_counter
    return {"force_accept_counter": None if counter is None else int(counter)}


def slot_fields(manager: Any) -> dict[str, Any]:
    """Who holds which slot of what the worker keeps, and who owns an automaton; nothing where there are no slots.

    Owners of automata are ids of requests, -1 for a dummy. Automata beside a draft model are no slots of the worker.
    """
    fields: dict[str, Any] = {}
    slots, automata = getattr(manager, "slot_manager", None), sa_manager_of(manager)
    if isinstance(slots, SlotManager) and (automata is not manager or automata.with_contexts):
        fields["spec_slots"] = slots.taken()
    if automata is not None:
        owners = automata.slot_manager.taken()
        fields["sa_requests"] = sorted(request if request < FIRST_DUMMY_ID else -1 for request in owners)
    return fields


def matcher_rows(decoder: CapturableGuidedDecoder | None, rows: Sequence[LlmRequest]) -> dict[str, list[Any]]:
    """How far the matcher of each row is, and in which state; None for a row without one."""
    if decoder is None:
        return {}
    slots = decoder.row_slots(rows)
    return {"matcher_rows": [None if slot == decoder.dummy_slot else _matcher(decoder, slot) for slot in slots]}


def matchers(decoder: CapturableGuidedDecoder | None) -> dict[str, dict[int, list[int]]]:
    """The same of every request that holds one."""
    if decoder is None:
        return {}
    return {"matchers": {i: _matcher(decoder, slot) for i, slot in decoder.slot_manager.taken().items()}}


def _matcher(decoder: CapturableGuidedDecoder, slot: int) -> list[int]:
    count = int(decoder.num_advanced_tokens[slot])
    # Clamped: a matcher that was taken back too often is to be seen, too.
    state = decoder.matcher_states[slot, min(max(count, 0), decoder.matcher_states.shape[1] - 1)]
    return [count, int(state)]


def relaxed_deltas(manager: Any, requests: Collection[int]) -> dict[str, dict[int, float]]:
    """How far below the first choice what these requests accept may be; nothing where acceptance is strict."""
    if not isinstance(manager, RelaxedDeltaManager) or manager.relaxed_delta_pool is None:
        return {}
    deltas = manager.relaxed_delta_pool[manager.slot_manager.get_slots(requests)].tolist()
    return {"relaxed_delta": {i: round(delta, _DIGITS) for i, delta in zip(requests, deltas)}}


def relaxed_deltas_left(manager: Any) -> dict[str, list[float]]:
    """Deltas in slots that nobody holds."""
    if not isinstance(manager, RelaxedDeltaManager) or manager.relaxed_delta_pool is None:
        return {}
    pool, taken = manager.relaxed_delta_pool.tolist(), set(manager.slot_manager.taken().values())
    return {"relaxed_delta_left": [round(d, _DIGITS) for slot, d in enumerate(pool) if d and slot not in taken]}


def spec_fields(manager: SpecResourceManager | None, requests: Collection[int]) -> dict[str, dict[int, Any]]:
    """Fields of the worker's own state, of these requests, but for those that hold none of it."""
    automata = sa_manager_of(manager)
    fields = {} if automata is None else _sa_fields(automata, requests)
    if isinstance(manager, MTPHiddenStatesManager):
        fields.update(_mtp_fields(manager, requests))
    return fields


def enhancer_buffers(worker: Any) -> dict[str, Tensor]:
    """What a worker with suffix automata beside its draft model keeps from one forward to the next."""
    enhancer = getattr(worker, "sa_enhancer", None)
    return {} if enhancer is None else {"sa_match_len": enhancer.match_len, "sa_draft_tokens": enhancer.draft_tokens}


def enhancer_fields(worker: Any, spec_metadata: Any) -> dict[str, Any]:
    """What these automata found for the generations of the step; nothing where nothing is drafted for any."""
    gens, draft_len = spec_metadata.num_generations, spec_metadata.runtime_draft_len
    buffers = enhancer_buffers(worker)
    if not buffers or not gens or not draft_len:
        return {}
    match_len, draft_tokens = buffers.values()
    return {
        "sa_match_len": match_len[:gens].tolist(),
        "sa_draft_tokens": draft_tokens[:gens, :draft_len].tolist(),
    }


def _held_slots(manager: SpecResourceManager, requests: Collection[int]) -> dict[int, int]:
    """Slot of each of these requests that has one."""
    slots = {request: manager.slot_manager.get_slot(request) for request in requests}
    return {request: slot for request, slot in slots.items() if slot is not None}


def _mtp_fields(manager: MTPHiddenStatesManager, requests: Collection[int]) -> dict[str, dict[int, Any]]:
    held = _held_slots(manager, requests)
    requests, slots = list(held), list(held.values())
    tokens = manager.mtp_past_tokens_pool[slots].tolist()
    hidden_states = manager.mtp_past_hidden_states_pool[slots, :, 0].tolist()
    return {
        "mtp_past_tokens": dict(zip(requests, tokens)),
        "mtp_past_hidden_states": dict(zip(requests, hidden_states)),
    }


def _sa_fields(manager: SuffixAutomatonManager, requests: Collection[int]) -> dict[str, dict[int, Any]]:
    held = _held_slots(manager, requests)
    requests, slots = list(held), list(held.values())
    texts, lens = manager.text[slots].tolist(), manager.text_lens[slots].tolist()
    return {"automaton": {i: text[:n] for i, text, n in zip(requests, texts, lens)}}
