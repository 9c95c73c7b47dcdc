"""The executor: steps, what each leaves behind, failures and the end of requests."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from reference import (
    attention_metadata,
    backend_fields,
    compressed_attention,
    kv_cache,
    proposals,
    ragged,
    ranks,
    recurrent,
)
from reference.attention import Sight
from reference.batch import Batch, lay_out
from reference.block_reuse import BlockReuse
from reference.compressed_attention import indexed, seen_compressed
from reference.dense_selection import selection
from reference.enhancer import enhanced, found, texts
from reference.guided_decoding import matcher_rows, matchers
from reference.history import History, Text, Turn
from reference.overlap import HostView
from reference.sparse_attention import derived, keys_of_contexts, prefill
from reference.tree_attention import masks
from reference.workers import WORKERS, DraftCall, Drafting, Fields
from scenarios.forced_acceptance import counts, draws
from scenarios.model import Config, FaultKind, Phase, Request, Scenario, Step
from scenarios.trace import (
    ENTERED,
    FAILED,
    PREPARED,
    RESTORED,
    SAVED,
    UPDATED,
    VERIFIED,
    StepTrace,
    Substep,
    Trace,
    draft,
)
from scenarios.tracer import EMPTY, PAD_TOKEN


def trace(scenario: Scenario, *, in_graphs: bool = False) -> Trace:
    """What an engine must do in a valid scenario, up to the step that ends it; ``in_graphs`` as for ``Session``."""
    session = Session(scenario.config, scenario.requests, in_graphs=in_graphs)
    for step in scenario.steps:
        if session.step(step).outcome == "fatal":
            break
    return session.trace()


@dataclass(frozen=True)
class Flight:
    """A step whose forward has been launched, and whose results the host has not seen yet.

    index     of its trace
    after     the requests, with the turn that it takes
    together  fields of what all ranks ran in it
    """

    index: int
    step: Step
    batch: Batch
    after: dict[int, History]
    phase: str
    together: Fields


class Session:
    """The oracle taken step by step. Steps must be valid (``scenarios.check``); it does not check them again.

    in_graphs  also what the kernels of a replay find between its ends, for those who watch on the device
    """

    def __init__(self, config: Config, requests: tuple[Request, ...] = (), *, in_graphs: bool = False) -> None:
        self._config = config
        self._in_graphs = in_graphs
        self._worker = WORKERS[config.worker]
        self._counter: int | None = 0 if config.force_num_accepted_tokens % 1 else None
        """Forwards that have drawn random numbers; None where none does or, after a failure, it is not known."""
        self._active: dict[int, History] = {}
        self._flight: Flight | None = None
        """The last step, under the overlap scheduler: its update follows when the next one has been launched."""
        self._reuse = BlockReuse(config, self._worker) if config.enable_block_reuse else None
        self._steps: list[StepTrace] = []
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """Queue a request; it runs when a step names it."""
        text = Text(
            request.prompt(self._config.seed), sight=Sight.of(self._config), guided=self._config.guided_decoding
        )
        self._active[request.id] = History(text, request.prompt_len, thinking=request.thinking)

    def step(self, step: Step) -> StepTrace:
        """What the next step must show, but for what follows only when a later one has been launched.

        A step with a fault shows all sub-steps of a clean one, as it cannot be known how far it gets, and then
        ``failed``, whose metadata fields suppose that it got as far as ``prepared``.
        """
        if not step.rows:
            return self._idle(step)
        if self._reuse:
            self._active |= self._reuse.begin(step, self._active)
        sampled = lay_out(step, self._config, self._active)
        counter, batch = self._forced(sampled)
        host = HostView(batch, self._flight.batch if self._flight else None)
        drafting = proposals.proposed(batch, enhanced(batch, self._worker.draft(batch)), self._config)
        after = self._active | self._turned(batch, drafting)
        if self._reuse:
            self._reuse.grant(batch, after)
        phases = _phases(step, self._config)
        substeps = [Substep(PREPARED, 0, phases[0], self._prepared(host, phases[0]))]
        substeps += self._runs((sampled, host), (batch, drafting), counter, phases)
        together = ranks.collectives(step, self._config, batch, self._worker, drafting, phases)
        flight = Flight(len(self._steps), step, batch, after, phases[0], together)
        overlaps = self._config.overlap and not step.phase.is_startup
        if not overlaps:
            substeps.append(self._updated(flight, _held(after)))
        outcome = "ok" if step.fault is None else self._outcome(step)
        if step.fault is None:
            self._counter = counter
            if overlaps:
                self._launched(flight)
            else:
                self._active = self._ended(after, step.finish)
        else:
            self._counter = self._counter if self._counter == counter else None
            self._flight, self._active = None, self._survivors(step)
            if self._reuse:
                self._reuse.forget()
            substeps.append(Substep(FAILED, 0, phases[0], self._failed(batch, host, outcome)))
        failed = step.fault is not None
        seen = tuple(
            replace(s, fields=backend_fields.shown(s.name, dict(s.fields), host.batch, self._config)) for s in substeps
        )
        taken = StepTrace(flight.index, step.phase, outcome, seen, fired=int(failed), injected=failed)
        self._steps.append(taken)
        return taken

    def trace(self) -> Trace:
        """Everything so far. A step in flight is waited for, as by an iteration that has nothing to launch."""
        self._wait()
        return Trace("reference", "cpu", tuple(self._steps))

    def _idle(self, step: Step) -> StepTrace:
        """An iteration that has nothing to launch."""
        self._wait()
        taken = StepTrace(len(self._steps), step.phase, "ok", ())
        self._steps.append(taken)
        return taken

    def _wait(self) -> None:
        """Update the step in flight, if there is one, without launching another."""
        if self._flight is not None:
            self._land(self._flight, _held(self._flight.after))
            self._active, self._flight = self._ended(self._active, self._flight.step.finish), None

    def _launched(self, flight: Flight) -> None:
        """Update the step before: it is over. What it finishes may have a row in ``flight``, which is then wasted."""
        after, before = flight.after, self._flight
        if before is not None:
            self._land(before, _held(after, flight.batch))
            after = self._ended(after, before.step.finish)
        self._active, self._flight = after, replace(flight, after=after)

    def _land(self, flight: Flight, held: Mapping[int, int]) -> None:
        """Add to the trace of a step what the host knows once it has its results."""
        taken = self._steps[flight.index]
        updated = self._updated(flight, held)
        self._steps[flight.index] = replace(taken, substeps=(*taken.substeps, updated))

    def _prepared(self, host: HostView, phase: str) -> Fields:
        """What is prepared, as far as the host knows lengths."""
        batch = host.batch
        fields = attention_metadata.prepared(batch, self._config) | prefill(batch, self._config)
        fields |= self._maps(batch, batch, phase, updated=False) | self._worker.spec_metadata(batch)
        fields |= ragged.published(batch, self._config)
        if self._config.overlap:
            fields |= host.corrections | {"position_ids": host.position_ids}
        return fields | ranks.announced(batch, self._worker)

    def _runs(
        self, unforced: tuple[Batch, HostView], forced: tuple[Batch, Drafting], counter: int | None, phases: list[str]
    ) -> Iterator[Substep]:
        """Sub-steps of each forward. One that warms up a graph accepts what is sampled, and so draws no number."""
        sampled, host = unforced
        for run, phase in enumerate(phases):
            warming = phase == "graph_warmup"
            forward = (sampled, self._worker.draft(sampled)) if warming and forced[0] is not sampled else forced
            drawn = {ENTERED: self._counter, RESTORED: self._counter if warming else counter}
            for name, fields in self._forward(*forward, host, run, phase):
                number = {"force_accept_counter": drawn[name]} if drawn.get(name) is not None else {}
                yield Substep(name, run, phase, fields | number)

    def _forward(
        self, batch: Batch, drafting: Drafting, host: HostView, run: int, phase: str
    ) -> Iterator[tuple[str, Fields]]:
        """Sub-steps of one forward. A replay runs no Python of the worker, so nothing between its ends is seen.

        Lengths that the host has supposed are corrected before the target runs, in a replay inside the graph.
        """
        # What a draft update has set stays until the next prepare(), and so is found by further forwards on one
        # preparation. A worker that calls no draft model has no update; K = 0 has none either, but one token per row.
        updated = run > 0 and bool(drafting.calls)
        start = host.batch if phase == "replay" else batch
        entered = attention_metadata.target(start) | self._maps(start, host.batch, phase, updated=updated)
        entered |= matcher_rows(batch, self._config, ENTERED) | ragged.widths(batch, self._config)
        if self._config.overlap:
            entered["position_ids"] = host.position_ids if phase == "replay" else batch.position_ids
        entered |= recurrent.found(batch, self._config)
        yield ENTERED, entered | self._worker.own_state(batch, after=False)
        saved = self._worker.saved_fields(phase) if batch.draft_len and not batch.shares_target_kv else []
        if phase != "replay" or self._in_graphs:
            if batch.draft_len:
                verified = attention_metadata.target(batch) | matcher_rows(batch, self._config, VERIFIED)
                verified |= recurrent.on_the_way(batch, self._config) | proposals.asked(batch, self._config)
                yield VERIFIED, verified | _acceptance(batch)
            if saved:
                yield SAVED, attention_metadata.target(batch, saved=saved)
            for i, call in enumerate(drafting.calls):
                fields = attention_metadata.drafting(call, batch, saved, self._config)
                fields |= keys_of_contexts(call, batch, self._config)
                fields |= matcher_rows(batch, self._config, draft(i), drafting.drafts, i)
                yield draft(i), fields | self._maps(call, host.batch, phase, updated=updated or call.updated)
        kv_lens = batch.kv_lens if "kv_lens_cuda" in saved else drafting.kv_lens
        restored = attention_metadata.restored(batch, kv_lens) | masks(batch, self._config)
        restored |= matcher_rows(batch, self._config, RESTORED)
        outputs = _outputs(batch, drafting) | found(batch, self._config)
        outputs |= recurrent.left(batch, phase, self._config) | proposals.left(batch, drafting, self._config)
        if self._config.overlap:
            outputs["position_ids"] = batch.position_ids
        if phase != "replay":
            outputs["left_open"] = []
        yield RESTORED, restored | outputs | self._worker.own_state(batch, after=True)

    def _forced(self, sampled: Batch) -> tuple[int | None, Batch]:
        """The counter of random numbers and the batch once acceptance has been forced, in one forward."""
        force, draft_len = self._config.force_num_accepted_tokens, sampled.draft_len
        if not force:
            return self._counter, sampled
        counter = self._counter if self._counter is None else self._counter + draws(force, draft_len)
        return counter, sampled.limited(counts(force, draft_len, counter or 0, len(sampled.generations)))

    def _maps(self, forward: Batch | DraftCall, host: Batch, phase: str, *, updated: bool) -> Fields:
        """What a forward must find beside the lengths, by backend and worker; what is skipped the host decides."""
        maps = derived(forward, self._config, updated=updated) | seen_compressed(forward, self._config)
        maps |= indexed(forward, self._config) if isinstance(forward, Batch) else {}
        maps |= backend_fields.tables(forward, host, self._config) | ragged.row_lengths(forward, self._config)
        return maps | selection(forward, host, self._config, graph=phase != "eager") | masks(forward, self._config)

    def _turned(self, batch: Batch, drafting: Drafting) -> dict[int, History]:
        """The requests of the batch, one turn later; dummies have none."""
        turned = {}
        for row, drafts in zip(batch.rows, drafting.drafts, strict=True):
            if row.request is None:
                continue
            history = self._active[row.request]
            turn = Turn(
                cached=row.end - row.past,
                emitted=row.emits,
                granted=kv_cache.granted(row, not history.started, batch.width, self._config),
                rewound=kv_cache.rewound(row),
                drafts=drafts,
            )
            turned[row.request] = history.after(turn, row.text)
        return turned

    def _updated(self, flight: Flight, held: Mapping[int, int]) -> Substep:
        """What sampler and managers make of a step. Rows of requests that ended while it ran are nobody's."""
        batch, after = flight.batch, flight.after
        generations = [row for row in batch.generations if row.request in after]
        started = {i: history for i, history in after.items() if history.started}
        if self._reuse:
            self._reuse.update(batch, held)
        fields = self._ledger(held, started) | self._caches(started) | self._owners(held)
        if self._config.traits.tree:
            fields["draft_tree"] = {i: list(history.drafts.parents) for i, history in started.items()}
        fields |= {
            "emitted": {i: history.emitted for i, history in started.items()},
            "py_rewind_len": {row.request: kv_cache.rewound(row) for row in generations},
            "py_num_accepted_draft_tokens": {row.request: len(row.accepted) - 1 for row in generations},
        }
        if not self._config.overlap:
            # Drafts that were fed and not accepted are nothing to be saved.
            fields["connector_num_tokens"] = {i: history.past for i, history in started.items()}
        return Substep(UPDATED, 0, flight.phase, fields | flight.together)

    def _caches(self, histories: Mapping[int, History]) -> Fields:
        """Contents of the caches. The indexer of a sparse backend is given each token that its model is given."""
        target = {i: history.text.slots(history.past) for i, history in histories.items()}
        kept = self._worker.kept(histories)
        if self._config.sa_threshold:
            kept |= texts(histories)
        if self._config.shares_target_kv:
            kept["draft_kv"] = {i: [EMPTY] * history.past for i, history in histories.items()}
        kept |= (
            {"target_kv": target} | recurrent.kept(histories, self._config) | proposals.kept(histories, self._config)
        )
        if self._config.compress_ratios:
            return kept | compressed_attention.caches(histories, self._config)
        sparse = self._config.index_topk > 0
        return kept | ({"target_indexer_kv": target, "draft_indexer_kv": kept["draft_kv"]} if sparse else {})

    def _failed(self, batch: Batch, host: HostView, outcome: str) -> Fields:
        fields = attention_metadata.failed(batch) | masks(batch, self._config)
        # Whether it was corrected before the failure is not known.
        if self._worker.returns_kv_lens and host.batch.kv_lens == batch.kv_lens:
            fields["kv_lens_cuda"] = batch.kv_lens
        # What becomes of the pages when the run ends is nobody's concern.
        held = _held(self._active)
        return fields if outcome == "fatal" else fields | self._ledger(held, self._active) | self._owners(held)

    def _ledger(self, held: Mapping[int, int], histories: Mapping[int, History]) -> Fields:
        """What is kept for requests that have started, and for no other; ``held`` KV tokens of each."""
        started = {i: history for i, history in histories.items() if history.started}
        fields = kv_cache.ledgers(held, self._config) | {"held_for_nobody": []}
        if self._reuse:
            fields |= self._reuse.fields()
        if self._config.use_relaxed_acceptance_for_thinking:
            delta = round(self._config.relaxed_delta, 6)
            deltas = {i: delta if history.is_thinking else 0 for i, history in started.items()}
            fields |= {"relaxed_delta": deltas, "relaxed_delta_left": []}
        return fields | matchers(started, self._config)

    def _owners(self, held: Mapping[int, int]) -> Fields:
        """Who has a suffix automaton: every request from its first chunk to its end, and no dummy."""
        if self._config.traits.draft_model and not self._config.sa_threshold:
            return {}
        return {"sa_requests": sorted(held)}

    def _outcome(self, step: Step) -> str:
        """Upstream survives lack of memory in general warm-up, and in serving what its error budget allows."""
        assert step.fault is not None
        kind = step.fault.kind
        if step.phase is Phase.WARMUP:
            return "tolerated" if kind is FaultKind.OOM else "fatal"
        if step.phase is Phase.CAPTURE or kind is FaultKind.CUDA:
            return "fatal"
        failures = sum(taken.outcome != "ok" and not taken.phase.is_startup for taken in self._steps)
        return "tolerated" if failures < self._config.error_budget else "fatal"

    def _ended(self, histories: Mapping[int, History], finished: Collection[int]) -> dict[int, History]:
        """The requests without those that end, whose pages are released."""
        if self._reuse:
            self._reuse.release(finished)
        return {i: history for i, history in histories.items() if i not in finished}

    def _survivors(self, step: Step) -> dict[int, History]:
        """A failure ends every request that has started or was about to; those still queued are left."""
        batch = {row.request for row in step.rows}
        return {i: history for i, history in self._active.items() if not history.started and i not in batch}


def _held(histories: Mapping[int, History], launched: Batch | None = None) -> dict[int, int]:
    """KV tokens of each request that has started; of those ``launched`` nothing has been taken back yet."""
    flying = {row.request for row in launched.rows} if launched else set()
    started = {i: history for i, history in histories.items() if history.started}
    return {i: history.kv_tokens + (history.turns[-1].rewound if i in flying else 0) for i, history in started.items()}


def _phases(step: Step, config: Config) -> list[str]:
    """How each forward of the step is executed."""
    if step.phase is Phase.CAPTURE:
        return ["graph_warmup"] * config.graph_warmup_runs + ["capture"]
    return ["replay" if step.phase is Phase.REPLAY else "eager"]


def _acceptance(batch: Batch) -> Fields:
    """What the worker has accepted, the target's own token included."""
    return {
        "num_accepted_tokens": [len(row.accepted) for row in batch.rows],
        "accepted_tokens": [row.accepted for row in batch.rows],
    }


def _outputs(batch: Batch, drafting: Drafting) -> Fields:
    """Outputs of the worker."""
    outputs: Fields = {
        "new_tokens": [row.accepted for row in batch.rows],
        "new_tokens_lens": [len(row.accepted) for row in batch.rows],
    }
    if drafting.open:
        return outputs
    next_drafts = [[*made.tokens, *[PAD_TOKEN] * (batch.width - len(made.tokens))] for made in drafting.drafts]
    return outputs | {
        "next_draft_tokens": next_drafts,
        "next_new_tokens": [[row.accepted[-1], *drafts] for row, drafts in zip(batch.rows, next_drafts, strict=True)],
    }
