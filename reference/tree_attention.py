"""Fields of ``attn_metadata`` that say which drafts see each other: the nodes of a tree, or a chain."""

from __future__ import annotations

from reference.batch import Batch
from reference.workers import DraftCall, Fields
from scenarios.model import Config


def masks(forward: Batch | DraftCall, config: Config) -> Fields:
    """Mask, offsets and lengths for the rows of a forward that hold drafts: one width for all three.

    A node sees those on its path, so its position is as far from that of the topmost one as there are nodes above
    it. Chains are told to the target only, as no call of their drafter asks; without drafts there is nothing to tell.
    """
    if not config.traits.tree and not (isinstance(forward, Batch) and forward.draft_len):
        return {}
    return {
        "spec_decoding_packed_mask": forward.paths,
        "spec_decoding_position_offsets": [[len(path) - 1 for path in nodes] for nodes in forward.paths],
        "spec_decoding_generation_lengths": [len(nodes) for nodes in forward.paths],
    }
