"""TRT-155: grammars, automata and page tables go by a host that is a step behind (overlap scheduler).

No public bugs, but what can go wrong where these meet the overlap scheduler.
"""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, EAGLE3, MTP, MTP_EAGLE, PARD, SA, Patch, bug

_REFERENCE = "TensorRT-LLM, no public number"
_GUIDED = ("matchers-follow-tokens", "matchers-equal-reference", "overlap-equals-no-overlap")
_PLACES = ("page-arrays-match-layout", "target-cache-holds-the-text")
_VIEW = ("page-arrays-match-layout", "overlap-equals-no-overlap")
_TEXT = ("automaton-holds-text", "history-equals-reference", "automata-equal-reference", "overlap-equals-no-overlap")


@bug(
    "TRT-155",
    kind="K3",
    workers=(EAGLE3, PARD, SA),
    title="A matcher is told what the host knows of a step in flight",
    reference=_REFERENCE,
    caught_by=_GUIDED,
)
def told_by_the_host(patch: Patch) -> None:
    from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder

    add_batch, feed = CapturableGuidedDecoder.add_batch, CapturableGuidedDecoder.feed

    def _add_batch(self: Any, scheduled_requests: Any, draft_len: int) -> None:
        add_batch(self, scheduled_requests, draft_len)
        self.known = [(r.generated[-1:] or [0]) + r.py_draft_tokens for r in scheduled_requests.generation_requests]

    patch(CapturableGuidedDecoder, "add_batch", _add_batch)
    patch(
        CapturableGuidedDecoder, "feed", lambda self, tokens: feed(self, tokens.new_tensor(self.known).view_as(tokens))
    )


@bug(
    "TRT-155",
    kind="K3",
    workers=(EAGLE3, MTP, PARD, DFLASH),
    variant="hole",
    title="What a context in flight has sampled is missing in the text of its automaton",
    reference=_REFERENCE,
    caught_by=_TEXT,
)
def hole_in_the_text(patch: Patch) -> None:
    from engines.portable.speculative.suffix_automaton import SuffixAutomatonManager

    patch(SuffixAutomatonManager, "append_first_tokens", lambda self, tokens: None)


@bug(
    "TRT-155",
    kind="K3",
    workers=(EAGLE3, PARD),
    variant="late",
    title="The host brings the text of an automaton along a step late, over what was appended since",
    reference=_REFERENCE,
    caught_by=_TEXT,
)
def brought_along_late(patch: Patch) -> None:
    from engines.portable.speculative.suffix_automaton import SuffixAutomatonManager

    prepare_resources = SuffixAutomatonManager.prepare_resources

    def prepare_again(self: Any, scheduled_batch: Any) -> None:
        prepare_resources(self, scheduled_batch)
        for request in () if self.with_contexts else scheduled_batch.generation_requests:
            if len(request.generated) == 1:
                self._pending[self.slot_manager.get_slot(request.py_request_id)] = request.prompt + request.generated

    patch(SuffixAutomatonManager, "prepare_resources", prepare_again)


@bug(
    "TRT-155",
    kind="K3",
    workers=(EAGLE3, MTP_EAGLE),
    variant="places",
    title="FlashInfer's lengths are corrected, and not the places to which tokens are written",
    reference=_REFERENCE,
    caught_by=_PLACES,
)
def places_of_the_host(patch: Patch) -> None:
    from engines.portable.attention.backends.flashinfer import FlashInferAttentionMetadata

    correct = FlashInferAttentionMetadata.apply_spec_decode_kv_lens_offsets

    def apply_spec_decode_kv_lens_offsets(self: Any, offsets: Any, num_generations: int) -> None:
        positions = self._positions.clone()
        correct(self, offsets, num_generations)
        self._positions.copy_(positions)

    patch(FlashInferAttentionMetadata, "apply_spec_decode_kv_lens_offsets", apply_spec_decode_kv_lens_offsets)


@bug(
    "TRT-155",
    kind="K7",
    workers=(EAGLE3, MTP_EAGLE),
    variant="view",
    title="A drafter's view of FlashInfer writes to its own cache where the host took the request to be",
    reference=_REFERENCE,
    caught_by=_VIEW,
)
def view_of_the_host(patch: Patch) -> None:
    from engines.portable.attention.backends.flashinfer import FlashInferAttentionMetadata

    def _copy_lengths(self: Any, target: Any) -> None:
        self._draft_kv_runtime_lens[: target.num_seqs].copy_(target._kv_lens())

    patch(FlashInferAttentionMetadata, "_copy_lengths", _copy_lengths)
