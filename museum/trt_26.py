"""TRT-26: of the rows that a generation verifies, the last one is rarely the last that is accepted."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP, MTP_EAGLE_TREE, PARD, Patch, bug

_TITLE = "Drafting goes on from the last row of a generation instead of the last accepted one"
_REFERENCE = "TensorRT-LLM #15806"


@bug(
    "TRT-26",
    kind="K6",
    workers=(EAGLE3, DRAFT_TARGET),
    title=_TITLE,
    reference=_REFERENCE,
    caught_by=("inputs-equal-reference", "drafts-equal-reference", "acceptance-follows-agreement"),
)
def last_row(patch: Patch) -> None:
    from engines.portable.speculative.linear import LinearSpecWorker

    first_gather_ids = LinearSpecWorker._first_gather_ids

    def _first_gather_ids(self: Any, num_accepted: Any, attn_metadata: Any, spec_metadata: Any) -> Any:
        rows = num_accepted.new_full(num_accepted.shape, spec_metadata.runtime_draft_len + 1)
        return first_gather_ids(self, rows, attn_metadata, spec_metadata)

    patch(LinearSpecWorker, "_first_gather_ids", _first_gather_ids)


@bug(
    "TRT-26",
    kind="K6",
    workers=(PARD,),
    title=_TITLE,
    reference=_REFERENCE,
    caught_by=("drafts-equal-reference", "acceptance-follows-agreement", "oracle-drafter-accepts-all"),
)
def last_parallel_row(patch: Patch) -> None:
    from engines.portable.speculative.pard import PARDWorker

    draft_rows = PARDWorker._draft_rows

    def _draft_rows(self: Any, num_accepted: Any, attn_metadata: Any, spec_metadata: Any) -> Any:
        rows = num_accepted.new_full(num_accepted.shape, spec_metadata.runtime_draft_len + 1)
        return draft_rows(self, rows, attn_metadata, spec_metadata)

    patch(PARDWorker, "_draft_rows", _draft_rows)


@bug(
    "TRT-26",
    kind="K6",
    workers=(MTP,),
    variant="history",
    title="The history of a generation takes in all rows that it verified, not only those that were accepted",
    reference=_REFERENCE,
    caught_by=("pools-match-history", "history-equals-reference", "inputs-equal-reference"),
)
def rejected_rows_in_the_history(patch: Patch) -> None:
    from engines.portable.speculative.mtp import MTPWorker

    update = MTPWorker.update_mtp_hidden_states

    def update_mtp_hidden_states(
        self: Any, input_ids: Any, hidden_states: Any, num_accepted: Any, attn_metadata: Any, spec_metadata: Any
    ) -> None:
        update(self, input_ids, hidden_states, attn_metadata.seq_lens_cuda, attn_metadata, spec_metadata)

    patch(MTPWorker, "update_mtp_hidden_states", update_mtp_hidden_states)


@bug(
    "TRT-26",
    kind="K6",
    workers=(MTP_EAGLE_TREE,),
    title=_TITLE,
    reference=_REFERENCE,
    caught_by=("inputs-equal-reference", "drafts-equal-reference", "acceptance-follows-agreement"),
)
def last_row_of_path(patch: Patch) -> None:
    from engines.portable.speculative.eagle3_dynamic_tree import Eagle3OneModelDynamicTreeWorker

    first_gather_ids = Eagle3OneModelDynamicTreeWorker._first_gather_ids

    def _first_gather_ids(self: Any, num_accepted: Any, attn_metadata: Any, spec_metadata: Any) -> Any:
        rows = num_accepted.new_full(num_accepted.shape, self._max_path_len)
        return first_gather_ids(self, rows, attn_metadata, spec_metadata)

    patch(Eagle3OneModelDynamicTreeWorker, "_first_gather_ids", _first_gather_ids)
