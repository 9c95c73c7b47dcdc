"""TRT-95: what verification accepts is never promoted to the state that the next step reads.

Upstream's victim was recurrent state. Here it is the cache, where accepted nodes lie scattered among the others.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3_TREE, MTP_EAGLE_TREE, Patch, bug

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
