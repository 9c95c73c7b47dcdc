"""What the overlap scheduler puts right on the device: inputs that depend on a step that the host has not seen yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from engines.portable._utils import host_tensor
from engines.portable.attention.backends import ragged
from engines.portable.copies import copy_to_device, to_device
from engines.portable.pyexecutor.llm_request import LlmRequest
from scenarios.tracer import PAD_TOKEN

NO_PREVIOUS_ROW: Final = -1


@dataclass(frozen=True)
class SampleStateTensors:
    """Outputs of the step in flight, on the device, row by row.

    next_new_tokens      int32 [n, drafts + 1]
    new_tokens_lens      int32 [n]
    next_draft_tokens    int32 [n, drafts]
    runtime_draft_len    drafts of a row that were made; its other draft slots are padding
    tokens_of_rows       what the host counts of each request of that step: the rows of a generation, of a context as
                         many as one has that verifies all of its drafts
    """

    next_new_tokens: Tensor
    new_tokens_lens: Tensor
    next_draft_tokens: Tensor
    runtime_draft_len: int
    tokens_of_rows: tuple[int, ...]


class OverlapInputs:
    """Corrections of one step's inputs. Their addresses are part of every graph.

    With rows of the step in flight, the host has neither the tokens of those requests nor knows how many of them were
    accepted: it counts all. The tokens are gathered when inputs are prepared; positions and KV lengths are corrected in
    the forward, which a graph replays.

    previous_batch_indices_cuda     int64 [rows]: row in flight of each generation, -1 where it has none
    previous_kv_lens_offsets_cuda   int32 [rows]: accepted tokens less those that the host has counted, else 0
    previous_pos_id_offsets_cuda    int32 [max_num_tokens]: accepted tokens, for each row of each generation, else 0
    """

    def __init__(self, max_num_requests: int, max_num_tokens: int, device: torch.device) -> None:
        self.device = device
        self.previous_batch_indices_cuda = torch.full(
            (max_num_requests,), NO_PREVIOUS_ROW, dtype=torch.int64, device=device
        )
        self.previous_kv_lens_offsets_cuda = torch.zeros(max_num_requests, dtype=torch.int32, device=device)
        self.previous_pos_id_offsets_cuda = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)

    def prepare(
        self,
        generations: Sequence[LlmRequest],
        width: int,
        runtime_draft_len: int,
        previous: SampleStateTensors | None,
        verify_widths: Tensor | None,
        input_ids: Tensor,
        draft_tokens: Tensor,
    ) -> None:
        """Fill the buffers for generations of ``width`` rows each, and fetch the tokens of those that are in flight.

        Of what these drafted ``runtime_draft_len`` are verified at most; other draft slots are padding.

        verify_widths  int32 [len(generations)], device: how many of these rows each has; None where all have all
        input_ids      int32 [rows of them], device; written in place where the host knew no better
        draft_tokens   int32 [that, less one for each], device; likewise
        """
        n = len(generations)
        offsets = self.previous_kv_lens_offsets_cuda[:n]
        positions = self.previous_pos_id_offsets_cuda[: len(input_ids)]
        indices = self.previous_batch_indices_cuda[:n]
        if previous is None:
            # Graphs and start-up come this way too: what an earlier step left here must not count.
            for buffer, value in ((indices, NO_PREVIOUS_ROW), (offsets, 0), (positions, 0)):
                buffer.fill_(value)
            return
        rows = self._rows(generations)
        copy_to_device("previous_batch_indices_cuda", indices, host_tensor(rows, self.device))
        counts = [0 if row == NO_PREVIOUS_ROW else previous.tokens_of_rows[row] for row in rows]
        counted = to_device("tokens_of_rows", host_tensor(counts, self.device), self.device)
        in_flight, place = indices >= 0, indices.clamp(min=0)
        accepted = torch.where(in_flight, previous.new_tokens_lens.index_select(0, place), 0)
        offsets.copy_(accepted - counted)
        made = previous.next_draft_tokens[:, : min(previous.runtime_draft_len, runtime_draft_len)]
        padded = torch.nn.functional.pad(made, (0, width - 1 - made.shape[1]), value=PAD_TOKEN)
        drafts = padded.index_select(0, place)
        tokens = torch.cat([previous.next_new_tokens.index_select(0, place)[:, :1], drafts], dim=1)
        known = in_flight.unsqueeze(1).expand(-1, width)
        positions.copy_(self._flat(accepted.unsqueeze(1).expand(-1, width), verify_widths, len(input_ids)))
        drafted = None if verify_widths is None else verify_widths - 1
        for buffer, fetched, widths in ((input_ids, tokens, verify_widths), (draft_tokens, drafts, drafted)):
            if not len(buffer):
                continue
            is_known = self._flat(known[:, : fetched.shape[1]], widths, len(buffer))
            buffer.copy_(torch.where(is_known, self._flat(fetched, widths, len(buffer)), buffer))

    @staticmethod
    def _flat(values: Tensor, widths: Tensor | None, rows: int) -> Tensor:
        """Values of the generations' rows, one after the other, of [n, columns]; all columns without ``widths``."""
        return values.flatten() if widths is None else ragged.flat(values, widths, rows)

    @staticmethod
    def _rows(generations: Sequence[LlmRequest]) -> list[int]:
        """Row in flight of each request: they may be left out of a batch, or stand in it in another order."""
        return [NO_PREVIOUS_ROW if r.previous_row is None else r.previous_row for r in generations]

    def correct(self, inputs: dict[str, Any]) -> None:
        """Move positions and KV lengths of the generations, in place, to where they are."""
        attn_metadata = inputs["attn_metadata"]
        contexts, n = attn_metadata.num_contexts, attn_metadata.num_seqs
        offsets = self.previous_kv_lens_offsets_cuda[: n - contexts]
        if hasattr(attn_metadata, "kv_lens_cuda"):
            attn_metadata.kv_lens_cuda[contexts:n].add_(offsets)
        else:
            attn_metadata.apply_spec_decode_kv_lens_offsets(offsets, n - contexts)
        in_generations = inputs["position_ids"][0, attn_metadata.num_ctx_tokens :]
        in_generations.add_(self.previous_pos_id_offsets_cuda[: len(in_generations)])

    def take_back(self, inputs: dict[str, Any]) -> None:
        """Undo what ``correct`` did, and the next forward on the same inputs does again; ``kv_lens_cuda`` apart.

        Whoever runs several forwards puts those lengths back, as draft loops move them, too.
        """
        attn_metadata = inputs["attn_metadata"]
        if not hasattr(attn_metadata, "kv_lens_cuda"):
            gens = attn_metadata.num_generations
            attn_metadata.apply_spec_decode_kv_lens_offsets(-self.previous_kv_lens_offsets_cuda[:gens], gens)
        in_generations = inputs["position_ids"][0, inputs["attn_metadata"].num_ctx_tokens :]
        in_generations.sub_(self.previous_pos_id_offsets_cuda[: len(in_generations)])
