"""What a configuration says of DSA."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DSAMetadataParams:
    """Parameters of the indexer that its metadata depends on.

    index_topk                   positions that a token attends to
    indexer_max_chunk_size       query tokens of a chunk of the indexer's prefill at most
    skip_indexer_for_short_seqs  whether sequences of at most ``index_topk`` tokens attend to all of them
    compress_ratios              of the caches that layers read; the indexer's is 4 where that is among them
    use_cute_dsl_topk            whether a kernel that splits rows computes the logits
    num_sms                      multiprocessors of the device (upstream asks it)
    """

    index_topk: int
    indexer_max_chunk_size: int = 32768
    skip_indexer_for_short_seqs: bool = True
    compress_ratios: tuple[int, ...] = (1,)
    use_cute_dsl_topk: bool = False
    num_sms: int = 132

    @property
    def indexer_compress_ratio(self) -> int:
        """Tokens per key of the indexer."""
        return 4 if 4 in self.compress_ratios else 1
