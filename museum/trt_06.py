"""TRT-06: what the draft loop writes is more than what it saves."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, EAGLE3_TREE, MTP_EAGLE, MTP_EAGLE_TREE, Patch, bug

_REFERENCE = "TensorRT-LLM #7100"


@bug(
    "TRT-06",
    kind="K2",
    workers=(EAGLE3,),
    title="After the draft loop only the sequence lengths are restored; counts and request types stay",
    reference=_REFERENCE,
    caught_by=("restored-layout", "derived-counters-consistent", "layout-equals-reference"),
)
def lengths_only(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    def _restore_attn_metadata_from_spec_dec(self: Any, attn_metadata: Any) -> None:
        attn_metadata.restore_from_spec_dec()
        self._spec_dec_attn_metadata = None

    patch(SpecWorkerBase, "_restore_attn_metadata_from_spec_dec", _restore_attn_metadata_from_spec_dec)


@bug(
    "TRT-06",
    kind="K2",
    workers=(MTP_EAGLE,),
    variant="request-types",
    title="After the draft loop the request types say that every row is a generation",
    reference=_REFERENCE,
    caught_by=("restored-layout", "request-types-match-layout"),
)
def request_types_stay(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    def _restore_attn_metadata_from_spec_dec(self: Any, attn_metadata: Any) -> None:
        attn_metadata._num_contexts = self._saved_num_contexts
        attn_metadata.restore_from_spec_dec()
        attn_metadata.on_update()
        self._spec_dec_attn_metadata = None

    patch(SpecWorkerBase, "_restore_attn_metadata_from_spec_dec", _restore_attn_metadata_from_spec_dec)


@bug(
    "TRT-06",
    kind="K2",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    variant="masks",
    title="After the layers of a tree the masks stay as the last of them had left them",
    reference=_REFERENCE,
    caught_by=("tree-masks-put-back", "tree-widths-share-one-stride"),
)
def masks_stay(patch: Patch) -> None:
    from engines.portable.speculative.eagle3_dynamic_tree import Eagle3OneModelDynamicTreeWorker
    from engines.portable.speculative.interface import SpecWorkerBase

    restore = SpecWorkerBase._restore_attn_metadata_from_spec_dec
    patch(Eagle3OneModelDynamicTreeWorker, "_restore_attn_metadata_from_spec_dec", restore)


@bug(
    "TRT-06",
    kind="K2",
    workers=(MTP_EAGLE_TREE,),
    variant="kv-lens",
    title="After the layers of a tree the KV lengths stay as the last of them had left them",
    reference=_REFERENCE,
    caught_by=("kv-lens-equals-reference",),
)
def kv_lens_stay(patch: Patch) -> None:
    from engines.portable.speculative.eagle3_dynamic_tree import Eagle3OneModelDynamicTreeWorker
    from engines.portable.speculative.mtp_dynamic_tree import MTPEagleDynamicTreeWorker

    restore = Eagle3OneModelDynamicTreeWorker._restore_attn_metadata_from_spec_dec
    patch(MTPEagleDynamicTreeWorker, "_restore_attn_metadata_from_spec_dec", restore)


@bug(
    "TRT-06",
    kind="K2",
    workers=(EAGLE3, MTP_EAGLE),
    variant="chain-masks",
    title="The draft loop tells the kernels of one row per sequence in the lengths that all steps share",
    reference=_REFERENCE,
    caught_by=("chain-masks-are-causal",),
)
def one_row_stays(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    prepare = SpecWorkerBase._prepare_attn_metadata_for_spec_dec

    def _prepare_attn_metadata_for_spec_dec(self: Any, attn_metadata: Any, *fields: str) -> None:
        prepare(self, attn_metadata, *fields)
        attn_metadata.spec_decoding_generation_lengths.fill_(1)

    patch(SpecWorkerBase, "_prepare_attn_metadata_for_spec_dec", _prepare_attn_metadata_for_spec_dec)
