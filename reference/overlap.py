"""A generation under the overlap scheduler: its step is prepared before the host knows what the last one accepted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from reference.batch import Batch, Row
from reference.workers.interface import Fields


@dataclass(frozen=True)
class OverlappedRow:
    """A generation whose last step is still running while the next one is prepared.

    known     tokens cached before the last step
    accepted  tokens that the last step accepts, which only the device knows
    fed       tokens that the last step feeds for it
    width     tokens that this one feeds
    """

    known: int
    accepted: int
    fed: int
    width: int

    @property
    def past(self) -> int:
        """Tokens cached before the step."""
        return self.known + self.accepted

    @property
    def kv(self) -> int:
        """KV length in the step: ``kv_lens_cuda`` once it is corrected."""
        return self.past + self.width

    @property
    def positions(self) -> range:
        """Positions of its tokens once they are corrected; the keys of target and drafter lie there too."""
        return range(self.past, self.kv)

    @property
    def host_past(self) -> int:
        """What the host supposes to be cached: as if all were accepted, so that no buffer is too short."""
        return self.known + self.fed

    @property
    def host_kv(self) -> int:
        """``kv_lens_runtime``, a bound of ``kv_lens_cuda``."""
        return self.host_past + self.width

    @property
    def host_positions(self) -> range:
        """``position_ids`` before they are corrected: as if nothing of the last step were known."""
        return range(self.known, self.known + self.width)

    @property
    def kv_offset(self) -> int:
        """What the device adds to the KV length."""
        return self.accepted - self.fed

    @property
    def position_offset(self) -> int:
        """What it adds to the positions."""
        return self.accepted


def _continued(row: Row, last: Batch | None) -> tuple[int, OverlappedRow | None]:
    """Which row of ``last`` a generation goes on from, and what is known of it; -1 and None where there is none.

    A prompt that ends in ``last`` is counted like a generation of full width: all but its last token are known, and its
    first output is what that generation accepts.
    """
    for index, before in enumerate(last.rows if last and row.request is not None and not row.is_context else ()):
        if last and before.request == row.request:
            accepted, fed = len(before.accepted), last.width + 1 if before.is_context else before.query
            return index, OverlappedRow(before.end - accepted, accepted, fed, row.query)
    return -1, None


@dataclass(frozen=True)
class HostView:
    """A batch as the host prepares it while the step before, ``last``, is still running; None if nothing is.

    What it feeds is known on the device; the host supposes how much is cached.
    """

    truth: Batch
    last: Batch | None

    @cached_property
    def _rows(self) -> list[tuple[int, OverlappedRow | None]]:
        return [_continued(row, self.last) for row in self.truth.rows]

    @cached_property
    def batch(self) -> Batch:
        """The batch with the lengths that the host supposes."""
        rows = [
            replace(row, past=guess.host_past) if guess else row
            for row, (_, guess) in zip(self.truth.rows, self._rows, strict=True)
        ]
        return replace(self.truth, rows=rows)

    @property
    def position_ids(self) -> list[int]:
        """Positions of the tokens fed as if nothing of the last step were known."""
        return [
            position - (guess.position_offset if guess else 0)
            for row, (_, guess) in zip(self.truth.rows, self._rows, strict=True)
            for position in row.positions
        ]

    @property
    def corrections(self) -> Fields:
        """What the device adds to lengths and positions of the generations, and for whose sake."""
        rows = list(zip(self.truth.generations, self._rows[self.truth.num_contexts :], strict=True))
        return {
            "previous_batch_indices": [index for _, (index, _) in rows],
            "previous_kv_lens_offsets_cuda": [guess.kv_offset if guess else 0 for _, (_, guess) in rows],
            "previous_pos_id_offsets_cuda": [
                guess.position_offset if guess else 0 for row, (_, guess) in rows for _ in row.tokens
            ],
        }
