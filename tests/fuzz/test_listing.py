"""The list of metadata names what upstream has, as far as the portable engine has it."""

from __future__ import annotations

import sys

import pytest

from fuzz import listing
from fuzz.metadata_classes import CLASSES
from scenarios import BACKENDS, UsageError

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


def test_metadata_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("engines.portable")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="the list of metadata needs torch; see `specfuzz doctor`"):
        listing.metadata()
