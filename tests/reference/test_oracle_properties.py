"""What holds in every scenario: losslessness, lengths, the ledger, and the tracer model taken literally."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, islice

from hypothesis import given
from hypothesis import strategies as st

from reference import trace
from scenarios import WORKERS, Config, Context, Generation, Phase, Request, Scenario, Step, Substep, check, walk
from scenarios.tracer import (
    EMPTY,
    MASK_TOKEN,
    PRIME,
    choose,
    disagree,
    entry,
    entry_fields,
    prompt_token,
    term,
)


@st.composite
def scenarios(draw: st.DrawFn, *, eager_drafter: bool = False) -> Scenario:
    """Start-up with dummies, then up to three requests in chunks; ``eager_drafter`` always agrees to all drafts."""
    traits = draw(st.sampled_from(sorted(WORKERS.values(), key=lambda traits: traits.name)))
    longest = draw(st.integers(1, 4))
    config = Config(worker=traits.name, max_draft_len=longest, graph_warmup_runs=draw(st.integers(0, 1)))
    requests = [Request(id=i, prompt_len=draw(st.integers(1, 7))) for i in range(draw(st.integers(1, 3)))]
    left = {request.id: request.prompt_len for request in requests}
    steps = draw(st.lists(_startup(config), max_size=2))
    for _ in range(draw(st.integers(2, 6))):
        k = draw(st.integers(traits.min_draft_len, longest))

        def agree(k: int = k) -> int:
            return k if eager_drafter else draw(st.integers(0, k))

        contexts, generations = [], []
        for i in draw(st.permutations(sorted(left))):
            if left[i] and draw(st.integers(0, 3)):
                chunk = left[i] if draw(st.booleans()) else draw(st.integers(1, left[i]))
                left[i] -= chunk
                contexts.append(Context(request=i, chunk=chunk, agree=agree() if traits.drafts_for_contexts else 0))
            elif not left[i]:
                generations.append(Generation(request=i, agree=agree()))
        if contexts or generations:
            steps.append(Step(draft_len=k, contexts=tuple(contexts), generations=tuple(generations)))
    if not steps:
        steps = [draw(_startup(config))]
    return check(Scenario(config=config, requests=tuple(requests), steps=tuple(steps)))


@st.composite
def _startup(draw: st.DrawFn, config: Config) -> Step:
    k = draw(st.integers(config.traits.min_draft_len, config.max_draft_len))
    phase = draw(st.sampled_from([Phase.WARMUP, Phase.CAPTURE]))
    chunks = draw(st.lists(st.integers(1, 4), max_size=2)) if phase is Phase.WARMUP else []
    dummy = st.builds(
        Generation, request=st.none(), agree=st.integers(0, k), past=st.integers(0, 6), accept=st.integers(1, k + 1)
    )
    generations = draw(st.lists(dummy, min_size=0 if chunks else 1, max_size=2))
    contexts = tuple(Context(request=None, chunk=chunk) for chunk in chunks)
    return Step(phase=phase, draft_len=k, contexts=contexts, generations=tuple(generations))


def greedy(prompt: list[int]) -> Iterator[int]:
    """What the target says after a prompt, each token from the sum over all tokens before it."""
    tokens = list(prompt)
    while True:
        tokens.append(choose(sum(term(n, entry(n, token)) for n, token in enumerate(tokens)) % PRIME))
        yield tokens[-1]


@given(scenarios())
def test_emitted_tokens_are_greedy_decoding_of_the_prompt_alone(scenario: Scenario) -> None:
    for step in trace(scenario).steps:
        for i, emitted in step.substeps[-1]["emitted"].items():
            prompt = [prompt_token(0, i, n) for n in range(scenario.requests[i].prompt_len)]
            assert emitted == list(islice(greedy(prompt), len(emitted)))


@given(scenarios())
def test_accepted_tokens_add_up_to_the_emitted_ones(scenario: Scenario) -> None:
    emitted: dict[int, list[int]] = {}
    for (step, plans), taken in zip(walk(scenario), trace(scenario).steps, strict=True):
        new_tokens = next(taken.named("restored"))["new_tokens"]
        for plan, new in zip(plans, new_tokens, strict=True):
            if plan.request is not None:
                emitted.setdefault(plan.request, []).extend(new if plan.accepted else [])
                assert len(new) == max(plan.accepted, 1)
        assert taken.substeps[-1]["emitted"] == ({} if step.phase.is_startup else emitted)


@given(scenarios())
def test_tokens_do_not_depend_on_the_company(scenario: Scenario) -> None:
    """A request alone, its prompt in one piece and no draft agreed with, emits the same text."""
    together = trace(scenario).steps[-1].substeps[-1]["emitted"]
    for i, emitted in together.items():
        request, k = scenario.requests[i], 1
        steps = [Step(draft_len=k, contexts=(Context(request=i, chunk=request.prompt_len),))]
        steps += [Step(draft_len=k, generations=(Generation(request=i),))] * len(emitted)
        alone = trace(check(replace(scenario, requests=(request,), steps=tuple(steps)))).steps[-1]
        assert alone.substeps[-1]["emitted"][i][: len(emitted)] == emitted


@given(scenarios())
def test_lengths_in_the_draft_loop(scenario: Scenario) -> None:
    parallel = scenario.config.traits.parallel
    for (_, plans), taken in zip(walk(scenario), trace(scenario).steps, strict=True):
        prepared = taken.substeps[0]
        assert prepared["kv_lens_cuda"] == [plan.past + plan.query for plan in plans]
        assert prepared["_seq_lens"] == [plan.query for plan in plans]
        for substep in taken.named("draft"):
            i = int(substep.name[len("draft[") : -1])
            expected = []
            for plan in plans:
                kv0 = plan.past + plan.query
                if plan.is_context:
                    expected.append(kv0 + i)
                elif i == 0:
                    expected.append(kv0 + int(parallel))
                else:
                    expected.append(plan.past + plan.accepted + i)
            assert substep["kv_lens_cuda"] == expected
            if i:
                assert substep["position_ids"] == [kv - 1 for kv in expected]


@given(scenarios())
def test_the_ledger_is_what_was_granted_first_plus_what_was_accepted(scenario: Scenario) -> None:
    config, held = scenario.config, dict[int, int]()
    for (step, plans), taken in zip(walk(scenario), trace(scenario).steps, strict=True):
        width = config.traits.tokens_per_gen_step(step.draft_len) - 1
        updated = taken.substeps[-1]
        for plan in plans:
            if plan.request is None:
                continue
            if plan.request not in held:
                prompt_len = scenario.requests[plan.request].prompt_len
                held[plan.request] = prompt_len + config.num_extra_kv_tokens + width
            if not plan.is_context:
                held[plan.request] += plan.accepted
                assert updated["py_num_accepted_draft_tokens"][plan.request] == plan.accepted - 1
                assert updated["py_rewind_len"][plan.request] == width - (plan.accepted - 1)
        assert updated["kv_tokens"] == held
        pages = sum(-(-tokens // config.tokens_per_block) for tokens in held.values())
        assert updated["free_blocks"] == config.num_blocks - pages


@given(scenarios(eager_drafter=True))
def test_a_drafter_that_equals_the_target_is_accepted_whole(scenario: Scenario) -> None:
    drafted: dict[int, int] = {}
    for step, taken in zip(scenario.steps, trace(scenario).steps, strict=True):
        if step.phase.is_startup:
            continue
        lens = dict(
            zip((row.request for row in step.rows), next(taken.named("restored"))["new_tokens_lens"], strict=True)
        )
        for row in step.generations:
            assert row.request is not None
            assert lens[row.request] == 1 + min(drafted[row.request], step.draft_len)
            drafted[row.request] = step.draft_len
        for context in step.contexts:
            assert context.request is not None
            drafted[context.request] = step.draft_len if scenario.config.traits.drafts_for_contexts else 0


class Pools:
    """The slots of one row's request in both pools, written as ``scenarios.tracer`` says."""

    def __init__(self) -> None:
        self.target: dict[int, int] = {}
        self.draft: dict[int, int] = {}

    def feed_target(self, index: int, position: int, token: int) -> int:
        """Write one row and return its digest."""
        self.target[index] = entry(position, token)
        return sum(term(s, self.target.get(s, EMPTY)) for s in range(index + 1)) % PRIME

    def feed_shifted(self, index: int, position: int, token: int, hidden: int | None) -> tuple[int, int]:
        """Write one row of a drafter with shift 1; return its choice and its hidden state."""
        self.draft[index] = entry(position, token)
        digest = term(0, self.target.get(0, EMPTY))
        for s in range(index + 1):
            fields = entry_fields(self.draft.get(s, EMPTY))
            value = self.target.get(s + 1, EMPTY) if fields is None else entry(fields[0] + 1, fields[1])
            digest += term(s + 1, value)
        if hidden is None:
            return choose(digest), digest % PRIME
        own = term(index + 1, entry(position + 1, token))
        return choose((2 * (hidden + own) - digest) % PRIME), digest % PRIME

    def feed_unshifted(self, index: int, position: int, token: int) -> int:
        """Write one row of a drafter with shift 0 and return its choice."""
        self.draft[index] = entry(position, token)
        first_mask = index + 1
        while first_mask and self._draft_token(first_mask - 1) == MASK_TOKEN:
            first_mask -= 1
        digest = sum(term(s, self.draft.get(s, EMPTY) or self.target.get(s, EMPTY)) for s in range(first_mask))
        for s in range(first_mask, index + 1):
            fields = entry_fields(self.draft[s])
            assert fields is not None
            digest += term(s, entry(fields[0], choose(digest)))
        return choose(digest)

    def _draft_token(self, index: int) -> int | None:
        fields = entry_fields(self.draft.get(index, EMPTY))
        return None if fields is None else fields[1]


def fed(substep: Substep, row: int) -> list[tuple[int, int, int]]:
    """(KV index, position, token) of each token that a forward feeds for a row, as the metadata says."""
    ends = list(accumulate(substep["_seq_lens_cuda"], initial=0))
    kv, query = substep["kv_lens_cuda"][row], substep["_seq_lens_cuda"][row]
    inputs = slice(ends[row], ends[row + 1])
    return list(zip(range(kv - query, kv), substep["position_ids"][inputs], substep["input_ids"][inputs], strict=True))


@given(scenarios())
def test_the_tracer_model_over_slots_gives_the_same_tokens(scenario: Scenario) -> None:
    """Both models, fed with what the trace says they are fed, choose what the trace says they choose."""
    pools: dict[int, Pools] = {}
    parallel = scenario.config.traits.parallel
    for step, taken in zip(scenario.steps, trace(scenario).steps, strict=True):
        for row, planned in enumerate(step.rows):
            request = planned.request
            pool = Pools() if request is None else pools.setdefault(request, Pools())
            prepared, restored = taken.substeps[0], next(taken.named("restored"))
            hidden = [pool.feed_target(*cell) for cell in fed(prepared, row)]
            new = restored["new_tokens"][row]
            first = len(hidden) - 1 if isinstance(planned, Context) else 0
            assert new == [choose(digest) for digest in hidden[first : first + len(new)]]
            gathered = first + len(new) - 1
            made = restored["next_draft_tokens"][row][: step.draft_len]
            calls = [s for s in taken.named("draft") if s.run == 0]
            if parallel:
                choices = [pool.feed_unshifted(*cell) for cell in fed(calls[0], row)]
                choices = choices[gathered : gathered + step.draft_len] if isinstance(planned, Generation) else []
            else:
                choices = drafts_over_slots(pool, calls, row, hidden, gathered)[: step.draft_len]
            expected = [c if depth < planned.agree else disagree(c) for depth, c in enumerate(choices)]
            assert made == (expected or [0] * len(made))
            if request is not None:
                past = len(taken.substeps[-1]["target_kv"][request])
                for name, slots in (("target_kv", pool.target), ("draft_kv", pool.draft)):
                    assert taken.substeps[-1][name][request] == [slots.get(s, EMPTY) for s in range(past)]


def drafts_over_slots(pool: Pools, calls: list[Substep], row: int, hidden: list[int], gathered: int) -> list[int]:
    """Choices of a linear loop, call by call; checks the hidden states that the calls are said to be fed."""
    choices = []
    for call in calls:
        states: list[int] | list[None] = [None] * len(hidden)
        if "hidden_states" in call:
            start = sum(call["_seq_lens"][:row])
            assert call["hidden_states"][start : start + len(hidden)] == hidden
            states = hidden
        rows = [pool.feed_shifted(*cell, state) for cell, state in zip(fed(call, row), states, strict=True)]
        choice, state = rows[gathered]
        choices.append(choice)
        hidden, gathered = [state], 0
    return choices
