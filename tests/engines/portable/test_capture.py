"""What Eagle3 captures of the target, where it keeps that, and which tokens its metadata counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.portable.pyexecutor.py_executor_creator import create_py_executor
from engines.portable.speculative.eagle3 import Eagle3OneModelSpecMetadata
from engines.portable.speculative.mode import SpeculativeDecodingMode
from reference import capture
from scenarios import Config
from tests.engines.portable.support import CPU

CONFIG = Config(worker="Eagle3OneModelWorker", max_draft_len=3, max_num_requests=3, max_num_tokens=20)


def metadata(mode: str = "EAGLE3_ONE_MODEL", **options: Any) -> Eagle3OneModelSpecMetadata:
    return Eagle3OneModelSpecMetadata(
        max_num_requests=3,
        max_num_tokens=20,
        spec_dec_mode=SpeculativeDecodingMode.from_string(mode),
        max_total_draft_tokens=3,
        device=CPU,
        hidden_size=2,
        **options,
    )


@pytest.mark.parametrize("num_layers", [1, 6, 7, 12, 32, 61])
def test_layers_to_capture(num_layers: int) -> None:
    assert metadata(num_layers=num_layers).layers_to_capture == capture.layers_to_capture(None, num_layers)
    given = metadata(num_layers=num_layers, layers_to_capture=[9, 2, 5])
    assert given.layers_to_capture == capture.layers_to_capture([9, 2, 5], num_layers)
    nothing = metadata("MTP_EAGLE_ONE_MODEL", num_layers=num_layers)
    assert (nothing.layers_to_capture, nothing.hidden_states.shape[1]) == ((), 0)


@pytest.mark.parametrize("num_layers", [2, 5])
def test_too_few_layers_to_choose_from(num_layers: int) -> None:
    with pytest.raises(ValueError, match=f"^{num_layers} layers are too few"):
        metadata(num_layers=num_layers)
    with pytest.raises(ValueError, match=f"^{num_layers} layers are too few"):
        capture.layers_to_capture(None, num_layers)


def test_each_layer_has_its_columns_and_no_row_beyond_the_step() -> None:
    spec = metadata(layers_to_capture=[4, 1])
    spec.hidden_states.fill_(-1)
    spec.num_capture_tokens = 3
    for layer in (1, 2, 4):
        spec.maybe_capture_hidden_states(layer, torch.full((5, 2), layer))
    assert spec.hidden_states[:4].tolist() == [[1, 1, 4, 4]] * 3 + [[-1] * 4]
    with pytest.raises(RuntimeError, match="3 rows are to be captured of 2, into a buffer of 20"):
        spec.maybe_capture_hidden_states(1, torch.zeros(2, 2))
    spec.num_capture_tokens = 21
    with pytest.raises(RuntimeError, match="21 rows are to be captured of 30, into a buffer of 20"):
        spec.maybe_capture_hidden_states(1, torch.zeros(30, 2))


@pytest.mark.parametrize("options", [{}, {"max_seq_len": 4, "max_num_tokens": 100, "num_blocks": 2}])
def test_the_manager_owns_what_graphs_share(options: dict[str, int]) -> None:
    config = Config(worker="Eagle3OneModelWorker", max_draft_len=3, **{"max_num_requests": 3, **options})
    executor = create_py_executor(config, CPU)
    manager: Any = executor.spec_resource_manager
    spec: Any = executor.model_engine.spec_metadata
    assert len(manager.hidden_states) == capture.captured_rows(config)
    assert len(manager.slot_manager._free_slots) == capture.slot_count(config, config.num_blocks)
    graph = spec.create_cuda_graph_metadata(2)
    for each in (spec, graph):
        assert each.hidden_states is manager.hidden_states
        assert each.batch_indices_cuda is manager.batch_indices_cuda
    assert graph.slot_ids is not spec.slot_ids
    assert len(graph.slot_ids) == 2


def test_a_manager_for_other_metadata_is_refused() -> None:
    manager = create_py_executor(CONFIG, CPU).spec_resource_manager
    with pytest.raises(AssertionError, match="captures other layers"):
        metadata(layers_to_capture=[1], spec_resource_manager=manager)


@pytest.mark.parametrize(
    ("mode", "counted"), [("EAGLE3_ONE_MODEL", [13 - 2 * 3, 6 - 3 * 3]), ("MTP_EAGLE_ONE_MODEL", [13, 6])]
)
def test_tokens_that_ranks_count(mode: str, counted: list[int]) -> None:
    """A context of 5 with two generations of 4 rows; three generations of 2 rows, with fewer drafts than Kmax."""
    found = []
    for num_tokens, generations in ((13, 2), (6, 3)):
        spec = metadata(mode, layers_to_capture=[1])
        spec.request_ids, spec.num_tokens, spec.num_generations = [0, 1, 2], num_tokens, generations
        spec.prepare()
        found.append(spec.num_tokens)
        assert spec.num_capture_tokens == num_tokens
    assert found == counted
