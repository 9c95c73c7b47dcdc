"""TRT-150: what the overlap scheduler corrects on the device is left over, left out, or not followed by what it moves.

No public bugs, but the ways in which the mechanism can fail that those of the museum are about.
"""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP, PARD, SA, Patch, bug

_REFERENCE = "TensorRT-LLM, no public number"


@bug(
    "TRT-150",
    kind="K3",
    workers=(EAGLE3, PARD),
    title="Corrections of an earlier step are not taken out when nothing is in flight",
    reference=_REFERENCE,
    caught_by=("corrections-follow-last-step", "corrected-lengths-are-committed-plus-fed"),
)
def corrections_left(patch: Patch) -> None:
    from engines.portable.pyexecutor.overlap import OverlapInputs

    prepare = OverlapInputs.prepare

    def prepare_in_flight(self: Any, generations: Any, width: int, drafts: int, previous: Any, *args: Any) -> None:
        if previous is not None:
            prepare(self, generations, width, drafts, previous, *args)

    patch(OverlapInputs, "prepare", prepare_in_flight)


@bug(
    "TRT-150",
    kind="K3",
    workers=(EAGLE3, MTP, SA),
    variant="left-out",
    title="A request that is left out of a step keeps the row that it had in the one before",
    reference=_REFERENCE,
    caught_by=("corrections-follow-last-step",),
)
def row_kept(patch: Patch) -> None:
    from engines.portable.pyexecutor.py_executor import PyExecutor

    run_batch = PyExecutor._run_batch

    def _run_batch(self: Any, iteration: Any) -> None:
        previous = () if self.previous_batch is None else self.previous_batch.iteration.batch.all_requests()
        rows = [request.py_batch_idx for request in previous]
        run_batch(self, iteration)
        most = len(iteration.batch.all_requests())
        for request, row in zip(previous, rows):
            if request.py_batch_idx is None and row is not None and row < most:
                request.py_batch_idx = row

    patch(PyExecutor, "_run_batch", _run_batch)


@bug(
    "TRT-150",
    kind="K10",
    workers=(EAGLE3, PARD),
    variant="captured",
    title="Lengths are corrected before the forward, and not in a graph",
    reference=_REFERENCE,
    caught_by=("kv-lens-balanced", "overlap-equals-no-overlap"),
)
def not_captured(patch: Patch) -> None:
    from engines.portable._utils import is_current_stream_capturing
    from engines.portable.pyexecutor.overlap import OverlapInputs

    correct = OverlapInputs.correct

    def correct_eagerly(self: Any, inputs: dict[str, Any]) -> None:
        if not is_current_stream_capturing():
            correct(self, inputs)

    patch(OverlapInputs, "correct", correct_eagerly)


@bug(
    "TRT-150",
    kind="K10",
    workers=(EAGLE3, PARD),
    variant="address",
    title="Corrections go to new tensors in each step, and a replayed graph reads those of its capture",
    reference=_REFERENCE,
    caught_by=("kv-lens-balanced", "overlap-equals-no-overlap"),
)
def new_tensors(patch: Patch) -> None:
    from engines.portable.pyexecutor.overlap import OverlapInputs

    prepare = OverlapInputs.prepare

    def prepare_anew(self: Any, *args: Any) -> None:
        for name in ("previous_kv_lens_offsets_cuda", "previous_pos_id_offsets_cuda"):
            setattr(self, name, getattr(self, name).clone())
        prepare(self, *args)

    patch(OverlapInputs, "prepare", prepare_anew)


@bug(
    "TRT-150",
    kind="K1",
    workers=(EAGLE3, PARD),
    variant="maps",
    title="What follows from KV lengths is not told that they were corrected",
    reference=_REFERENCE,
    caught_by=("slots-in-own-pages", "sparse-maps-equal-reference"),
)
def maps_not_told(patch: Patch) -> None:
    from engines.portable.pyexecutor.model_engine import PyTorchModelEngine

    def _preprocess_inputs(self: Any, inputs: dict[str, Any]) -> None:
        inputs["attn_metadata"].on_update_kv_lens()
        if self.overlap is not None:
            self.overlap.correct(inputs)

    patch(PyTorchModelEngine, "_preprocess_inputs", _preprocess_inputs)


@bug(
    "TRT-150",
    kind="K7",
    workers=(EAGLE3, DRAFT_TARGET),
    variant="own-cache",
    title="The first draft call writes to its own indexer's cache where the host took the request to be",
    reference=_REFERENCE,
    caught_by=("slots-in-own-pages",),
)
def slots_of_the_host(patch: Patch) -> None:
    from engines.portable._utils import is_current_stream_capturing
    from engines.portable.attention.backends.sparse.dsa.indexer import Indexer
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata

    refer = DSAtrtllmAttentionMetadata._refer_to_draft_twins

    def _refer_to_draft_twins(self: Any) -> None:
        refer(self)
        if not is_current_stream_capturing():
            Indexer.recompute_slot_mappings(self)

    patch(DSAtrtllmAttentionMetadata, "_refer_to_draft_twins", _refer_to_draft_twins)


@bug(
    "TRT-150",
    kind="K5",
    workers=(EAGLE3, PARD),
    variant="failure",
    title="Results of the step in flight are still taken when the step behind it has failed",
    reference=_REFERENCE,
    caught_by=("failure-ends-what-is-in-flight",),
)
def taken_after_a_failure(patch: Patch) -> None:
    from engines.portable.pyexecutor.py_executor import PyExecutor

    handle_errors = PyExecutor._handle_errors

    def _handle_errors(self: Any, iteration: Any, error: Any) -> str:
        if self.previous_batch is not None and self._updated is None:
            self.sampler.update_requests(self.previous_batch.sample_state)
            self._process_batch(self.previous_batch.iteration)
        return str(handle_errors(self, iteration, error))

    patch(PyExecutor, "_handle_errors", _handle_errors)


@bug(
    "TRT-150",
    kind="K5",
    workers=(EAGLE3, PARD),
    variant="kept",
    title="After a failure the step in flight is still in flight, and its requests have ended",
    reference=_REFERENCE,
    caught_by=("substeps-in-order", "next-step-equals-never-failed-twin"),
)
def still_in_flight(patch: Patch) -> None:
    from engines.portable.pyexecutor.py_executor import PyExecutor

    handle_errors = PyExecutor._handle_errors

    def _handle_errors(self: Any, iteration: Any, error: Any) -> str:
        previous = self.previous_batch
        outcome = handle_errors(self, iteration, error)
        self.previous_batch = previous
        return str(outcome)

    patch(PyExecutor, "_handle_errors", _handle_errors)
