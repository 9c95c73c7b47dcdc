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
from scenarios import Config, Phase, RowPlan, Scenario, Step, StepTrace, Substep, Trace, WorkerTraits, walk


class Pages:
    """Hands out the lowest free pages."""

    def __init__(self, count: int, size: int) -> None:
        self._free = list(range(count))
        self._size = size
        self.owned: dict[int, list[int]] = {}

    def grow(self, pages: list[int], tokens: int) -> list[int]:
        """``pages`` and as many more as ``tokens`` need."""
        while len(pages) * self._size < tokens:
            pages.append(self._free.pop(0))
        return pages

    def shrink(self, pages: list[int], tokens: int) -> None:
        """Release what ``tokens`` do not need."""
        while (len(pages) - 1) * self._size >= tokens:
            self._free.append(pages.pop())


@cache
def dressed(scenario: Scenario) -> Trace:
    """What a right engine would show."""
    config = scenario.config
    pages = Pages(config.num_blocks, config.tokens_per_block)
    expected = reference.trace(scenario)
    steps = []
    slots: dict[int, int] = {}
    for (step, plans), taken in zip(walk(scenario), expected.steps, strict=False):
        tables = [pages.grow(pages.owned.setdefault(p.request, []) if p.request is not None else [], p.granted)
                  for p in plans]  # fmt: skip
        prepared = {"kv_cache_block_offsets": [list(table) for table in tables]}
        _release(pages, step, plans, tables, taken)
        blocks = {request: list(owned) for request, owned in pages.owned.items()}
        for request in step.finish:
            pages.shrink(pages.owned.pop(request), 0)
        taken = _dress_sparse(taken, prepared["kv_cache_block_offsets"], config)
        taken = _dress_slots(_dress_counter(_dress_context(taken, config.traits)), step, slots)
        steps.append(_dress_step(step, taken, prepared, blocks, config.traits))
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


def _dress_sparse(taken: StepTrace, tables: list[list[int]], config: Config) -> StepTrace:
    """Adds the pages and slots that a sparse backend names wherever the oracle says which tokens they belong to."""
    size, columns = config.tokens_per_block, 1 + config.max_draft_len
    prepared = taken.find("prepared")
    if prepared is None or "slot_owners" not in prepared:
        return taken
    used = [pages[: -(-kv // size)] for pages, kv in zip(tables, prepared["kv_lens_cuda"], strict=True)]
    substeps = []
    for substep in taken.substeps:
        if "slot_owners" in substep:
            places = [(tables[row][i // size], i % size) for row, i in substep["slot_owners"]]
            physical = {
                "slot_mapping_fp8": [page * size * 132 + offset * 128 for page, offset in places],
                "block_table": used,
                "indexer_k_cache_block_offsets": used,
            }
            if substep.name in ("prepared", "entered"):
                rows = used[substep["num_contexts"] :]
                physical["block_table_expanded"] = [pages for pages in rows for _ in range(columns)]
            substep = replace(substep, fields={**substep.fields, **physical})
        substeps.append(substep)
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
    step: Step, taken: StepTrace, prepared: dict[str, Any], blocks: dict[int, list[int]], traits: WorkerTraits
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
    kv_after = taken.find("restored" if traits.parallel or traits.keeps_context or kept else last)
    substeps = []
    cut = False
    for substep in taken.substeps:
        fields = dict(substep.fields)
        name = substep.name
        if "_seq_lens" in fields:
            if name == "entered" and graph:
                fields["shared_with_eager"] = ["device", "kv_cache_manager"]
            fields["identity"] = {**objects, **{f: f"clone of {f}" for f in fields["_saved_tensors"]}}
        if name == "prepared":
            fields |= prepared
        if name in ("updated", "failed") and "kv_tokens" in fields:
            fields["kv_blocks"] = blocks
        if name == "failed":
            assert kv_after is not None
            fields = {
                "kv_lens_cuda": kv_after["kv_lens_cuda"],
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
