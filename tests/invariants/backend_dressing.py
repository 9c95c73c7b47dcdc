"""What a pretend engine shows of pages where its attention metadata is not ``TrtllmAttentionMetadata`` itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

from invariants.pools import Pool, pools
from scenarios import BACKENDS, Config, StepTrace, Substep

TABLES = ("kv_cache_block_offsets", "draft_kv_cache_block_offsets")

Fields = dict[str, Any]


def dress_backend(taken: StepTrace, prepared: Fields, config: Config) -> StepTrace:
    """``taken`` with tables of its backend; ``prepared`` has the pages of each row in each pool."""
    backend = BACKENDS[config.attention_backend]
    if backend.compressed:
        first = taken.find("prepared")
        lens = [] if first is None else first["kv_lens_cuda"]
        return _each(taken, lambda substep: _compressed(substep, prepared, lens, config))
    if backend.draft_view or backend.one_page:
        return _each(taken, lambda substep: _without_tables(substep, prepared, config))
    return taken


def _each(taken: StepTrace, dress: Callable[[Substep], Fields]) -> StepTrace:
    return replace(taken, substeps=tuple(replace(s, fields=dress(s)) for s in taken.substeps))


def _pool(substep: Substep, config: Config) -> Pool:
    return pools(config)[-1 if substep.name.startswith("draft[") else 0]


def _compressed(substep: Substep, prepared: Fields, lens: list[int], config: Config) -> Fields:
    """``lens`` are the KV lengths that the host supposes."""
    fields = dict(substep.fields)
    if substep.name not in ("prepared", "entered", "restored", "failed") and not substep.name.startswith("draft["):
        return fields
    pool, target = _pool(substep, config), prepared[TABLES[0]]
    fields["sliding_block_tables"] = prepared[pool.field(TABLES[0])]
    if substep.name.startswith("draft["):
        return fields
    fields["compress_block_tables"] = dict.fromkeys(config.compress_ratios[1:], target)
    if "slot_owners" not in substep:
        return fields
    # Of a page of 4 tokens with ratio 2, the keys of 2 compressed tokens.
    size = pool.tokens_per_block // config.compress_ratios[1]
    places = [(target[row][i // size], i % size) for row, i in substep["slot_owners"]]
    fields["slot_mapping_fp8"] = [page * size * 132 + offset * 128 for page, offset in places]
    pages = [table[: pool.pages(kv)] for table, kv in zip(target, lens, strict=True)]
    return fields | {"indexer_k_cache_block_offsets": pages}


def _without_tables(substep: Substep, prepared: Fields, config: Config) -> Fields:
    """The metadata has neither block tables nor, outside views, lengths on the device."""
    left_out = TABLES if substep.name.startswith("draft[") else (*TABLES, "kv_lens_cuda")
    fields = {name: value for name, value in substep.fields.items() if name not in left_out}
    if substep.name == "prepared" and not config.host_offload:
        fields |= {pool.field("block_ids_per_seq"): prepared[pool.field(TABLES[0])] for pool in pools(config)}
    if "num_cached_tokens_per_seq" in fields:
        fields["cache_indices"] = prepared[TABLES[0]]
    return fields | _page_arrays(substep, prepared, config) if "_qo_indptr" in fields else fields


def _page_arrays(substep: Substep, prepared: Fields, config: Config) -> Fields:
    """A view lists every page that is granted, the target those of the step's tokens."""
    tables = prepared[_pool(substep, config).field(TABLES[0])]
    if not substep.name.startswith("draft["):
        tables = [table[:count] for table, count in zip(tables, substep["num_blocks"], strict=True)]
    counts, first = list(map(len, tables)), substep["num_contexts"]
    totals = [list(accumulate(part, initial=0)) for part in (counts[:first], counts[first:], counts)]
    names = ("_paged_kv_indptr_prefill", "_paged_kv_indptr_decode", "_paged_kv_indptr")
    fields = {"num_blocks": counts, "_paged_kv_indices": tables, **dict(zip(names, totals, strict=True))}
    return fields if substep.name.startswith("draft[") else {**fields, "planned_num_blocks": counts}
