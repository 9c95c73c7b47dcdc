"""Wrong rules of the oracle about further attention backends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from museum.bug import EAGLE3, MTP_EAGLE, SA, Patch
from reference import attention, backend_fields, compressed_attention, executor, flash_infer
from reference.workers.linear import LinearWorker
from tests.quality.wrong_rules import Fields, edit, rule


@rule("a compressed token as soon as it is begun", EAGLE3, "TRT-160")
def begun_counts(patch: Patch) -> None:
    """A forward adds each compressed token of which it feeds the first, not the last."""

    def begun(chunk: Any, ratio: int = 1) -> range:
        return range(-(-chunk.past // ratio), -(-(chunk.past + chunk.query) // ratio))

    patch(compressed_attention, "new_keys", begun)


@rule("columns without the window", MTP_EAGLE, "TRT-160/windows")
def columns_without_window(patch: Patch) -> None:
    """Of a layer with compressed tokens the kernel reads as many columns as there are of these."""

    def change(columns: list[Any], config: Any) -> list[Any]:
        window = config.window_size
        return [columns[0], *(lambda place, of=of: of(place) - window for of in columns[1:])]

    edit(patch, compressed_attention, "widths", change)


@rule("the third ratio is selected, too", SA, "TRT-160/rejected")
def all_are_selected(patch: Patch) -> None:
    """Of a layer without an indexer the highest scores are seen, not all."""
    through = attention.CompressedReading._through

    def selected(self: Any, layer: int, ratio: int) -> int:
        through(self, layer, ratio)
        return sum(sorted(self._scores[layer])[-self._sight.index_topk :])

    patch(attention.CompressedReading, "_through", selected)


@rule("keys of the indexer for every ratio", EAGLE3, "TRT-160/keys")
def keys_of_the_last_ratio(patch: Patch) -> None:
    """The indexer has keys of the last layer's compressed tokens."""

    def change(fields: Fields, histories: Any, config: Any) -> Fields:
        return {**fields, "target_indexer_kv": fields["target_compressed_kv"][config.compress_ratios[-1]]}

    edit(patch, compressed_attention, "caches", change)


@rule("a full page is followed by an empty one", SA, "TRT-161")
def empty_last_page(patch: Patch) -> None:
    """The last page of a length that fills it has no tokens."""
    patch(flash_infer, "last_page_len", lambda kv, page_size: kv % page_size)


@rule("a view of the target moves on", MTP_EAGLE, "TRT-161/all-fed")
def shared_view_moves(patch: Patch) -> None:
    """A drafter that reads the target's cache sees one token more in each call."""

    def change(call: Any, worker: Any, of: Any, chains: Any, i: int) -> Any:
        return replace(call, kv_lens=[kv + i for kv in call.kv_lens])

    edit(patch, LinearWorker, "_look", change)


@rule("a view leaves room for its tokens", EAGLE3, "TRT-161/pages")
def view_is_not_further(patch: Patch) -> None:
    """A view of the drafter's own cache has all of its length cached."""

    def change(fields: Fields, forward: Any, *_: Any) -> Fields:
        drafts = "_draft_kv_runtime_lens" in fields
        return {**fields, "_cached_token_lens": forward.kv_lens} if drafts else fields

    edit(patch, backend_fields, "tables", change)


@rule("the step's tokens are cached", SA, "TRT-162/lengths")
def step_is_cached(patch: Patch) -> None:
    """What a sequence of one page has cached includes the step's own tokens."""

    def change(fields: Fields, of: Any, config: Any) -> Fields:
        return dict.fromkeys(fields, of.kv_lens)

    edit(patch, executor.backend_fields, "on_host", change)
