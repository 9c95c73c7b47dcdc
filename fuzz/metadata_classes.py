"""Upstream's classes that hold what a step, a request or a cache is about, and which of them are not in the engine."""

from __future__ import annotations

from typing import Final

_TWO_ENGINES = "for drafters that are engines of their own"
_RECORDS = "writes hidden states to files for training, and drafts nothing"
_TREES = "its buffers are those of SpecTreeManager here"

CLASSES: Final[dict[str, dict[str, str]]] = {
    "attention": {
        "AttentionMetadata": "",
        "TrtllmAttentionMetadata": "",
        "DSAtrtllmAttentionMetadata": "",
        "DeepseekV4TrtllmAttentionMetadata": "",
        "FlashInferAttentionMetadata": "",
        "VanillaAttentionMetadata": "",
        "RocketTrtllmAttentionMetadata": "edits the cached lengths that it is given, for caches that drop tokens",
        "RocketVanillaAttentionMetadata": "edits the cached lengths that it is given, for caches that drop tokens",
    },
    "parameters": {
        "KVCacheParams": "",
        "AttentionRuntimeFeatures": "",
        "DSAMetadataParams": "",
        "IndexerParams": "",
        "IndexerPrefillChunkMetadata": "",
    },
    "speculation": {
        "SpecMetadata": "",
        "Eagle3OneModelSpecMetadata": "",
        "MTPSpecMetadata": "",
        "PARDSpecMetadata": "",
        "DFlashSpecMetadata": "",
        "DraftTargetOneModelSpecMetadata": "",
        "SASpecMetadata": "",
        "DSparkSpecMetadata": "DFlash's does for it",
        "Eagle3SpecMetadata": _TWO_ENGINES,
        "SaveHiddenStatesSpecMetadata": _RECORDS,
        "MTPIndexShareMetadata": "a protocol: DSA's metadata has its attributes",
        "MTPIndexerScheduleTrimMetadata": "a protocol: DSA's metadata has its attributes",
        "LogitsProcessorMetadata": "for context logits that are returned, which no scenario asks for",
    },
    "per request": {
        "SlotManager": "",
        "Eagle3ResourceManager": "",
        "MTPHiddenStatesManager": "",
        "SeqSlotManager": "",
        "SuffixAutomatonManager": "",
        "SpecTreeManager": "",
        "CapturableGuidedDecoder": "",
        "Eagle3OneModelDynamicTreeResourceManager": _TREES,
        "MTPEagleDynamicTreeResourceManager": _TREES,
        "NGramPoolManager": _TWO_ENGINES,
        "SaveHiddenStatesResourceManager": _RECORDS,
        "BaseResourceManager": "an interface that all managers have",
    },
    "KV cache": {
        "KVCacheManager": "",
        "KVCacheManagerV2": "",
        "DSACacheManager": "",
        "DSACacheManagerV2": "",
        "DeepseekV4CacheManager": "",
        "DeepseekV4CacheManagerV2": "",
        "MambaHybridCacheManager": "",
        "BaseMambaCacheManager": "an interface of managers of states; there is one here",
    },
}
"""By what they are for: upstream's name, and why the portable engine has none of that name; empty if it has one."""
