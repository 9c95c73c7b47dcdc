"""What a configuration says of DSA."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DSAMetadataParams:
    """Parameters of the indexer that its metadata depends on.

    index_topk                   positions that a token attends to
    indexer_max_chunk_size       query tokens of a chunk of the indexer's prefill at most
    skip_indexer_for_short_seqs  whether sequences of fewer than ``index_topk`` tokens attend to all of them
    compress_ratios              of the caches that layers read, in ascending order; the second is the indexer's (4)
    window_size                  tokens that such layers see uncompressed; 0 where nothing is compressed
    use_cute_dsl_topk            whether a kernel that splits rows computes the logits
    num_sms                      multiprocessors of the device (upstream asks it)
    """

    index_topk: int
    indexer_max_chunk_size: int = 32768
    skip_indexer_for_short_seqs: bool = True
    compress_ratios: tuple[int, ...] = (1,)
    window_size: int = 0
    use_cute_dsl_topk: bool = False
    num_sms: int = 132

    @property
    def indexer_compress_ratio(self) -> int:
        """Tokens per key of the indexer."""
        return self.compress_ratios[1] if len(self.compress_ratios) > 1 else 1
