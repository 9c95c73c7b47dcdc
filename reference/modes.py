"""What upstream answers about each of its modes, as a table: the oracle of ``SpeculativeDecodingMode``.

Read off ``speculative/interface.py`` at commit 00b6d5a25c30. Modes are numbered from 1 in this order.
"""

from __future__ import annotations

from typing import Final

MODES: Final = (
    "MTP",
    "MTP_EAGLE",
    "MTP_EAGLE_ONE_MODEL",
    "EAGLE3",
    "EAGLE3_ONE_MODEL",
    "NGRAM",
    "SA",
    "DRAFT_TARGET",
    "DRAFT_TARGET_ONE_MODEL",
    "USER_PROVIDED",
    "SAVE_HIDDEN_STATES",
    "PARD",
    "DFLASH",
    "DSPARK",
    "NONE",
    "AUTO",
)
"""Names in the order of their values."""

ANSWERS: Final[dict[str, frozenset[str]]] = {
    "is_mtp_one_model": frozenset(["MTP", "MTP_EAGLE_ONE_MODEL"]),
    "is_parallel_draft": frozenset(["PARD", "DFLASH", "DSPARK"]),
    "is_external_drafter": frozenset(["DRAFT_TARGET_ONE_MODEL", "PARD", "DFLASH", "DSPARK"]),
    "use_one_engine": frozenset(
        ["MTP", "MTP_EAGLE_ONE_MODEL", "EAGLE3_ONE_MODEL", "SA", "DRAFT_TARGET_ONE_MODEL", "PARD", "DFLASH", "DSPARK"]
    ),
    "needs_kv_cache_rewind": frozenset(
        [
            "MTP",
            "MTP_EAGLE_ONE_MODEL",
            "EAGLE3_ONE_MODEL",
            "NGRAM",
            "SA",
            "DRAFT_TARGET_ONE_MODEL",
            "PARD",
            "DFLASH",
            "DSPARK",
        ]
    ),
    "has_draft_model": frozenset(["MTP_EAGLE", "EAGLE3", "DRAFT_TARGET"]),
    "support_overlap_scheduler": frozenset(
        [
            "MTP",
            "MTP_EAGLE",
            "MTP_EAGLE_ONE_MODEL",
            "EAGLE3",
            "EAGLE3_ONE_MODEL",
            "SA",
            "DRAFT_TARGET",
            "DRAFT_TARGET_ONE_MODEL",
            "PARD",
            "DFLASH",
            "DSPARK",
        ]
    ),
    "has_spec_drafter": frozenset(["MTP_EAGLE", "EAGLE3", "NGRAM", "DRAFT_TARGET", "USER_PROVIDED"]),
    "support_guided_decoder": frozenset(["MTP_EAGLE", "EAGLE3", "NGRAM", "DRAFT_TARGET", "USER_PROVIDED", "NONE"]),
    "support_capturable_guided_decoder": frozenset(
        ["MTP", "MTP_EAGLE_ONE_MODEL", "EAGLE3_ONE_MODEL", "SA", "DRAFT_TARGET_ONE_MODEL", "PARD", "DFLASH", "DSPARK"]
    ),
    "support_dynamic_draft_len": frozenset(
        ["MTP", "MTP_EAGLE_ONE_MODEL", "EAGLE3_ONE_MODEL", "SA", "DRAFT_TARGET_ONE_MODEL", "PARD", "DFLASH"]
    ),
    "needs_kv_cache_recompute": frozenset(["MTP_EAGLE", "EAGLE3"]),
    "need_load_draft_weights": frozenset(["EAGLE3_ONE_MODEL", "DRAFT_TARGET_ONE_MODEL", "PARD", "DFLASH", "DSPARK"]),
    "has_spec_decoder": frozenset(
        [
            "MTP",
            "MTP_EAGLE",
            "MTP_EAGLE_ONE_MODEL",
            "EAGLE3",
            "EAGLE3_ONE_MODEL",
            "SA",
            "DRAFT_TARGET_ONE_MODEL",
            "PARD",
            "DFLASH",
            "DSPARK",
        ]
    ),
    "without_logits": frozenset(
        ["MTP", "MTP_EAGLE_ONE_MODEL", "EAGLE3_ONE_MODEL", "SA", "DRAFT_TARGET_ONE_MODEL", "PARD", "DFLASH", "DSPARK"]
    ),
    "is_mtp_vanilla": frozenset(["MTP"]),
    "is_mtp_eagle": frozenset(["MTP_EAGLE"]),
    "is_mtp_eagle_one_model": frozenset(["MTP_EAGLE_ONE_MODEL"]),
    "is_eagle3": frozenset(["EAGLE3"]),
    "is_eagle3_one_model": frozenset(["EAGLE3_ONE_MODEL"]),
    "is_ngram": frozenset(["NGRAM"]),
    "is_sa": frozenset(["SA"]),
    "is_draft_target": frozenset(["DRAFT_TARGET"]),
    "is_draft_target_one_model": frozenset(["DRAFT_TARGET_ONE_MODEL"]),
    "is_user_provided": frozenset(["USER_PROVIDED"]),
    "is_save_hidden_states": frozenset(["SAVE_HIDDEN_STATES"]),
    "is_pard": frozenset(["PARD"]),
    "is_dflash": frozenset(["DFLASH"]),
    "is_dspark": frozenset(["DSPARK"]),
    "is_none": frozenset(["NONE"]),
}
"""Question -> modes for which the answer is yes."""
