"""Ways to make, to read and to accept drafts, what they ask of draft lengths, agreements and matches, several ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from scenarios import Config
from scenarios import forced_acceptance as forced
from strategies.choices import Draw, choose, digits, pick

_FORCES: Final = (*(0.0,) * 9, 1.0, 0.5, 1.5, 2.75, 3.0, 0.25, 32.0)
"""Mostly none; the last one is everything at any draft length."""
_OWN_VOCABULARY: Final = (False, False, False, True)
_THRESHOLDS: Final = (0, 0, 0, 1, 3, 8)
_RANKS: Final = (1, 1, 1, 1, 1, 2, 3, 2)


def draw_variants(draw: Draw, config: Config, variants: Collection[str]) -> Config:
    """``config`` with some of the ``variants``, names of ``scenarios.acceptance.VARIANTS``, that its worker has."""
    # Drawn for any worker: otherwise those would be the simplest that have the fewest choices.
    force = choose(draw, _FORCES) if "force_num_accepted_tokens" in variants else 0.0
    vocabulary = choose(draw, _OWN_VOCABULARY) if "draft_vocab_map" in variants else False
    threshold = choose(draw, _THRESHOLDS) if "sa_threshold" in variants else 0
    ranks = choose(draw, _RANKS) if "attention_dp_size" in variants else 1
    return replace(
        config,
        force_num_accepted_tokens=force if config.traits.drafts_for_contexts else 0.0,
        draft_vocab_map=vocabulary and config.traits.draft_vocab,
        sa_threshold=threshold if config.traits.sa_enhancer else 0,
        attention_dp_size=ranks,
        attention_dp_rank=pick(draw, ranks),
    )


def draw_matches(draw: Draw, config: Config, rows: int) -> list[int]:
    """How long the matches of suffix automata are, for each of so many generations; 0 where there are no automata."""
    threshold = config.sa_threshold
    if not threshold:
        return [0] * rows
    # None, just enough, just not, more than enough.
    lengths = [min(n, config.max_seq_len) for n in (0, threshold, threshold - 1, 4 * threshold)]
    return [lengths[i] for i in digits(draw, (len(lengths),) * rows)]


def least_agreement(config: Config, draft_len: int) -> int:
    """With how many of ``draft_len`` drafts the target has to agree, as so many may be accepted by force."""
    force = config.force_num_accepted_tokens
    return forced.most(force, draft_len) - 1 if force else 0
