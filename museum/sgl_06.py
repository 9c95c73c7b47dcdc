"""SGL-06: what is kept per row must be filtered and merged when requests leave and join; one field is forgotten."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, EAGLE3_TREE, MTP, MTP_EAGLE_TREE, PARD, SA, Patch, bug

_REFERENCE = "SGLang #18647, #12625"


@bug(
    "SGL-06",
    kind="K6",
    workers=(EAGLE3, PARD),
    title="Drafts are kept by row, and the rows are not followed when requests leave and join",
    reference=_REFERENCE,
    caught_by=("drafts-carried-over", "acceptance-follows-agreement", "batch-equals-requests-alone"),
)
def drafts_by_row(patch: Patch) -> None:
    from engines.portable.pyexecutor.py_executor import PyExecutor
    from engines.portable.pyexecutor.sampler import SpecSampler

    update, pad_draft_tokens = SpecSampler.update_requests, PyExecutor._pad_draft_tokens

    def update_requests(self: Any, state: Any) -> None:
        update(self, state)
        self.drafts = [request.py_draft_tokens for request in state.scheduled_requests.all_requests()]

    def _pad_draft_tokens(self: Any, iteration: Any) -> None:
        for request, drafts in zip(iteration.batch.all_requests(), getattr(self.sampler, "drafts", ())):
            request.py_draft_tokens = drafts
        pad_draft_tokens(self, iteration)

    patch(SpecSampler, "update_requests", update_requests)
    patch(PyExecutor, "_pad_draft_tokens", _pad_draft_tokens)


@bug(
    "SGL-06",
    kind="K6",
    workers=(DRAFT_TARGET,),
    variant="verified-id",
    title="The last verified tokens are kept by row, and the rows are not followed when requests leave and join",
    reference=_REFERENCE,
    caught_by=("rows-belong-to-requests", "inputs-equal-reference", "row-order-does-not-matter"),
)
def verified_id_by_row(patch: Patch) -> None:
    from engines.portable.pyexecutor.model_engine import PyTorchModelEngine

    flatten = PyTorchModelEngine._flatten

    def _flatten(self: Any, scheduled_requests: Any, *previous: Any) -> Any:
        verified = [request.generated[-1:] for request in getattr(self, "last_batch", ())]
        self.last_batch = scheduled_requests.all_requests()
        rows = flatten(self, scheduled_requests, *previous)
        begin = 0
        for request, length, token in zip(self.last_batch, rows.sequence_lengths, verified):
            if token and not request.is_context:
                rows.input_ids[begin] = token[0]
            begin += length
        return rows

    patch(PyTorchModelEngine, "_flatten", _flatten)


@bug(
    "SGL-06",
    kind="K6",
    workers=(MTP,),
    variant="history",
    title="The history of a request is kept by row, and the rows are not followed when requests leave and join",
    reference=_REFERENCE,
    caught_by=("pools-match-history", "history-equals-reference", "inputs-equal-reference"),
)
@bug(
    "SGL-06",
    kind="K6",
    workers=(SA,),
    variant="text",
    title="The text of a request is kept by row, and the rows are not followed when requests leave and join",
    reference=_REFERENCE,
    caught_by=("automaton-holds-text", "history-equals-reference", "drafts-equal-reference"),
)
def slots_by_row(patch: Patch) -> None:
    from engines.portable.speculative.mtp import MTPSpecMetadata
    from engines.portable.speculative.sa_worker import SASpecMetadata

    def by_row(prepare: Any) -> Any:
        def prepare_by_row(self: Any) -> None:
            prepare(self)
            slots = self.slot_ids if isinstance(self, MTPSpecMetadata) else self.sa_manager.batch_slots
            rows = len(self.request_ids)
            slots[:rows].copy_(self.batch_indices_cuda[:rows])

        return prepare_by_row

    for metadata in (MTPSpecMetadata, SASpecMetadata):
        patch(metadata, "prepare", by_row(metadata.prepare))


@bug(
    "SGL-06",
    kind="K6",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    variant="trees",
    title="Trees are stored in the slot of the row, and the rows are not followed when requests leave and join",
    reference=_REFERENCE,
    caught_by=("verified-tree-is-the-drafted-one", "accepted-drafts-lie-on-a-path", "batch-equals-requests-alone"),
)
def trees_by_row(patch: Patch) -> None:
    from engines.portable.speculative.spec_tree_manager import SpecTreeManager

    prepare = SpecTreeManager.prepare_resources

    def prepare_resources(self: Any, scheduled_batch: Any) -> None:
        prepare(self, scheduled_batch)
        rows = range(len(scheduled_batch.all_requests()))
        self.slot_storage.all_ids_buf[: len(rows)].copy_(self._upload(rows))

    patch(SpecTreeManager, "prepare_resources", prepare_resources)
