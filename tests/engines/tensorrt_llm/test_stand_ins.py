"""Behaviours that the modules under test depend on, beyond what the miniature tree asks for."""

from __future__ import annotations

import pytest
import torch

from engines.tensorrt_llm.stand_ins import (
    Logger,
    MappingStandIn,
    SlotManager,
    StandInModule,
    greedy_search_sampling_batch,
    inplace_slice_copy,
    nvtx_range,
    select_position_ids,
    stand_in_class,
)


def test_slots_are_the_lowest_that_are_free():
    slots = SlotManager(3)
    assert [slots.add_slot(request) for request in ("a", "b", "c")] == [0, 1, 2]
    slots.remove_slot("a")
    slots.remove_slot("never")
    assert slots.get_slot("a") is None
    assert slots.add_slot("d") == 0
    slots.shutdown()
    assert [slots.get_slot(request) for request in ("b", "c", "d")] == [None, None, None]
    assert slots.add_slot("e") == 0


def test_a_column_group_is_written_in_place():
    buffer = torch.zeros(3, 4)
    inplace_slice_copy(buffer, torch.ones(2, 2), 1, 3)
    assert buffer.tolist() == [[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_positions_are_taken_from_the_last_dimension():
    positions = torch.arange(6).view(2, 3)
    assert select_position_ids(positions, torch.tensor([2, 0])).tolist() == [[2, 0], [5, 3]]


def test_sampling_is_greedy():
    tokens, probabilities = greedy_search_sampling_batch(torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]]))
    assert tokens.tolist() == [1, 0]
    assert probabilities is None


def test_decorators_leave_functions_alone():
    assert nvtx_range("name")(len) is len


def test_there_is_one_rank():
    mapping = MappingStandIn()
    assert (mapping.tp_size, mapping.has_cp_helix()) == (1, False)


def test_what_no_table_lists_is_a_class_that_answers():
    module = StandInModule("package", {"answer": lambda: 42})
    assert module.answer == 42
    assert module.Unknown is module.Unknown
    assert module.Unknown.MEMBER == module.Unknown.MEMBER
    assert issubclass(type("Derived", (module.Unknown,), {}), module.Unknown)
    assert stand_in_class("Other", "package").__module__ == "package"
    with pytest.raises(AttributeError):
        _ = module.__wrapped__
    with pytest.raises(AttributeError):
        _ = Logger().__wrapped__
