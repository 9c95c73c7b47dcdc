"""Where the indexer of a sparse backend keeps the key of a token, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SCALE_BYTES = 4


@dataclass(frozen=True)
class IndexerPages:
    """Pages of the indexer's cache: first the keys of all tokens of a page, then the scales of all of them.

    head_dim          values of a key, one byte each, or half of one with ``fp4``
    quant_block_size  values that share a scale (float32)
    """

    tokens_per_block: int
    head_dim: int
    quant_block_size: int = 128
    fp4: bool = False

    @property
    def key_bytes(self) -> int:
        """Bytes of a key."""
        return self.head_dim // 2 if self.fp4 else self.head_dim

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a key."""
        return self.head_dim // self.quant_block_size * _SCALE_BYTES

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.tokens_per_block * (self.key_bytes + self.scale_bytes)

    def slot(self, pages: Sequence[int], position: int) -> tuple[int, int]:
        """Byte offsets of key and scale of the token at ``position`` of a request that owns these pages, in order.

        Upstream: an entry of ``slot_mapping_fp8`` and of ``slot_mapping_scale``.
        """
        page, place = pages[position // self.tokens_per_block], position % self.tokens_per_block
        start = page * self.page_bytes
        scales = start + self.tokens_per_block * self.key_bytes
        return start + place * self.key_bytes, scales + place * self.scale_bytes
