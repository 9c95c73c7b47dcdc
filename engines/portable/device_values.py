"""What of a sub-step lives on the device, under the trace's names, without reading it: tensors instead of their values.

Beside it the way back: how a value of the trace is laid out in such a tensor. What a trace derives from tables of
pages (owners of slots, tables) is not here, as an expectation that knows no pages cannot be laid out; a wrong one is
seen where tokens or hidden states come of it. Neither is what only the host knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final, cast

from torch import Tensor

from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from engines.portable.mismatches import ANYTHING
from engines.portable.pyexecutor.llm_request import ScheduledRequests
from engines.portable.pyexecutor.py_executor import PyExecutor
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from engines.portable.row_values import OPEN_ROWS, RowValues
from engines.portable.spec_observation import enhancer_buffers
from scenarios import BACKENDS, Config
from scenarios.trace import ENTERED, PREPARED, RESTORED, SAVED, VERIFIED

Values = dict[str, Tensor]

OUTPUTS: Final = ("new_tokens", "new_tokens_lens", "next_draft_tokens", "next_new_tokens")
"""Outputs of a forward."""

_MASK: Final = "spec_decoding_packed_mask"
_DENSE: Final = "topk_indices_buffer"
_WORD: Final = 32


class DeviceValues:
    """Finds the tensors of one engine. ``arguments`` of a sub-step are what its seam was called with or returned."""

    def __init__(self, config: Config, executor: PyExecutor, worker: Any) -> None:
        self._tree = config.traits.tree
        self._sparse = BACKENDS[config.attention_backend].sparse
        self._keeps_context = isinstance(executor.spec_resource_manager, SeqSlotManager)
        self._overlap = executor.model_engine.overlap
        self._worker = worker
        self.rows = RowValues(config, executor)

    def begin(self, batch: ScheduledRequests) -> None:
        """A batch has been prepared, before anything is asked of it."""
        self.rows.begin(batch)

    def at(self, substep: str, attn: Any, spec: Any, arguments: Any, position_ids: Tensor | None = None) -> Values:
        """Tensors of a sub-step, each with as many dimensions as the trace has lists in lists.

        position_ids  those that the target reads, at the ends of its forward
        """
        if substep == PREPARED:
            return self._forward(attn, spec) | self._prepared(attn, spec, arguments)
        if substep == ENTERED:
            values = self._forward(attn, spec) | self._kept(attn, spec) | self.rows.entered() | self.rows.matchers()
            return values | self._positions(position_ids)
        if substep == VERIFIED:
            accepted, counts = arguments
            values = self._lens(attn) | {"num_accepted_tokens": counts, "accepted_tokens": accepted}
            return values | self.rows.verified(attn, spec) | self.rows.matchers()
        if substep == SAVED:
            return self._lens(attn)
        if substep == RESTORED:
            return self._restored(attn, spec, arguments) | self._positions(position_ids)
        # A view of it, where drafters have one.
        attn = arguments.get("attn_metadata", attn)
        masks = self._tree_masks(attn) if self._tree else {}
        values = self._lens(attn) | self._maps(attn) | masks | self._draft_inputs(arguments)
        return values | self.rows.matchers()

    def _lens(self, attn: Any) -> Values:
        lens = {"_seq_lens_cuda": attn._seq_lens_cuda}
        if hasattr(attn, "kv_lens_cuda"):
            lens["kv_lens_cuda"] = attn.kv_lens_cuda[: attn.num_seqs]
        return lens

    def _forward(self, attn: Any, spec: Any) -> Values:
        return self._lens(attn) | self._maps(attn) | self._masks(attn, spec) | self._widths(attn)

    def _widths(self, attn: Any) -> Values:
        """What is told of the rows of generations, where these differ in how many they have."""
        lens = getattr(attn, "ragged_verify_lens", None)
        if not lens:
            return {}
        values = {"gen_token_repeats_cuda": attn.gen_token_repeats_cuda[: len(lens)]}
        if self._sparse:
            names = ("row_req_idx_cuda", "row_kv_lens_cuda")
            values |= {name: getattr(attn, name)[: sum(lens)] for name in names}
        return values

    def _prepared(self, attn: Any, spec: Any, inputs: Mapping[str, Any]) -> Values:
        values = {
            "gather_ids": spec.gather_ids,
            "draft_tokens": spec.draft_tokens,
            "input_ids": inputs["input_ids"],
            "position_ids": inputs["position_ids"].flatten(),
        }
        if hasattr(attn, "prompt_lens_cuda"):
            values["prompt_lens_cuda"] = attn.prompt_lens_cuda[: attn.num_seqs]
        if self._overlap is not None:
            gens, rows = attn.num_generations, attn.num_tokens - attn.num_ctx_tokens
            values["previous_batch_indices"] = self._overlap.previous_batch_indices_cuda[:gens]
            values["previous_kv_lens_offsets_cuda"] = self._overlap.previous_kv_lens_offsets_cuda[:gens]
            values["previous_pos_id_offsets_cuda"] = self._overlap.previous_pos_id_offsets_cuda[:rows]
        if self._sparse:
            contexts, tokens = attn.num_contexts, attn.num_ctx_tokens
            values |= {
                name: getattr(attn, name)[: contexts + 1] for name in ("ctx_kv_indptr", "ctx_cached_token_indptr")
            }
            values |= {name: getattr(attn, name)[:tokens] for name in ("cu_seqlen_ks", "cu_seqlen_ke")}
        return values

    def _draft_inputs(self, arguments: Mapping[str, Any]) -> Values:
        if self._keeps_context:
            return {
                "input_ids": arguments["noise_embedding"].flatten(),
                "position_ids": arguments["query_positions"].flatten(),
                "num_ctx_per_req": arguments["num_ctx_per_req"],
            }
        values = {name: arguments[name] for name in ("input_ids", "position_ids")}
        if "hidden_states" in arguments:
            values["hidden_states"] = arguments["hidden_states"][:, 0]
        if "recurrent_hidden_states" in arguments:
            values["hidden_states"] = arguments["recurrent_hidden_states"]
        return values

    def _restored(self, attn: Any, spec: Any, outputs: Mapping[str, Tensor]) -> Values:
        values = self._lens(attn) | {name: outputs[name] for name in OUTPUTS}
        gens, draft_len = spec.num_generations, spec.runtime_draft_len
        if gens and draft_len and (buffers := enhancer_buffers(self._worker)):
            values["sa_match_len"] = buffers["sa_match_len"][:gens]
            values["sa_draft_tokens"] = buffers["sa_draft_tokens"][:gens, :draft_len]
        return values | self._masks(attn, spec) | self._kept(attn, spec) | self.rows.restored(attn, spec)

    def _positions(self, position_ids: Tensor | None) -> Values:
        """Positions that the target reads; without overlap they are those that were prepared."""
        if self._overlap is None or position_ids is None:
            return {}
        return {"position_ids": position_ids.flatten()}

    def _kept(self, attn: Any, spec: Any) -> Values:
        """What the worker keeps from step to step."""
        values: Values = {}
        counter = getattr(self._worker, "_force_accept_rng_counter", None)
        if counter is not None:
            values["force_accept_counter"] = counter
        if self._keeps_context:
            slots = spec.batch_to_slot[attn.num_contexts : attn.num_seqs]
            values["ctx_len"] = self._worker._ctx_len[slots]
        return values

    def _maps(self, attn: Any) -> Values:
        """What sparse attention reads."""
        if not self._sparse:
            return {}
        tokens, gens = attn.num_tokens, attn.num_generations
        values = {
            "req_idx_per_token": attn.req_idx_per_token[:tokens],
            "gen_kv_indptr": attn.gen_kv_indptr[: gens + 1],
            "gen_cached_token_indptr": attn.gen_cached_token_indptr[: gens + 1],
            "kv_lens_cuda_2d": attn.kv_lens_cuda_2d[:gens],
            _DENSE: attn.topk_indices_buffer[:tokens],
        }
        if attn.expands_generations:
            values["kv_lens_expanded_cuda"] = attn.kv_lens_expanded_cuda[: gens * (1 + attn.max_draft_tokens)]
        return values

    def _masks(self, attn: Any, spec: Any) -> Values:
        """What kernels are told of drafts: of trees, or of chains where there are any."""
        if self._tree:
            return self._tree_masks(attn)
        gens, width = attn.num_generations, spec.runtime_tokens_per_gen_step
        if not gens or not spec.runtime_draft_len or not isinstance(attn, TrtllmAttentionMetadata):
            return {}
        return {
            _MASK: attn.spec_decoding_packed_mask[:gens, :width],
            "spec_decoding_position_offsets": attn.spec_decoding_position_offsets[:gens, :width],
            "spec_decoding_generation_lengths": attn.spec_decoding_generation_lengths[:gens],
        }

    def _tree_masks(self, attn: Any) -> Values:
        """Buffers of one stride, the rows that each sequence feeds to this forward."""
        gens = attn.num_generations
        if not gens:
            return {}
        width = (attn.num_tokens - attn.num_ctx_tokens) // gens
        return {
            _MASK: attn.spec_decoding_packed_mask[:gens, :width],
            "spec_decoding_position_offsets": attn.spec_decoding_position_offsets[: gens * width].view(gens, width),
            "spec_decoding_generation_lengths": attn.spec_decoding_generation_lengths[:gens],
        }


def laid_out(field: str, value: Any, shape: Sequence[int]) -> Sequence[int] | None:
    """A value of the trace as a tensor of ``shape`` would have it, row by row; None where it does not fit.

    What is behind the end of a row that is shorter than the tensor's is left open; so is a row of which nothing is
    said.
    """
    if isinstance(value, int):
        value = [value]
    if len(value) != shape[0]:
        return None
    if len(shape) == 1:
        if field in OPEN_ROWS:
            return [ANYTHING if row is None else row for row in value]
        return cast(Sequence[int], value)
    width = prod(shape[1:])
    if field == _MASK:
        value = _packed(value, *shape[1:])
    elif field == _DENSE:
        value = [[ANYTHING] * width if row is None else [*row, *[-1] * (width - len(row))] for row in value]
    elif field in OPEN_ROWS:
        value = [() if row is None else row for row in value]
    flat: list[int] = []
    anything = [ANYTHING] * width
    for row in value:
        flat += row
        flat += anything[len(row) :]
    return flat if len(flat) == width * len(value) else None


def _packed(value: Sequence[Sequence[Sequence[int]]], count: int, words: int) -> list[list[int]]:
    """Bits of the rows of each sequence as int32 words; those of chains are all like the first one's."""
    packed: list[list[int]] = []
    for i, rows in enumerate(value):
        if i and rows == value[i - 1]:
            packed.append(packed[-1])
        else:
            packed.append([word for bits in rows[:count] for word in _words(tuple(bits), words)])
    return packed


@lru_cache(maxsize=4096)
def _words(bits: tuple[int, ...], count: int) -> tuple[int, ...]:
    words = [0] * count
    for bit in bits:
        words[bit // _WORD] |= 1 << bit % _WORD
    return tuple(word - (word >> 31 << 32) for word in words)
