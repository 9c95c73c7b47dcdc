"""Seams that not every engine has: those of caches, ranks and drafters that a configuration asks for."""

from __future__ import annotations

from typing import Any

from engines.portable.distributed import Distributed
from engines.portable.speculative.suffix_automaton import sa_manager_of
from faults import Seam, SiteClass
from scenarios import Config


def collective_seams(dist: Distributed, worker: Any) -> list[Seam]:
    """What several ranks do together."""
    calls = ("tp_allgather", "allgather_rows") if dist.enable_attention_dp else ()
    shards = getattr(worker, "vocab_shards", None)
    told = [] if shards is None else [Seam("vocab_shards.allgather", shards, "allgather", SiteClass.COLLECTIVE)]
    return told + [Seam(f"dist.{call}", dist, call, SiteClass.COLLECTIVE) for call in calls]


def draft_cache_seams(attn_metadata: Any, draft_kv_cache_manager: Any) -> list[Seam]:
    """A separate draft KV cache: its manager, and the metadata that refers to it for a while."""
    if draft_kv_cache_manager is None:
        return []
    seams = [
        Seam("draft_kv_cache_manager.prepare_resources", draft_kv_cache_manager, "prepare_resources", SiteClass.ALLOC)
    ]
    # Called by prepare too, and halfway through a swap.
    tables = "prepare_for_indexer_k_cache"
    if hasattr(attn_metadata, tables):
        seams.insert(0, Seam(f"attn_metadata.{tables}", attn_metadata, tables, SiteClass.LAUNCH))
    # A view of the metadata refers to nothing else.
    swap = {"prepare_for_draft_forward": SiteClass.HOOK, "restore_after_draft_forward": SiteClass.RESTORE}
    if hasattr(attn_metadata, "prepare_for_draft_forward"):
        seams += [Seam(f"attn_metadata.{name}", attn_metadata, name, kind) for name, kind in swap.items()]
    return seams


def draft_seams(config: Config, draft_model: Any, spec_resource_manager: Any, watch: Any) -> list[Seam]:
    """What drafts: a model, the layers of one, or the automata."""
    automata, launch = sa_manager_of(spec_resource_manager), SiteClass.LAUNCH
    seams = [] if automata is None else [Seam("sa_manager.extend", automata, "extend", launch)]
    for drafter, call, head in _draft_model_calls(draft_model) if config.traits.draft_model else []:
        seams.append(Seam("draft_model.forward", drafter, call, launch, before=watch.drafting))
        seams.append(Seam("draft_model.logits", head, "forward", launch))
    return seams


def guided_seams(guided_decoder: Any) -> list[Seam]:
    """Guided decoding, if there is any."""
    calls = ("execute", "add_draft_batch", "execute_draft_batch", "rollback_rejected_batch") if guided_decoder else ()
    return [Seam(f"guided_decoder.{call}", guided_decoder, call, SiteClass.LAUNCH) for call in calls]


def state_seams(config: Config, kv_cache_manager: Any, watch: Any) -> list[Seam]:
    """Where recurrent states become live, if there are any."""
    if not config.recurrent:
        return []
    name = "update_mamba_states"
    return [Seam(f"kv_cache_manager.{name}", kv_cache_manager, name, SiteClass.LAUNCH, before=watch.promoting)]


def _draft_model_calls(draft_model: Any) -> list[tuple[Any, str, Any]]:
    """Whose method of which name a worker calls to draft, and the head behind it: one, or one of each layer."""
    if hasattr(draft_model, "dflash_forward"):
        return [(draft_model, "dflash_forward", draft_model.logits_processor)]
    if hasattr(draft_model, "forward_draft_step"):
        return [(draft_model, "forward_draft_step", draft_model.logits_processor)]
    layers = getattr(draft_model, "mtp_layers", None)
    if layers is not None:
        return [(layer, "forward", layer.shared_head) for layer in layers]
    return [(draft_model.model, "forward", draft_model.logits_processor)]
