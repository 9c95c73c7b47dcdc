"""Source lines as sites. The monitored code is a module written for the test: its lines are in sight."""

from __future__ import annotations

import importlib.util
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from faults import LINES, InjectedFault, Seam, SiteClass, Sites, raised_at
from scenarios import Fault, FaultKind, UsageError

monitored = pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")

WORKER = """\
class Worker:
    def __init__(self):
        self.log = []
        self.lens = [4, 4]

    def forward(self, drafts):
        saved = list(self.lens)
        try:
            for i in range(drafts):
                self.draft(i)
        except ValueError:
            self.log.append("not reached")
        finally:
            self.lens = list(saved)
            self.log.append("restored")
        return sum(self.lens)

    def draft(self, i):
        self.lens[0] += i
        self.log.append(f"draft {i}")

    def guarded(self):
        with self:
            self.draft(0)

    def __enter__(self):
        self.log.append("enter")

    def __exit__(self, *exc_info):
        self.log.append("exit")

    def restore(self):
        self.log.append("put back")


def rows(n):
    for i in range(n):
        yield str(i)


total = sum(int(r) for r in rows(3))
"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    path = tmp_path / "engine" / "worker.py"
    path.parent.mkdir()
    path.write_text(WORKER)
    return load(path)


@pytest.fixture
def worker(module: ModuleType) -> Any:
    return module.Worker()


@pytest.fixture
def sites(module: ModuleType, tmp_path: Path) -> Iterator[Sites]:
    with Sites(roots=[tmp_path / "engine"], base=tmp_path) as sites:
        yield sites


def line(text: str) -> int:
    """Number of the first line of the worker with this text."""
    return next(i for i, each in enumerate(WORKER.splitlines(), 1) if text in each)


def site(text: str) -> str:
    return f"line:engine/worker.py:{line(text)}"


def plan(text: str, occurrence: int = 1) -> Fault:
    return Fault(site=site(text), occurrence=occurrence, kind=FaultKind.ERROR)


def tool_ids() -> list[str | None]:
    return [sys.monitoring.get_tool(i) for i in range(6)] if sys.version_info >= (3, 12) else []


@monitored
def test_counts_are_how_often_each_line_ran(worker: Any, sites: Sites) -> None:
    with sites.bracket(record=[LINES]) as bracket:
        worker.forward(3)
    assert bracket.counts == {
        site("saved = list"): 1,
        site("for i in range(drafts)"): 4,
        site("self.draft(i)"): 3,
        site("self.lens[0] += i"): 3,
        site("draft {i}"): 3,
        site("return sum"): 1,
    }


@monitored
@pytest.mark.parametrize("record", [(), (LINES,)], ids=["unrecorded", "recorded"])
def test_the_fault_surfaces_at_its_line_and_cleanup_runs(worker: Any, sites: Sites, record: tuple[str, ...]) -> None:
    with sites.bracket(plan("draft {i}", 2), record) as bracket:
        with pytest.raises(InjectedFault) as caught:
            worker.forward(3)
        assert worker.log == ["draft 0", "restored"]
        assert worker.lens == [4, 4]
        worker.forward(3)
    assert (bracket.fired, bracket.raised) == (1, caught.value)
    frames = [f for f in traceback.extract_tb(caught.value.__traceback__) if f.filename.endswith("worker.py")]
    assert [f.lineno for f in frames] == [line("self.draft(i)"), line("draft {i}")]
    assert str(raised_at(caught.value)).endswith(f"worker.py:{line('draft {i}')}")


@monitored
def test_a_fault_in_a_generator(module: ModuleType, sites: Sites) -> None:
    with sites.bracket(plan("yield str", 2)):
        generator = module.rows(3)
        assert next(generator) == "0"
        with pytest.raises(InjectedFault):
            next(generator)


@monitored
def test_the_moment_a_with_block_is_left_is_restore_code(worker: Any, sites: Sites) -> None:
    with sites.bracket(record=[LINES]) as bracket:
        worker.guarded()
    assert bracket.counts[site("with self")] == 1
    assert site('"exit"') not in bracket.counts
    assert worker.log == ["enter", "draft 0", "exit"]


@monitored
def test_entering_a_with_block_can_fail(worker: Any, sites: Sites) -> None:
    with pytest.raises(InjectedFault), sites.bracket(plan("with self")):
        worker.guarded()
    assert worker.log == []


@monitored
def test_double_faults_reach_finally_blocks_and_exits(worker: Any, sites: Sites) -> None:
    with sites.bracket(record=[LINES], double=True) as bracket:
        worker.forward(0)
        worker.guarded()
    assert bracket.counts[site('"restored"')] == 1
    assert bracket.counts[site("with self")] == 2
    assert bracket.counts[site('"exit"')] == 1
    with pytest.raises(InjectedFault), sites.bracket(plan('"restored"'), double=True):
        worker.forward(0)


@monitored
def test_restore_seams_and_shelters_hide_lines(worker: Any, module: ModuleType, tmp_path: Path) -> None:
    seam = Seam("worker.restore", worker, "restore", SiteClass.RESTORE)
    with Sites([seam], roots=[tmp_path]) as sites, sites.bracket(record=[LINES]) as bracket:
        worker.restore()
        with sites.shelter():
            worker.draft(1)
    assert worker.log == ["put back", "draft 1"]
    assert bracket.counts == {}


@monitored
def test_other_files_are_not_monitored(worker: Any, sites: Sites, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(WORKER)
    other = load(tmp_path / "other.py").Worker()
    with sites.bracket(record=[LINES]) as bracket:
        other.forward(2)
    assert bracket.counts == {}


@monitored
@pytest.mark.parametrize(
    ("roots", "base", "name"),
    [
        (["engine"], None, "worker.py"),
        (["engine/worker.py"], None, "worker.py"),
        (["."], None, "engine/worker.py"),
        (["elsewhere", "engine"], ".", "engine/worker.py"),
    ],
)
def test_paths_are_relative_to_the_base_or_the_root(
    worker: Any, tmp_path: Path, roots: list[str], base: str | None, name: str
) -> None:
    where = tmp_path / base if base else None
    with Sites(roots=[tmp_path / r for r in roots], base=where) as sites, sites.bracket(record=[LINES]) as bracket:
        worker.restore()
    assert bracket.counts == {f"line:{name}:{line('put back')}": 1}


@monitored
def test_code_loaded_at_any_time_is_found(sites: Sites, tmp_path: Path) -> None:
    late = tmp_path / "engine" / "late.py"
    late.write_text("def run():\n    return str(1)\n")
    with sites.bracket(record=[LINES]) as bracket:
        load(late).run()
    assert bracket.counts["line:engine/late.py:2"] == 1


@monitored
def test_every_load_of_a_file_is_monitored(sites: Sites, tmp_path: Path) -> None:
    late = tmp_path / "engine" / "late.py"
    late.write_text("def run():\n    return str(1)\n")
    first, second = load(late), load(late)
    for module in (first, second, first):
        with sites.bracket(record=[LINES]) as bracket:
            module.run()
        assert bracket.counts == {"line:engine/late.py:2": 1}


@monitored
def test_the_suite_s_own_lines_are_never_sites() -> None:
    import faults

    package = Path(faults.__file__).parent
    with Sites(roots=[package]) as sites, sites.bracket(record=[LINES]) as bracket:
        with sites.shelter():
            pass
        faults.torch_site("clone")
    assert bracket.counts == {}


@monitored
@pytest.mark.parametrize("fails", [False, True])
def test_the_tool_id_is_free_again_and_no_events_stay(worker: Any, sites: Sites, fails: bool) -> None:
    before = tool_ids()
    code = type(worker).draft.__code__
    try:
        with sites.bracket(plan("draft {i}") if fails else None, [LINES]):
            during = tool_ids()
            worker.draft(0)
    except InjectedFault:
        assert fails
    assert [i for i in range(6) if during[i] != before[i]] == [4]
    assert tool_ids() == before
    sys.monitoring.use_tool_id(4, "test")
    try:
        assert sys.monitoring.get_local_events(4, code) == 0
        assert sys.monitoring.register_callback(4, sys.monitoring.events.LINE, None) is None
    finally:
        sys.monitoring.free_tool_id(4)


@monitored
def test_tracing_is_left_alone(worker: Any, sites: Sites) -> None:
    def trace(*_: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with sites.bracket(record=[LINES]):
            worker.draft(0)
            during = sys.gettrace()
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert (during, after) == (trace, trace)


@monitored
def test_a_second_session_takes_the_next_free_id(worker: Any, sites: Sites, tmp_path: Path) -> None:
    with Sites(roots=[tmp_path]) as second, sites.bracket(record=[LINES]) as outer:
        with second.bracket(record=[LINES]) as inner:
            worker.draft(0)
        worker.draft(1)
    assert outer.counts[site("draft {i}")] == 2
    assert inner.counts[site("draft {i}")] == 1


@monitored
def test_without_a_free_id_the_message_says_so(sites: Sites) -> None:
    taken = [i for i in (3, 4, 5) if sys.monitoring.get_tool(i) is None]
    for i in taken:
        sys.monitoring.use_tool_id(i, "test")
    try:
        with pytest.raises(UsageError, match="line sites need a free"), sites.bracket(record=[LINES]):
            pass
    finally:
        for i in taken:
            sys.monitoring.free_tool_id(i)
    with sites.bracket(record=[LINES]):
        pass


@monitored
def test_other_threads_are_not_counted(worker: Any, sites: Sites) -> None:
    with sites.bracket(plan("draft {i}"), [LINES]) as bracket:
        thread = threading.Thread(target=worker.draft, args=(0,))
        thread.start()
        thread.join()
    assert worker.log == ["draft 0"]
    assert (bracket.counts, bracket.fired) == ({}, 0)


@monitored
def test_line_sites_need_source_folders(worker: Any) -> None:
    with Sites() as sites, pytest.raises(UsageError, match="names no source folders"):
        with sites.bracket(record=[LINES]):
            pass


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="line sites work from Python 3.12 on")
@pytest.mark.parametrize(
    "open_bracket",
    [
        lambda s: s.bracket(record=[LINES]),
        lambda s: s.bracket(Fault(site="line:a.py:1", occurrence=1, kind=FaultKind.OOM)),
    ],
    ids=["recording", "planned"],
)
def test_an_older_python_is_named(sites: Sites, open_bracket: Callable[[Sites], Any]) -> None:
    with pytest.raises(UsageError, match=r"^line sites need Python 3.12 or newer, this is 3.1[01]; use seams"):
        with open_bracket(sites):
            pass
    with sites.bracket():
        pass
