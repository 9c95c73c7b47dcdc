"""The indexer's prefill: which keys each context token may select from, and the chunks that it is computed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class IndexerParams:
    """Keys of each row of a batch, counted by the host: int64 [n] each.

    A key stands for ``ratio`` tokens, and is there once the last of them is.
    """

    seq_lens: Tensor
    cached_tokens: Tensor
    ratio: int = 1

    @property
    def cached_kv(self) -> Tensor:
        """Keys from before the step."""
        return self.cached_tokens // self.ratio

    @property
    def kv_lens(self) -> Tensor:
        """Keys, this step's included."""
        return (self.cached_tokens + self.seq_lens) // self.ratio

    @property
    def new_kv(self) -> Tensor:
        """Keys of this step."""
        return self.kv_lens - self.cached_kv

    def positions(self) -> tuple[Tensor, Tensor]:
        """Row, and place in its sequence, of each new key: two of int64 [keys]."""
        return _ranges(self.cached_kv, self.kv_lens)

    def all_positions(self, num_contexts: int) -> tuple[Tensor, Tensor]:
        """The same of all keys of the contexts."""
        ends = self.kv_lens[:num_contexts]
        return _ranges(torch.zeros_like(ends), ends)

    def windows(self, num_contexts: int) -> tuple[Tensor, Tensor]:
        """First key, and the key after the last, that each context token may select: two of int64 [num_ctx_tokens].

        Keys are counted through all contexts; a token may select those that are complete with itself.
        """
        lens, cached = self.seq_lens[:num_contexts], self.cached_tokens[:num_contexts]
        kv = self.kv_lens[:num_contexts]
        rows, positions = _ranges(cached, cached + lens)
        first = (kv.cumsum(0) - kv)[rows]
        return first, first + (positions + 1) // self.ratio


def _ranges(starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """``starts[i]..ends[i]-1`` one after the other, and the ``i`` of each: index first."""
    lens = ends - starts
    index = torch.repeat_interleave(torch.arange(len(lens)), lens)
    offset = torch.arange(len(index)) - (lens.cumsum(0) - lens)[index]
    return index, starts[index] + offset


@dataclass(frozen=True)
class IndexerPrefillChunkMetadata:
    """A chunk: its tokens and keys, from and to, counted through the contexts; windows count from its first key."""

    token_start: int
    token_end: int
    k_token_start: int
    k_token_end: int
    cu_seqlen_ks: Tensor
    cu_seqlen_ke: Tensor


def split_prefill_chunks(
    params: IndexerParams, num_contexts: int, max_chunk_size: int
) -> list[IndexerPrefillChunkMetadata]:
    """Chunks of at most ``max_chunk_size`` query tokens, less for very long sequences.

    Contexts that fit are packed in order; a longer one is split, and shares its chunks with no other.
    """
    lens, kv = params.seq_lens[:num_contexts].tolist(), params.kv_lens[:num_contexts].tolist()
    size = min(max_chunk_size, _largest_chunk(max(kv)))
    windows = params.windows(num_contexts)
    chunks, packed = [], _Block()
    for row, (query, keys) in enumerate(zip(lens, kv)):
        if packed.tokens and packed.tokens + query > size:
            chunks.append(packed.chunk(windows))
            packed = packed.after()
        if query <= size:
            packed.tokens, packed.keys = packed.tokens + query, packed.keys + keys
            continue
        cached = int(params.cached_tokens[row])
        for start in range(0, query, size):
            end = min(start + size, query)
            block = _Block(
                packed.token_start + start, packed.k_token_start, end - start, (cached + end) // params.ratio
            )
            chunks.append(block.chunk(windows))
        packed = _Block(packed.token_start + query, packed.k_token_start + keys)
    return [*chunks, packed.chunk(windows)] if packed.tokens else chunks


def _largest_chunk(longest_kv: int) -> int:
    """So many query tokens that the logits of a chunk stay within bounds."""
    if longest_kv > 524288:
        return 8192
    return 16384 if longest_kv >= 262144 else 32768


@dataclass
class _Block:
    """Tokens and keys of a chunk, and how many of each are before it."""

    token_start: int = 0
    k_token_start: int = 0
    tokens: int = 0
    keys: int = 0

    def after(self) -> _Block:
        """An empty one that begins where this one ends."""
        return _Block(self.token_start + self.tokens, self.k_token_start + self.keys)

    def chunk(self, windows: Sequence[Tensor]) -> IndexerPrefillChunkMetadata:
        """The chunk, with its part of the ``windows`` of all context tokens (see ``IndexerParams.windows``)."""
        end, rows = self.after(), slice(self.token_start, self.token_start + self.tokens)
        ks, ke = (window[rows] - self.k_token_start for window in windows)
        return IndexerPrefillChunkMetadata(
            self.token_start, end.token_start, self.k_token_start, end.k_token_start, ks, ke
        )
