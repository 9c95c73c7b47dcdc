"""SGL-03: metadata takes a maximum over rows of which there may be none."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, SA, Patch, bug


@bug(
    "SGL-03",
    kind="K5",
    workers=(EAGLE3, PARD, SA),
    title="The longest query of the generations is looked for in a batch that has none",
    reference="SGLang #33892",
    caught_by=("steps-complete",),
)
def maximum_of_nothing(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata

    prepare = DSAtrtllmAttentionMetadata.prepare

    def prepare_with_a_maximum(self: Any) -> None:
        self.max_gen_seq_len = int(self.seq_lens[self.num_contexts :].max())
        prepare(self)

    patch(DSAtrtllmAttentionMetadata, "prepare", prepare_with_a_maximum)
