"""Fields of ``attn_metadata`` (and the inputs beside them) at each sub-step, under upstream's names.

Only the lengths, the number of contexts and what is saved differ between sub-steps; counters and request types
follow from them as in upstream's ``on_update``.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference.batch import Batch
from reference.workers.interface import DraftCall, Fields
from scenarios.model import Config

UNSPECIFIED_AFTER_FAILURE = ("kv_lens_cuda", "use_spec_decoding")


def metadata(
    seq_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_contexts: int,
    *,
    counted: Sequence[int] | None = None,
    saved: Sequence[str] = (),
    use_spec_decoding: bool = True,
    manager: str = "target",
    all_rank_num_tokens: Sequence[int] | None = None,
) -> Fields:
    """The fields that every sub-step but ``updated`` has.

    counted  lengths that ``on_update`` last saw
    manager  whose pages the metadata refers to: the target's but for draft calls over a cache of their own
    """
    counted = seq_lens if counted is None else counted
    num_generations = len(seq_lens) - num_contexts
    return {
        "num_contexts": num_contexts,
        "num_generations": num_generations,
        "num_ctx_tokens": sum(counted[:num_contexts]),
        "num_tokens": sum(counted),
        "_seq_lens": list(seq_lens),
        "_seq_lens_cuda": list(seq_lens),
        "kv_lens_cuda": list(kv_lens),
        "host_request_types": [0] * num_contexts + [1] * num_generations,
        "use_spec_decoding": use_spec_decoding,
        "all_rank_num_tokens": all_rank_num_tokens,
        "kv_cache_manager": manager,
        "_saved_tensors": list(saved),
    }


def target(batch: Batch, *, saved: Sequence[str] = ()) -> Fields:
    """As ``prepare()`` leaves it; so it stays until drafting starts (``entered``, ``verified``, ``saved``)."""
    counts = batch.tokens_of_ranks(batch.width + 1)
    return metadata(batch.seq_lens, batch.kv_lens, batch.num_contexts, saved=saved, all_rank_num_tokens=counts)


def prepared(batch: Batch, config: Config) -> Fields:
    """After ``prepare()`` of both metadata objects, with the inputs of the target forward."""
    kv_lens, num_contexts = batch.kv_lens, batch.num_contexts
    prompt_lens = [row.query if row.is_context else row.prompt_len for row in batch.rows]
    return target(batch) | {
        "kv_lens": [kv + config.num_extra_kv_tokens for kv in kv_lens],
        "kv_lens_runtime": list(kv_lens),
        "host_total_kv_lens": [sum(kv_lens[:num_contexts]), sum(kv_lens[num_contexts:])],
        "prompt_lens_cpu": prompt_lens,
        "prompt_lens_cuda": prompt_lens,
        "request_ids": [row.request for row in batch.rows],
        "gather_ids": batch.gather_ids,
        "draft_tokens": batch.draft_tokens,
        "runtime_draft_len": batch.draft_len,
        "runtime_tokens_per_gen_step": batch.width + 1,
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
    }


def drafting(call: DraftCall, batch: Batch, saved: Sequence[str], config: Config) -> Fields:
    """Before a call of the draft model, with the inputs of that call."""
    fields = metadata(
        call.seq_lens,
        call.kv_lens,
        call.num_contexts,
        counted=call.counted,
        saved=saved,
        use_spec_decoding=call.use_spec_decoding,
        manager="draft" if config.use_separate_draft_kv_cache else "target",
        all_rank_num_tokens=call.rank_counts if call.shows_rank_counts else batch.tokens_of_ranks(batch.width + 1),
    )
    for name in ("input_ids", "position_ids", "hidden_states", "num_ctx_per_req"):
        if (value := getattr(call, name)) is not None:
            fields[name] = value
    return fields | {"draft_all_rank_num_tokens": call.rank_counts} if call.takes_rank_counts else fields


def restored(batch: Batch, kv_lens: Sequence[int]) -> Fields:
    """After the worker's forward: as prepared, but for the KV lengths (PR #16382, PR #17381)."""
    return target(batch) | {"kv_lens_cuda": list(kv_lens)}


def failed(batch: Batch) -> Fields:
    """After the worker's cleanup. Holds for a failure that struck after ``prepare()`` of this step."""
    return {name: value for name, value in target(batch).items() if name not in UNSPECIFIED_AFTER_FAILURE}
