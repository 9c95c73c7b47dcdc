"""What holds in every scenario, dense or sparse: losslessness, lengths and the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from hypothesis import given

from reference import trace
from scenarios import Context, Generation, Scenario, Step, check, walk
from scenarios.tracer import choose, entry, prompt_token, term
from tests.reference.cases import LINEAR, PARD, scenarios


def greedy(prompt: list[int], index_topk: int) -> Iterator[int]:
    """What the target says after a prompt, each token from the sum over all tokens before it or the highest."""
    tokens = list(prompt)
    while True:
        terms = sorted((term(n, entry(n, token)) for n, token in enumerate(tokens)), reverse=True)
        tokens.append(choose(sum(terms[: index_topk or len(terms)])))
        yield tokens[-1]


@given(scenarios(enhanced=True))
def test_emitted_tokens_are_greedy_decoding_of_the_prompt_alone(scenario: Scenario) -> None:
    for step in trace(scenario).steps:
        for i, emitted in step.substeps[-1]["emitted"].items():
            prompt = [prompt_token(0, i, n) for n in range(scenario.requests[i].prompt_len)]
            assert emitted == list(islice(greedy(prompt, scenario.config.index_topk), len(emitted)))


@given(scenarios(enhanced=True))
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
        request, k = scenario.requests[i], max(1, scenario.config.min_draft_len)
        steps = [Step(draft_len=k, contexts=(Context(request=i, chunk=request.prompt_len),))]
        steps += [Step(draft_len=k, generations=(Generation(request=i),))] * len(emitted)
        alone = trace(check(replace(scenario, requests=(request,), steps=tuple(steps)))).steps[-1]
        assert alone.substeps[-1]["emitted"][i][: len(emitted)] == emitted


@given(scenarios([*LINEAR, PARD]))
def test_lengths_in_the_draft_loop(scenario: Scenario) -> None:
    # A drafter of one call adds 1 to its generations for it.
    ahead = int(scenario.config.traits.parallel or scenario.config.traits.keeps_context)
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
                    expected.append(kv0 + ahead)
                else:
                    expected.append(plan.past + plan.accepted + i)
            assert substep["kv_lens_cuda"] == expected
            if i:
                assert substep["position_ids"] == [kv - 1 for kv in expected]


@given(scenarios(enhanced=True))
def test_the_ledger_is_what_was_granted_first_plus_what_was_accepted(scenario: Scenario) -> None:
    config, held = scenario.config, dict[int, int]()
    for (step, plans), taken in zip(walk(scenario), trace(scenario).steps, strict=True):
        width = config.tokens_per_gen_step(step.draft_len) - 1
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
                assert updated["py_rewind_len"][plan.request] == plan.query - plan.accepted
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
            verified = step.draft_len if row.verify is None else row.verify
            assert lens[row.request] == 1 + min(drafted[row.request], verified)
            drafted[row.request] = step.draft_len
        for context in step.contexts:
            assert context.request is not None
            drafted[context.request] = step.draft_len if scenario.config.traits.drafts_for_contexts else 0
