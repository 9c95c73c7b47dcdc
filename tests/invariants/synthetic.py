"""A pretend engine: the oracle's trace, dressed with what only an engine has (objects, pages, exceptions).

It is right by construction, so that each invariant holds on it, and plain data, so that a test can falsify one
field and ask whether the invariant notices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import reference
from invariants.pools import Pool, pools
from scenarios import Config, Phase, RowPlan, Scenario, Step, StepTrace, Substep, Trace, WorkerTraits, walk
from scenarios.reuse import look_ahead
from tests.invariants.backend_dressing import TABLES, dress_backend

CORRECTIONS = ("previous_kv_lens_offsets_cuda", "previous_pos_id_offsets_cuda")


class Pages:
    """Hands out the first free pages; those that are known by a beginning of a prompt only if there is no other."""

    def __init__(self, pool: Pool, ahead: int) -> None:
        self.pool = pool
        self._ahead = ahead
        self._free = list(range(pool.num_blocks))
        self.owned: dict[int, list[int]] = {}
        self.known: dict[tuple[int, ...], int] = {}

    def grow(self, pages: list[int], tokens: int) -> list[int]:
        """``pages`` and as many more as ``tokens`` need."""
        while len(pages) * self.pool.tokens_per_block < tokens:
            page = next((page for page in self._free if page not in self.known.values()), self._free[0])
            self._free.remove(page)
            self.known = {key: of for key, of in self.known.items() if of != page}
            pages.append(page)
        return pages

    def shrink(self, pages: list[int], tokens: int) -> None:
        """Release what ``tokens`` do not need and nobody else owns."""
        while (len(pages) - 1) * self.pool.tokens_per_block >= tokens:
            page = pages.pop()
            if all(page not in owned for owned in self.owned.values()):
                self._free.append(page)

    def keys(self, prompt: Sequence[int], tokens: int) -> list[tuple[int, ...]]:
        """Keys of the pages that the first ``tokens`` tokens of a prompt fill."""
        size = self.pool.tokens_per_block
        return [tuple(prompt[: end + self._ahead]) for end in range(size, tokens + 1, size)]

    def share(self, request: int, prompt: Sequence[int], tokens: int) -> None:
        """Let a request start with known pages."""
        self.owned[request] = [self.known[key] for key in self.keys(prompt, tokens)]
        self._free = [page for page in self._free if page not in self.owned[request]]

    def learn(self, request: int, prompt: Sequence[int]) -> None:
        """Let the pages of a computed prompt be known."""
        for key, page in zip(self.keys(prompt, len(prompt) - self._ahead), self.owned[request]):
            self.known.setdefault(key, page)


class Managers:
    """Pages of each pool, and slots, of the requests that have them, and what is shown of them step by step."""

    def __init__(self, scenario: Scenario) -> None:
        config = scenario.config
        self._pages = [Pages(pool, look_ahead(config)) for pool in pools(config)]
        self._config = config
        self._prompts = {request.id: request.prompt(config.seed) for request in scenario.requests}
        self._slots: dict[int, int] = {}

    def launch(self, plans: list[RowPlan], index: int) -> dict[str, Any]:
        """Grant what the rows of a step need: their tables. Dummies own nothing; slots of theirs are the highest."""
        fields: dict[str, Any] = {}
        for held in self._pages:
            pool = held.pool
            for plan in plans:
                if plan.request is not None and plan.reused:
                    held.share(plan.request, self._prompts[plan.request], plan.reused)
            tables = [held.grow(held.owned.setdefault(p.request, []) if p.request is not None else [], p.granted)
                      for p in plans]  # fmt: skip
            ids = [list(table) for table in tables]
            # With host offload every page lies one further with each step.
            moved = index * self._config.host_offload
            places = [[(page + moved) % pool.num_blocks for page in table] for table in ids]
            fields[pool.field("kv_cache_block_offsets")] = places
            if self._config.host_offload:
                fields |= {pool.field("block_ids_per_seq"): ids, pool.field("kv_pool_indices"): places}
            if pool.owner == "target" and self._config.attention_backend == "TRTLLM":
                generations = [pages for plan, pages in zip(plans, places) if not plan.is_context]
                fields |= {"kv_block_ids_per_seq": _told(places), "gen_block_ids_per_seq": _told(generations)}
            for plan, table in zip(plans, tables, strict=True):
                if plan.request is None:
                    held.shrink(table, 0)
        for plan in plans:
            if plan.request is not None and plan.request not in self._slots:
                self._slots[plan.request] = min(set(range(len(self._slots) + 1)) - set(self._slots.values()))
        return fields | {"slot_ids": [self._slots.get(plan.request, 99 - i) for i, plan in enumerate(plans)]}

    def land(self, taken: StepTrace, plans: list[RowPlan], finish: Collection[int]) -> dict[str, Any]:
        """What is left when a step is over, and then what it finishes is freed; a failure frees everything."""
        failed = taken.outcome != "ok"
        if failed:
            self._free(list(self._slots))
        updated = taken.substeps[-1]
        blocks: dict[str, Any] = {}
        for held in self._pages:
            for request, table in held.owned.items():
                held.shrink(table, updated["kv_tokens"][request])
            blocks[held.pool.field("kv_blocks")] = {request: list(owned) for request, owned in held.owned.items()}
            if self._config.enable_block_reuse:
                blocks[held.pool.field("known_page_ids")] = self._known(held, taken, plans)
        told = () if failed else updated["emitted"]
        blocks["connector_block_ids"] = {i: pages for i, pages in blocks["kv_blocks"].items() if i in told}
        names = ["spec_slots", *(name for name, on in _slots_of(self._config, "mamba_slots", "seq_slots") if on)]
        blocks |= {name: dict(self._slots) for name in names}
        self._free(finish)
        return blocks

    def _known(self, held: Pages, taken: StepTrace, plans: list[RowPlan]) -> list[int]:
        """Pages that are known once the prompts of a step are computed, in the order in which the oracle has them."""
        if taken.outcome != "ok":
            held.known = {}
        for plan in plans if taken.outcome == "ok" else ():
            if plan.is_context and plan.accepted and plan.request in held.owned:
                held.learn(plan.request, self._prompts[plan.request])
        known = taken.substeps[-1][held.pool.field("known_pages")]
        return [held.known[tuple(key)] for _, *key in known]

    def _free(self, requests: Collection[int]) -> None:
        for request in requests:
            self._slots.pop(request)
            for held in self._pages:
                held.shrink(held.owned.pop(request), 0)


@cache
def dressed(scenario: Scenario) -> Trace:
    """What a right engine would show."""
    config = scenario.config
    managers = Managers(scenario)
    expected = reference.trace(scenario)
    launched: list[tuple[Step, StepTrace, list[RowPlan], dict[str, Any]]] = []
    left: dict[int, dict[str, Any]] = {}
    flying: int | None = None
    for (step, plans), taken in zip(walk(scenario), expected.steps, strict=False):
        launched.append((step, taken, plans, managers.launch(plans, taken.index) if plans else {}))
        overlaps = config.overlap and not step.phase.is_startup and taken.outcome == "ok"
        landing = flying if overlaps else taken.index
        flying = taken.index if overlaps and plans else None
        if landing is not None:
            left[landing] = managers.land(*launched[landing][1:3], launched[landing][0].finish)
    if flying is not None:
        left[flying] = managers.land(*launched[flying][1:3], ())
    steps = []
    for step, taken, _, prepared in launched:
        if not step.rows:
            steps.append(taken)
            continue
        slots = prepared.pop("slot_ids", [])
        dressing = _dress_slots(taken, slots, config)
        dressing = _dress_counter(_dress_context(_dress_sparse(dressing, prepared, config), config.traits))
        dressing = _dress_step(step, dressing, prepared, left.get(taken.index, {}), config)
        steps.append(dress_backend(dressing, prepared, config))
    classes = {"forward_defined_in": ["SpecWorkerBase", "Module"]}
    return Trace("synthetic", "cpu", tuple(steps), classes)


def _told(tables: list[list[int]]) -> list[list[int]]:
    """As the trace shows tables for flash MLA: a page at place 0 that is a row's last is left out, and rows of none."""
    told = [pages[:-1] if pages[-1] == 0 else list(pages) for pages in tables]
    while told and not told[-1]:
        told.pop()
    return told


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


def _slots_of(config: Config, states: str, proposals: str) -> list[tuple[str, bool]]:
    """Fields about the slots of recurrent states and of proposals, and whether there are such slots."""
    return [(states, config.recurrent), (proposals, config.rejection_sampling)]


def _dress_slots(taken: StepTrace, slots: list[int], config: Config) -> StepTrace:
    """Adds the slot of each row; of states and proposals dummies share the last one."""
    shared = [min(slot, config.num_blocks) for slot in slots]
    more = {name: shared for name, on in _slots_of(config, "state_indices", "batch_slot_ids") if on}
    substeps = []
    for substep in taken.substeps:
        shown = {"slot_ids": slots} if substep.name == "prepared" else {}
        shown |= more if substep.name in ("prepared", "entered", "restored", "failed") else {}
        substeps.append(replace(substep, fields={**substep.fields, **shown}))
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
        if "identity" in fields and config.overlap:
            fields["identity"] |= {name: name for name in CORRECTIONS}
        if "identity" in fields and config.sa_threshold:
            fields["identity"] |= {"sa_match_len": "enhancer.match_len", "sa_draft_tokens": "enhancer.drafts"}
        if name == "prepared":
            fields |= prepared
        elif "kv_cache_manager" in fields:
            fields |= {name: prepared[name] for name in TABLES if name in prepared}
            fields["kv_cache_block_offsets"] = _tables(name, prepared, config)[1]
        if name in ("updated", "failed") and "kv_tokens" in fields:
            fields |= blocks
        if name in ("restored", "updated", "failed"):
            fields["racing_copies"] = []
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
