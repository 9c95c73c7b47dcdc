"""What the suite's model engine calls on upstream's metadata of speculation, whatever a version of it is called."""

from __future__ import annotations

import torch

from engines.portable.pyexecutor.llm_request import LlmRequest
from engines.tensorrt_llm.backend import spec_metadata_class


class NewerSpecMetadata:
    """A version whose own method is told tokens."""

    def __init__(self) -> None:
        self.context_prompt_lookahead_tokens = torch.zeros(3, dtype=torch.int32)

    def populate_context_prompt_lookahead(self, tokens: list[int]) -> None:
        raise AssertionError("the suite has requests, not tokens")


def test_a_version_with_a_lookahead_of_its_own_is_driven_like_any_other() -> None:
    spec = spec_metadata_class(NewerSpecMetadata, -1)()
    requests = [LlmRequest(0, [10, 11, 12], context_chunk_size=2), LlmRequest(1, [20, 21], context_chunk_size=2)]
    spec.populate_context_prompt_lookahead(requests)
    spec.write_padding_draft_probs(2, [], 3)
    assert spec.context_prompt_lookahead_tokens.tolist() == [12, -1, 0]
