"""Verify widths: a generation may verify fewer drafts than the step's draft length, and each a number of its own.

Who may have them, and what a row may say. A row that verifies ``v`` drafts feeds the target ``v + 1`` rows, is granted
room for so many tokens and gives back what it did not accept of them; drafts are made for it as for any other row. A
graph is captured for a number of rows altogether, and replays any widths of that sum.
"""

from __future__ import annotations

from typing import Final

from scenarios.errors import outside, require
from scenarios.model import Config, Generation
from scenarios.traits import BACKENDS, WORKERS

_NOT_RAGGED: Final = (
    "guided_decoding",
    "use_relaxed_acceptance_for_thinking",
    "force_num_accepted_tokens",
    "sa_threshold",
)
"""What takes all drafts of a step for verified: how a row is accepted by it is known for K + 1 rows only."""


def ragged_on(worker: str, backend: str) -> bool:
    """Whether verify widths may differ with a worker and an attention backend, by name.

    Compressed tokens, pages as running totals and lengths on the host alone would each need rows of their own kind.
    """
    traits = BACKENDS[backend]
    return WORKERS[worker].ragged_verify and not (traits.compressed or traits.draft_view or traits.one_page)


def check_ragged(config: Config) -> None:
    """Raise ``ScenarioError`` for verify widths where they are not combined with the rest."""
    if not config.ragged_verify:
        return
    require(
        config.traits.ragged_verify,
        "config.ragged_verify",
        f"{config.worker} verifies the same number of drafts of each generation",
        "leave it out",
    )
    require(
        ragged_on(config.worker, config.attention_backend),
        "config.ragged_verify",
        f"is not combined with attention_backend {config.attention_backend}",
        "leave one of them out",
    )
    for name in _NOT_RAGGED:
        require(
            not getattr(config, name), f"config.{name}", "is not combined with ragged_verify", "leave one of them out"
        )
    require(
        config.attention_dp_size == 1,
        "config.attention_dp_size",
        f"{config.attention_dp_size} ranks are not combined with ragged_verify",
        "leave one of them out",
    )


def check_verify(config: Config, row: Generation, draft_len: int, field: str) -> None:
    """Raise ``ScenarioError`` for a row that verifies more drafts than there are, or a number where all do the same."""
    if row.verify is None:
        return
    require(config.ragged_verify, f"{field}.verify", "is for config.ragged_verify", "leave it out")
    require(
        0 <= row.verify <= draft_len,
        f"{field}.verify",
        f"{row.verify} is {outside(0, draft_len)}",
        "write how many of its drafts the row verifies, or leave it out for all",
    )


def verify_width(config: Config, row: Generation, draft_len: int) -> int:
    """Draft slots of a generation: what it verifies, or all that a row of this worker has."""
    return config.tokens_per_gen_step(draft_len) - 1 if row.verify is None else row.verify
