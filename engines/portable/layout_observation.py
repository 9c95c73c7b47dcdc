"""What the observer reads of the lengths of a batch: those that ``prepare`` writes, and rows of generations."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def prepared_lens(attn: Any) -> Fields:
    """Lengths that ``prepare`` writes; a backend whose kernels are not told of them has none."""
    if not hasattr(attn, "kv_lens"):
        return {}
    n = attn.num_seqs
    names = ("kv_lens", "prompt_lens_cpu", "prompt_lens_cuda")
    lens = {name: getattr(attn, name).tolist() for name in ("kv_lens_runtime", "host_total_kv_lens")}
    return lens | {name: getattr(attn, name).tolist()[:n] for name in names}


def planned_widths(attn: Any) -> Fields:
    """Rows of each generation as the host has planned them; nothing where all have the same."""
    lens = getattr(attn, "ragged_verify_lens", None)
    return {} if lens is None else {"ragged_verify_lens": list(lens)}


def published_widths(attn: Any) -> Fields:
    """The same as the device is told."""
    if getattr(attn, "ragged_verify_lens", None) is None:
        return {}
    return {"gen_token_repeats_cuda": attn.gen_token_repeats_cuda[: attn.num_generations].tolist()}
