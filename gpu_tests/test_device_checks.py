"""Sub-steps compared on the CUDA device, inside graphs too.

What is verified:

1. The clean engine has no mismatch, for every worker and backend, in eager steps, captures and replays, with torch's
   kernels and with Triton's; with the overlap scheduler, recurrent layers, proposals, pages that are reused and shards
   of a vocabulary, too.
2. Stale state of a replay is found where it is read first, between the ends of the replay (TRT-63, TRT-88, VLL-11), and
   so are a correction that is missing in a graph (TRT-150), states and proposals of another row (TRT-57, TRT-10).
3. A length that is wrong inside a graph only is found in its step, sub-step, field and row, though each trace is right.
4. Comparing waits for nothing: torch, told to raise where it synchronises, raises in a step that is traced and in none
   that is compared on the device, but for what the engine itself waits for.
5. After each test the device still computes.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from benchmarks.gpu.serving import most_dimensions, serving
from engines import kernels, run
from engines.portable import PortableEngine
from engines.portable.device_checks import DeviceChecks
from engines.portable.observation import Observer
from fuzz.on_device import DeviceHunt
from museum import BUGS, seeded
from scenarios import WORKERS, Phase
from scenarios.backends import runs_on
from scenarios.trace import UNREADABLE
from tests.museum.scenario_of import scenario_of
from tests.wrong_inside import ROW, WORKER, wrong_inside

STALE = {
    "TRT-63/Eagle3OneModelWorker/replay": "draft[1] (run 0) input_ids",
    "TRT-88/PARDWorker": "verified (run 0) kv_lens_cuda",
    "VLL-11/Eagle3OneModelWorker": "draft[0] (run 0) input_ids",
    "TRT-150/Eagle3OneModelWorker/captured": "verified (run 0) kv_lens_cuda",
    "TRT-57/Eagle3OneModelWorker/captured": "restored (run 0) ssm_states",
    "TRT-10/Eagle3OneModelWorker/scratch": "restored (run 0) draft_probs",
}


@pytest.fixture(params=kernels.NAMES, autouse=True)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv(kernels.ENVIRONMENT, request.param)


def hunt() -> DeviceHunt:
    return DeviceHunt(PortableEngine("cuda"))


@pytest.mark.parametrize(("worker", "backend"), [(w, b) for b in ("TRTLLM", "DSA") for w in WORKERS if runs_on(w, b)])
def test_clean(worker: str, backend: str) -> None:
    checked = hunt()
    assert checked.run(serving(worker, batch=6, draft_len=3, steps=4, backend=backend)) is None
    assert checked.read() is None


@pytest.mark.parametrize("worker", WORKERS)
def test_clean_in_all_dimensions_that_a_worker_has(worker: str) -> None:
    checked = hunt()
    assert checked.run(serving(worker, batch=6, draft_len=3, steps=4, **most_dimensions(worker, "TRTLLM"))) is None
    assert checked.read() is None


@pytest.mark.parametrize(("bug", "place"), STALE.items())
def test_stale_state_of_a_replay(bug: str, place: str) -> None:
    scenario = scenario_of(BUGS[bug])
    with seeded(bug):
        checked = hunt()
        finding = checked.run(scenario) or checked.read()
        assert finding is not None
    assert scenario.steps[finding.step].phase is Phase.REPLAY
    assert finding.mismatch.startswith(place)
    assert finding.violations


def test_wrong_inside_a_graph_only() -> None:
    scenario = serving(WORKER, batch=4, draft_len=3, steps=3)
    with wrong_inside():
        checked = hunt()
        finding = checked.run(scenario) or checked.read()
    assert finding is not None
    assert (finding.step, finding.violations) == (2, ())
    assert finding.mismatch.startswith(f"draft[1] (run 0) kv_lens_cuda[{ROW}] ")
    assert "and 2 more" in finding.mismatch, "one for each replay"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_comparing_waits_for_nothing() -> None:
    scenario = serving(WORKER, batch=4, draft_len=3, steps=3, phase=Phase.EAGER)

    def guarded(method: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    with mock.patch.object(Observer, "entered", guarded(Observer.entered)):
        observed = run(PortableEngine("cuda"), scenario).steps[0].find(UNREADABLE)
    assert observed is not None
    assert "sync" in observed["message"], "what is read on the host waits"
    names = ("prepared", "entered", "verified", "saved", "drafting", "worker_returned", "replay_begins", "replayed")
    names += ("launched", "updated")
    with mock.patch.multiple(DeviceChecks, **{name: guarded(getattr(DeviceChecks, name)) for name in names}):
        checked = hunt()
        assert checked.run(scenario) is None
        assert checked.run(serving(WORKER, batch=4, draft_len=3, steps=3)) is None
        assert checked.run(serving(WORKER, batch=4, draft_len=3, steps=3, **most_dimensions(WORKER, "TRTLLM"))) is None
    assert checked.read() is None
