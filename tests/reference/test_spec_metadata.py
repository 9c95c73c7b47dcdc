"""Counts of the speculative metadata, what Eagle3 captures, and shapes of what a worker returns."""

from __future__ import annotations

import pytest

from reference.capture import captured_rows, layers_to_capture, slot_count
from reference.outputs import NORMAL, SKIP_DRAFTING, SKIP_FORWARD, shapes
from scenarios import Config
from tests.reference.cases import (
    ALL,
    DFLASH,
    DRAFT_TARGET,
    EAGLE3,
    EAGLE3_TREE,
    MTP,
    MTP_EAGLE,
    MTP_EAGLE_TREE,
    PARD,
    SA,
    at,
    configuration,
    serve,
)


@pytest.mark.parametrize(
    ("worker", "counted", "captured"),
    [
        (EAGLE3, 7, 13),
        (MTP_EAGLE, 13, 13),
        (MTP, 11, None),
        (DRAFT_TARGET, 7, None),
        (PARD, 17, None),
        (DFLASH, 13, 13),
        (SA, 13, None),
        (EAGLE3_TREE, 7, 19),
        (MTP_EAGLE_TREE, 19, 19),
    ],
)
def test_tokens_that_a_metadata_class_counts(worker: str, counted: int, captured: int | None) -> None:
    prepared = at(serve(worker), "prepared")
    assert (prepared["spec_num_tokens"], prepared.fields.get("num_capture_tokens")) == (counted, captured)


def test_eagle3_subtracts_the_longest_draft_and_draft_target_the_real_one() -> None:
    layout = {"contexts": (), "past": (4, 5, 6), "acc": (1, 1, 1), "draft_len": 1, "max_draft_len": 4}
    assert at(serve(EAGLE3, **layout), "prepared")["spec_num_tokens"] == -6
    assert at(serve(DRAFT_TARGET, **layout), "prepared")["spec_num_tokens"] == 3


@pytest.mark.parametrize(
    ("given", "num_layers", "layers"),
    [(None, 32, (1, 15, 28)), (None, 6, (1, 2, 2)), (None, 1, (0,)), ((9, 2, 4), 3, (2, 4, 9)), ((), 32, ())],
)
def test_layers_that_eagle3_captures(given: tuple[int, ...] | None, num_layers: int, layers: tuple[int, ...]) -> None:
    assert layers_to_capture(given, num_layers) == layers


@pytest.mark.parametrize("num_layers", [2, 5])
def test_too_few_layers_to_choose_from(num_layers: int) -> None:
    with pytest.raises(ValueError, match="too few"):
        layers_to_capture(None, num_layers)


def test_room_for_what_is_captured_and_kept() -> None:
    config = Config(worker=EAGLE3, max_draft_len=3, max_num_tokens=100, max_num_requests=4, max_seq_len=20)
    assert captured_rows(config) == 80 + 4 * 4
    assert (slot_count(config), slot_count(config, num_seq_slots=30)) == (21, 31)
    tree = configuration(EAGLE3_TREE, 3, max_num_tokens=50, max_num_requests=4)
    assert captured_rows(tree) == 50 + 7 * 4


@pytest.mark.parametrize("worker", ALL)
def test_outputs_have_the_shape_that_the_table_says(worker: str) -> None:
    config = configuration(worker, 3)
    for draft_len, kind in ((3, NORMAL), (config.min_draft_len, NORMAL if config.min_draft_len else SKIP_DRAFTING)):
        restored = at(serve(worker, draft_len=draft_len, max_draft_len=3, acc=(1, 1)), "restored")
        table = shapes(kind, config, 3, draft_len)
        assert table["new_tokens_lens"] == (len(restored["new_tokens_lens"]),)
        for name in ("next_draft_tokens", "next_new_tokens"):
            assert {(len(restored[name]), len(row)) for row in restored[name]} == {table[name]}
        assert max(restored["new_tokens_lens"]) <= table["new_tokens"][1]


def test_shapes_that_differ_from_a_chain() -> None:
    names = ("new_tokens", "next_draft_tokens", "next_new_tokens")
    widths = {
        (worker, kind): tuple(shapes(kind, configuration(worker, 3), 2, 3)[name][1] for name in names)
        for worker in (EAGLE3, PARD, EAGLE3_TREE)
        for kind in (NORMAL, SKIP_FORWARD)
    }
    assert widths == {
        (EAGLE3, NORMAL): (4, 3, 4),
        (PARD, NORMAL): (6, 5, 6),
        (EAGLE3_TREE, NORMAL): (4, 6, 7),
        (EAGLE3, SKIP_FORWARD): (4, 3, 4),
        (PARD, SKIP_FORWARD): (4, 3, 4),
        (EAGLE3_TREE, SKIP_FORWARD): (4, 3, 4),
    }
    assert shapes(SKIP_DRAFTING, configuration(PARD, 3), 2, 0)["next_draft_tokens"] == (2, 0)
    assert shapes(SKIP_FORWARD, configuration(EAGLE3, 3), 2, 1)["new_tokens"] == (2, 4)
