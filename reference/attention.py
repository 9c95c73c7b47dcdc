"""What attention makes of the slots that a row sees, dense or sparse: the digest of ``scenarios.tracer``."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

from scenarios.tracer import EMPTY, PRIME, entry, term


class Reading:
    """The target on its way through the slots of a request, with its ``digest`` of those seen so far.

    It attends to all of them or, with ``index_topk``, to the highest scores. The score of a slot is what it adds to
    the digest, so it does not matter which of two equal ones is selected; EMPTY is never selected and scores 0.
    """

    def __init__(self, index_topk: int, length: int = 0, digest: int = 0, scores: Sequence[int] = ()) -> None:
        self.digest = digest
        self._index_topk = index_topk
        self._length = length
        self._scores = list(scores)

    def see(self, slot: int) -> int:
        """The digest with the next slot."""
        score = term(self._length, slot)
        self._length += 1
        if self._index_topk:
            self._scores.append(score if slot != EMPTY else 0)
            self.digest = sum(nlargest(self._index_topk, self._scores)) % PRIME
        else:
            self.digest = (self.digest + score) % PRIME
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
        return Reading(self._index_topk, length, digest, self._scores[:length])
