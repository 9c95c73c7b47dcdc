"""The list of metadata names what upstream has, as far as the portable engine has it."""

from __future__ import annotations

import sys

import pytest

from fuzz import listing
from scenarios import BACKENDS, UsageError

UPSTREAM = {
    "attention": {
        "AttentionMetadata",
        "TrtllmAttentionMetadata",
        "DSAtrtllmAttentionMetadata",
        "FlashInferAttentionMetadata",
        "VanillaAttentionMetadata",
    },
    "speculation": {
        "SpecMetadata",
        "Eagle3OneModelSpecMetadata",
        "MTPSpecMetadata",
        "PARDSpecMetadata",
        "DFlashSpecMetadata",
        "DraftTargetOneModelSpecMetadata",
        "SASpecMetadata",
    },
    "per request": {
        "Eagle3ResourceManager",
        "MTPHiddenStatesManager",
        "SuffixAutomatonManager",
        "SpecTreeManager",
        "CapturableGuidedDecoder",
    },
    "KV cache": {"KVCacheManager", "KVCacheManagerV2", "DSACacheManager", "DSACacheManagerV2"},
}
"""By upstream's names. Not here yet: DeepSeek-V4 attention."""
OWN = {"CapturingSpecMetadata", "SpecResourceManager", "SeqSlotManager", "RelaxedDeltaManager"}
"""What upstream has under other names, or inside a worker."""


def test_metadata() -> None:
    pytest.importorskip("torch", reason="the portable engine needs torch")
    rows = listing.metadata()
    by_kind = {kind: {row["name"] for row in rows if row["kind"] == kind} - OWN for kind in UPSTREAM}
    assert by_kind == UPSTREAM
    assert {backend.metadata for backend in BACKENDS.values()} <= by_kind["attention"]
    assert all(row["summary"] for row in rows)


def test_metadata_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("engines.portable")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="the list of metadata needs torch; see `specfuzz doctor`"):
        listing.metadata()
