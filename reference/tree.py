"""Trees of drafts: how a drafter grows one, which nodes it keeps, and which nodes see each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from reference.attention import Reading
from reference.drafter import drafted
from reference.history import Text
from scenarios.tracer import SCORE_RANK, SCORE_SPREAD, SCORE_STEP, alternative, choose

ROOT: Final = -1
"""Parent of the nodes that follow on what is known."""


def paths(parents: Sequence[int]) -> list[list[int]]:
    """Per node the nodes that it sees: those above it, the topmost first, and itself.

    parents  per node the node that it follows, which comes before it, or ``ROOT``
    """
    seen: list[list[int]] = []
    for node, parent in enumerate(parents):
        seen.append([*(seen[parent] if parent != ROOT else []), node])
    return seen


class Node(NamedTuple):
    """A candidate that the drafter made.

    parent   the node that it follows, an index of those made, or ``ROOT``
    score    how good it is, worse than its parent
    reading  the drafter after it
    """

    token: int
    parent: int
    score: int
    reading: Reading


@dataclass(frozen=True)
class Growth:
    """All nodes that a drafter made, layer by layer, and per layer those that it went on from, the best first.

    start  the drafter before the first layer
    """

    start: Reading
    made: list[Node]
    layers: list[list[int]]

    def reading(self, node: int) -> Reading:
        """The drafter after a node."""
        return self.start if node == ROOT else self.made[node].reading

    def fed(self, depth: int) -> list[int]:
        """Nodes that the draft call of layer ``depth`` is fed: those that the layers before it went on from."""
        return [node for layer in self.layers[:depth] for node in layer]

    def kept(self, count: int) -> list[int]:
        """The best nodes of all layers, in the order in which they were made."""
        return sorted(_best(self.made, range(len(self.made)), count))

    def parents(self, nodes: Sequence[int]) -> list[int]:
        """The parent of each of ``nodes``, as its place among them."""
        place = {ROOT: ROOT} | {node: i for i, node in enumerate(nodes)}
        return [place[self.made[node].parent] for node in nodes]


def grow(text: Text, known: int, depth: int, topk: int, agree: int, kept: int) -> Growth:
    """A tree of ``depth`` layers after the first ``known`` tokens, of which ``kept`` nodes will be kept.

    The first layer has ``topk`` nodes, every other one as many for each of the best ``topk`` nodes of the layer
    before it. On each path the first candidates are what a chain would draft; where there is room for one more node,
    another candidate may come before the last of them.
    """
    growth = Growth(text.reading(known), [], [])
    made = growth.made
    parents = [ROOT]
    for layer in range(depth):
        first = len(made)
        for parent in parents:
            reading = growth.reading(parent)
            score = made[parent].score if parent != ROOT else 0
            choice = choose(reading.digest)
            candidates = _candidates(choice, layer, topk, agree)
            if layer == depth - 1 and kept > depth and choice % 2:
                candidates[:2] = _changed(*candidates[:2])
            made += [Node(token, parent, score - loss, reading.after(token)) for token, loss in candidates]
        parents = _best(made, range(first, len(made)), topk)
        growth.layers.append(parents)
    return growth


def _candidates(choice: int, layer: int, topk: int, agree: int) -> list[tuple[int, int]]:
    """What the drafter offers where it would choose ``choice``, and how far each is below the node it follows."""
    others = [alternative(choice, rank) for rank in range(1, topk)]
    losses = [SCORE_STEP + rank * SCORE_RANK + token % SCORE_SPREAD for rank, token in enumerate(others, start=1)]
    return [(drafted(choice, layer, agree), SCORE_STEP), *zip(others, losses, strict=True)]


def _changed(first: tuple[int, int], second: tuple[int, int]) -> list[tuple[int, int]]:
    """The first two candidates in each other's place, close to each other."""
    return [(second[0], SCORE_STEP), (first[0], 2 * SCORE_STEP)]


def _best(made: Sequence[Node], nodes: Iterable[int], count: int) -> list[int]:
    """The ``count`` nodes of the highest scores, highest first; of equal ones the earlier made."""
    return sorted(nodes, key=lambda node: -made[node].score)[:count]
