"""Which drafter is configured, and what the rest of the engine may expect of it (upstream: in ``interface``).

Most questions are answered by other questions, as upstream does: so a mode that is added, or an answer that is
narrowed, changes whatever is built on it. ``reference.modes`` has the same answers as a table.
"""

from __future__ import annotations

from enum import IntEnum, auto

__all__ = ["SpeculativeDecodingMode"]


class SpeculativeDecodingMode(IntEnum):
    """The modes of upstream; those of one engine have a worker."""

    MTP = auto()
    MTP_EAGLE = auto()
    MTP_EAGLE_ONE_MODEL = auto()
    EAGLE3 = auto()
    EAGLE3_ONE_MODEL = auto()
    NGRAM = auto()
    SA = auto()
    DRAFT_TARGET = auto()
    DRAFT_TARGET_ONE_MODEL = auto()
    USER_PROVIDED = auto()
    SAVE_HIDDEN_STATES = auto()
    PARD = auto()
    DFLASH = auto()
    DSPARK = auto()
    NONE = auto()
    AUTO = auto()

    @classmethod
    def from_string(cls, name: str | None) -> SpeculativeDecodingMode:
        """The mode of that name, in any case; NONE for None. ``KeyError`` for another name."""
        return cls.NONE if name is None else cls[name.upper()]

    # Questions about one mode.

    def is_mtp_vanilla(self) -> bool:
        """Whether K MTP layers draft, one token each."""
        return self is SpeculativeDecodingMode.MTP

    def is_mtp_eagle(self) -> bool:
        """Whether an MTP layer drafts as a model of its own."""
        return self is SpeculativeDecodingMode.MTP_EAGLE

    def is_mtp_eagle_one_model(self) -> bool:
        """Whether one MTP layer drafts, again and again, in the target's engine."""
        return self is SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL

    def is_eagle3(self) -> bool:
        """Whether Eagle3 drafts as a model of its own."""
        return self is SpeculativeDecodingMode.EAGLE3

    def is_eagle3_one_model(self) -> bool:
        """Whether Eagle3 drafts in the target's engine."""
        return self is SpeculativeDecodingMode.EAGLE3_ONE_MODEL

    def is_ngram(self) -> bool:
        """Whether n-grams of the prompt are the drafts."""
        return self is SpeculativeDecodingMode.NGRAM

    def is_sa(self) -> bool:
        """Whether a suffix automaton drafts."""
        return self is SpeculativeDecodingMode.SA

    def is_draft_target(self) -> bool:
        """Whether a separate model in an engine of its own drafts."""
        return self is SpeculativeDecodingMode.DRAFT_TARGET

    def is_draft_target_one_model(self) -> bool:
        """Whether a separate model in the target's engine drafts."""
        return self is SpeculativeDecodingMode.DRAFT_TARGET_ONE_MODEL

    def is_user_provided(self) -> bool:
        """Whether the user brings the drafter."""
        return self is SpeculativeDecodingMode.USER_PROVIDED

    def is_save_hidden_states(self) -> bool:
        """Whether nothing is drafted and hidden states are written out."""
        return self is SpeculativeDecodingMode.SAVE_HIDDEN_STATES

    def is_pard(self) -> bool:
        """Whether PARD drafts."""
        return self is SpeculativeDecodingMode.PARD

    def is_dflash(self) -> bool:
        """Whether DFlash drafts."""
        return self is SpeculativeDecodingMode.DFLASH

    def is_dspark(self) -> bool:
        """Whether DSpark drafts."""
        return self is SpeculativeDecodingMode.DSPARK

    def is_none(self) -> bool:
        """Whether there is no speculation."""
        return self is SpeculativeDecodingMode.NONE

    # Questions about families.

    def is_mtp_one_model(self) -> bool:
        """Whether MTP layers draft in the target's engine: vanilla and Eagle.

        PR #12353 moved MTP-Eagle to Eagle3's worker; what asks for MTP's layers still means both.
        """
        return self.is_mtp_vanilla() or self.is_mtp_eagle_one_model()

    def is_parallel_draft(self) -> bool:
        """Whether one forward makes all drafts."""
        return self.is_pard() or self.is_dflash() or self.is_dspark()

    def is_external_drafter(self) -> bool:
        """Whether a model of its own, with its own weights, drafts in the target's engine."""
        return self.is_parallel_draft() or self.is_draft_target_one_model()

    def use_one_engine(self) -> bool:
        """Whether target and drafter are one model of one engine."""
        return self.is_mtp_one_model() or self.is_eagle3_one_model() or self.is_external_drafter() or self.is_sa()

    def without_logits(self) -> bool:
        """Whether the target's logits go to the worker and not to the sampler."""
        return self.use_one_engine()

    def needs_kv_cache_rewind(self) -> bool:
        """Whether what is not accepted must be taken off the KV cache."""
        return self.use_one_engine() or self.is_ngram()

    def needs_kv_cache_recompute(self) -> bool:
        """Whether the drafter computes its cache again in each step."""
        return self.is_eagle3() or self.is_mtp_eagle()

    def has_draft_model(self) -> bool:
        """Whether a second engine runs the drafter."""
        return self.is_eagle3() or self.is_draft_target() or self.is_mtp_eagle()

    def need_load_draft_weights(self) -> bool:
        """Whether the drafter's weights are not the target's."""
        return self.is_eagle3_one_model() or self.is_external_drafter()

    def has_spec_decoder(self) -> bool:
        """Whether the mode has a sampler of its own."""
        return self.use_one_engine() or self.is_mtp_eagle() or self.is_eagle3()

    def has_spec_drafter(self) -> bool:
        """Whether a drafter outside the target's engine proposes tokens."""
        return self.has_draft_model() or self.is_ngram() or self.is_user_provided()

    # Questions about other features.

    def support_overlap_scheduler(self) -> bool:
        """Whether the next step may be prepared while this one runs."""
        return self.use_one_engine() or self.has_draft_model()

    def support_guided_decoder(self) -> bool:
        """Whether a grammar on the host can guide it."""
        return self.is_none() or self.has_spec_drafter()

    def support_capturable_guided_decoder(self) -> bool:
        """Whether a grammar can guide it from within a CUDA graph."""
        return self.use_one_engine()

    def support_dynamic_draft_len(self) -> bool:
        """Whether K may change from step to step; DSpark's block is fixed."""
        return self.use_one_engine() and not self.is_dspark()
