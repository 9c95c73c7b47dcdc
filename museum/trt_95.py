"""TRT-95: what verification accepts is never promoted to the state that the next step reads.

Upstream's victim was recurrent state. So is the cache, where accepted nodes lie scattered among the others.
"""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, DSPARK, EAGLE3, EAGLE3_TREE, MTP, MTP_EAGLE, MTP_EAGLE_TREE, SA, Patch, bug

_REFERENCE = "TensorRT-LLM #16759"
_LOST = (
    "target-cache-holds-the-text",
    "kv-content-equals-reference",
    "acceptance-follows-agreement",
    "output-lossless",
)


@bug(
    "TRT-95",
    kind="K13",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    title="Cache entries of accepted nodes stay where the tree had them",
    reference=_REFERENCE,
    caught_by=_LOST,
)
def never_moved(patch: Patch) -> None:
    from engines.portable.speculative.eagle3_dynamic_tree import Eagle3OneModelDynamicTreeWorker

    def _relocate_kv_eagerly(self: Any, attn_metadata: Any, num_accepted: Any) -> None:
        pass

    patch(Eagle3OneModelDynamicTreeWorker, "_relocate_kv_eagerly", _relocate_kv_eagerly)


@bug(
    "TRT-95",
    kind="K13",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    variant="shifted",
    title="Accepted nodes are counted without the root, and the entries one before theirs are moved",
    reference=_REFERENCE,
    caught_by=_LOST,
)
def the_one_before_moved(patch: Patch) -> None:
    from engines.portable.speculative import eagle3_dynamic_tree
    from engines.portable.speculative.dynamic_tree_ops import update_kv_cache_draft_token_location as move

    def update(pool: Any, table: Any, accept_index: Any, num_accepted: Any, past: Any) -> None:
        move(pool, table, (accept_index - 1).clamp(min=0), num_accepted, past)

    patch(eagle3_dynamic_tree, "update_kv_cache_draft_token_location", update)


_STATES = ("accepted-state-becomes-live", "recurrent-state-equals-cache", "recurrent-states-equal-reference")
_COUNTED = ("states-are-promoted-once", "recurrent-states-equal-reference")


@bug(
    "TRT-95",
    kind="K13",
    workers=(SA, MTP, DFLASH, MTP_EAGLE_TREE),
    variant="recurrent",
    title="Recurrent states of accepted tokens never become live",
    reference=_REFERENCE,
    caught_by=(*_STATES, "states-are-promoted-once", "output-lossless"),
)
def never_live(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    def _update_mamba_states(self: Any, num_accepted: Any, attn_metadata: Any) -> None:
        pass

    patch(SpecWorkerBase, "_update_mamba_states", _update_mamba_states)


@bug(
    "TRT-95",
    kind="K13",
    workers=(EAGLE3, SA, DSPARK),
    variant="no-drafts",
    title="A step with draft length 0 makes no recurrent state live",
    reference=_REFERENCE,
    caught_by=("recurrent-state-equals-cache", *_COUNTED),
)
def not_without_drafts(patch: Patch) -> None:
    from engines.portable.speculative import interface, recurrent

    update = recurrent.update_mamba_states

    def update_mamba_states(attn_metadata: Any, num_accepted: Any, leaves: Any = None) -> None:
        if attn_metadata.num_tokens - attn_metadata.num_ctx_tokens > attn_metadata.num_generations:
            update(attn_metadata, num_accepted, leaves)

    patch(interface, "update_mamba_states", update_mamba_states)


@bug(
    "TRT-95",
    kind="K13",
    workers=(MTP_EAGLE, DFLASH, MTP_EAGLE_TREE),
    variant="contexts",
    title="Recurrent states are made live for a batch of contexts, too",
    reference=_REFERENCE,
    caught_by=_COUNTED,
)
def for_contexts_too(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    def _update_mamba_states(self: Any, num_accepted: Any, attn_metadata: Any) -> None:
        manager = attn_metadata.kv_cache_manager
        if hasattr(manager, "update_mamba_states"):
            manager.update_mamba_states(
                attn_metadata=attn_metadata,
                num_accepted_tokens=num_accepted,
                state_indices=attn_metadata.mamba_metadata.state_indices,
                accepted_leaf_positions=self._accepted_leaf_positions(num_accepted, attn_metadata),
            )

    patch(SpecWorkerBase, "_update_mamba_states", _update_mamba_states)


@bug(
    "TRT-95",
    kind="K13",
    workers=(EAGLE3, MTP),
    variant="count",
    title="The recurrent state one row behind the last accepted one becomes live",
    reference=_REFERENCE,
    caught_by=_STATES,
)
def one_too_far(patch: Patch) -> None:
    from engines.portable.speculative import interface, recurrent

    update = recurrent.update_mamba_states

    def update_mamba_states(attn_metadata: Any, num_accepted: Any, leaves: Any = None) -> None:
        rows = (attn_metadata.num_tokens - attn_metadata.num_ctx_tokens) // max(attn_metadata.num_generations, 1)
        update(attn_metadata, (num_accepted + 1).clamp(max=max(rows, 1)), leaves)

    patch(interface, "update_mamba_states", update_mamba_states)


@bug(
    "TRT-95",
    kind="K13",
    workers=(MTP_EAGLE_TREE,),
    variant="leaf",
    title="The recurrent state of an accepted node is looked for where a chain would have it",
    reference=_REFERENCE,
    caught_by=("recurrent-state-equals-cache", "recurrent-states-equal-reference"),
)
def as_in_a_chain(patch: Patch) -> None:
    from engines.portable.speculative.eagle3_dynamic_tree import Eagle3OneModelDynamicTreeWorker

    patch(Eagle3OneModelDynamicTreeWorker, "_accepted_leaf_positions", lambda self, num_accepted, attn_metadata: None)


@bug(
    "TRT-95",
    kind="K13",
    workers=(MTP_EAGLE, SA),
    variant="rows",
    title="Verified states are looked for behind those of the contexts, which have none",
    reference=_REFERENCE,
    caught_by=_STATES,
)
def behind_contexts(patch: Patch) -> None:
    from engines.portable.pyexecutor.mamba_cache_manager import MambaHybridCacheManager
    from engines.process import replaced

    update = MambaHybridCacheManager.update_mamba_states

    def update_mamba_states(self: Any, *, attn_metadata: Any, **kwargs: Any) -> None:
        shifted = self.intermediate_ssm_states.roll(-attn_metadata.num_contexts, 0)
        with replaced(self, "intermediate_ssm_states", shifted):
            update(self, attn_metadata=attn_metadata, **kwargs)

    patch(MambaHybridCacheManager, "update_mamba_states", update_mamba_states)
