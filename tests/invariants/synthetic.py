"""A pretend engine: the oracle's trace, dressed with what only an engine has (objects, pages, exceptions).

It is right by construction, so that each invariant holds on it, and plain data, so that a test can falsify one
field and ask whether the invariant notices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import reference
from invariants.pools import Pool, pools
from scenarios import Config, Phase, RowPlan, Scenario, Step, StepTrace, Substep, Trace, WorkerTraits, walk
from tests.invariants.backend_dressing import TABLES, dress_backend


class Pages:
    """Hands out the lowest free pages."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._free = list(range(pool.num_blocks))
        self.owned: dict[int, list[int]] = {}

    def grow(self, pages: list[int], tokens: int) -> list[int]:
        """``pages`` and as many more as ``tokens`` need."""
        while len(pages) * self.pool.tokens_per_block < tokens:
            pages.append(self._free.pop(0))
        return pages

    def shrink(self, pages: list[int], tokens: int) -> None:
        """Release what ``tokens`` do not need."""
        while (len(pages) - 1) * self.pool.tokens_per_block >= tokens:
            self._free.append(pages.pop())


@cache
def dressed(scenario: Scenario) -> Trace:
    """What a right engine would show."""
    config = scenario.config
    pages = [Pages(pool) for pool in pools(config)]
    expected = reference.trace(scenario)
    steps = []
    slots: dict[int, int] = {}
    for (step, plans), taken in zip(walk(scenario), expected.steps, strict=False):
        prepared, blocks = {}, {}
        for held in pages:
            pool = held.pool
            tables = [held.grow(held.owned.setdefault(p.request, []) if p.request is not None else [], p.granted)
                      for p in plans]  # fmt: skip
            ids = [list(table) for table in tables]
            # With host offload every page lies one further with each step.
            moved = taken.index * config.host_offload
            places = [[(page + moved) % pool.num_blocks for page in table] for table in ids]
            prepared[pool.field("kv_cache_block_offsets")] = places
            if config.host_offload:
                prepared |= {pool.field("block_ids_per_seq"): ids, pool.field("kv_pool_indices"): places}
            _release(held, step, plans, tables, taken)
            blocks[pool.field("kv_blocks")] = {request: list(owned) for request, owned in held.owned.items()}
            for request in step.finish:
                held.shrink(held.owned.pop(request), 0)
        blocks["connector_block_ids"] = blocks["kv_blocks"]
        taken = _dress_sparse(taken, prepared, config)
        taken = _dress_slots(_dress_counter(_dress_context(taken, config.traits)), step, slots)
        steps.append(dress_backend(_dress_step(step, taken, prepared, blocks, config), prepared, config))
    classes = {"forward_defined_in": ["SpecWorkerBase", "Module"]}
    return Trace("synthetic", "cpu", tuple(steps), classes)


def _release(pages: Pages, step: Step, plans: list[RowPlan], tables: list[list[int]], taken: StepTrace) -> None:
    if taken.outcome != "ok":
        for request in list(pages.owned):
            pages.shrink(pages.owned.pop(request), 0)
    held = next(s for s in taken.substeps if s.name == "updated")["kv_tokens"]
    for plan, table in zip(plans, tables, strict=True):
        if plan.request is None:
            pages.shrink(table, 0)
        elif taken.outcome == "ok":
            pages.shrink(table, held[plan.request])


def _tables(name: str, prepared: dict[str, Any], config: Config) -> tuple[Pool, list[list[int]]]:
    """The pool that a sub-step of this name reads, and the pages of its rows there."""
    pool = pools(config)[-1 if name.startswith("draft[") else 0]
    return pool, prepared[pool.field("kv_cache_block_offsets")]


def _dress_sparse(taken: StepTrace, prepared: dict[str, Any], config: Config) -> StepTrace:
    """Adds the pages and slots that a sparse backend names wherever the oracle says which tokens they belong to."""
    first = taken.find("prepared")
    if first is None or "slot_owners" not in first or config.compress_ratios:
        return taken
    substeps = []
    for substep in taken.substeps:
        pool, tables = _tables(substep.name, prepared, config)
        used = [pages[: pool.pages(kv)] for pages, kv in zip(tables, first["kv_lens_cuda"], strict=True)]
        fields = dict(substep.fields)
        if "slot_owners" in fields or substep.name in ("restored", "failed"):
            fields |= {"block_table": used, "indexer_k_cache_block_offsets": used}
        if "slot_owners" in fields:
            size = pool.tokens_per_block
            places = [(tables[row][i // size], i % size) for row, i in fields["slot_owners"]]
            fields["slot_mapping_fp8"] = [page * size * 132 + offset * 128 for page, offset in places]
            rows = range(fields["num_contexts"], len(used))
            if any(fields["_seq_lens"][row] > 1 for row in rows) or not substep.name.startswith("draft["):
                fields["block_table_expanded"] = [used[row] for row in rows for _ in range(1 + config.max_draft_len)]
        substeps.append(replace(substep, fields=fields))
    return replace(taken, substeps=tuple(substeps))


def _dress_context(taken: StepTrace, traits: WorkerTraits) -> StepTrace:
    """Adds the columns of dummies, which the oracle leaves open, and those that a failed forward leaves."""
    if not traits.keeps_context:
        return taken
    substeps = []
    columns: list[int] = []
    for substep in taken.substeps:
        if "ctx_len" in substep:
            columns = substep["ctx_len"] if substep.name == "entered" else columns
        elif substep.name == "entered":
            columns = [7] * substep["num_generations"]
        if substep.name in ("entered", "failed") or (substep.name == "restored" and substep.phase == "graph_warmup"):
            substep = replace(substep, fields={**substep.fields, "ctx_len": columns})
        substeps.append(substep)
    return replace(taken, substeps=tuple(substeps))


def _dress_counter(taken: StepTrace) -> StepTrace:
    """Adds the counter of forced acceptance that a failed step leaves: every one has accepted."""
    restored, last = taken.find("restored", 0), taken.substeps[-1]
    if last.name != "failed" or restored is None or "force_accept_counter" not in restored:
        return taken
    fields = {**last.fields, "force_accept_counter": restored["force_accept_counter"]}
    return replace(taken, substeps=(*taken.substeps[:-1], replace(last, fields=fields)))


def _dress_slots(taken: StepTrace, step: Step, slots: dict[int, int]) -> StepTrace:
    """Adds ``slots``, the lowest free one for each request of the step that has none; dummies have the highest."""
    for row in step.rows:
        if row.request is not None and row.request not in slots:
            slots[row.request] = min(set(range(len(slots) + 1)) - set(slots.values()))
    shown = {
        "prepared": {"slot_ids": [slots.get(row.request, 99 - i) for i, row in enumerate(step.rows)]},
        "updated": {"spec_slots": dict(slots)},
        "failed": {"spec_slots": {}},
    }
    for request in slots.copy() if taken.outcome != "ok" else step.finish:
        slots.pop(request)
    substeps = [replace(s, fields={**s.fields, **shown.get(s.name, {})}) for s in taken.substeps]
    return replace(taken, substeps=tuple(substeps))


def _dress_step(
    step: Step, taken: StepTrace, prepared: dict[str, Any], blocks: dict[str, Any], config: Config
) -> StepTrace:
    graph = step.phase in (Phase.CAPTURE, Phase.REPLAY)
    owner = f"graph{len(step.rows), step.draft_len}" if graph else f"step{taken.index}"
    kv = "graphs.kv" if graph else "kv"
    objects = {"_seq_lens": f"{owner}.lens", "_seq_lens_cuda": f"{owner}.cuda", "kv_lens_cuda": kv}
    # A failing step gets as far as its second draft call, its only one or, without any, its acceptance. A drafter of
    # one call then completes its rewind and saved lengths come back, as they do in the sub-step after the forward.
    last = next(name for name in ("draft[1]", "draft[0]", "verified") if taken.find(name) or name == "verified")
    saved = taken.find("saved")
    kept = saved is not None and "kv_lens_cuda" in saved["_saved_tensors"]
    traits = config.traits
    kv_after = taken.find("restored" if traits.parallel or traits.keeps_context or kept else last)
    substeps = []
    cut = False
    for substep in taken.substeps:
        fields = dict(substep.fields)
        name = substep.name
        if "_seq_lens" in fields:
            if name == "entered" and graph:
                fields["shared_with_eager"] = ["device", *(pool.field("kv_cache_manager") for pool in pools(config))]
            fields["identity"] = {**objects, **{f: f"clone of {f}" for f in fields["_saved_tensors"]}}
        if "identity" in fields and config.sa_threshold:
            fields["identity"] |= {"sa_match_len": "enhancer.match_len", "sa_draft_tokens": "enhancer.drafts"}
        if name == "prepared":
            fields |= prepared
        elif "kv_cache_manager" in fields:
            fields |= {name: prepared[name] for name in TABLES if name in prepared}
            fields["kv_cache_block_offsets"] = _tables(name, prepared, config)[1]
        if name in ("updated", "failed") and "kv_tokens" in fields:
            fields |= blocks
        if name == "failed":
            assert kv_after is not None
            fields = {
                "kv_lens_cuda": kv_after.fields.get("kv_lens_cuda"),
                **fields,
                "exception": "InjectedOutOfMemory",
                "message": "out of memory",
            }
        if not cut or name == "failed":
            substeps.append(Substep(name, substep.run, substep.phase, fields))
        cut = cut or (step.fault is not None and name == last)
    return replace(taken, substeps=tuple(substeps))


def edit_step(trace: Trace, index: int, **changes: Any) -> Trace:
    """``trace`` with other values in one ``StepTrace``."""
    steps = list(trace.steps)
    steps[index] = replace(steps[index], **changes)
    return replace(trace, steps=tuple(steps))


def edit(trace: Trace, index: int, substep: str, field: str, change: Callable[[Any], Any], run: int = 0) -> Trace:
    """``trace`` with one field changed; ``change`` is given the value, a fresh copy of lists and objects."""
    found = trace.steps[index].find(substep, run)
    assert found is not None
    assert field in found, f"{substep} has no {field}"
    changed = replace(found, fields={**found.fields, field: change(_copy(found[field]))})
    substeps = tuple(changed if s is found else s for s in trace.steps[index].substeps)
    return edit_step(trace, index, substeps=substeps)


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(v) for v in value]
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else value
