"""The Triton kernels give the bits of the torch operations that they stand for, interpreted on the CPU.

The same comparisons run on a device in ``gpu_tests/test_kernels.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

pytest.importorskip("torch", reason="the kernels need torch")

import torch

from engines import kernels
from tests.kernel_comparisons import COMPARISONS, Comparison

MISSING = [name for name in ("triton", "numpy") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"to interpret the kernels install {' and '.join(MISSING)}")


@pytest.fixture(scope="module", autouse=True)
def _interpreted() -> Iterator[None]:
    if "triton" in sys.modules:
        pytest.skip("Triton was imported by other tests already, and compiles from then on; run this file alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with kernels.using("triton"):
            assert kernels.triton_for(torch.zeros(1)) is not None, "torch would be compared with itself"
        yield


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.__name__)
def test_same_bits(comparison: Comparison) -> None:
    comparison("cpu")
