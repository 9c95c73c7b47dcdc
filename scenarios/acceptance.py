"""Which ways to draft and to accept a configuration may ask for, what rows may ask, and what not every engine has."""

from __future__ import annotations

from typing import Final

from scenarios.errors import outside, require
from scenarios.model import Config, Context, Generation, Request
from scenarios.tracer import NEAR_GAP

VARIANTS: Final = (
    "force_num_accepted_tokens",
    "draft_vocab_map",
    "sa_threshold",
    "guided_decoding",
    "use_relaxed_acceptance_for_thinking",
    "attention_dp_size",
    "overlap",
    "enable_block_reuse",
    "recurrent",
    "rejection_sampling",
    "tp_size",
    "ragged_verify",
)
"""Fields of ``Config`` that ask for another way than upstream's usual one; strategies draw those that an engine has."""

_LARGEST_DELTA: Final = 0.6
"""Beyond it, third choices would count, which the tracer does not have."""
_DELTA_MARGIN: Final = 0.01
"""So far from the gap to the second choice it is certain on which side of it a delta is, in float32, too."""


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
    _check_guided(config)
    _check_relaxed(config)


def _check_guided(config: Config) -> None:
    if not config.guided_decoding:
        return
    require(
        not config.traits.tree, "config.guided_decoding", "a matcher follows a chain of drafts, no tree", "leave it out"
    )
    _alone(
        config, "guided_decoding", "force_num_accepted_tokens", "use_relaxed_acceptance_for_thinking", "sa_threshold"
    )


def _alone(config: Config, variant: str, *others: str) -> None:
    for name in others:
        require(not getattr(config, name), f"config.{name}", f"is not combined with {variant}", "leave one of them out")


def _check_relaxed(config: Config) -> None:
    relaxed = config.use_relaxed_acceptance_for_thinking
    require(
        relaxed == (config.relaxed_topk > 0),
        "config.relaxed_topk",
        f"{config.relaxed_topk} does not fit use_relaxed_acceptance_for_thinking {str(relaxed).lower()}",
        "write 1 or more" if relaxed else "leave it out",
    )
    require(
        relaxed or not config.relaxed_delta,
        "config.relaxed_delta",
        "is for use_relaxed_acceptance_for_thinking",
        "leave it out",
    )
    if not relaxed:
        return
    require(
        config.traits.relaxed_acceptance,
        "config.use_relaxed_acceptance_for_thinking",
        f"{config.worker} accepts no draft but the target's first choice",
        "leave it out",
    )
    _alone(config, "use_relaxed_acceptance_for_thinking", "force_num_accepted_tokens", "sa_threshold")
    delta = config.relaxed_delta
    require(
        0 < delta <= _LARGEST_DELTA and abs(delta - NEAR_GAP) > _DELTA_MARGIN,
        "config.relaxed_delta",
        f"{delta} is not in 0..{_LARGEST_DELTA}, or too close to the second choice's {NEAR_GAP}",
        "write 0.125 for less than that, or 0.5 for more",
    )


def relaxes(config: Config) -> bool:
    """Whether relaxed acceptance takes the second choice of the target, for a request that thinks."""
    return config.relaxed_topk >= 2 and config.relaxed_delta > NEAR_GAP


def check_request(config: Config, request: Request, field: str) -> None:
    """Raise ``ScenarioError`` for a request that thinks where it makes no difference."""
    require(
        config.use_relaxed_acceptance_for_thinking or not request.thinking,
        f"{field}.thinking",
        "is for config.use_relaxed_acceptance_for_thinking",
        "leave it out",
    )


def check_row(config: Config, row: Context | Generation, draft_len: int, field: str) -> None:
    """Raise ``ScenarioError`` for a row whose drafts cannot be as good as it says, or not in this configuration."""
    if isinstance(row, Generation):
        require(
            0 <= row.agree <= draft_len,
            f"{field}.agree",
            f"{row.agree} is outside 0..{draft_len}",
            "write how many of the drafts made for this row agree with the target",
        )
        _check_match(config, row, field)
    most = 0 if config.guided_decoding and not config.traits.guides_drafts else draft_len
    require(
        row.agree <= most or row.request is None,
        f"{field}.agree",
        f"{row.agree} is too much, as {config.worker} drafts without the grammar that guides the target",
        "leave it out",
    )
    most = draft_len - row.agree if config.use_relaxed_acceptance_for_thinking and row.request is not None else 0
    require(
        0 <= row.near <= most,
        f"{field}.near",
        f"{row.near} is {outside(0, most)}",
        "write how many drafts after those that agree are the target's second choice"
        if config.use_relaxed_acceptance_for_thinking
        else "leave it out, as only relaxed acceptance takes second choices",
    )


def _check_match(config: Config, row: Generation, field: str) -> None:
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
