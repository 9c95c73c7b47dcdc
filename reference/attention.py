"""What attention makes of the slots that a row sees, dense or sparse: the digest of ``scenarios.tracer``."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from typing import Final, NamedTuple

from scenarios.model import Config
from scenarios.tracer import EMPTY, PRIME, compress, entry, term


class Sight(NamedTuple):
    """What the target attends to: everything, the ``index_topk`` highest scores or, with ``ratios``, a window and more.

    window  slots, a row's own the last of them, that it sees as they are
    ratios  slots that make a compressed token, per layer: of a layer with ratio 1 none, of the second layer the
            ``index_topk`` highest scores are seen, of a third one all
    """

    index_topk: int = 0
    window: int = 0
    ratios: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Config) -> Sight:
        """That of an attention backend."""
        return cls(config.index_topk, config.window_size, tuple(config.compress_ratios))

    def reading(self) -> Reading:
        """The target before the first slot."""
        if self.ratios:
            return CompressedReading(self)
        return SelectiveReading(self.index_topk) if self.index_topk else Reading()


EVERYTHING: Final = Sight()
"""What dense attention sees."""


class Reading:
    """The target as it reads the slots of a request one by one; ``digest`` is that of the slots seen so far.

    Here, with dense attention, every slot counts.
    """

    def __init__(self, length: int = 0, digest: int = 0) -> None:
        self.digest = digest
        self._length = length

    def see(self, slot: int) -> int:
        """The digest with the next slot."""
        self.digest = (self.digest + term(self._length, slot)) % PRIME
        self._length += 1
        return self.digest

    def read(self, token: int) -> int:
        """The digest with the next token, written at its own position."""
        return self.see(entry(self._length, token))

    def after(self, token: int) -> Reading:
        """Another one that has read ``token`` too."""
        other = self.fork(self._length, self.digest)
        other.read(token)
        return other

    def fork(self, length: int, digest: int) -> Reading:
        """Another one that has seen the first ``length`` slots only, whose digest was ``digest``."""
        return Reading(length, digest)


class SelectiveReading(Reading):
    """Of the slots seen only those with the highest scores count.

    The score of a slot is what it adds to the digest, so it does not matter which of two equal ones is selected; EMPTY
    is never selected and scores 0.
    """

    def __init__(self, index_topk: int, length: int = 0, digest: int = 0, scores: Sequence[int] = ()) -> None:
        super().__init__(length, digest)
        self._index_topk = index_topk
        self._scores = list(scores)

    def see(self, slot: int) -> int:
        """The digest with the next slot."""
        self._scores.append(_score(self._length, slot))
        self._length += 1
        self.digest = sum(nlargest(self._index_topk, self._scores)) % PRIME
        return self.digest

    def fork(self, length: int, digest: int) -> Reading:
        """Another one that has seen the first ``length`` slots only."""
        return SelectiveReading(self._index_topk, length, digest, self._scores[:length])


class CompressedReading(Reading):
    """Layers that see the window as it is, and what is before it through compressed tokens, selected or all of them.

    A compressed token counts as soon as its last slot is seen, so that those in the window are seen twice.
    """

    def __init__(
        self, sight: Sight, digest: int = 0, slots: Sequence[int] = (), scores: Sequence[Sequence[int]] = ()
    ) -> None:
        super().__init__(len(slots), digest)
        self._sight = sight
        self._slots = list(slots)
        self._scores = [list(of_layer) for of_layer in scores] or [[] for _ in sight.ratios]

    def see(self, slot: int) -> int:
        """The digest with the next slot."""
        self._slots.append(slot)
        self._length += 1
        first = max(0, self._length - self._sight.window)
        window = sum(_score(s, self._slots[s]) for s in range(first, self._length))
        layers = enumerate(self._sight.ratios[1:], 1)
        total = len(self._scores) * window + sum(self._through(layer, ratio) for layer, ratio in layers)
        self.digest = total % PRIME
        return self.digest

    def _through(self, layer: int, ratio: int) -> int:
        """What a layer's compressed tokens add, the newest of which may end with the newest slot."""
        scores = self._scores[layer]
        if self._length % ratio == 0:
            scores.append(_score(len(scores), compress(self._length - ratio, self._slots[-ratio:])))
        return sum(nlargest(self._sight.index_topk, scores) if layer == 1 else scores)

    def fork(self, length: int, digest: int) -> Reading:
        """Another one that has seen the first ``length`` slots only."""
        scores = [made[: length // ratio] for made, ratio in zip(self._scores, self._sight.ratios, strict=True)]
        return CompressedReading(self._sight, digest, self._slots[:length], scores)


def compressed(slots: Sequence[int], ratio: int) -> list[int]:
    """The compressed tokens of ``slots``: one of each ``ratio`` that follow each other; a remainder makes none."""
    return [compress(end - ratio, slots[end - ratio : end]) for end in range(ratio, len(slots) + 1, ratio)]


def _score(index: int, slot: int) -> int:
    return term(index, slot) if slot != EMPTY else 0
