"""Fields of ``attn_metadata`` that say which nodes of a tree see each other."""

from __future__ import annotations

from reference.batch import Batch
from reference.workers import DraftCall, Fields
from scenarios.model import Config


def masks(forward: Batch | DraftCall, config: Config) -> Fields:
    """Mask, offsets and lengths for the rows of a forward that are trees: one width for all three.

    A node sees those on its path, so its position is as far from that of the topmost one as there are nodes above
    it. A worker that drafts chains has none of these fields.
    """
    if not config.traits.tree:
        return {}
    return {
        "spec_decoding_packed_mask": forward.paths,
        "spec_decoding_position_offsets": [[len(path) - 1 for path in nodes] for nodes in forward.paths],
        "spec_decoding_generation_lengths": [len(nodes) for nodes in forward.paths],
    }
