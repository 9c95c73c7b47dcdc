"""Modes answer as upstream's do."""

from __future__ import annotations

import pytest

from engines.portable.speculative.mode import SpeculativeDecodingMode
from reference.modes import ANSWERS, MODES


def test_every_mode_has_upstreams_name_and_value() -> None:
    assert [(mode.name, mode.value) for mode in SpeculativeDecodingMode] == list(zip(MODES, range(1, 17)))


def test_every_question_is_in_the_table() -> None:
    asked = {name for name in vars(SpeculativeDecodingMode) if name.startswith(("is_", "has_", "need", "support_"))}
    assert asked | {"use_one_engine", "without_logits"} == set(ANSWERS)


@pytest.mark.parametrize("question", ANSWERS)
def test_answers(question: str) -> None:
    yes = {mode.name for mode in SpeculativeDecodingMode if getattr(mode, question)()}
    assert yes == ANSWERS[question]


def test_names_are_read_in_any_case() -> None:
    assert SpeculativeDecodingMode.from_string("eagle3_one_model") is SpeculativeDecodingMode.EAGLE3_ONE_MODEL
    assert SpeculativeDecodingMode.from_string(None) is SpeculativeDecodingMode.NONE
    with pytest.raises(KeyError):
        SpeculativeDecodingMode.from_string("eagle4")
