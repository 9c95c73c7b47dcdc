"""TRT-57: slots of recurrent states that belong to requests which are alive are used for something else."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, DSPARK, EAGLE3, MTP, MTP_EAGLE, MTP_EAGLE_TREE, SA, Patch, baked, bug

_REFERENCE = "TensorRT-LLM #13151, #13278, #13489"
_PARKED = ("states-of-others-stay", "recurrent-state-equals-cache", "recurrent-states-equal-reference")
_STATES = ("recurrent-state-equals-cache", "recurrent-states-equal-reference")


@bug(
    "TRT-57",
    kind="K5",
    workers=(EAGLE3, SA, DFLASH),
    title="Dummies that pad a batch have the slot of a request that is alive and not in it",
    reference=_REFERENCE,
    caught_by=("dummies-share-a-slot-of-their-own", *_PARKED),
)
def of_a_parked_request(patch: Patch) -> None:
    from engines.portable.pyexecutor.mamba_cache_manager import MambaHybridCacheManager

    find = MambaHybridCacheManager.get_state_indices

    def get_state_indices(self: Any, request_ids: Any) -> list[int]:
        return [0 if slot == self.padding_slot else slot for slot in find(self, request_ids)]

    patch(MambaHybridCacheManager, "get_state_indices", get_state_indices)


@bug(
    "TRT-57",
    kind="K5",
    workers=(MTP_EAGLE, DSPARK, MTP_EAGLE_TREE),
    variant="tail",
    title="States become live by a list of the manager's whose tail is that of a larger batch before",
    reference=_REFERENCE,
    caught_by=_PARKED,
)
def stale_tail(patch: Patch) -> None:
    from engines.portable.pyexecutor.mamba_cache_manager import MambaHybridCacheManager

    update = MambaHybridCacheManager.update_mamba_states

    def update_mamba_states(self: Any, *, attn_metadata: Any, state_indices: Any, **kwargs: Any) -> None:
        update(self, attn_metadata=attn_metadata, state_indices=state_indices, **kwargs)
        tail = slice(attn_metadata.num_seqs, len(state_indices))
        self.write_states(state_indices[tail], self.intermediate_ssm_states[tail, 0])

    patch(MambaHybridCacheManager, "update_mamba_states", update_mamba_states)


@bug(
    "TRT-57",
    kind="K2",
    workers=(EAGLE3, MTP, SA),
    variant="last-owner",
    title="A prompt goes on from the state that the last owner of its slot has left",
    reference=_REFERENCE,
    caught_by=(*_STATES, "output-lossless"),
)
def of_the_last_owner(patch: Patch) -> None:
    from engines.portable.pyexecutor.mamba_cache_manager import Mamba2Metadata

    prepare = Mamba2Metadata.prepare

    def prepare_all(self: Any, attn_metadata: Any) -> None:
        prepare(self, attn_metadata)
        self.has_initial_states.fill_(True)

    patch(Mamba2Metadata, "prepare", prepare_all)


@bug(
    "TRT-57",
    kind="K12",
    workers=(EAGLE3, SA, DFLASH),
    variant="chunk",
    title="Each chunk of a prompt begins with no state",
    reference=_REFERENCE,
    caught_by=(*_STATES, "recurrent-layers-change-nothing"),
)
def each_chunk_anew(patch: Patch) -> None:
    from engines.portable.pyexecutor.mamba_cache_manager import Mamba2Metadata

    prepare = Mamba2Metadata.prepare

    def prepare_generations(self: Any, attn_metadata: Any) -> None:
        prepare(self, attn_metadata)
        self.has_initial_states[: attn_metadata.num_contexts] = False

    patch(Mamba2Metadata, "prepare", prepare_generations)


@bug(
    "TRT-57",
    kind="K5",
    workers=(MTP_EAGLE, MTP, MTP_EAGLE_TREE),
    variant="written",
    title="Dummies write their states to the slot that all of them share",
    reference=_REFERENCE,
    caught_by=("dummies-share-a-slot-of-their-own", "recurrent-states-equal-reference"),
)
def written_by_dummies(patch: Patch) -> None:
    from engines.portable.pyexecutor.mamba_cache_manager import MambaHybridCacheManager

    def write_states(self: Any, state_indices: Any, states: Any) -> None:
        self.ssm_states.index_copy_(0, state_indices.long(), states)

    patch(MambaHybridCacheManager, "write_states", write_states)


@bug(
    "TRT-57",
    kind="K10",
    workers=(EAGLE3, DFLASH, SA),
    variant="captured",
    title="A graph makes states live in the slots of its capture",
    reference=_REFERENCE,
    caught_by=(*_STATES, "replay-equals-eager"),
)
def of_the_capture(patch: Patch) -> None:
    from engines.portable.pyexecutor.mamba_cache_manager import MambaHybridCacheManager

    update = MambaHybridCacheManager.update_mamba_states

    def update_mamba_states(self: Any, *, attn_metadata: Any, state_indices: Any, **kwargs: Any) -> None:
        slots = baked(self.get_state_indices(attn_metadata.request_ids), self.device)
        update(self, attn_metadata=attn_metadata, state_indices=slots, **kwargs)

    patch(MambaHybridCacheManager, "update_mamba_states", update_mamba_states)


@bug(
    "TRT-57",
    kind="K5",
    workers=(EAGLE3, SA),
    variant="kept",
    title="The slot of a request that has ended is never free again",
    reference=_REFERENCE,
    caught_by=("slots-belong-to-requests",),
)
def never_free(patch: Patch) -> None:
    from engines.portable.pyexecutor.mamba_cache_manager import MambaHybridCacheManager
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    def free_resources(self: Any, request: Any) -> None:
        KVCacheManager.free_resources(self, request)

    patch(MambaHybridCacheManager, "free_resources", free_resources)
