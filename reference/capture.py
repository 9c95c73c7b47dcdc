"""What Eagle3 captures of the target, and what it makes room for (upstream: ``Eagle3OneModelSpecMetadata`` and
``Eagle3ResourceManager``)."""

from __future__ import annotations

from collections.abc import Collection

from scenarios.model import Config


def layers_to_capture(given: Collection[int] | None, num_layers: int) -> tuple[int, ...]:
    """Layers of the target whose hidden states an Eagle3 drafter is fed, in the order of their columns.

    Without a choice one near the start, one in the middle and one near the end. With 6 layers two of these are the
    same, and its third column is never written. ``ValueError`` where there are too few layers to choose from.
    """
    if given is not None:
        return tuple(sorted(given))
    if num_layers == 1:
        return (0,)
    if num_layers <= 5:
        raise ValueError(f"{num_layers} layers are too few to choose three of them; name those to capture")
    return 1, num_layers // 2 - 1, num_layers - 4


def captured_rows(config: Config) -> int:
    """Rows of the buffer of captured hidden states: the longest forward, and a row per draft slot of each request."""
    longest = min(config.max_num_tokens, config.max_num_requests * config.max_seq_len)
    drafts = config.max_total_draft_tokens or config.max_draft_len
    return longest + (1 + drafts) * config.max_num_requests


def slot_count(config: Config, num_seq_slots: int = 0) -> int:
    """Slots that the resource manager keeps per-request state in: one per request and one more, and never few."""
    return max(num_seq_slots, config.max_num_requests, config.max_seq_len) + 1
