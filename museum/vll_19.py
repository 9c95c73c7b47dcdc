"""VLL-19: a drafter stops early for requests near the length limit, while those of other ranks draft on."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP_EAGLE, Patch, bug


@bug(
    "VLL-19",
    kind="K9",
    workers=(EAGLE3, MTP_EAGLE, DRAFT_TARGET),
    title="Near max_seq_len a rank makes one draft only, and so fewer forwards than the others",
    reference="vLLM #44954, #44185",
    caught_by=("drafts-equal-reference",),
)
def stops_near_the_limit(patch: Patch) -> None:
    from engines.portable.speculative.linear import LinearSpecWorker

    draft = LinearSpecWorker._forward_draft_loop

    def forward_draft_loop(
        self: Any, draft_model: Any, inputs: Any, num_accepted: Any, attn_metadata: Any, spec_metadata: Any
    ) -> Any:
        call, limit = self._forward_draft_model, attn_metadata.kv_cache_manager.max_seq_len
        last: list[Any] = []

        def call_once(*args: Any) -> Any:
            # What is not drafted is made up from what was.
            if not last or attn_metadata.kv_lens[: attn_metadata.num_seqs].max() < limit:
                last[:] = call(*args)
            hidden, to_save = last
            return hidden[: len(args[1]["input_ids"])], to_save[: len(args[1]["input_ids"])]

        self._forward_draft_model = call_once
        try:
            return draft(self, draft_model, inputs, num_accepted, attn_metadata, spec_metadata)
        finally:
            del self._forward_draft_model

    patch(LinearSpecWorker, "_forward_draft_loop", forward_draft_loop)
