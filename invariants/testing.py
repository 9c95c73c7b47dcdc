"""Helpers for the tests of those who work on a worker. They need neither a scenario nor an engine of this suite."""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType
from typing import Any, Final

FIELDS: Final = (
    "_seq_lens",
    "_seq_lens_cuda",
    "num_contexts",
    "num_generations",
    "num_ctx_tokens",
    "num_tokens",
    "host_request_types",
    "all_rank_num_tokens",
)
"""What ``assert_restored`` watches where the metadata has it. ``kv_lens_cuda`` moves by design."""


def _content(value: Any) -> Any:
    """Plain content of a tensor; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


class assert_restored:
    """Assert that a block gives ``metadata`` back as it found it, whether it succeeds or raises.

    ``metadata`` is any object with upstream's names: ``_saved_tensors`` must be empty before and after, tensors
    must be the same objects with the same contents, other fields equal (PR #16382, PR #17381)::

        with assert_restored(attn_metadata):
            worker.forward(..., attn_metadata=attn_metadata)

    also    further fields to watch, for instance ``["kv_lens_cuda"]`` in graph warm-up
    exempt  fields not to watch

    Raises ``AssertionError`` that lists every departure; an exception of the block itself is its context. When
    nothing departs that exception goes on unchanged.
    """

    def __init__(self, metadata: Any, *, also: Collection[str] = (), exempt: Collection[str] = ()) -> None:
        self._metadata = metadata
        self._fields = [f for f in (*FIELDS, *also) if hasattr(metadata, f) and f not in exempt]
        self._before: dict[str, tuple[Any, Any]] = {}

    def __enter__(self) -> None:
        __tracebackhide__ = True
        saved = list(self._metadata._saved_tensors)
        if saved:
            raise AssertionError(f"_saved_tensors holds {saved} before the block")
        for field in self._fields:
            value = getattr(self._metadata, field)
            self._before[field] = value, _content(value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        departures = self._departures()
        if departures:
            raise AssertionError("metadata is not restored: " + "; ".join(departures))

    def _departures(self) -> list[str]:
        found = []
        saved = list(self._metadata._saved_tensors)
        if saved:
            found.append(f"_saved_tensors still holds {saved}")
        for field, (value, content) in self._before.items():
            now = getattr(self._metadata, field)
            if hasattr(value, "tolist") and now is not value:
                found.append(f"{field} is another tensor")
            if _content(now) != content:
                found.append(f"{field} is {_content(now)}, was {content}")
        return found
