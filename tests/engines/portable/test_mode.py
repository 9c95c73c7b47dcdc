"""Modes answer as upstream's do."""

from __future__ import annotations

import pytest

from engines.portable.speculative import eagle3, mtp
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


def test_what_hangs_on_the_question_that_12353_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PR #12353 let ``is_mtp_one_model`` mean vanilla MTP alone; it was widened again, as much follows from it."""
    narrowed = SpeculativeDecodingMode.is_mtp_vanilla
    monkeypatch.setattr(SpeculativeDecodingMode, "is_mtp_one_model", narrowed)
    mtp_eagle = SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL
    changed = {
        question for question, yes in ANSWERS.items() if getattr(mtp_eagle, question)() != (mtp_eagle.name in yes)
    }
    assert changed == {
        *("is_mtp_one_model", "use_one_engine", "without_logits", "needs_kv_cache_rewind", "has_spec_decoder"),
        *("support_overlap_scheduler", "support_capturable_guided_decoder", "support_dynamic_draft_len"),
    }
    others = [mode for mode in SpeculativeDecodingMode if mode is not mtp_eagle]
    assert all(getattr(mode, question)() == (mode.name in yes) for question, yes in ANSWERS.items() for mode in others)


def test_the_worker_of_mtp_eagle_is_found_where_it_was_and_where_it_is() -> None:
    assert eagle3.MTPEagleWorker is mtp.MTPEagleWorker
