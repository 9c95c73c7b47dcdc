"""Shapes of what a worker returns, as a table: the oracle of its output dictionary. All of it is int32.

``logits``, the fifth entry, is the very object that the worker was given.
"""

from __future__ import annotations

from typing import Final

from scenarios.model import Config

NORMAL: Final = "normal"
"""The worker has verified drafts and made new ones."""
SKIP_DRAFTING: Final = "skip_drafting"
"""The draft length is 0: one token per row, from ``SpecWorkerBase.skip_drafting``."""
SKIP_FORWARD: Final = "skip_forward"
"""Another rank of a pipeline computes the outputs: placeholders, from ``SpecWorkerBase.skip_forward``.

They are as wide as the longest chain of drafts, whatever the draft length and also where a worker returns more.
Only ``new_tokens_lens`` has a content: 1 per row.
"""


def shapes(kind: str, config: Config, rows: int, draft_len: int) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of the output dictionary of a batch with so many rows."""
    depth = {NORMAL: draft_len, SKIP_DRAFTING: 0, SKIP_FORWARD: config.max_draft_len}[kind]
    width = config.tokens_per_gen_step(depth) if kind == NORMAL else 1 + depth
    return {
        "new_tokens": (rows, width if config.traits.parallel else 1 + depth),
        "new_tokens_lens": (rows,),
        "next_draft_tokens": (rows, width - 1),
        "next_new_tokens": (rows, width),
    }
