"""What all one-model speculation workers share: their mode, their metadata and the template of their forward."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from engines.portable._utils import host_tensor
from engines.portable.attention.backends import ragged
from engines.portable.attention.backends.interface import AttentionMetadata
from engines.portable.copies import copy_to_device
from engines.portable.speculative.forced_acceptance import ForcedAcceptance
from engines.portable.speculative.mode import SpeculativeDecodingMode
from engines.portable.speculative.recurrent import update_mamba_states
from engines.portable.speculative.rejection import ProposalRows, RejectionSampling
from engines.portable.speculative.sa_enhancer import SADraftEnhancer
from engines.portable.vocab_shards import VocabShards
from scenarios.tracer import PAD_TOKEN

if TYPE_CHECKING:
    from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder
    from engines.portable.pyexecutor.llm_request import LlmRequest
    from engines.portable.speculative.suffix_automaton import SuffixAutomatonManager

logger = logging.getLogger("specfuzz.portable")

INVALID_PROMPT_LOOKAHEAD_TOKEN: Final = -1
"""Says of a context that no prompt token follows its chunk."""


@dataclass(kw_only=True, eq=False)
class SpecMetadata(ProposalRows):
    """What a worker knows of the step beside the attention metadata.

    draft_tokens                     int32 [G * (tokens per generation - 1)], device: drafts to verify, flat
    gather_ids                       int [C + G * tokens per generation], device: rows that get logits
    context_prompt_lookahead_tokens  int32 [max_num_requests], device: prompt token after each context's chunk
        (PR #18295)
    batch_indices_cuda               int32 [max_num_requests], device: 0, 1, 2, ...
    num_tokens, seq_lens, request_ids, num_generations   host; ``prepare`` takes from ``num_tokens`` what the draft
        model is not fed, see ``dp_num_tokens``
    max_total_draft_tokens           draft slots of a generation at most
    runtime_draft_len, runtime_tokens_per_gen_step       K of the step, and rows per generation
    verify_widths                    int32 [G], device: rows of each generation where they differ; None where all have
        ``runtime_tokens_per_gen_step``, which is the most then
    all_rank_num_tokens, all_rank_num_seqs, all_rank_num_gens  lists, host: ``num_tokens``, sequences and generations of
        each rank; None without attention data parallelism
    subseq_all_rank_num_tokens       the same for draft forwards after the first, where drafts are made one by one
    sa_manager                       suffix automata of the requests; None without
    """

    max_num_requests: int
    max_num_tokens: int
    spec_dec_mode: SpeculativeDecodingMode
    max_total_draft_tokens: int
    device: torch.device
    is_cuda_graph: bool = field(default=False, init=False)
    draft_tokens: Tensor | None = field(default=None, init=False)
    gather_ids: Tensor | None = field(default=None, init=False)
    request_ids: list[int] | None = field(default=None, init=False)
    seq_lens: list[int] | None = field(default=None, init=False)
    num_generations: int = field(default=0, init=False)
    num_tokens: int = field(default=0, init=False)
    runtime_draft_len: int = field(default=0, init=False)
    runtime_tokens_per_gen_step: int = field(default=1, init=False)
    verify_widths: Tensor | None = field(default=None, init=False)
    all_rank_num_tokens: list[int] | None = field(default=None, init=False)
    all_rank_num_seqs: list[int] | None = field(default=None, init=False)
    all_rank_num_gens: list[int] | None = field(default=None, init=False)
    subseq_all_rank_num_tokens: list[int] | None = field(default=None, init=False)
    sa_manager: SuffixAutomatonManager | None = None

    def __post_init__(self) -> None:
        """Allocate the buffers; called again on the copy that belongs to a graph."""
        rows = self.max_num_requests
        self.batch_indices_cuda = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.context_prompt_lookahead_tokens = torch.full(
            (rows,), INVALID_PROMPT_LOOKAHEAD_TOKEN, dtype=torch.int32, device=self.device
        )

    def prepare(self) -> None:
        """Fill the buffers from the fields of the step."""
        assert self.request_ids is not None, "prepare: request_ids is not set"
        n = len(self.request_ids)
        copy_to_device("batch_indices_cuda", self.batch_indices_cuda[:n], host_tensor(range(n), self.device))
        if self.use_rejection_sampling:
            self._prepare_proposals(self.request_ids)
        if self.sa_manager is not None:
            self.sa_manager.prepare(self.request_ids[self._first_sa_row() :])

    def _first_sa_row(self) -> int:
        """The row from which on texts are extended on the device: the first generation."""
        assert self.request_ids is not None
        return len(self.request_ids) - self.num_generations

    def dp_num_tokens(self, num_tokens: int, num_generations: int) -> int:
        """Of a rank's tokens those that it tells the other ranks of attention data parallelism; here all."""
        return num_tokens

    def set_all_rank_counts(self, num_tokens: list[int], num_seqs: list[int], num_gens: list[int]) -> None:
        """Take over what the ranks told each other, one entry per rank.

        From the second draft forward on a sequence has one token, where drafts are made one by one.
        """
        self.all_rank_num_tokens, self.all_rank_num_seqs, self.all_rank_num_gens = num_tokens, num_seqs, num_gens
        self.subseq_all_rank_num_tokens = num_seqs

    def populate_context_prompt_lookahead(self, context_requests: Sequence[LlmRequest]) -> None:
        """Upload the prompt token that follows each context's chunk."""
        if context_requests:
            tokens = [request.prompt_lookahead_token for request in context_requests]
            values = host_tensor([INVALID_PROMPT_LOOKAHEAD_TOKEN if t is None else t for t in tokens], self.device)
            copy_to_device("lookahead_tokens", self.context_prompt_lookahead_tokens[: len(tokens)], values)

    def create_cuda_graph_metadata(self, max_batch_size: int) -> SpecMetadata:
        """The metadata of a graph of ``max_batch_size`` generations, with buffers of its own."""
        if self.is_cuda_graph:
            return self
        metadata = copy.copy(self)
        metadata.is_cuda_graph = True
        metadata.max_num_requests = max_batch_size
        metadata.__post_init__()
        return metadata

    def is_layer_capture(self, layer_id: int) -> bool:
        """Whether the drafter reads this layer's output."""
        return False

    def maybe_capture_hidden_states(self, layer_id: int, hidden_states: Tensor) -> None:
        """Told by the target of the output of a layer that is to be captured."""


class SpecWorkerBase(ForcedAcceptance, RejectionSampling, ABC):
    """A drafter's side of one forward: accept, draft, and leave the attention metadata as it was found.

    Subclasses implement ``_forward_impl``; ``forward`` is the template around it that cleans up after a failure
    (PR #16382), and a class that overrides it cannot be created.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sa_enhancer: SADraftEnhancer | None = None
        self._spec_dec_attn_metadata: Any = None
        self._saved_num_contexts: int | None = None
        self._saved_host_request_types: Tensor | None = None
        self._d2t: Tensor | None = None
        self.guided_decoder: CapturableGuidedDecoder | None = None
        self.vocab_shards: VocabShards | None = None

    def set_draft_model(self, draft_model: Any) -> None:
        """Learn the draft model's vocabulary: ``d2t``, int64 [draft vocabulary], of its ``model`` where it has one."""
        self._d2t = getattr(getattr(draft_model, "model", None), "d2t", None)

    def set_guided_decoder(self, guided_decoder: CapturableGuidedDecoder) -> bool:
        """Let a grammar restrict what requests choose; says whether the worker can, and every one can."""
        self.guided_decoder = guided_decoder
        return True

    def _execute_guided_decoder_if_present(self, logits: Tensor) -> None:
        """Mask the target's logits in place, before anything is chosen of them."""
        if self.guided_decoder is not None:
            self.guided_decoder.execute(logits)

    def _rollback_guided_decoder_after_verify(self, num_accepted_tokens: Tensor) -> None:
        """Let the matchers forget what was not accepted, int32 [n], where drafting does not tell them (PR #19296)."""
        if self.guided_decoder is not None:
            self.guided_decoder.rollback_rejected_batch(num_accepted_tokens)

    @property
    def _saved_attn_metadata(self) -> Any:
        """The metadata of an open save, under upstream's name (PR #17381)."""
        return self._spec_dec_attn_metadata

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            raise TypeError(f"{cls.__name__} overrides forward, which cleans up; implement _forward_impl instead")

    @property
    @abstractmethod
    def max_draft_len(self) -> int:
        """Drafts per request at most."""

    @abstractmethod
    def _forward_impl(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        logits: Tensor,
        attn_metadata: AttentionMetadata,
        spec_metadata: Any,
        draft_model: Any,
    ) -> dict[str, Tensor]:
        """Accept drafts and make new ones; see ``forward``."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Accept the drafts that the target agrees with and make new ones.

        Takes the inputs and outputs of the target forward, ``attn_metadata``, ``spec_metadata`` and the draft
        model. Returns ``logits`` (the object passed in) and int32 device tensors: ``new_tokens`` [n, drafts + 1],
        of which the first ``new_tokens_lens`` [n] count, ``next_draft_tokens`` [n, drafts] and
        ``next_new_tokens`` [n, drafts + 1]. Whether it succeeds or raises, what it saved is restored.
        """
        attn_metadata, spec_metadata = kwargs.get("attn_metadata"), kwargs.get("spec_metadata")
        for value in args:
            if attn_metadata is None and isinstance(value, AttentionMetadata):
                attn_metadata = value
            elif spec_metadata is None and isinstance(value, SpecMetadata):
                spec_metadata = value
        try:
            return self._forward_impl(*args, **kwargs)
        finally:
            self._ensure_spec_dec_state_restored(attn_metadata, spec_metadata)

    def _ensure_spec_dec_state_restored(
        self, attn_metadata: AttentionMetadata | None, spec_metadata: SpecMetadata | None
    ) -> None:
        """Restore what a failed forward left saved; on success there is nothing to do."""
        saved = self._spec_dec_attn_metadata
        if saved is not None:
            logger.warning("%s failed while drafting; its attention metadata is restored", type(self).__name__)
            try:
                self._restore_attn_metadata_from_spec_dec(saved)
            finally:
                # Even if restoring fails too, the next forward must be able to prepare.
                self._forget_saved()
        elif attn_metadata is not None and attn_metadata.has_spec_dec_saved_state:
            logger.warning("%s failed after it saved fields itself; they are restored", type(self).__name__)
            attn_metadata.restore_from_spec_dec()
            attn_metadata.on_update()

    def _forget_saved(self) -> None:
        self._spec_dec_attn_metadata = self._saved_num_contexts = self._saved_host_request_types = None

    def _fields_to_save(self, attn_metadata: AttentionMetadata) -> tuple[str, ...]:
        """Tensors that drafting writes on and that must come back as they were."""
        return "_seq_lens", "_seq_lens_cuda"

    def _prepare_attn_metadata_for_spec_dec(self, attn_metadata: Any, *fields: str) -> None:
        """Save what drafting changes: tensors as objects, the context count and the request types as values.

        ``fields`` name tensors to save beside those of ``_fields_to_save``. To be followed by
        ``_restore_attn_metadata_from_spec_dec`` on the same object (PR #17381); raises ``AssertionError`` when the
        last such pair is still open. A failure leaves nothing saved.
        """
        assert self._spec_dec_attn_metadata is None, "prepare and restore calls must be paired: restore first"
        self._saved_num_contexts = attn_metadata.num_contexts
        types = getattr(attn_metadata, "host_request_types", None)
        self._saved_host_request_types = None if types is None else types.clone()
        self._spec_dec_attn_metadata = attn_metadata
        try:
            attn_metadata.prepare_for_spec_dec(*self._fields_to_save(attn_metadata), *fields)
        except BaseException:  # an interrupt leaves nothing saved either
            self._ensure_spec_dec_state_restored(attn_metadata, None)
            raise

    def _restore_attn_metadata_from_spec_dec(self, attn_metadata: Any) -> None:
        """Put back what ``_prepare_attn_metadata_for_spec_dec`` saved, counters included.

        Raises ``AssertionError`` without a paired prepare and for another object.
        """
        assert self._spec_dec_attn_metadata is not None, "restore requires a paired prepare"
        assert self._spec_dec_attn_metadata is attn_metadata, "restore requires the same object as prepare"
        # Not through its setter: that would call a hook before the tensors are back.
        attn_metadata._num_contexts = self._saved_num_contexts
        attn_metadata.restore_from_spec_dec()
        if self._saved_host_request_types is not None:
            attn_metadata.host_request_types.copy_(self._saved_host_request_types)
        attn_metadata.on_update()
        # Last: a raise above leaves the pair open, so that the cleanup in forward does all of it again. Upstream
        # forgets what it saved before on_update, whose failure leaves the counters of the draft phase behind.
        self._forget_saved()

    def _sample_tokens_for_batch(self, logits: Tensor) -> Tensor:
        """Greedy choice of each row: int64 [rows]."""
        return torch.argmax(logits, dim=-1)

    def _reshape_draft_tokens_for_accept(self, spec_metadata: SpecMetadata, num_gens: int) -> Tensor:
        """Drafts to verify: int32 [G, K], with padding behind those of a generation that verifies fewer."""
        assert spec_metadata.draft_tokens is not None
        if spec_metadata.verify_widths is not None:
            drafts, counts = spec_metadata.draft_tokens, spec_metadata.verify_widths - 1
            return ragged.padded_with(PAD_TOKEN, drafts, counts, spec_metadata.runtime_draft_len)
        return spec_metadata.draft_tokens.view(num_gens, spec_metadata.runtime_draft_len)

    def _reshape_logits_for_accept(self, logits: Tensor, spec_metadata: SpecMetadata, num_contexts: int) -> Tensor:
        """Logits of each context's last row, then of K + 1 rows per generation, those that it lacks being its last."""
        widths = spec_metadata.verify_widths
        if widths is None or not len(widths):
            return logits
        gens = ragged.padded(logits[num_contexts:], widths, spec_metadata.runtime_draft_len + 1)
        return torch.cat([logits[:num_contexts], gens.flatten(0, 1)])

    def sample_and_accept_draft_tokens(
        self, logits: Tensor, attn_metadata: AttentionMetadata, spec_metadata: SpecMetadata
    ) -> tuple[Tensor, Tensor]:
        """The target's tokens, int32 [n, K + 1], and how many of each row's count, int32 [n].

        A context has one; a generation one more than the drafts, from the first on, that the target agrees with. With
        rejection sampling it has to agree with what was proposed for them, too.
        """
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        num_gens = batch_size - num_contexts
        draft_tokens = self._reshape_draft_tokens_for_accept(spec_metadata, num_gens)
        draft_len = draft_tokens.shape[1]
        logits = self._reshape_logits_for_accept(logits, spec_metadata, num_contexts)
        target_tokens = self._sample_tokens_for_batch(logits)
        accepted_tokens = torch.zeros(batch_size, draft_len + 1, dtype=torch.int32, device=logits.device)
        num_accepted_tokens = torch.ones(batch_size, dtype=torch.int32, device=logits.device)
        accepted_tokens[:num_contexts, 0] = target_tokens[:num_contexts]
        gen_tokens = target_tokens[num_contexts:].view(num_gens, draft_len + 1)
        accepted_tokens[num_contexts:] = gen_tokens
        agreed = draft_tokens == gen_tokens[:, :draft_len]
        if self._can_use_rejection_sampling(logits, draft_tokens, attn_metadata, spec_metadata):
            agreed &= self._proposals_hold(logits, draft_tokens, attn_metadata, spec_metadata)
        num_accepted_tokens[num_contexts:] += agreed.cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)
        self._apply_force_accepted_tokens(num_accepted_tokens, num_contexts, draft_len, spec_metadata)
        return accepted_tokens, num_accepted_tokens

    def _accept_drafts(self, logits: Tensor, attn_metadata: Any, spec_metadata: Any) -> tuple[Tensor, Tensor]:
        """Begin a step with drafts; returns what ``sample_and_accept_draft_tokens`` does.

        A grammar masks the logits before it; recurrent states and automata are told afterwards what was accepted.
        """
        self._execute_guided_decoder_if_present(logits)
        accepted, num_accepted = self.sample_and_accept_draft_tokens(logits, attn_metadata, spec_metadata)
        self._update_mamba_states(num_accepted, attn_metadata)
        self._extend_automata(accepted, num_accepted, attn_metadata, spec_metadata)
        return accepted, num_accepted

    def _accept_own_tokens(self, logits: Tensor, attn_metadata: Any, spec_metadata: Any) -> tuple[Tensor, Tensor]:
        """The same for a step without drafts: each row's own token, int32 [n, 1], and ones, int32 [n]."""
        self._execute_guided_decoder_if_present(logits)
        accepted = self._sample_tokens_for_batch(logits).int().unsqueeze(1)
        num_accepted = torch.ones(attn_metadata.num_seqs, dtype=torch.int32, device=logits.device)
        self._update_mamba_states(num_accepted, attn_metadata)
        self._extend_automata(accepted, num_accepted, attn_metadata, spec_metadata)
        return accepted, num_accepted

    def _update_mamba_states(self, num_accepted: Tensor, attn_metadata: AttentionMetadata) -> None:
        """Make live what recurrent layers had after the last accepted row of each generation, if there are such."""
        update_mamba_states(attn_metadata, num_accepted, self._accepted_leaf_positions(num_accepted, attn_metadata))

    def _accepted_leaf_positions(self, num_accepted: Tensor, attn_metadata: AttentionMetadata) -> Tensor | None:
        """Row of each generation that its last accepted token is in, int [G]; None for chains, where counts say it."""
        return None

    def _extend_automata(
        self, accepted_tokens: Tensor, num_accepted: Tensor, attn_metadata: AttentionMetadata, spec_metadata: Any
    ) -> None:
        """Append what the generations accept to their texts; what these then draft may take over."""
        if self.sa_enhancer is not None:
            self.sa_enhancer.extend_and_prepare(
                spec_metadata.sa_manager,
                accepted_tokens,
                num_accepted,
                attn_metadata.num_generations,
                attn_metadata.num_contexts,
                spec_metadata.runtime_draft_len,
            )

    def _override_drafts(self, drafts: Tensor) -> Tensor:
        """Drafts of the generations, int32 [G, K]: those of a suffix automaton where its match is long enough."""
        return drafts if self.sa_enhancer is None else self.sa_enhancer.maybe_override_all_draft_tokens(drafts)

    def sample_draft_tokens(self, logits: Tensor, spec_metadata: SpecMetadata, draft_step: int | None = None) -> Tensor:
        """Greedy drafts from draft logits of any leading shape: int32. ``draft_step`` is None for a block.

        With rejection sampling, what was proposed for them is kept for the step that verifies them.
        """
        if spec_metadata.use_rejection_sampling:
            self._scatter_draft_probs(logits, spec_metadata, draft_step)
        shards = self.vocab_shards
        return self._map_draft_tokens(torch.argmax(logits, dim=-1) if shards is None else shards.argmax(logits))

    def _map_draft_tokens(self, draft_ids: Tensor) -> Tensor:
        """The target's tokens for the draft vocabulary's, int64: int32."""
        return (draft_ids if self._d2t is None else draft_ids + self._d2t[draft_ids]).int()

    def _prepare_next_new_tokens(self, accepted_tokens: Tensor, num_accepted: Tensor, drafts: Tensor) -> Tensor:
        """Each row's last accepted token, then its drafts: int32 [n, drafts + 1]."""
        last = accepted_tokens.gather(1, (num_accepted - 1).long().unsqueeze(1))
        return torch.cat([last, drafts], dim=1)

    def _prepare_context_input_ids(
        self, input_ids: Tensor, attn_metadata: AttentionMetadata, spec_metadata: SpecMetadata, accepted: Tensor
    ) -> Tensor:
        """Context tokens shifted by one: int32 [num_ctx_tokens].

        Last of each context is the next prompt token; the accepted one when the chunk is the prompt's last.
        """
        num_contexts, num_ctx_tokens = attn_metadata.num_contexts, attn_metadata.num_ctx_tokens
        shifted = input_ids[:num_ctx_tokens].roll(-1)
        if num_contexts:
            assert spec_metadata.gather_ids is not None
            lookahead = spec_metadata.context_prompt_lookahead_tokens[:num_contexts]
            known = lookahead != INVALID_PROMPT_LOOKAHEAD_TOKEN
            shifted[spec_metadata.gather_ids[:num_contexts]] = torch.where(known, lookahead, accepted[:num_contexts, 0])
        return shifted

    def _placeholder_draft_len(self, spec_metadata: SpecMetadata) -> int:
        """Drafts per row that ``skip_forward`` pretends to make."""
        return self.max_draft_len

    def skip_forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        logits: Tensor,
        attn_metadata: AttentionMetadata,
        spec_metadata: SpecMetadata,
        draft_model: Any,
        resource_manager: Any = None,
    ) -> dict[str, Tensor]:
        """What a rank returns that is not the last of a pipeline: outputs of the right form, with any content.

        The executor calls it instead of ``forward``. Nothing is accepted or drafted, and nothing else is touched.
        """
        rows, draft_len = attn_metadata.num_seqs, self._placeholder_draft_len(spec_metadata)
        widths = {"new_tokens": draft_len + 1, "next_draft_tokens": draft_len, "next_new_tokens": draft_len + 1}
        outputs = {
            name: torch.empty(rows, width, dtype=torch.int32, device=logits.device) for name, width in widths.items()
        }
        lens = torch.ones(rows, dtype=torch.int32, device=logits.device)
        return {"logits": logits, "new_tokens_lens": lens, **outputs}

    def _outputs(self, logits: Tensor, accepted: Tensor, num_accepted: Tensor, drafts: Tensor) -> dict[str, Tensor]:
        """The result of ``forward``."""
        return {
            "logits": logits,
            "new_tokens": accepted,
            "new_tokens_lens": num_accepted,
            "next_draft_tokens": drafts,
            "next_new_tokens": self._prepare_next_new_tokens(accepted, num_accepted, drafts),
        }
