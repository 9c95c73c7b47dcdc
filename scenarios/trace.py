"""The trace: what an engine did, sub-step by sub-step, under upstream's own field names.

Sub-steps of one step, in order. ``run`` counts the forwards of the step from 0 (a capture step has
``graph_warmup_runs`` forwards, then the capture; every other step has one).

=========== ================================================================================================
prepared    the inputs and both metadata objects are prepared; no forward has run (once per step)
entered     a model forward is about to start (once per run)
verified    the worker has accepted draft tokens (not in a replay, where no Python of the worker runs)
saved       ``prepare_for_spec_dec`` has returned (not in a replay)
draft[i]    the i-th call of the draft model is about to start, with its inputs (not in a replay)
restored    the worker's forward has returned, with its outputs (once per run)
updated     sampler and KV-cache manager are updated (once per step, served or start-up); with overlap after the
            next step's forward, or when the run ends, and never if the next step fails
failed      the step ended in an exception and the executor has handled it (instead of the rest)
unreadable  what was to be observed here could not be, as ``exception`` and ``message`` say (instead of the sub-step)
=========== ================================================================================================

A trace of the oracle has the same sub-steps and a subset of the fields: only what is specified. A field that
an engine cannot observe is absent from the sub-step, never made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from scenarios.model import Phase

PREPARED: Final = "prepared"
ENTERED: Final = "entered"
VERIFIED: Final = "verified"
SAVED: Final = "saved"
RESTORED: Final = "restored"
UPDATED: Final = "updated"
FAILED: Final = "failed"
UNREADABLE: Final = "unreadable"


def draft(i: int) -> str:
    """Name of the sub-step before the i-th draft-model call."""
    return f"draft[{i}]"


FIELDS: Final[dict[str, str]] = {
    # Attention metadata: prepared, entered, verified, saved, draft[i], restored, failed. n = num_seqs.
    "num_contexts": "host int",
    "num_generations": "host int",
    "num_ctx_tokens": "host int",
    "num_tokens": "host int",
    "_seq_lens": "host int32 [n]",
    "_seq_lens_cuda": "device int32 [n]",
    "kv_lens_cuda": "device int32, first n: KV length of each row, this step's tokens included; with overlap that of "
    "the host until the forward starts (in a replay: until it has run)",
    "host_request_types": "host int32, first n: 0 context, 1 generation",
    "use_spec_decoding": "host bool",
    "all_rank_num_tokens": "host list of int, or None",
    "_saved_tensors": "names of the fields whose originals are saved, in order",
    "identity": "field name -> label of the object it refers to; equal labels, same object",
    "kv_cache_manager": "whose manager the metadata refers to: target or draft",
    # Block tables of the metadata, per row the places in the pool of the pages that hold its granted tokens, in order.
    "kv_cache_block_offsets": "device: of the manager it refers to; prepared, draft[i], restored, failed",
    "draft_kv_cache_block_offsets": "device: of a separate draft KV cache; prepared, restored, failed",
    # Only at prepared.
    "kv_lens": "host int32, first n: KV lengths plus extra tokens",
    "kv_lens_runtime": "host int32 [n]: KV lengths as told to the kernels",
    "host_total_kv_lens": "host int [2]: sums over contexts and over generations",
    "prompt_lens_cpu": "host int32, first n",
    "prompt_lens_cuda": "device int32, first n",
    "block_ids_per_seq": "per row its pages as the manager calls them, in order",
    "draft_block_ids_per_seq": "the same of a separate draft KV cache",
    "kv_pool_indices": "per row where the manager says that these pages are; with host offload",
    "draft_kv_pool_indices": "the same of a separate draft KV cache",
    "request_ids": "scenario request of each row, None for a dummy",
    "gather_ids": "device int [L]: rows of the target forward that get logits",
    "draft_tokens": "device int32 [G * (tokens_per_gen_step - 1)]: drafts to verify, flat",
    "runtime_draft_len": "host int",
    "runtime_tokens_per_gen_step": "host int",
    # Verify widths (config.ragged_verify): rows of each generation, what it verifies and one more; r = their sum. Flat
    # fields have as many entries per generation as it has rows (draft_tokens one less, offsets of positions as many).
    "ragged_verify_lens": "host list of int [G]: rows of each generation; prepared",
    "gen_token_repeats_cuda": "device int32 [G]: the same; prepared, entered",
    "row_req_idx_cuda": "device int32 [r]: batch row of each row of the generations; DSA: prepared, entered, draft[0]",
    "row_kv_lens_cuda": "device int32 [r]: KV length of its request up to each of them, itself included; likewise",
    # The overlap scheduler (config.overlap): prepared. g generations, w rows each.
    "previous_batch_indices": "device int64 [g]: row of the step in flight that each one continues, -1 without one",
    "previous_kv_lens_offsets_cuda": "device int32 [g]: what the forward adds to its KV length",
    "previous_pos_id_offsets_cuda": "device int32 [g * w]: what the forward adds to the position of each of its rows",
    # Copies to the device whose source was rewritten before they had certainly run: restored, updated, failed.
    "racing_copies": "names of such copies that were not reported before",
    # Attention data parallelism, of the spec metadata: prepared, several ranks.
    "spec_all_rank_num_tokens": "host list of int: spec_num_tokens of every rank",
    "all_rank_num_seqs": "host list of int: sequences of every rank",
    "all_rank_num_gens": "host list of int: generations of every rank",
    "subseq_all_rank_num_tokens": "host list of int: tokens of every rank in draft calls of one token per sequence",
    # Inputs of the forward that is about to run: prepared (target), draft[i] (draft model).
    "input_ids": "device int32 [rows]",
    "position_ids": "device int32 [rows]; with overlap the host's at prepared, and also at entered and restored",
    "hidden_states": "device int64 [rows] (tracer digests); draft[i] of workers that feed hidden states",
    "draft_all_rank_num_tokens": "host: the all_rank_num_tokens argument of the draft call, if it has one",
    # Sparse attention (DSA): prepared, entered, draft[i], and tables of pages after a forward, too: restored, failed.
    # Of the rows of this forward, t = num_tokens, g = num_generations.
    "req_idx_per_token": "device int32 [t]: batch row of each token",
    "slot_mapping_fp8": "device int64 [t]: byte offset of each token in the indexer's cache",
    "slot_owners": "where slot_mapping_fp8 points: per token [batch row, KV index], [-1, -1] outside the batch's pages",
    "block_table": "device: per row the pages of its KV length, in order",
    "indexer_k_cache_block_offsets": "device: per row the indexer's pages of its KV length, in order",
    "gen_kv_indptr": "device int64 [g + 1]: running totals of the generations' KV lengths",
    "gen_cached_token_indptr": "device int64 [g + 1]: the same of their cached lengths",
    "kv_lens_cuda_2d": "device int32 [g, 1 + Kmax]: KV length of each generation, in every column",
    "max_gen_seq_len": "host int: longest query of a generation, 0 without generations; from the first draft update to "
    "the next ``prepare`` 1",
    "scale_owners": "where slot_mapping_scale points, as slot_owners",
    "skip_indexer_for_ctx_reqs": "host bool: contexts are so short that they attend to all of their tokens",
    "skip_indexer_for_gen_reqs": "host bool: the same of the generations of this forward",
    "topk_indices_buffer": "device: per token the KV indices it attends to, None where the indexer selects them",
    "kv_lens_expanded_cuda": "device int32 [g * (1 + Kmax)]: KV lengths of generations, repeated; only Kmax > 1",
    "block_table_expanded": "device: per entry of kv_lens_expanded_cuda its pages; prepared, entered, draft[i]",
    "cu_seqlen_ks": "device int32 [num_ctx_tokens]: first key of each context token among all contexts' keys; prepared",
    "cu_seqlen_ke": "device int32 [num_ctx_tokens]: the key after its last one; prepared",
    "ctx_kv_indptr": "device int64 [C + 1]: running totals of the contexts' KV lengths; prepared",
    "ctx_cached_token_indptr": "device int64 [C + 1]: the same of their cached lengths; prepared",
    "fullkv_owners": "where slot_mapping_fp8_fullkv points, all keys of contexts, as slot_owners; prepared, draft[i]",
    # Compressed attention (DEEPSEEK_V4): prepared, entered, draft[i], and tables of pages also restored, failed; fields
    # marked r map each ratio to its values.
    # Of the sparse fields above it has those of rows and generations there, and those of the indexer at prepared and
    # entered, where its tokens are the compressed ones that the step adds.
    "cu_seq_lens": "device int32 [n + 1]: running totals of the rows' queries",
    "cached_token_lens": "device int32 [n]: KV lengths without this forward's tokens",
    "new_comp_kv_lens": "r, device int32 [n]: compressed tokens that each row adds",
    "cu_new_comp_kv": "r, device int32 [n + 1]: running totals of these",
    "compressed_kv_lens": "r, device int32 [n]: compressed tokens of each row, added ones included",
    "past_kv_lens": "r, device int32 [n]: compressed tokens of each row before",
    "compressed_position_ids": "r > 1, device int32: position of the first token in each added one, row by row",
    "compressed_mask": "r > 1, device bool [t]: whether there is a first, second, ... added token",
    "swa_local_indices": "device int32 [t, window_size]: KV indices that each token sees plainly, ascending, then -1",
    "compressed_local_indices": "device int32 [t, width]: compressed tokens of the third ratio it sees, then -1",
    "sparse_mla_topk_lens": "r, device int32 [t]: columns of window and compressed tokens that the kernel reads",
    "sliding_block_tables": "device: per row the pages of its granted tokens, in order",
    "compress_block_tables": "r > 1, device: the same for the caches of compressed tokens; prepared, entered",
    "target_compressed_kv": "r > 1, request -> what its compressed tokens 0..past//r-1 hold; updated",
    # Page tables as arrays (FLASHINFER): prepared and entered of the target, draft[i] of the view that drafters read.
    "_qo_indptr": "device int32 [n + 1]: running totals of the rows' queries",
    "num_blocks": "host int [n]: pages of each row in the page table",
    "planned_num_blocks": "host int [n]: pages of each row by which the kernels were planned; not of a view",
    "_paged_kv_indices": "device: per row its pages in the page table, in order, by their places in the pool",
    "_paged_kv_indptr_prefill": "device int32 [C + 1]: running totals of pages, of the contexts",
    "_paged_kv_indptr_decode": "device int32 [G + 1]: the same of the generations",
    "_paged_kv_indptr": "device int32 [n + 1]: the same of both",
    "_paged_kv_last_page_len": "device int32 [n]: tokens in the last page that each row's KV length reaches",
    "_cached_token_lens": "device int32 [n]: KV lengths before the forward; after it in a view of the target's cache",
    "_batch_indices": "device int32 [t]: row of each token; not in a view of the target's cache",
    "_positions": "device int32 [t]: KV index of each token; not in a view of the target's cache",
    "_draft_kv_runtime_lens": "device int32 [n]: KV length of each row; draft[i]",
    # One page per sequence (VANILLA): prepared, entered, verified, restored, failed.
    "cache_indices": "host: per row its pages as the metadata has them, by their places in the pool",
    "num_cached_tokens_per_seq": "host: tokens of each row that were cached before the step",
    # Copies of the metadata that belong to graphs: entered of captures and replays.
    "shared_with_eager": "sorted names of attributes that are the very object of the metadata they were copied from",
    # Trees of drafts: prepared, entered, draft[i], restored, failed; rows that the masks speak of (generations of the
    # target, every row of a draft call from the second one on).
    "spec_decoding_packed_mask": "device: per row and node the nodes of this forward that it sees, itself last",
    "spec_decoding_position_offsets": "device: per row and node how many nodes of this forward are above it",
    "spec_decoding_generation_lengths": "device int32: nodes per row; and rows of each generation with verify widths, "
    "on TRTLLM: prepared, entered",
    # A drafter with a context of its own (DFlash, DSpark).
    "ctx_len": "device int64, per generation of the batch: columns of its context; entered, restored, failed",
    "num_ctx_per_req": "device int64 [G]: columns that the draft call reads; draft[i]",
    # A target with recurrent layers, where config.recurrent. There are config.num_blocks slots of states, and behind
    # them one that all dummies share.
    "state_indices": "device int32 [n]: slot of each row's state; prepared, entered, restored, failed",
    "ssm_states": "device int64 [n]: live state of each row, None for dummies; restored, and entered where not past 0",
    "intermediate_ssm_states": "device int64 [G, w]: state after each row, None for dummies; verified",
    "update_mamba_states": "host int: how often this forward has made accepted states live; restored but in a replay",
    "recurrent_states": "request -> its live state; updated",
    "mamba_slots": "request id -> slot of its state; every one that is taken (updated, failed)",
    "sentinel_state": "device int64: state in the slot of dummies, never written to; restored, updated, failed",
    # Proposals of a drafter, where config.rejection_sampling: config.num_blocks rows, and one behind them for dummies.
    "batch_slot_ids": "device int64 [n]: row of each request's proposals; prepared, entered, restored, failed",
    "draft_probs": "device int64: verified: per generation the K that it reads; restored: per row the first K; None "
    "for dummies",
    "kept_draft_probs": "request -> its proposals, as many as its last step had draft length; updated",
    "rejection_rows": "device int: generations that this forward has verified by proposals; restored",
    "seq_slots": "request id -> row of its proposals; every one that is taken (updated, failed)",
    # What the worker's own metadata says of the step: prepared.
    "slot_ids": "device int64, first n: slot of each row in what the worker keeps per request (Eagle3, vanilla MTP)",
    "spec_num_tokens": "host int: num_tokens of the spec metadata, of which attention data parallelism tells all ranks",
    "num_capture_tokens": "host int: rows of the target whose hidden states are captured (Eagle family)",
    # Acceptance: verified. The counter: entered, restored, failed, where force_num_accepted_tokens has a fraction.
    "force_accept_counter": "device int64: forwards that have drawn from the pool of forced acceptance, None without",
    "num_accepted_tokens": "device int32 [n], the target's own token included",
    "accepted_tokens": "device int32: per row its first num_accepted_tokens entries",
    # Guided decoding, where config.guided_decoding: entered, verified, draft[i], restored; then updated, failed.
    "matcher_rows": "device: per row [tokens advanced, state] of its matcher, None for dummies and non-final chunks",
    "matchers": "request -> [tokens advanced, state] of its matcher; every one that is held",
    # Relaxed acceptance, where config.use_relaxed_acceptance_for_thinking: updated; the latter failed, too.
    "relaxed_delta": "request -> how far below the first choice an accepted draft may be, to 6 digits; 0: not thinking",
    "relaxed_delta_left": "deltas other than 0 in slots that no request holds",
    # Outputs of the worker: restored.
    "new_tokens": "device int32: per row its first new_tokens_lens entries",
    "new_tokens_lens": "device int32 [n]",
    "next_draft_tokens": "device int32 [n, drafts]",
    "next_new_tokens": "device int32 [n, drafts + 1]",
    "worker_state": "worker's own step-local state: name -> value (rewind pending, held copies)",
    "left_open": "names of what the worker had yet to put back when its forward had succeeded; not in a replay",
    "sa_match_len": "device int64 [G]: length of the match of each generation's automaton (sa_threshold, K > 0)",
    "sa_draft_tokens": "device int32 [G, K]: what each of these automata drafts (sa_threshold, K > 0)",
    "held_for_nobody": "tables of managers with an entry of a request that has ended; updated, failed",
    # Executor, per real request in the batch or still active, keyed by id: updated (and failed: ledger only).
    "emitted": "request -> tokens emitted so far (generated ones, not the prompt)",
    "kv_tokens": "request -> tokens granted in the KV-cache manager",
    "kv_blocks": "request -> pages owned, in order",
    "free_blocks": "pages in the pool that nobody owns",
    "draft_kv_tokens": "request -> tokens granted in a separate draft KV cache",
    "draft_kv_blocks": "request -> pages owned there, in order",
    "draft_free_blocks": "pages there that nobody owns",
    # Block reuse (config.enable_block_reuse): updated, failed. A page is known by the tokens up to its end and, where a
    # drafter is a token ahead, the one after it; in order of known_pages, and the same for a separate draft KV cache.
    "reused_tokens": "request -> tokens of its prompt that it found in known pages",
    "known_pages": "ascending: [requests that have the page, tokens of its key...]",
    "known_page_ids": "what the manager calls each of them",
    "known_kv": "entries that each of them holds of the target",
    "known_draft_kv": "entries that each of them holds of the drafter, in the cache that the drafter has",
    "reclaim_order": "indices in known_pages of those that nobody has, in the order in which they would be taken",
    "draft_known_pages": "known_pages of a separate draft KV cache",
    "draft_known_page_ids": "known_page_ids there",
    "draft_reclaim_order": "reclaim_order there",
    "connector_block_ids": "request -> pages that a KV connector was told of; updated",
    "connector_num_tokens": "request -> tokens that it may save; updated, not with overlap",
    "py_rewind_len": "request -> tokens rewound after this step (generations of this step)",
    "py_num_accepted_draft_tokens": "request -> accepted drafts of this step, without the target's own token",
    "target_kv": "request -> entries of its target slots 0..past-1 (tracer entries)",
    "draft_kv": "request -> entries of its draft slots 0..past-1, 0 where the drafter was given nothing",
    "target_indexer_kv": "request -> entries of its target slots 0..past-1 in the indexer's cache (DSA)",
    "draft_indexer_kv": "request -> the same of its draft slots (DSA)",
    "draft_layers_kv": "request -> per MTP layer the entries of its draft slots (vanilla MTP, instead of draft_kv)",
    "mtp_past_tokens": "request -> the last Kmax tokens that vanilla MTP keeps, oldest first",
    "mtp_past_hidden_states": "request -> the target's hidden states (tracer digests) of these",
    "draft_context": "request -> [position, value] of each column of the drafter's own context (DFlash, DSpark)",
    "automaton": "request -> text that its suffix automaton holds (SA, or beside a model)",
    "sa_requests": "owners of suffix automata, ascending, -1 for a dummy (SA, or beside a model); updated, failed",
    "spec_slots": "request id -> slot of what the worker keeps for it; every one that is taken (updated, failed)",
    "draft_tree": "request -> per draft node of its last step its parent, -1 for the root; [] without a tree",
    "collectives": "[name, count of each rank] of what all ranks did together in this step, in order; several ranks",
    "graph_key": "[generations, draft slots of each, tokens] of the graph that the step replays or captures, or None",
    # failed.
    "exception": "class name of the exception",
    "message": "its text",
    "raised_at": "file:line of the innermost frame outside the suite's injector, or None",
}
"""Every field of a trace: what it holds and on which side it lives."""


@dataclass(frozen=True)
class Substep:
    """Observable state at one point: ``fields`` maps names of ``FIELDS`` to JSON values."""

    name: str
    run: int
    phase: str
    """"eager", "graph_warmup", "capture" or "replay": how the forward of this run is executed."""
    fields: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the sub-step within its step."""
        return self.name, self.run

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


@dataclass(frozen=True)
class StepTrace:
    """What happened in one step.

    outcome   "ok"; "tolerated": it failed and the run goes on; "fatal": it failed and the run is over
    fired     how often the planned fault was raised (1 in a sound run, 0 without a plan)
    injected  whether the exception that ended the step is the planned one
    sites     site -> occurrences within the step, when recorded
    """

    index: int
    phase: Phase
    outcome: str
    substeps: tuple[Substep, ...]
    fired: int = 0
    injected: bool = False
    sites: Mapping[str, int] = field(default_factory=dict)

    def find(self, name: str, run: int = 0) -> Substep | None:
        """The sub-step of that name and run, None if the step has none."""
        for substep in self.substeps:
            if substep.name == name and substep.run == run:
                return substep
        return None

    def named(self, *names: str) -> Iterator[Substep]:
        """Sub-steps with one of these names; ``draft`` stands for every draft call."""
        for substep in self.substeps:
            if substep.name in names or ("draft" in names and substep.name.startswith("draft[")):
                yield substep


@dataclass(frozen=True)
class Trace:
    """What an engine did in a scenario.

    engine   "portable", "tensorrt_llm" or "reference"
    device   "cpu", "cpu (emulated)" or "cuda"; where the fields called device live
    classes  facts about the classes under test: ``forward_defined_in`` lists the worker's classes, most
             derived first, whose own body or later assignment defines ``forward``
    """

    engine: str
    device: str
    steps: tuple[StepTrace, ...]
    classes: Mapping[str, Any] = field(default_factory=dict)
