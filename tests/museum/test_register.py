"""What is registered: ids, entries, one file each. Needs no torch, and neither does listing the defects."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import museum
from museum import BUGS, Bug, Patch, bug, find, nearest, seeded
from scenarios import WORKERS, UsageError
from tests.museum.scenario_of import SCENARIOS

MUSEUM = {
    "TRT": "01-04 06 07 09 10 12 13 16 17 19-21 23-27 29 30 32-37 39-43 45-47 49-52 54 56-58 60 62-66 68-71 73 75 77 78"
    " 80-83 85 87 88 90 91 93-95 97-102 110 120 121 130 131 140 150 155 160-162",
    "VLL": "02-08 10-15 18-23",
    "SGL": "01 03 04 06-08 10-12",
}
"""The bug museum: bugs of TensorRT-LLM, vLLM with its plug-ins, and SGLang; public ones but for TRT-98 and later."""


def _entries() -> set[str]:
    entries = set()
    for engine, numbers in MUSEUM.items():
        for part in numbers.split():
            first, _, last = part.partition("-")
            entries |= {f"{engine}-{n:02}" for n in range(int(first), int(last or first) + 1)}
    return entries


@pytest.mark.exhaustive(every=8)
@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.id)
def test_a_defect_says_what_it_is(bug: Bug) -> None:
    entry, worker, *variant = bug.id.split("/")
    assert entry in _entries()
    assert worker == bug.worker
    assert worker in WORKERS
    assert len(variant) <= 1
    assert re.fullmatch(r"K([1-9]|1[0-4])", bug.kind)
    assert re.fullmatch(
        r"(TensorRT-LLM|vLLM|vllm-metal|vllm-ascend|SGLang)( #\d+(, #\d+)*|, no public number)", bug.reference
    )
    assert bug.title[0].isupper()
    assert not bug.title.endswith(".")
    assert len(bug.title) <= 120
    assert bug.caught_by


def test_each_entry_is_seeded_or_a_page_says_why_not() -> None:
    pages = ("docs/add-a-seeded-defect.md", "docs/kv-cache.md")
    root = Path(__file__).parents[2]
    explained = {entry for page in pages for entry in re.findall(r"^\| (\w+-\d+) \|", (root / page).read_text(), re.M)}
    assert explained == _entries() - {bug.id.partition("/")[0] for bug in BUGS.values()}


def test_each_entry_is_the_file_of_its_name() -> None:
    files = {path.stem for path in Path(museum.__file__).parent.glob("*.py")} - {"__init__", "bug"}
    assert files == {bug.id.partition("/")[0].replace("-", "_").lower() for bug in BUGS.values()}


def test_each_scenario_is_some_defects() -> None:
    without_worker = {"/".join(part for part in bug.id.split("/") if part != bug.worker) for bug in BUGS.values()}
    assert set(SCENARIOS) - without_worker <= set(BUGS)


def test_the_incidents_that_issues_name_are_there() -> None:
    linear = {"Eagle3OneModelWorker", "MTPEagleWorker", "DraftTargetOneModelWorker"}
    workers = {
        entry: {bug.worker for bug in BUGS.values() if bug.id.startswith(entry)} for entry in ("TRT-01", "TRT-03")
    }
    trees = {"Eagle3OneModelDynamicTreeWorker", "MTPEagleDynamicTreeWorker"}
    assert workers == {
        "TRT-01": {*linear, *trees, "PARDWorker", "MTPWorker", "DFlashWorker", "DSparkWorker"},
        "TRT-03": linear | trees,
    }
    assert {"TRT-04/Eagle3OneModelWorker", "TRT-06/Eagle3OneModelWorker"} <= set(BUGS)


def test_an_id_is_taken_once() -> None:
    taken = next(iter(BUGS.values()))
    register = bug(
        taken.id.partition("/")[0], kind="K1", workers=(taken.worker,), title="T", reference="r", caught_by=()
    )
    with pytest.raises(ValueError, match=f"^museum: {taken.id} is registered twice; name a variant$"):
        register(lambda patch: None)
    assert BUGS[taken.id] is taken


def test_an_unknown_defect_is_refused_with_the_closest() -> None:
    with pytest.raises(UsageError, match=r"^bug: none is called 'TRT-2/DSparkWorker'; did you mean 'TRT-02/"):
        find("TRT-2/DSparkWorker")
    # Of an entry that exists, another entry's defect is not what was meant, however alike the names are.
    for id, remedy in (
        ("TRT-03/PARDWorker", "write one of TRT-03/Eagle3OneModelWorker, TRT-03/MTPEagleWorker, "),
        ("trt-03/MTPEagleWorkr", "did you mean 'TRT-03/MTPEagleWorker'?"),
        ("TRT-01/Nobody", "see `specfuzz list bugs`"),
        ("zzz", "see `specfuzz list bugs`"),
    ):
        assert nearest(id).startswith(remedy)
    with seeded(None) as nothing:
        assert nothing is None


def test_listing_needs_no_torch() -> None:
    code = "import museum, sys; print('torch' in sys.modules, len(museum.BUGS))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", str(len(BUGS))]


class Parent:
    limit = 1

    def ask(self) -> str:
        return "parent"


class Child(Parent):
    pass


def test_a_patch_ends_with_the_block_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(patch: Patch) -> None:
        patch(Child, "ask", lambda self: "patched")
        patch(Parent, "limit", 2)

    monkeypatch.setitem(BUGS, "X", Bug("X", "K1", "PARDWorker", "T", "r", (), apply))
    with pytest.raises(RuntimeError, match="inside"), seeded("X") as found:
        assert found is BUGS["X"]
        assert (Child().ask(), Parent().ask(), Parent.limit) == ("patched", "parent", 2)
        raise RuntimeError("inside")
    assert (Child().ask(), Parent.limit) == ("parent", 1)
    assert "ask" not in vars(Child)
