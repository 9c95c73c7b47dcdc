"""Which ways to make, to read and to accept drafts a configuration may ask for, and what else not every engine has."""

from __future__ import annotations

from typing import Final

from scenarios.errors import require
from scenarios.model import Config, Generation

VARIANTS: Final = ("force_num_accepted_tokens", "draft_vocab_map", "sa_threshold", "attention_dp_size")
"""Fields of ``Config`` that ask for another way than upstream's usual one; strategies draw those that an engine has."""


def check_acceptance(config: Config) -> None:
    """Raise ``ScenarioError`` for a way that the worker cannot take."""
    require(
        config.traits.drafts_for_contexts or not config.force_num_accepted_tokens,
        "config.force_num_accepted_tokens",
        f"{config.worker} drafts nothing for a context, so the first generation has nothing to accept",
        "leave it out",
    )
    require(
        config.traits.draft_vocab or not config.draft_vocab_map,
        "config.draft_vocab_map",
        f"{config.worker} has no draft head of its own, and so no vocabulary to map from",
        "leave it out",
    )
    require(
        config.traits.sa_enhancer or not config.sa_threshold,
        "config.sa_threshold",
        f"{config.worker} has no suffix automaton beside a draft model",
        "leave it out",
    )


def check_match(config: Config, row: Generation, field: str) -> None:
    """Raise ``ScenarioError`` for the match of an automaton that the row has not."""
    enhanced = config.sa_threshold > 0 and row.request is not None
    most = config.max_seq_len if enhanced else 0
    require(
        0 <= row.match <= most,
        f"{field}.match",
        f"{row.match} is outside 0..{most}",
        "write how many tokens the match has"
        if enhanced
        else "leave it out, as it is for real requests of a config with sa_threshold",
    )
