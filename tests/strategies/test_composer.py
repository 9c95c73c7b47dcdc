"""Steps in the middle of a scenario: replays of what was captured, failures that something follows."""

from __future__ import annotations

from hypothesis import Phase as Part
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios import Config, Context, Generation, Phase, Request, Scenario, Schedule, Step
from strategies import faulted_scenarios
from strategies.composer import Composer

CONFIG = Config(worker="MTPEagleWorker", max_draft_len=4, num_blocks=100)
look_at_many = settings(max_examples=150, phases=[Part.generate], deadline=None, derandomize=True, database=None)


def composer(*graphs: tuple[int, int], requests: int, config: Config = CONFIG) -> Composer:
    """A composer after the capture of these (batch size, draft length) and the prefill of so many requests."""
    made = Composer(config, startup=len(graphs))
    for size, draft_len in graphs:
        made.schedule.advance(
            Step(phase=Phase.CAPTURE, draft_len=draft_len, generations=(Generation(request=None),) * size)
        )
    for i in range(requests):
        made.requests.append(Request(id=i, prompt_len=5))
        made.schedule.add(made.requests[i])
    made.schedule.advance(Step(draft_len=4, contexts=tuple(Context(request=i, chunk=5) for i in range(requests))))
    return made


def replayed(*graphs: tuple[int, int], requests: int) -> set[tuple[int, int]]:
    """(batch size, draft length) of the steps that are drawn as replays."""
    seen = set()

    @look_at_many
    @given(st.data())
    def look(data: st.DataObject) -> None:
        made = composer(*graphs, requests=requests)
        made.draw_step(data.draw, Phase.REPLAY)
        step = made.steps[-1]
        assert step.phase is Phase.REPLAY
        assert not step.contexts
        seen.add((len(step.generations), step.draft_len))

    look()
    return seen


def test_every_graph_that_has_its_batch_is_replayed() -> None:
    graphs = ((1, 0), (1, 3), (2, 3), (3, 1))
    assert replayed(*graphs, requests=2) == {(1, 0), (1, 3), (2, 3)}


def test_a_graph_whose_batch_does_not_fit_gives_way_to_an_eager_step() -> None:
    # One page of four tokens is left. The graph needs two more for each request, which have 12 tokens each.
    config = Config(worker="MTPEagleWorker", max_draft_len=4, tokens_per_block=4, num_blocks=7)

    @look_at_many
    @given(st.data())
    def look(data: st.DataObject) -> None:
        made = composer((2, 4), requests=2, config=config)
        made.draw_step(data.draw, Phase.REPLAY)
        assert made.steps[-1].phase is Phase.EAGER

    look()


def test_the_very_last_step_never_fails() -> None:
    def only_third(scenario: Scenario) -> dict[str, int]:
        return {"target_model.forward": 1} if len(scenario.steps) == 3 else {}

    lengths = set()

    @look_at_many
    @given(faulted_scenarios(record=only_third, max_steps=4))
    def look(scenario: Scenario) -> None:
        schedule = Schedule(scenario.config, scenario.requests)
        for step in scenario.steps:
            schedule.advance(step)
        failing = [i for i, step in enumerate(scenario.steps) if step.fault]
        # The third step fails if a fourth is to come, which stays away only where the failure ends the run.
        assert failing == ([2] if len(scenario.steps) == 4 or schedule.over else [])
        lengths.add(len(scenario.steps))

    look()
    assert lengths == {2, 3, 4}
