"""Which of its drafts the target accepts."""

from __future__ import annotations

from collections.abc import Sequence


def accepted(drafts: Sequence[int], choices: Sequence[int]) -> list[int]:
    """Tokens that a generation commits: the target's, up to the first one that was not drafted.

    drafts   the K draft tokens that were verified
    choices  the target's token after the last committed token, and after each draft (K + 1 or more)
    """
    agreed = 0
    while agreed < len(drafts) and drafts[agreed] == choices[agreed]:
        agreed += 1
    return list(choices[: agreed + 1])
