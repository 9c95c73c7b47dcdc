"""Ways to make, to read and to accept drafts, what they ask of draft lengths, agreements and matches, several ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from scenarios import Config
from scenarios import forced_acceptance as forced
from scenarios.overlap import overlaps_on
from scenarios.ragged import ragged_on
from scenarios.rows import recurs_on
from strategies.choices import Draw, choose, digits, pick
from strategies.widths import holds_several

_FORCES: Final = (*(0.0,) * 8, 1.0, 0.5, 1.5, 2.75, 1.5, 0.25, 0.5, 32.0)
"""Half of them none; then mostly fractions, which need a counter. The last one is everything at any draft length."""
_OWN_VOCABULARY: Final = (False, False, False, True)
_GUIDED: Final = (False, False, False, True)
_RELAXED: Final = (*((0, 0.0),) * 9, (2, 0.5), (2, 0.5), (4, 0.5), (1, 0.5), (2, 0.125))
"""``relaxed_topk`` and ``relaxed_delta``: mostly none, then such that take second choices, then such that do not."""
_THINKING: Final = (False, True, True)
_THRESHOLDS: Final = (0, 0, 1, 3, 3, 8)
_RANKS: Final = (1, 1, 1, 1, 1, 2, 3, 2)
_REPLICAS: Final = (1, 1, 1, 1, 1, 2, 3)
_OVERLAP: Final = (False, False, False, True)
_RAGGED: Final = (*((False, False),) * 3, (True, False), (True, True))
"""Whether generations verify numbers of drafts of their own, and whether that is to meet the overlap scheduler."""
_ROWS: Final = (*((False, False),) * 3, *((True, False),) * 3, *((False, True),) * 2, (True, True))
"""Whether the target has recurrent layers, and whether drafts are verified by proposals.

Both often: recurrent layers give way to pages that are reused and to sparse attention, and proposals go wrong where
rows have made unequal numbers of drafts, which is rare in itself."""


def draw_variants(draw: Draw, config: Config, variants: Collection[str]) -> Config:
    """``config`` with some of the ``variants``, names of ``scenarios.acceptance.VARIANTS``, that its worker has."""
    # Drawn for any worker: otherwise those would be the simplest that have the fewest choices.
    force = choose(draw, _FORCES) if "force_num_accepted_tokens" in variants else 0.0
    vocabulary = choose(draw, _OWN_VOCABULARY) if "draft_vocab_map" in variants else False
    guided = choose(draw, _GUIDED) if "guided_decoding" in variants else False
    topk, delta = choose(draw, _RELAXED) if "use_relaxed_acceptance_for_thinking" in variants else _RELAXED[0]
    guided = guided and not config.traits.tree and not config.shares_target_kv
    if guided or not config.traits.relaxed_acceptance:
        topk, delta = _RELAXED[0]
    # These are not combined with others.
    alone = guided or topk > 0
    forces = config.traits.drafts_for_contexts and not alone
    threshold = choose(draw, _THRESHOLDS) if "sa_threshold" in variants else 0
    overlap = choose(draw, _OVERLAP) if "overlap" in variants else False
    recurrent, rejection = _draw_rows(draw, config, variants)
    rejection = rejection and not (forces and force)
    if rejection:
        # What else it is not combined with gives way.
        topk, delta, threshold = *_RELAXED[0], 0
    ragged, meets_overlap = choose(draw, _RAGGED) if "ragged_verify" in variants else _RAGGED[0]
    if ragged and ragged_on(config.worker, config.attention_backend) and holds_several(config):
        # What it is not combined with gives way.
        forces, guided, topk, delta, threshold = False, False, *_RELAXED[0], 0
        overlap = overlap or (meets_overlap and "overlap" in variants)
        config = replace(config, ragged_verify=True)
    config = replace(config, recurrent=recurrent, rejection_sampling=rejection)
    ranks = choose(draw, _RANKS) if "attention_dp_size" in variants else 1
    ranks = 1 if config.ragged_verify else ranks
    rank = pick(draw, ranks)
    shards = choose(draw, _REPLICAS) if "tp_size" in variants else 1
    if ranks > 1 or guided or not config.traits.shares_draft_head:
        shards = 1
    config = replace(config, tp_size=shards, tp_rank=pick(draw, shards))
    return replace(
        config,
        force_num_accepted_tokens=force if forces else 0.0,
        draft_vocab_map=vocabulary and config.traits.draft_vocab,
        guided_decoding=guided,
        use_relaxed_acceptance_for_thinking=topk > 0,
        relaxed_topk=topk,
        relaxed_delta=delta,
        sa_threshold=threshold if config.traits.sa_enhancer and not alone and not config.shares_target_kv else 0,
        attention_dp_size=ranks,
        attention_dp_rank=rank,
        overlap=overlap and overlaps_on(config.attention_backend),
    )


def _draw_rows(draw: Draw, config: Config, variants: Collection[str]) -> tuple[bool, bool]:
    """Whether there are recurrent states, and whether there are proposals, of those that are asked for."""
    recurrent, rejection = choose(draw, _ROWS) if {"recurrent", "rejection_sampling"} & {*variants} else _ROWS[0]
    recurs = "recurrent" in variants and recurs_on(config.worker, config.attention_backend)
    rejects = "rejection_sampling" in variants and config.traits.rejection_sampling
    return recurrent and recurs, rejection and rejects


def draw_thinking(draw: Draw, config: Config) -> bool:
    """Whether a request thinks; never where it makes no difference."""
    return choose(draw, _THINKING) if config.use_relaxed_acceptance_for_thinking else False


def draw_near(draw: Draw, config: Config, draft_len: int, agree: Sequence[int]) -> list[int]:
    """How many drafts after those that ``agree``, row by row, are the target's second choice; 0 without use."""
    if not config.use_relaxed_acceptance_for_thinking:
        return [0] * len(agree)
    bases = [draft_len - a + 1 for a in agree]
    return digits(draw, bases) if pick(draw, 4) else [base - 1 for base in bases]


def most_agreement(config: Config, draft_len: int) -> int:
    """With how many of ``draft_len`` drafts the target may agree: none, where only the target is guided."""
    return 0 if config.guided_decoding and not config.traits.guides_drafts else draft_len


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
