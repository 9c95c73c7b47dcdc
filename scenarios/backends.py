"""What a configuration may ask of its attention backend, and which steps that runs."""

from __future__ import annotations

from typing import Final

from scenarios.errors import require
from scenarios.model import Config, Phase
from scenarios.traits import BACKENDS, WORKERS

_LARGEST_RATIO: Final = 128


def runs_on(worker: str, backend: str) -> bool:
    """Whether the worker runs on the attention backend; both are names that are known."""
    traits = BACKENDS[backend]
    return (WORKERS[worker].sparse or not traits.sparse) and (not traits.workers or worker in traits.workers)


def longest_grant(config: Config) -> int:
    """Most KV tokens that one request is ever granted: its longest sequence, and one more set of draft slots."""
    return config.max_seq_len + config.tokens_per_gen_step(config.max_draft_len) - 1


def check_backend(config: Config) -> None:
    """Raise ``ScenarioError`` unless the backend runs the worker, and sizes are those that it has."""
    backend = BACKENDS[config.attention_backend]
    require(
        backend.sparse == (config.index_topk > 0),
        "config.index_topk",
        f"{config.index_topk} does not fit attention_backend {backend.name}",
        "write 1 or more" if backend.sparse else "leave it out, as only a sparse backend selects positions",
    )
    require(
        runs_on(config.worker, backend.name),
        "config.attention_backend",
        f"{config.worker} does not run on {backend.name}",
        "choose one that it runs on: " + ", ".join(name for name in BACKENDS if runs_on(config.worker, name)),
    )
    least = longest_grant(config)
    require(
        not backend.one_page or config.tokens_per_block >= least,
        "config.tokens_per_block",
        f"{config.tokens_per_block} is too small for {backend.name}, where a sequence lies in one page",
        f"write {least} or more, room for config.max_seq_len and the drafts of a step",
    )
    _check_compression(config)
    _check_view(config)


def _check_compression(config: Config) -> None:
    name, ratios = config.attention_backend, config.compress_ratios
    if not BACKENDS[name].compressed:
        for field in ("window_size", "compress_ratios"):
            require(not getattr(config, field), f"config.{field}", f"{name} compresses no tokens", "leave it out")
        return
    require(config.window_size >= 1, "config.window_size", f"0 is too small for {name}", "write 1 or more")
    ascending = list(ratios) == sorted(set(ratios))
    require(
        2 <= len(ratios) <= 3 and ratios[0] == 1 and ascending and ratios[-1] <= _LARGEST_RATIO,
        "config.compress_ratios",
        f"{list(ratios)} is not 1 and one or two larger ratios, {_LARGEST_RATIO} at most, in ascending order",
        "write [1, 4] or [1, 2, 4]",
    )
    for i, ratio in enumerate(ratios):
        require(
            config.tokens_per_block % ratio == 0,
            f"config.compress_ratios[{i}]",
            f"{ratio} does not divide tokens_per_block {config.tokens_per_block}, so that a page would hold parts",
            "write a divisor of it, or change config.tokens_per_block",
        )


def _check_view(config: Config) -> None:
    """A drafter that reads the target's cache is asked for chains and for nothing else."""
    if config.shares_target_kv:
        for name in ("sa_threshold", "guided_decoding"):
            require(
                not getattr(config, name),
                f"config.{name}",
                f"is not combined with a drafter that reads the target's KV cache, as on {config.attention_backend}",
                "leave it out or set config.use_separate_draft_kv_cache",
            )


def check_phase(config: Config, phase: Phase, field: str) -> None:
    """Raise ``ScenarioError`` for a graph of a backend that reads lengths on the host."""
    require(
        phase not in (Phase.CAPTURE, Phase.REPLAY) or not BACKENDS[config.attention_backend].one_page,
        f"{field}.phase",
        f"{config.attention_backend} reads lengths on the host, which no CUDA graph can",
        "write 'eager'",
    )
