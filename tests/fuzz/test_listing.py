"""The list of metadata names what upstream has, as far as the portable engine has it."""

from __future__ import annotations

import sys

import pytest

from fuzz import listing
from fuzz.metadata_classes import CLASSES
from fuzz.options import target
from invariants import all_invariants
from scenarios import BACKENDS, WORKERS, UsageError

OWN = {"CapturingSpecMetadata", "SpecResourceManager", "RelaxedDeltaManager", "MambaHybridCacheManagerV2"}
"""What upstream has under other names, or inside a worker."""


def test_metadata() -> None:
    pytest.importorskip("torch", reason="the portable engine needs torch")
    rows = listing.metadata()
    assert {(row["kind"], row["name"]) for row in rows if row["name"] not in OWN} == {
        (kind, name) for kind, classes in CLASSES.items() for name in classes
    }
    assert len({row["name"] for row in rows}) == len(rows)
    absent = {row["name"] for row in rows if row["summary"].startswith("not in the portable engine: ")}
    assert absent == {name for classes in CLASSES.values() for name, why in classes.items() if why}
    assert {backend.metadata for backend in BACKENDS.values()} <= set(CLASSES["attention"]) - absent
    assert all(row["summary"] for row in rows)


def test_lists_go_by_the_worker() -> None:
    one = target(engine="portable", device="cpu", faults="seams", worker=["SAWorker"])
    every = target(engine="portable", device="cpu", faults="seams")
    assert [row["name"] for row in listing.rows("workers", one, ["--worker"])] == ["SAWorker"]
    assert {row["worker"] for row in listing.rows("bugs", one, ["--worker"])} == {"SAWorker"}
    names = {row["name"] for row in listing.rows("invariants", one, ["--worker"])}
    others = {row["name"] for row in listing.rows("invariants", every)} - names
    assert "process-survives" in names
    assert others == {i.slug for i in all_invariants() if i.trait and not getattr(WORKERS["SAWorker"], i.trait)}
    assert others


@pytest.mark.parametrize(
    ("what", "option"), [("metadata", "--worker"), ("bugs", "--engine"), ("invariants", "--faults")]
)
def test_an_option_that_a_list_does_not_go_by_is_refused(what: str, option: str) -> None:
    every = target(engine="portable", device="cpu", faults="seams")
    with pytest.raises(UsageError, match=f"^{option}: the list of {what} does not go by it; leave it out$"):
        listing.rows(what, every, [option])


def test_metadata_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("engines.portable")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="the list of metadata needs torch; see `specfuzz doctor`"):
        listing.metadata()
