"""Looking things up in a trace."""

from __future__ import annotations

from scenarios import FIELDS, Phase, StepTrace, Substep
from scenarios.trace import ENTERED, PREPARED, RESTORED, draft

STEP = StepTrace(
    index=0,
    phase=Phase.CAPTURE,
    outcome="ok",
    substeps=(
        Substep(PREPARED, 0, "graph_warmup", {"num_contexts": 0}),
        Substep(ENTERED, 0, "graph_warmup", {}),
        Substep(draft(0), 0, "graph_warmup", {}),
        Substep(draft(1), 0, "graph_warmup", {}),
        Substep(ENTERED, 1, "capture", {"num_contexts": 1}),
        Substep(RESTORED, 1, "capture", {}),
    ),
)


def test_a_sub_step_is_found_by_name_and_run() -> None:
    found = STEP.find(ENTERED, run=1)
    assert found is not None
    assert (found.phase, found.key) == ("capture", (ENTERED, 1))
    first = STEP.find(ENTERED)
    assert first is not None
    assert first.phase == "graph_warmup"
    assert STEP.find(RESTORED) is None
    assert STEP.find("failed") is None


def test_fields_are_read_like_a_mapping() -> None:
    substep = STEP.substeps[0]
    assert "num_contexts" in substep
    assert "_seq_lens" not in substep
    assert substep["num_contexts"] == 0


def test_draft_stands_for_every_draft_call() -> None:
    assert [s.name for s in STEP.named("draft")] == ["draft[0]", "draft[1]"]
    assert [s.name for s in STEP.named("draft[1]", PREPARED)] == [PREPARED, "draft[1]"]


def test_every_field_is_described() -> None:
    assert all(text and text == text.strip() for text in FIELDS.values())
