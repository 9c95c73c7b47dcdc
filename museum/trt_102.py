"""TRT-102: which tokens of a step the worker's metadata counts, and which of them it captures."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP, Patch, bug

_REFERENCE = "TensorRT-LLM, no public number"
_COUNTS = "spec-counts-equal-reference"


@bug(
    "TRT-102",
    kind="K9",
    workers=(EAGLE3,),
    title="What is captured is bounded by the count that ranks tell each other, which leaves the drafts out",
    reference=_REFERENCE,
    caught_by=(_COUNTS, "drafts-equal-reference"),
)
def captured_too_few(patch: Patch) -> None:
    from engines.portable.speculative.eagle3 import Eagle3OneModelSpecMetadata

    prepare = Eagle3OneModelSpecMetadata.prepare

    def bounded(self: Any) -> None:
        prepare(self)
        self.num_capture_tokens = max(self.num_tokens, 0)

    patch(Eagle3OneModelSpecMetadata, "prepare", bounded)


@bug(
    "TRT-102",
    kind="K8",
    workers=(EAGLE3,),
    variant="width",
    title="The count that ranks tell each other goes by the drafts of the step, where the others go by the most",
    reference=_REFERENCE,
    caught_by=(_COUNTS,),
)
def by_the_step(patch: Patch) -> None:
    from engines.portable.speculative.eagle3 import Eagle3OneModelSpecMetadata

    def dp_num_tokens(self: Any, num_tokens: int, num_generations: int) -> int:
        return int(num_tokens - num_generations * self.runtime_draft_len)

    patch(Eagle3OneModelSpecMetadata, "dp_num_tokens", dp_num_tokens)


@bug(
    "TRT-102",
    kind="K2",
    workers=(EAGLE3, MTP, DRAFT_TARGET),
    variant="again",
    title="Metadata that is prepared twice for a step takes the drafts off its count twice",
    reference=_REFERENCE,
    caught_by=(_COUNTS,),
)
def prepared_twice(patch: Patch) -> None:
    from engines.portable.pyexecutor.model_engine import PyTorchModelEngine

    prepare_inputs = PyTorchModelEngine._prepare_inputs

    def _prepare_inputs(self: Any, *args: Any) -> Any:
        inputs = prepare_inputs(self, *args)
        inputs["spec_metadata"].prepare()
        return inputs

    patch(PyTorchModelEngine, "_prepare_inputs", _prepare_inputs)
