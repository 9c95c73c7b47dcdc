"""A generation under the overlap scheduler: its step is prepared before the host knows what the last one accepted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OverlappedRow:
    """A generation whose last step is still running while the next one is prepared.

    known     tokens cached before the last step
    accepted  tokens that the last step accepts, which only the device knows
    width     tokens that each of the two steps feeds
    """

    known: int
    accepted: int
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
        return self.known + self.width

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
        return self.accepted - self.width

    @property
    def position_offset(self) -> int:
        """What it adds to the positions."""
        return self.accepted
