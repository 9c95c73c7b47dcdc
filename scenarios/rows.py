"""Recurrent states of the target, and proposals that verification reads: who may have them, and what they ask."""

from __future__ import annotations

from typing import Final

from scenarios.errors import require
from scenarios.model import Config
from scenarios.traits import BACKENDS, WORKERS

_NOT_REJECTED: Final = (
    "force_num_accepted_tokens",
    "sa_threshold",
    "use_relaxed_acceptance_for_thinking",
)
"""Other ways to accept, or to draft, that proposals of a draft model say nothing of."""


def recurs_on(worker: str, backend: str) -> bool:
    """Whether a target with recurrent layers is combined with a worker and an attention backend, by name."""
    return WORKERS[worker].recurrent and not BACKENDS[backend].sparse


def rejects(config: Config) -> bool:
    """Whether rejection sampling is combined with the rest of a configuration."""
    return config.traits.rejection_sampling and not any(getattr(config, name) for name in _NOT_REJECTED)


def check_rows(config: Config) -> None:
    """Raise ``ScenarioError`` for recurrent states or proposals where they are not combined with the rest."""
    if config.recurrent:
        require(
            config.traits.recurrent,
            "config.recurrent",
            f"{config.worker} makes no recurrent state live that it has accepted",
            "leave it out",
        )
        require(
            recurs_on(config.worker, config.attention_backend),
            "config.recurrent",
            f"is not combined with attention_backend {config.attention_backend}",
            "leave one of them out",
        )
    if config.rejection_sampling:
        require(
            config.traits.rejection_sampling,
            "config.rejection_sampling",
            f"{config.worker} has no drafts of a model, one after the other, and so no proposals to verify by",
            "leave it out",
        )
        for name in _NOT_REJECTED:
            require(
                not getattr(config, name),
                f"config.{name}",
                "is not combined with rejection_sampling",
                "leave one of them out",
            )
