"""TRT-78: the ranks tell each other a number of tokens before it is what the drafter goes by."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, EAGLE3_TREE, MTP, Patch, bug

_REFERENCE = "TensorRT-LLM #18629, #18293"


@bug(
    "TRT-78",
    kind="K9",
    workers=(EAGLE3, EAGLE3_TREE, DRAFT_TARGET, MTP),
    title="The ranks exchange num_tokens of the spec metadata before prepare rewrites it",
    reference=_REFERENCE,
    caught_by=("rank-counts-follow-batches", "rank-counts-equal-reference", "collectives-equal-reference"),
)
def exchanged_before_prepare(patch: Patch) -> None:
    from engines.portable.pyexecutor.model_engine import PyTorchModelEngine
    from engines.process import replaced

    gather = PyTorchModelEngine._gather_spec_counts

    def too_early(self: Any, attn_metadata: Any, spec_metadata: Any) -> None:
        def as_fed(num_tokens: int, num_generations: int) -> int:
            return num_tokens

        with (
            replaced(spec_metadata, "num_tokens", attn_metadata.num_tokens),
            replaced(spec_metadata, "dp_num_tokens", as_fed),
        ):
            gather(self, attn_metadata, spec_metadata)

    patch(PyTorchModelEngine, "_gather_spec_counts", too_early)


@bug(
    "TRT-78",
    kind="K9",
    workers=(EAGLE3_TREE,),
    variant="width",
    title="The ranks leave out of their tokens as many drafts as a chain has, and not a tree",
    reference=_REFERENCE,
    caught_by=("rank-counts-equal-reference", "collectives-equal-reference"),
)
def drafts_of_a_chain(patch: Patch) -> None:
    from engines.portable.speculative.eagle3 import Eagle3OneModelSpecMetadata

    def dp_num_tokens(self: Any, num_tokens: int, num_generations: int) -> int:
        return num_tokens - num_generations * int(self.runtime_draft_len)

    patch(Eagle3OneModelSpecMetadata, "dp_num_tokens", dp_num_tokens)
