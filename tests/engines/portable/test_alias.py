"""Tests written for ``tensorrt_llm``, run against the portable engine."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

import engines.portable.attention.backends.sparse.dsa.metadata as dsa
import engines.portable.speculative.interface as interface
from engines.portable.alias import as_tensorrt_llm, main
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from scenarios import UsageError

ROOT = Path(__file__).parents[3]
LAYOUTS = ("attention_backend", "attention.backends")

UNIT_TEST = """
from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm._torch.{layout} import AttentionMetadata
from tensorrt_llm._torch.{layout}.sparse.dsa import DSAtrtllmAttentionMetadata, build_req_idx_per_token
from tensorrt_llm._torch.{layout}.trtllm import TrtllmAttentionMetadata
from tensorrt_llm._torch.speculative import interface
from tensorrt_llm._torch.speculative.dflash import DFlashWorker
from tensorrt_llm._torch.speculative.draft_target import DraftTargetOneModelWorker
from tensorrt_llm._torch.speculative.eagle3 import Eagle3OneModelWorker
from tensorrt_llm._torch.speculative.pard import PARDWorker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="tensors live on the GPU")


class Failing(interface.SpecWorkerBase):
    max_draft_len = 2

    def _forward_impl(self, attn_metadata, spec_metadata):
        attn_metadata.prepare_for_spec_dec("_seq_lens")
        attn_metadata._seq_lens.zero_()
        raise RuntimeError("out of luck")


def metadata(is_cuda_graph=False):
    seq_lens = torch.tensor([4, 3, 3], dtype=torch.int32)
    result = TrtllmAttentionMetadata(
        max_num_requests=3, max_num_tokens=16, seq_lens=seq_lens, num_contexts=1, is_cuda_graph=is_cuda_graph
    )
    result.kv_lens_cuda = torch.full((3,), 8, dtype=torch.int32, device="cuda")
    return result


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize(
    "worker, prepare",
    [
        (DFlashWorker, "_prepare_attn_metadata_for_dflash"),
        (PARDWorker, "_prepare_attn_metadata_for_pard"),
        (DraftTargetOneModelWorker, "_prepare_attn_metadata_for_draft_target"),
    ],
)
def test_kv_lens_are_saved_while_a_graph_warms_up(worker, prepare, capturing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    attn = metadata(is_cuda_graph=True)
    worker = worker.__new__(worker)
    interface.SpecWorkerBase.__init__(worker)
    getattr(worker, prepare)(attn, SimpleNamespace(is_cuda_graph=True))
    attn.kv_lens_cuda += 1
    worker._restore_attn_metadata_from_spec_dec(attn)
    assert attn.kv_lens_cuda.tolist() == ([9, 9, 9] if capturing else [8, 8, 8])
    assert worker._saved_num_contexts is None


def test_a_failed_forward_leaves_nothing_saved():
    attn = metadata()
    with pytest.raises(RuntimeError, match="out of luck"):
        Failing()(attn_metadata=attn, spec_metadata=None)
    assert not attn.has_spec_dec_saved_state
    assert attn.context_lens.tolist() == [4]
    assert attn.num_generations == 2
    torch.cuda.synchronize()


def test_tensors_are_where_cuda_is():
    lens = torch.tensor([2, 0, 1]).cuda()
    assert build_req_idx_per_token(lens, 3).tolist() == [0, 0, 2]
    assert isinstance(metadata(), AttentionMetadata)


def test_metadata_that_nobody_prepared_follows_a_new_layout():
    attn = object.__new__(DSAtrtllmAttentionMetadata)
    attn.kv_cache_manager = None
    attn._num_tokens, attn._num_generations = 3, 0
    attn._seq_lens = torch.tensor([1, 2], dtype=torch.int32)
    attn._seq_lens_cuda, attn.kv_lens_cuda = attn._seq_lens.cuda(), attn._seq_lens.cuda()
    attn.req_idx_per_token = torch.zeros(3, dtype=torch.int32, device="cuda")
    attn.prepare_dense_topk_indices = lambda: None
    attn.on_update_kv_lens()
    assert attn.req_idx_per_token.tolist() == [0, 1, 1]


def test_a_drafter_reads_the_targets_cache_by_the_view_that_the_backend_gives():
    view, steps = SimpleNamespace(use_spec_decoding=True, padded_num_tokens=4), []

    def forward_draft_step(attn_metadata, recurrent_hidden_states, **kwargs):
        steps.append(attn_metadata)
        return recurrent_hidden_states, recurrent_hidden_states

    start = torch.tensor([1, 2]), torch.zeros(2, 4), torch.tensor([[3, 4]])
    drafts = Eagle3OneModelWorker._forward_external_shared_target_kv_draft_loop(
        SimpleNamespace(
            guided_decoder=None,
            sa_enhancer=None,
            _prepare_shared_kv_draft_inputs=lambda **kwargs: start,
            sample_draft_tokens=lambda logits, spec_metadata, draft_step: torch.tensor([5, 6]) + draft_step,
        ),
        position_ids=None,
        hidden_states=None,
        attn_metadata=SimpleNamespace(get_shared_kv_draft_metadata=lambda accepted, num_contexts: view),
        spec_metadata=SimpleNamespace(runtime_draft_len=2, subseq_all_rank_num_tokens=[2]),
        draft_model=SimpleNamespace(forward_draft_step=forward_draft_step),
        accepted_tokens=None,
        num_accepted_tokens=None,
        num_contexts=1,
        batch_size=2,
    )
    assert drafts.tolist() == [[5, 6], [6, 7]]
    assert steps == [view, view]
    assert (view.use_spec_decoding, view.padded_num_tokens, view.all_rank_num_tokens) == (False, None, [2])
"""


@pytest.fixture
def alias() -> Iterator[None]:
    with as_tensorrt_llm():
        yield


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engines.portable.alias", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.exhaustive
def test_a_unit_test_passes_under_the_paths_of_both_layouts(tmp_path: Path) -> None:
    files = []
    for number, layout in enumerate(LAYOUTS):
        files.append(str(tmp_path / f"test_layout_{number}.py"))
        Path(files[-1]).write_text(UNIT_TEST.format(layout=layout))
    result = run("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *files)
    assert "20 passed" in result.stdout, result.stdout + result.stderr
    assert result.returncode == 0


def test_bad_usage_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``python -m`` runs it, in this process: starting another one with torch takes seconds."""
    monkeypatch.setattr(sys, "argv", ["alias", "-m", "no_such_module"])
    monkeypatch.delitem(sys.modules, "engines.portable.alias")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("engines.portable.alias", run_name="__main__")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err == (
        "engines.portable.alias: no module named 'no_such_module'; "
        "usage: python -m engines.portable.alias -m MODULE ARGS... (or: FILE ARGS...)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "nothing to run"),
        (["-m"], "nothing to run"),
        (["-m", "no_such_module.main"], "no module named 'no_such_module.main'"),
        (["-q", "file.py"], "-q: unknown option"),
        (["no_such_file.py"], "no_such_file.py: no such file"),
    ],
)
def test_bad_usage_names_the_problem(arguments: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=f"^{problem}; usage: .*FILE ARGS"):
        main(arguments)


def test_a_file_is_run_with_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside.py").write_text("from tensorrt_llm._torch.speculative.pard import PARDWorker\n")
    file = tmp_path / "script.py"
    file.write_text("import sys, beside\nprint(__name__, sys.argv[1:], beside.PARDWorker.__module__)\n")
    path = list(sys.path)
    main([str(file), "-x", "1"])
    assert capsys.readouterr().out == "__main__ ['-x', '1'] engines.portable.speculative.pard\n"
    assert sys.path == path


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("module", ["", ".trtllm"])
def test_both_layouts_lead_to_the_same_class(alias: None, layout: str, module: str) -> None:
    path = f"tensorrt_llm._torch.{layout}{module}"
    assert importlib.import_module(path).TrtllmAttentionMetadata is TrtllmAttentionMetadata


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("from tensorrt_llm._torch.metadata import KVCacheParams as found", "attention.backends.interface"),
        ("from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests as found", "pyexecutor.llm_request"),
        ("from tensorrt_llm._torch.speculative.spec_sampler_base import SpecSampler as found", "pyexecutor.sampler"),
        ("from tensorrt_llm._torch.speculative import get_spec_worker as found", "speculative.utils"),
        ("import tensorrt_llm\nfound = tensorrt_llm._torch.pyexecutor.sampler.SpecSampler", "pyexecutor.sampler"),
    ],
)
def test_names_are_found_where_upstream_has_them(alias: None, statement: str, name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(statement, namespace)
    assert namespace["found"].__module__ == f"engines.portable.{name}"


@pytest.mark.parametrize(
    ("statement", "missing"),
    [
        ("import tensorrt_llm.llmapi", "tensorrt_llm.llmapi"),
        ("import tensorrt_llm._torch.session", "tensorrt_llm._torch.session"),
        ("import tensorrt_llm._torch.speculative.pard.deep", "tensorrt_llm._torch.speculative.pard.deep"),
        ("from tensorrt_llm import LLM", "LLM of tensorrt_llm"),
        ("from tensorrt_llm._torch.speculative import ngram", "ngram of tensorrt_llm._torch.speculative"),
        (
            "from tensorrt_llm._torch.speculative.pard import PARDWorker, Pard",
            "Pard of tensorrt_llm._torch.speculative.pard",
        ),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(alias: None, statement: str, missing: str) -> None:
    kind = "module" if statement.startswith("import") else "name"
    with pytest.raises(ImportError) as caught:
        exec(statement)
    assert str(caught.value) == f"{missing} is missing: the portable engine has no counterpart of this {kind}"


def test_asking_for_a_missing_name_is_no_import_error(alias: None) -> None:
    module = importlib.import_module("tensorrt_llm._torch.speculative.pard")
    assert not hasattr(module, "Pard")
    assert getattr(module, "Pard", None) is None


def patched_by_mock(path: str) -> Any:
    return mock.patch(path, None)


@contextmanager
def patched_by_pytest(path: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path, None)
        yield


@contextmanager
def deleted(path: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(path)
        patch.setattr(path, None, raising=False)
        yield


@pytest.mark.parametrize("replaced", [patched_by_mock, patched_by_pytest, deleted])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("module", ["", ".metadata"])
def test_a_replacement_reaches_the_engine_and_is_taken_back(
    alias: None, replaced: Any, layout: str, module: str
) -> None:
    original = dsa.build_req_idx_per_token
    with replaced(f"tensorrt_llm._torch.{layout}.sparse.dsa{module}.build_req_idx_per_token"):
        assert dsa.build_req_idx_per_token is None
    assert dsa.build_req_idx_per_token is original


def test_views_stay_out_of_the_engine(alias: None) -> None:
    view = importlib.import_module("tensorrt_llm._torch.speculative.interface")
    assert importlib.import_module("tensorrt_llm._torch.speculative").interface is view
    assert importlib.import_module("engines.portable.speculative").interface is interface
    assert view.torch is torch


def test_star_imports(alias: None) -> None:
    namespace: dict[str, Any] = {}
    exec("from tensorrt_llm._torch.speculative.pard import *", namespace)
    assert {"PARDWorker", "PARDSpecMetadata"} <= set(namespace)


def test_nothing_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ModuleType("tensorrt_llm")
    monkeypatch.setitem(sys.modules, "tensorrt_llm", installed)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", installed)
    before = list(sys.meta_path), torch.cuda.is_available, torch.cuda.is_current_stream_capturing
    with pytest.raises(ZeroDivisionError), as_tensorrt_llm():
        importlib.import_module("tensorrt_llm._torch.speculative.pard")
        assert "tensorrt_llm.llmapi" not in sys.modules
        torch.zeros(1, device="cuda")
        raise ZeroDivisionError
    assert {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "tensorrt_llm"} == {
        "tensorrt_llm": installed,
        "tensorrt_llm.llmapi": installed,
    }
    assert before == (list(sys.meta_path), torch.cuda.is_available, torch.cuda.is_current_stream_capturing)
