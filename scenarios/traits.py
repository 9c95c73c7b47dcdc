"""What a scenario needs to know of workers and attention backends; all else of them is the engines' own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class WorkerTraits:
    """What a scenario needs to know of a worker to be valid for it.

    parallel             it drafts from mask tokens, so that a generation feeds 2K rows and not K + 1
    drafts_for_contexts  whether the drafts made for a context row are real
    min_draft_len        smallest runtime draft length that it handles
    fixed_draft_len      it does not follow a runtime draft length: K is always ``max_draft_len``
    chunked_prefill      a prompt may be computed in chunks; without look-ahead a chunk border costs a drafter tokens
    feeds_history        its generations feed the drafter their last K tokens again, so prompts have K or more
    keeps_context        its drafter reads a context that it keeps per slot, and neither KV cache nor attention metadata
    tree                 it drafts a tree: ``max_total_draft_tokens`` nodes of depth K at most
    sparse               whether it runs on a sparse attention backend
    draft_model          it drafts by calls of a model; without one it saves nothing and moves no lengths
    draft_vocab          its draft model has a head of its own, and so may have a vocabulary of its own
    relaxed_acceptance   it may accept, of a request that thinks, drafts that are not the target's first choice
    sa_enhancer          a suffix automaton's drafts may take the place of the model's
    recurrent            it makes the recurrent states of the tokens that it accepts the live ones of hybrid models
    rejection_sampling   it may verify its drafts by what its draft model has proposed
    ragged_verify        it may verify another number of drafts of each generation: a chain of one row per draft
    """

    name: str
    summary: str
    parallel: bool = False
    drafts_for_contexts: bool = True
    min_draft_len: int = 0
    fixed_draft_len: bool = False
    chunked_prefill: bool = True
    feeds_history: bool = False
    keeps_context: bool = False
    tree: bool = False
    sparse: bool = True
    draft_model: bool = True
    draft_vocab: bool = True
    relaxed_acceptance: bool = False
    sa_enhancer: bool = False
    recurrent: bool = False
    rejection_sampling: bool = False
    ragged_verify: bool = False

    @property
    def reuses_blocks(self) -> bool:
        """Whether its prompts may begin with pages of earlier ones: all that it keeps of them is in pages."""
        return self.chunked_prefill and not self.keeps_context

    @property
    def guides_drafts(self) -> bool:
        """Whether guided decoding takes part in drafting: it follows a chain that a model drafts token by token."""
        return self.drafts_for_contexts and self.draft_model

    @property
    def varies_draft_len(self) -> bool:
        """Whether steps may differ in their draft length."""
        return not self.fixed_draft_len

    @property
    def shares_draft_head(self) -> bool:
        """Whether ranks may share its draft head: one that a draft per row is the best token of."""
        return self.draft_model and not self.tree

    @property
    def separate_draft_kv_cache(self) -> bool:
        """Whether its drafter may have a KV cache of its own: it has layers in one, and no context instead of it."""
        return self.draft_model and not self.keeps_context


WORKERS: Final[dict[str, WorkerTraits]] = {
    w.name: w
    for w in (
        WorkerTraits(
            "Eagle3OneModelWorker",
            "Eagle3, linear draft loop over one draft layer group",
            relaxed_acceptance=True,
            sa_enhancer=True,
            recurrent=True,
            rejection_sampling=True,
            ragged_verify=True,
        ),
        WorkerTraits(
            "MTPEagleWorker",
            "MTP-Eagle, linear draft loop over one MTP layer",
            draft_vocab=False,
            relaxed_acceptance=True,
            sa_enhancer=True,
            recurrent=True,
            rejection_sampling=True,
            ragged_verify=True,
        ),
        WorkerTraits(
            "DraftTargetOneModelWorker",
            "a separate draft model, linear draft loop over tokens alone",
            rejection_sampling=True,
            ragged_verify=True,
        ),
        WorkerTraits(
            "PARDWorker",
            "PARD, one parallel forward over mask tokens",
            parallel=True,
            drafts_for_contexts=False,
            min_draft_len=1,
            sa_enhancer=True,
            rejection_sampling=True,
        ),
        WorkerTraits(
            "MTPWorker",
            "vanilla MTP, K layers that each look one token further",
            min_draft_len=1,
            fixed_draft_len=True,
            chunked_prefill=False,
            feeds_history=True,
            sparse=False,
            draft_vocab=False,
            relaxed_acceptance=True,
            sa_enhancer=True,
            recurrent=True,
            rejection_sampling=True,
        ),
        WorkerTraits(
            "SAWorker",
            "drafts from the suffix automaton of a request's own text",
            draft_model=False,
            draft_vocab=False,
            recurrent=True,
            ragged_verify=True,
        ),
        WorkerTraits(
            "DFlashWorker",
            "DFlash, one block of drafts from the context that the drafter keeps per slot",
            drafts_for_contexts=False,
            keeps_context=True,
            sparse=False,
            sa_enhancer=True,
            recurrent=True,
            rejection_sampling=True,
        ),
        WorkerTraits(
            "DSparkWorker",
            "DSpark, DFlash with a block of K rows and a head that corrects it",
            drafts_for_contexts=False,
            keeps_context=True,
            sparse=False,
            sa_enhancer=True,
            recurrent=True,
            rejection_sampling=True,
        ),
        WorkerTraits(
            "Eagle3OneModelDynamicTreeWorker",
            "Eagle3, a dynamic tree of drafts",
            drafts_for_contexts=False,
            min_draft_len=1,
            fixed_draft_len=True,
            tree=True,
            sparse=False,
        ),
        WorkerTraits(
            "MTPEagleDynamicTreeWorker",
            "MTP-Eagle, a dynamic tree of drafts",
            drafts_for_contexts=False,
            min_draft_len=1,
            fixed_draft_len=True,
            tree=True,
            sparse=False,
            draft_vocab=False,
            recurrent=True,
        ),
    )
}
"""Workers by class name. A worker is added to the suite by adding its traits here first."""


@dataclass(frozen=True)
class BackendTraits:
    """What a scenario needs to know of an attention backend to be valid for it.

    metadata    upstream's class
    sparse      it attends to the ``Config.index_topk`` positions that its indexer selects
    compressed  what it selects from are compressed tokens (``Config.compress_ratios``), beside a window of plain ones
    draft_view  a drafter reads the cache through a view of the metadata: one of its own cache or, without one, of the
                target's, to which it adds nothing
    one_page    a sequence lies in one page, of which the host alone knows the length
    workers     the only ones that run on it; empty for all, but that not all run on a sparse one
    """

    name: str
    metadata: str
    summary: str
    sparse: bool = False
    compressed: bool = False
    draft_view: bool = False
    one_page: bool = False
    workers: tuple[str, ...] = ()


BACKENDS: Final[dict[str, BackendTraits]] = {
    b.name: b
    for b in (
        BackendTraits("TRTLLM", "TrtllmAttentionMetadata", "dense attention over the paged KV cache"),
        BackendTraits(
            "DSA",
            "DSAtrtllmAttentionMetadata",
            "sparse attention: an indexer with a cache of its own selects positions",
            sparse=True,
        ),
        BackendTraits(
            "DEEPSEEK_V4",
            "DeepseekV4TrtllmAttentionMetadata",
            "a sliding window beside compressed tokens, of which an indexer selects some",
            sparse=True,
            compressed=True,
        ),
        BackendTraits(
            "FLASHINFER",
            "FlashInferAttentionMetadata",
            "page tables as arrays of running totals; drafters read views of them",
            draft_view=True,
            workers=("Eagle3OneModelWorker", "MTPEagleWorker", "SAWorker"),
        ),
        BackendTraits(
            "VANILLA",
            "VanillaAttentionMetadata",
            "each sequence in one page, lengths on the host; no graphs and no draft model",
            one_page=True,
            workers=("SAWorker",),
        ),
    )
}
"""Attention backends by the name that a configuration gives them."""
