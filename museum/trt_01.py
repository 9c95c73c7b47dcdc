"""TRT-01: a forward that fails leaves the long-lived attention metadata as its draft loop had it.

General warm-up survives running out of memory, so the next forward finds a save that was never restored.
"""

from __future__ import annotations

from typing import Any

from museum.bug import (
    DFLASH,
    DRAFT_TARGET,
    DSPARK,
    EAGLE3,
    EAGLE3_TREE,
    MTP,
    MTP_EAGLE,
    MTP_EAGLE_TREE,
    PARD,
    Patch,
    bug,
)

_REFERENCE = "TensorRT-LLM #16382, #16325, #16381"
_PARALLEL = (PARD, DFLASH, DSPARK)
_LEAK = ("saved-state-empty", "restored-identity", "steps-complete", "next-step-equals-never-failed-twin")


@bug(
    "TRT-01",
    kind="K2",
    workers=(EAGLE3, MTP_EAGLE, DRAFT_TARGET, MTP),
    title="A forward that fails does not restore what it saved of the attention metadata",
    reference=_REFERENCE,
    caught_by=(*_LEAK, "restored-layout"),
)
@bug(
    "TRT-01",
    kind="K2",
    workers=_PARALLEL,
    title="A forward that fails neither restores what it saved nor takes its KV increment back",
    reference=_REFERENCE,
    caught_by=(*_LEAK, "kv-lens-balanced"),
)
@bug(
    "TRT-01",
    kind="K2",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    title="A forward that fails restores neither what it saved of the attention metadata nor the masks of its trees",
    reference="TensorRT-LLM #16724, #16727, #16731",
    caught_by=(*_LEAK, "restored-layout", "tree-masks-put-back"),
)
def forward_without_cleanup(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._forward_impl(*args, **kwargs)

    patch(SpecWorkerBase, "forward", forward)


@bug(
    "TRT-01",
    kind="K2",
    workers=(DRAFT_TARGET,),
    variant="override",
    title="A worker is given a forward of its own after its class was made, past the guard of the template method",
    reference=_REFERENCE,
    caught_by=("forward-not-overridden", "saved-state-empty"),
)
def forward_assigned(patch: Patch) -> None:
    from engines.portable.speculative.draft_target import DraftTargetOneModelWorker

    patch(DraftTargetOneModelWorker, "forward", DraftTargetOneModelWorker._forward_impl)


@bug(
    "TRT-01",
    kind="K2",
    workers=_PARALLEL,
    variant="restore-only",
    title="After a failure the saved tensors are restored, but the KV increment is not taken back",
    reference=_REFERENCE,
    caught_by=("kv-lens-balanced",),
)
def rewind_lost(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase
    from engines.portable.speculative.parallel import ParallelSpecWorker

    patch(ParallelSpecWorker, "_ensure_spec_dec_state_restored", SpecWorkerBase._ensure_spec_dec_state_restored)


@bug(
    "TRT-01",
    kind="K2",
    workers=_PARALLEL,
    variant="rewind-only",
    title="After a failure the KV increment is taken back, but the saved tensors are not restored",
    reference=_REFERENCE,
    caught_by=_LEAK,
)
def restore_lost(patch: Patch) -> None:
    from engines.portable.speculative.parallel import ParallelSpecWorker

    def _ensure_spec_dec_state_restored(self: Any, attn_metadata: Any, spec_metadata: Any) -> None:
        if self._kv_rewind_pending:
            self._apply_kv_rewind_after_draft(attn_metadata)

    patch(ParallelSpecWorker, "_ensure_spec_dec_state_restored", _ensure_spec_dec_state_restored)


@bug(
    "TRT-01",
    kind="K2",
    workers=_PARALLEL,
    variant="rewind-restored",
    title="In graph warm-up, where the KV lengths themselves are saved, the rewind is applied to the restored ones too",
    reference=_REFERENCE,
    caught_by=("kv-lens-balanced", "kv-lens-equals-reference"),
)
def rewind_of_restored_lengths(patch: Patch) -> None:
    from engines.portable.speculative.parallel import ParallelSpecWorker

    def _apply_kv_rewind_after_draft(self: Any, attn_metadata: Any) -> None:
        attn_metadata.kv_lens_cuda[self._kv_rewind_nc : self._kv_rewind_bs].sub_(self._kv_rewind_amount)
        self._kv_rewind_pending = False

    patch(ParallelSpecWorker, "_apply_kv_rewind_after_draft", _apply_kv_rewind_after_draft)


@bug(
    "TRT-01",
    kind="K2",
    workers=_PARALLEL,
    variant="rewind-twice",
    title="The rewind stays pending once it is applied, and the cleanup applies it again",
    reference=_REFERENCE,
    caught_by=("kv-lens-balanced", "kv-lens-equals-reference"),
)
def rewind_twice(patch: Patch) -> None:
    from engines.portable.speculative.parallel import ParallelSpecWorker

    apply_kv_rewind_after_draft = ParallelSpecWorker._apply_kv_rewind_after_draft

    def _apply_kv_rewind_after_draft(self: Any, attn_metadata: Any) -> None:
        pending = self._kv_rewind_pending
        apply_kv_rewind_after_draft(self, attn_metadata)
        self._kv_rewind_pending = pending

    patch(ParallelSpecWorker, "_apply_kv_rewind_after_draft", _apply_kv_rewind_after_draft)


@bug(
    "TRT-01",
    kind="K2",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    variant="masks",
    title="After a failure only what every worker saves is restored, and not what trees save beside it",
    reference="TensorRT-LLM #16724, #16727, #16731",
    caught_by=("tree-masks-put-back",),
)
def masks_lost(patch: Patch) -> None:
    from engines.portable.speculative.eagle3_dynamic_tree import Eagle3OneModelDynamicTreeWorker
    from engines.portable.speculative.interface import SpecWorkerBase

    def _ensure_spec_dec_state_restored(self: Any, attn_metadata: Any, spec_metadata: Any) -> None:
        if self._spec_dec_attn_metadata is not None:
            SpecWorkerBase._restore_attn_metadata_from_spec_dec(self, self._spec_dec_attn_metadata)

    patch(Eagle3OneModelDynamicTreeWorker, "_ensure_spec_dec_state_restored", _ensure_spec_dec_state_restored)


@bug(
    "TRT-01",
    kind="K2",
    workers=(EAGLE3, MTP_EAGLE, DRAFT_TARGET, MTP, PARD),
    variant="unpaired",
    title="A forward that succeeds leaves it to the cleanup to restore what it saved",
    reference="TensorRT-LLM #17381",
    caught_by=("forward-closes-what-it-opens",),
)
def restored_by_cleanup(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    restore = SpecWorkerBase._restore_attn_metadata_from_spec_dec
    cleanup = SpecWorkerBase._ensure_spec_dec_state_restored
    cleaning_up: list[bool] = []

    def _restore_attn_metadata_from_spec_dec(self: Any, attn_metadata: Any) -> None:
        if cleaning_up:
            restore(self, attn_metadata)

    def _ensure_spec_dec_state_restored(self: Any, attn_metadata: Any, spec_metadata: Any) -> None:
        cleaning_up.append(True)
        try:
            cleanup(self, attn_metadata, spec_metadata)
        finally:
            cleaning_up.clear()

    patch(SpecWorkerBase, "_restore_attn_metadata_from_spec_dec", _restore_attn_metadata_from_spec_dec)
    patch(SpecWorkerBase, "_ensure_spec_dec_state_restored", _ensure_spec_dec_state_restored)


@bug(
    "TRT-01",
    kind="K2",
    workers=(EAGLE3, PARD),
    variant="nothing",
    title="What was saved is dropped before it is put back: the metadata has nothing in its place",
    reference=_REFERENCE,
    caught_by=("state-can-be-read",),
)
def restore_nothing(patch: Patch) -> None:
    from engines.portable.attention.backends.interface import AttentionMetadata

    def restore_from_spec_dec(self: Any) -> None:
        names = tuple(self._saved_tensors)
        self._saved_tensors.clear()
        for name in names:
            setattr(self, name, self._saved_tensors.get(name))

    patch(AttentionMetadata, "restore_from_spec_dec", restore_from_spec_dec)
