"""TRT-50: small arithmetic around the mask of a tree: how many words a row has, and where the next row begins."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3_TREE, MTP_EAGLE_TREE, Patch, bug

_REFERENCE = "TensorRT-LLM #5343, #4879, #8421"


@bug(
    "TRT-50",
    kind="K4",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    title="A row of the mask has words for the draft nodes, and none for the bit of the root more",
    reference=_REFERENCE,
    caught_by=("tree-mask-is-ancestry",),
)
def no_word_for_the_root(patch: Patch) -> None:
    from engines.portable.speculative import dynamic_tree_ops, spec_tree_manager

    def packed_words(nodes: int) -> int:
        return -(-(nodes - 1) // 32)

    patch(dynamic_tree_ops, "packed_words", packed_words)
    patch(spec_tree_manager, "packed_words", packed_words)


@bug(
    "TRT-50",
    kind="K4",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    variant="mask-stride",
    title="Masks are written one right behind the other, and read with the stride of their buffer",
    reference=_REFERENCE,
    caught_by=("tree-mask-is-ancestry", "layers-grow-the-tree", "drafts-equal-reference"),
)
def masks_of_another_stride(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    set_rows = TrtllmAttentionMetadata.set_spec_decoding_rows

    def set_spec_decoding_rows(self: Any, packed_mask: Any, position_offsets: Any) -> None:
        set_rows(self, packed_mask, position_offsets)
        self.spec_decoding_packed_mask[: len(packed_mask)].zero_()
        self.spec_decoding_packed_mask.view(-1)[: packed_mask.numel()].copy_(packed_mask.flatten())

    patch(TrtllmAttentionMetadata, "set_spec_decoding_rows", set_spec_decoding_rows)


@bug(
    "TRT-50",
    kind="K4",
    workers=(MTP_EAGLE_TREE,),
    variant="offset-stride",
    title="Position offsets are written with the stride of their buffer, and read one right behind the other",
    reference=_REFERENCE,
    caught_by=("trees-equal-reference", "draft-position-is-kv-minus-one"),
)
def offsets_of_another_stride(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    set_rows = TrtllmAttentionMetadata.set_spec_decoding_rows

    def set_spec_decoding_rows(self: Any, packed_mask: Any, position_offsets: Any) -> None:
        set_rows(self, packed_mask, position_offsets)
        table = self.spec_decoding_position_offsets.view(-1, self.spec_tree_width)
        table[: len(position_offsets), : position_offsets.shape[1]].copy_(position_offsets)

    patch(TrtllmAttentionMetadata, "set_spec_decoding_rows", set_spec_decoding_rows)
