"""Which numbers and names a configuration may have, and which of them go together."""

from __future__ import annotations

from typing import Final

from scenarios.acceptance import check_acceptance
from scenarios.backends import check_backend
from scenarios.caches import check_caches
from scenarios.errors import ScenarioError, closest
from scenarios.model import Config
from scenarios.overlap import check_overlap
from scenarios.pipeline import check_pipeline
from scenarios.ragged import check_ragged
from scenarios.ranks import check_ranks_config, check_replica
from scenarios.reuse import check_reuse
from scenarios.rows import check_rows
from scenarios.traits import BACKENDS, WORKERS
from scenarios.trees import check_tree

_LIMITS: Final = {
    "max_draft_len": (1, 31),
    "tokens_per_block": (1, 256),
    "num_blocks": (1, 16_384),
    "max_num_requests": (1, 256),
    "max_num_tokens": (1, 16_384),
    "max_seq_len": (2, 4096),
    "graph_warmup_runs": (0, 16),
    "error_budget": (0, 1_000_000),
    "seed": (0, 2**31 - 1),
    "index_topk": (0, 4096),
    "dynamic_tree_max_topK": (0, 16),
    "max_total_draft_tokens": (0, 255),
    "attention_dp_size": (1, 64),
    "attention_dp_rank": (0, 63),
    "tp_size": (1, 64),
    "tp_rank": (0, 63),
    "pp_size": (1, 2),
    "force_num_accepted_tokens": (0, 32),
    "relaxed_topk": (0, 8),
    "draft_num_blocks": (0, 16_384),
    "draft_tokens_per_block": (0, 256),
    "sa_threshold": (0, 4096),
    "window_size": (0, 4096),
}
"""Lowest and highest value of each number. With all of the highest the tensors of an engine take 70 MB with a linear
drafter and 1.2 GB with one that has a cache per layer or a context of its own; they become resident as they are used.
"""


def check_config(config: Config) -> None:
    """Raise ``ScenarioError`` unless names are known, numbers within their limits, and all of it goes together."""
    # Looking for the closest name costs more than all other checks together, so only where it is needed.
    if config.worker not in WORKERS:
        problem = f"no worker is called {config.worker!r}"
        raise ScenarioError("config.worker", problem, closest(config.worker, WORKERS))
    if config.attention_backend not in BACKENDS:
        problem = f"no attention backend is called {config.attention_backend!r}"
        raise ScenarioError("config.attention_backend", problem, closest(config.attention_backend, BACKENDS))
    for name, (low, high) in _LIMITS.items():
        value = getattr(config, name)
        if not value >= low:
            raise ScenarioError(f"config.{name}", f"{value} is too small", f"write {low} or more")
        if value > high:
            raise ScenarioError(f"config.{name}", f"{value} is too large", f"write at most {high}")
    check_backend(config)
    check_tree(config)
    check_acceptance(config)
    check_caches(config)
    check_ranks_config(config)
    check_replica(config)
    check_pipeline(config)
    check_overlap(config)
    check_reuse(config)
    check_rows(config)
    check_ragged(config)
