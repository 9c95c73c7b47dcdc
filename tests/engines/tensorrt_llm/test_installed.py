"""An installed package: imported as it is where there is CUDA, read like a checkout where there is none."""

from __future__ import annotations

import sys

import pytest
import torch

from engines import run
from engines.tensorrt_llm import TensorrtLlmEngine
from engines.tensorrt_llm.loader import Upstream
from engines.tensorrt_llm.source import find
from engines.tensorrt_llm.stand_ins import ROOTS
from engines.upstream import DRIVEN
from tests.engines.tensorrt_llm.cases import life
from tests.fixtures.tensorrt_llm_tree import build, install


@pytest.fixture
def package(tmp_path, monkeypatch):
    root = install(build(tmp_path, "post-fix"))
    monkeypatch.syspath_prepend(root)
    yield root
    for name in [n for n in sys.modules if n.partition(".")[0] in ROOTS]:
        del sys.modules[name]


def test_the_installed_package_is_found(package):
    source = find()
    assert source.installed
    assert source.root == package.resolve()


def test_with_cuda_everything_is_its_own(package):
    upstream = Upstream(find(), emulated=False)
    workers = [upstream.load(name) for name in DRIVEN]
    assert all(issubclass(worker, upstream.interface.SpecWorkerBase) for worker in workers)
    assert upstream.interface is sys.modules["tensorrt_llm._torch.speculative.interface"]
    assert upstream.module_of(workers[0]).__file__ == upstream.where(workers[0])
    assert set(upstream.files.values()) == {upstream.where(worker) for worker in workers} | {
        str(upstream.source.attention_file), str(upstream.source.interface_file)
    }  # fmt: skip
    assert issubclass(upstream.metadata["TRTLLM"], upstream.attention.AttentionMetadata)
    assert upstream.supplements == {}
    with upstream.active():
        assert torch.compile is not None
        assert torch.zeros(1).device.type == "cpu"


def test_without_cuda_its_files_are_read_like_a_checkouts(package):
    engine = TensorrtLlmEngine(device="cpu")
    assert not engine.upstream.source.installed
    trace = run(engine, life("MTPEagleWorker"))
    assert [step.outcome for step in trace.steps] == ["ok"] * 7
    assert "tensorrt_llm" not in sys.modules
