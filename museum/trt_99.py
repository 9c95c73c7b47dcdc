"""TRT-99: what ``prepare`` decides for short sequences still holds when contexts have become generations.

An entry of this suite's own, after upstream's code.
"""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP_EAGLE, Patch, bug


@bug(
    "TRT-99",
    kind="K1",
    workers=(EAGLE3, MTP_EAGLE, DRAFT_TARGET),
    title="A long context that becomes a generation in the draft loop counts as short as those were, and is cut",
    reference="TensorRT-LLM, no public number",
    caught_by=("skipped-rows-fit-the-selection", "selection-equals-reference"),
)
def flag_of_the_generations_stays(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata

    update = DSAtrtllmAttentionMetadata.update_for_spec_dec

    def update_for_spec_dec(self: Any) -> None:
        self._all_short = self.skip_indexer_for_gen_reqs
        update(self)

    patch(DSAtrtllmAttentionMetadata, "update_for_spec_dec", update_for_spec_dec)
