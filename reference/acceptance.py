"""Which of its drafts the target accepts."""

from __future__ import annotations

from collections.abc import Sequence

from scenarios.tracer import near


def agreed(
    tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int], *, relaxed: bool = False
) -> list[int]:
    """Indices of the tokens that stand: the last committed one, then each draft that the target chose there.

    tokens   the last committed token and the drafts to verify: a chain, or a tree whose siblings differ
    parents  per token the one that it follows, which comes before it
    choices  the target's token after each
    relaxed  whether its second choice will do as well
    """
    path = [0]
    for node in range(1, len(tokens)):
        choice = choices[path[-1]]
        if parents[node] == path[-1] and (tokens[node] == choice or (relaxed and tokens[node] == near(choice))):
            path.append(node)
    return path
