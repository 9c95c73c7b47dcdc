"""Which lengths follow from a scenario, and whether upstream's executor could produce it.

``Schedule`` walks the steps and refuses, naming the field, what could not happen. Strategies use it to stay
inside, the codec to check what it reads. It knows lengths only: neither tokens nor any engine state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scenarios import forced_acceptance as forced
from scenarios.acceptance import check_request, check_row, relaxes
from scenarios.backends import check_phase
from scenarios.caches import check_pools, pages
from scenarios.errors import ScenarioError, outside
from scenarios.errors import require as _require
from scenarios.limits import check_config
from scenarios.model import Config, Context, FaultKind, Generation, Phase, Request, Scenario, Step
from scenarios.overlap import check_idle
from scenarios.pipeline import check_piped
from scenarios.plans import RequestState, RowPlan
from scenarios.ragged import check_verify, verify_width
from scenarios.ranks import check_ranks
from scenarios.reuse import Reuse, check_prefix


class Schedule:
    """The state of the executor as far as lengths go, advanced step by step.

    ``requests`` maps the id of each request that has entered to its ``RequestState``; ``graphs`` has batch size, draft
    length and rows of each graph captured so far; ``over`` says that a fatal failure ended the run; ``counter`` is how
    far forced acceptance has walked through its pool, None once a failed step may have moved it or not. ``in_flight``,
    with overlap, says that the host has yet to process the last step. ``reuse`` knows which pages may be reused.
    """

    def __init__(self, config: Config, requests: tuple[Request, ...] = ()) -> None:
        check_config(config)
        self.config = config
        self.requests: dict[int, RequestState] = {}
        self.graphs: set[tuple[int, int, int]] = set()
        self.failures = 0
        self.counter: int | None = 0
        self.serving = False
        self.over = False
        self.in_flight = False
        self.reuse = Reuse(config)
        for i, request in enumerate(requests):
            self.add(request, f"requests[{i}]")

    def add(self, request: Request, field: str = "request") -> None:
        """Let a request enter the queue."""
        _require(0 <= request.id < 2**31, f"{field}.id", f"{request.id} is outside 0..2**31-1", "write a small number")
        _require(
            request.id not in self.requests,
            f"{field}.id",
            f"{request.id} is taken by an earlier request",
            "give each request its own id",
        )
        _require(
            request.prompt_len >= 1, f"{field}.prompt_len", f"{request.prompt_len} is too small", "write 1 or more"
        )
        least = self.config.least_history
        _require(
            request.prompt_len >= least,
            f"{field}.prompt_len",
            f"{request.prompt_len} is too small for {self.config.worker}, which feeds its last tokens again",
            f"write {least} or more",
        )
        longest = request.prompt_len + self.config.num_extra_kv_tokens
        _require(
            longest <= self.config.max_seq_len,
            f"{field}.prompt_len",
            f"its KV length {longest} (extra tokens included) exceeds max_seq_len {self.config.max_seq_len}",
            "shorten the prompt or raise config.max_seq_len",
        )
        check_request(self.config, request, field)
        check_prefix(request, field)
        self.reuse.add(request)
        self.requests[request.id] = RequestState(request.prompt_len, thinking=request.thinking)

    def fork(self) -> Schedule:
        """A copy that can be advanced on trial."""
        other = Schedule(self.config)
        other.requests = {i: RequestState(**vars(s)) for i, s in self.requests.items()}
        other.graphs = set(self.graphs)
        other.failures, other.serving, other.over = self.failures, self.serving, self.over
        other.counter, other.in_flight, other.reuse = self.counter, self.in_flight, self.reuse.fork()
        return other

    @property
    def waiting(self) -> list[int]:
        """Active requests with prompt tokens still to compute."""
        return [i for i, s in self.requests.items() if s.active and s.in_context]

    @property
    def generating(self) -> list[int]:
        """Active requests whose prompt is computed."""
        return [i for i, s in self.requests.items() if s.active and not s.in_context]

    @property
    def blocks_in_use(self) -> tuple[int, ...]:
        """Pages held by active requests between two steps, in each pool of ``Config.pools``."""
        return pages(self.config, [s.granted for s in self.requests.values() if s.active], self.reuse.shared())

    def draft_width(self, draft_len: int) -> int:
        """Draft slots of a generation row (upstream: length of ``py_draft_tokens``)."""
        return self.config.tokens_per_gen_step(draft_len) - 1

    def context_width(self, draft_len: int) -> int:
        """Draft slots for which a prompt is granted room: with overlap those of the longest drafts.

        The host counts all rows of a step in flight, and the draft length may have grown since the first chunk.
        """
        return self.draft_width(self.config.max_draft_len if self.config.overlap else draft_len)

    def end(self, request: int) -> None:
        """Let a request end with the last step; with overlap, when that has been processed."""
        state = self.requests[request]
        state.active, state.ending = self.in_flight, self.in_flight
        self.reuse.ends(request)
        if not self.in_flight:
            self.reuse.land()

    def plan(self, step: Step, field: str = "step") -> list[RowPlan]:
        """Lengths of the rows of ``step`` if it came next; raise ``ScenarioError`` if it could not."""
        config, traits = self.config, self.config.traits
        k = step.draft_len
        _require(not self.over, field, "an earlier fault ended the run", "remove this step or that fault")
        if not step.rows:
            check_idle(config, step, self.in_flight, field)
        low = config.min_draft_len
        _require(
            low <= k <= config.max_draft_len,
            f"{field}.draft_len",
            f"{k} is {outside(low, config.max_draft_len)}",
            f"{traits.name} with this max_draft_len needs a value in that range",
        )
        if step.phase.is_startup:
            _require(
                not self.serving,
                f"{field}.phase",
                f"{step.phase.value} comes after a served batch",
                "move it before the first eager or replay step",
            )
        rows = [self._plan_context(step, c, f"{field}.contexts[{i}]") for i, c in enumerate(step.contexts)]
        rows += [self._plan_generation(step, g, f"{field}.generations[{i}]") for i, g in enumerate(step.generations)]
        check_ranks(config, step, field)
        rows = self._force_acceptance(step, rows, field)
        check_phase(config, step.phase, field)
        self._check_batch(step, rows, field)
        self._check_graph(step, rows, field)
        self._check_finish(step, field)
        self._check_fault(step, field)
        return rows

    def advance(self, step: Step, field: str = "step") -> list[RowPlan]:
        """Check ``step``, let it happen and return the lengths of its rows."""
        rows = self.plan(step, field)
        self.serving = not step.phase.is_startup
        if rows and self.counter is not None and forced.draws(self.config.force_num_accepted_tokens, step.draft_len):
            self.counter = self.counter + 1 if step.fault is None else None
        if step.fault is not None:
            self._fail(step)
            return rows
        if step.phase is Phase.CAPTURE:
            self.graphs.add(_graph(step, rows))
        self._grant(rows)
        self._land()
        self.in_flight = self.config.overlap and self.serving and bool(rows)
        for row, plan in zip(step.rows, rows, strict=True):
            if plan.request is not None and not plan.wasted:
                self._move(self.requests[plan.request], row, plan, step.draft_len)
        if not self.in_flight:
            self.reuse.land()
        for request in step.finish:
            self.end(request)
        return rows

    def _grant(self, rows: list[RowPlan]) -> None:
        """Give the requests of a step the tokens, and with block reuse the pages, that their rows are granted."""
        for plan in rows:
            if plan.request is not None:
                self.requests[plan.request].granted = plan.granted
        if not self.reuse.enabled:
            return
        self.reuse.claim(rows)
        dummies = [plan.granted for plan in rows if plan.request is None]
        held = [s.granted for s in self.requests.values() if s.active]
        self.reuse.take(pages(self.config, [*held, *dummies], self.reuse.shared()))

    def _move(self, state: RequestState, row: Context | Generation, plan: RowPlan, draft_len: int) -> None:
        """Advance ``state`` by the request's row in a step that succeeded."""
        if plan.is_context:
            state.past = plan.past + plan.query
            if plan.accepted and plan.request is not None:
                self.reuse.computed(plan.request)
            made = draft_len if self.config.traits.drafts_for_contexts else 0
        else:
            state.past += plan.accepted
            # The step granted 1 + width tokens; what was not accepted is rewound.
            state.rewind = plan.query - plan.accepted
            made = draft_len
        if self.in_flight and plan.accepted:
            counted = self.config.tokens_per_gen_step(draft_len) if plan.is_context else plan.query
            state.ahead = counted - plan.accepted
        if not self.in_flight:
            state.land()
        state.drafts, state.agree = made, row.agree
        if state.thinking and relaxes(self.config):
            state.agree += row.near

    def _land(self) -> None:
        """The step in flight has been processed: requests give back what they did not need, and may end."""
        for state in self.requests.values():
            state.land()
        self.reuse.land()

    def _fail(self, step: Step) -> None:
        """A step has failed, and with it every active request, those of the step in flight included."""
        assert step.fault is not None
        self.in_flight = False
        if not self.tolerates(step):
            self.over = True
        elif step.phase is not Phase.WARMUP:
            self.failures += 1
            self.reuse.forget()
            for state in self.requests.values():
                state.land()
                # Upstream fails every active request; those still queued without a page are not active yet.
                state.active = state.active and state.granted == 0 and state.past == 0
            for row in step.rows:
                if row.request is not None:
                    self.requests[row.request].active = False

    def tolerates(self, step: Step) -> bool:
        """Whether the run goes on after the fault of ``step``."""
        assert step.fault is not None
        kind = step.fault.kind
        if step.phase is Phase.WARMUP:
            return kind is FaultKind.OOM
        if step.phase is Phase.CAPTURE or kind is FaultKind.CUDA:
            return False
        return self.failures < self.config.error_budget

    def _plan_context(self, step: Step, row: Context, field: str) -> RowPlan:
        config = self.config
        _require(row.chunk >= 1, f"{field}.chunk", f"{row.chunk} is too small", "write 1 or more")
        most = step.draft_len if config.traits.drafts_for_contexts else 0
        _require(
            0 <= row.agree <= most,
            f"{field}.agree",
            f"{row.agree} is outside 0..{most}",
            "write how many of the drafts made for this row agree with the target"
            if config.traits.drafts_for_contexts
            else f"leave it out, as {config.worker} drafts nothing for a context",
        )
        check_row(config, row, step.draft_len, field)
        first_grant = row.chunk + config.num_extra_kv_tokens + self.draft_width(step.draft_len)
        if row.request is None:
            self._check_dummy(step, field)
            return RowPlan(None, True, 0, row.chunk, 1, first_grant)
        state = self._active(step, row.request, field)
        _require(
            state.in_context,
            f"{field}.request",
            f"the prompt of request {row.request} is already computed",
            "list it under generations",
        )
        left = state.prompt_len - state.past
        _require(
            row.chunk <= left,
            f"{field}.chunk",
            f"{row.chunk} exceeds the {left} prompt tokens left of request {row.request}",
            f"write at most {left}",
        )
        _require(
            row.chunk == left or config.traits.chunked_prefill,
            f"{field}.chunk",
            f"{row.chunk} is a part of the prompt, and {config.worker} computes it in one",
            f"write {left}",
        )
        first_grant = state.prompt_len + config.num_extra_kv_tokens + self.context_width(step.draft_len)
        accepted, granted = int(row.chunk == left), state.granted or first_grant
        reused = self.reuse.found(row.request) if state.granted == 0 else 0
        _require(
            row.chunk > reused,
            f"{field}.chunk",
            f"the first {reused} tokens of request {row.request} are reused, and {row.chunk} leaves none to compute",
            f"write {reused + 1} or more",
        )
        past, query = state.past + reused, row.chunk - reused
        return RowPlan(row.request, True, past, query, accepted, granted, wasted=state.ending, reused=reused)

    def _plan_generation(self, step: Step, row: Generation, field: str) -> RowPlan:
        config, k = self.config, step.draft_len
        check_row(config, row, k, field)
        check_verify(config, row, k, field)
        width = verify_width(config, row, k)
        if row.request is None:
            self._check_dummy(step, field, may_pad=True)
            least, most = self.config.least_history, 1 if config.traits.tree else 1 + min(k, width)
            _require(row.past >= least, f"{field}.past", f"{row.past} is too small", f"write {least} or more")
            _require(
                1 <= row.accept <= most,
                f"{field}.accept",
                f"{row.accept} is outside 1..{most}",
                "leave it out, as a dummy has no tree of drafts" if config.traits.tree else f"write 1 to {most}",
            )
            granted = row.past + 1 + config.num_extra_kv_tokens + width
            return RowPlan(None, False, row.past, 1 + width, row.accept, granted)
        for name, default in (("past", 0), ("accept", 1)):
            _require(
                getattr(row, name) == default,
                f"{field}.{name}",
                "is for dummies; it follows from the earlier steps of a real request",
                "leave it out",
            )
        state = self._active(step, row.request, field)
        _require(
            not state.in_context,
            f"{field}.request",
            f"request {row.request} still has {state.prompt_len - state.past} prompt tokens to compute",
            "list it under contexts until its prompt is done",
        )
        accepted = 1 + min(state.agree, state.drafts, k, width)
        granted = state.granted + 1 + width
        return RowPlan(row.request, False, state.past, 1 + width, accepted, granted, state.ahead, state.ending)

    def _force_acceptance(self, step: Step, rows: list[RowPlan], field: str) -> list[RowPlan]:
        """``rows`` with what generations accept by force; none may accept a draft that the target disagrees with."""
        force, k = self.config.force_num_accepted_tokens, step.draft_len
        if not force:
            return rows
        draws, most, first = forced.draws(force, k), forced.most(force, k), len(step.contexts)
        _require(
            not draws or self.counter is not None,
            field,
            "where the earlier fault struck decides how many drafts it accepts",
            "remove this step or that fault, or write a whole number for config.force_num_accepted_tokens",
        )
        for i, row in enumerate(rows[first:], first):
            _require(
                row.accepted >= most,
                step.row_field(i, field),
                f"the target agrees with {row.accepted - 1} of its drafts, and {most - 1} may be accepted by force",
                f"write accept of {most} or more" if row.request is None else "raise agree in the request's last step",
            )
        counts = forced.counts(force, k, (self.counter or 0) + draws, len(rows) - first)
        return rows[:first] + [replace(r, accepted=n) for r, n in zip(rows[first:], counts, strict=True)]

    def _active(self, step: Step, request: int, field: str) -> RequestState:
        _require(
            not step.phase.is_startup,
            f"{field}.request",
            f"a {step.phase.value} step holds dummies only",
            "write null",
        )
        state = self.requests.get(request)
        if state is None:
            raise ScenarioError(f"{field}.request", f"no request has id {request}", "add it under requests")
        _require(
            state.active,
            f"{field}.request",
            f"request {request} has ended before this step",
            "remove the row, the earlier finish or the earlier fault",
        )
        return state

    def _check_dummy(self, step: Step, field: str, *, may_pad: bool = False) -> None:
        """Served steps hold dummies only where they keep several ranks in step."""
        _require(
            step.phase.is_startup or (may_pad and self.config.attention_dp_size > 1),
            f"{field}.request",
            f"is null in a step of phase {step.phase.value}, and only warmup and capture steps hold dummies",
            "name a request",
        )

    def _check_batch(self, step: Step, rows: list[RowPlan], field: str) -> None:
        config = self.config
        seen: set[int] = set()
        for i, row in enumerate(rows):
            if row.request in seen:
                raise ScenarioError(
                    f"{step.row_field(i, field)}.request",
                    f"request {row.request} is in the batch twice",
                    "list each request once",
                )
            if row.request is not None:
                seen.add(row.request)
        _require(
            len(rows) <= config.max_num_requests,
            field,
            f"{len(rows)} rows exceed max_num_requests {config.max_num_requests}",
            "remove rows",
        )
        tokens = sum(r.query for r in rows)
        _require(
            tokens <= config.max_num_tokens,
            field,
            f"{tokens} tokens exceed max_num_tokens {config.max_num_tokens}",
            "shorten chunks or remove rows",
        )
        for i, row in enumerate(rows):
            longest = row.host_past + row.query + config.num_extra_kv_tokens
            if longest > config.max_seq_len:
                raise ScenarioError(
                    step.row_field(i, field),
                    f"its KV length {longest} (extra tokens included) exceeds max_seq_len {config.max_seq_len}",
                    "end the request earlier or raise config.max_seq_len",
                )
        held = [s.granted for r, s in self.requests.items() if s.active and r not in seen]
        trial = self.reuse.fork()
        trial.claim(rows)
        check_pools(config, (*held, *(r.granted for r in rows)), field, trial.shared())

    def _check_graph(self, step: Step, rows: list[RowPlan], field: str) -> None:
        if step.phase in (Phase.CAPTURE, Phase.REPLAY):
            _require(not step.contexts, f"{field}.contexts", "a CUDA graph holds generations only", "remove them")
        if step.phase is Phase.REPLAY:
            shape = _graph(step, rows)
            of_rows = f" and {shape[2]} rows altogether" if self.config.ragged_verify else ""
            _require(
                shape in self.graphs,
                f"{field}.phase",
                f"no earlier step captured batch size {shape[0]} with draft_len {shape[1]}{of_rows}",
                "add a capture step of that shape or write 'eager'",
            )

    def _check_finish(self, step: Step, field: str) -> None:
        in_batch = {row.request for row in step.rows}
        for i, request in enumerate(step.finish):
            state = self.requests.get(request)
            _require(
                state is not None and state.active and not state.ending and (state.past > 0 or request in in_batch),
                f"{field}.finish[{i}]",
                f"request {request} is not active",
                "name a request that has run and not ended",
            )
            _require(
                request not in step.finish[:i], f"{field}.finish[{i}]", f"names request {request} twice", "list it once"
            )

    def _check_fault(self, step: Step, field: str) -> None:
        fault = step.fault
        if fault is None:
            return
        _require(bool(fault.site), f"{field}.fault.site", "is empty", "name a site, see `specfuzz list sites`")
        _require(
            fault.occurrence >= 1, f"{field}.fault.occurrence", f"{fault.occurrence} is too small", "write 1 or more"
        )
        check_piped(self.config, step, field)
        _require(
            not step.finish, f"{field}.finish", "no request finishes in a step that fails", "remove it or the fault"
        )


def _graph(step: Step, rows: list[RowPlan]) -> tuple[int, int, int]:
    """Batch size, draft length and rows of the graph that a step captures or replays."""
    return len(rows), step.draft_len, sum(row.query for row in rows)


def walk(scenario: Scenario) -> Iterator[tuple[Step, list[RowPlan]]]:
    """Steps of a valid scenario with the lengths of their rows; raises ``ScenarioError`` where it is not valid."""
    schedule = Schedule(scenario.config, scenario.requests)
    for i, step in enumerate(scenario.steps):
        yield step, schedule.advance(step, f"steps[{i}]")


def check(scenario: Scenario) -> Scenario:
    """``scenario`` itself if upstream's executor could produce it; raises ``ScenarioError`` otherwise."""
    _require(bool(scenario.steps), "steps", "is empty", "add a step")
    for _ in walk(scenario):
        pass
    return scenario
