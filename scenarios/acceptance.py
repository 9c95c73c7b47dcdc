"""Which ways to accept and to read drafts a configuration may ask for, and what else not every engine has."""

from __future__ import annotations

from typing import Final

from scenarios.errors import require
from scenarios.model import Config

VARIANTS: Final = ("force_num_accepted_tokens", "draft_vocab_map", "attention_dp_size")
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
