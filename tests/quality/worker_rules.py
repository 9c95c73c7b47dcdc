"""Wrong rules of the oracle about how workers draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from museum.bug import (
    DFLASH,
    DRAFT_TARGET,
    DSPARK,
    EAGLE3,
    EAGLE3_TREE,
    MTP,
    MTP_EAGLE,
    MTP_EAGLE_TREE,
    PARD,
    SA,
    Patch,
)
from reference import batch, drafter, enhancer, executor, tree, tree_attention
from reference.workers import (
    dflash,
    draft_target,
    dspark,
    eagle3,
    eagle3_dynamic_tree,
    interface,
    linear,
    mtp,
    mtp_eagle_dynamic_tree,
    pard,
    sa_worker,
)
from reference.workers import tree as tree_worker
from scenarios.tracer import entry
from tests.quality.wrong_rules import edit, rule

Fields = Mapping[str, Any]


@rule("one draft more agrees", PARD, "TRT-01/rewind-twice")
def one_more_agrees(patch: Patch) -> None:
    """``agree`` counts from 0."""
    right = drafter.drafted
    patch(drafter, "drafted", lambda choice, depth, agree, close=0: right(choice, depth, agree + 1, close))


@rule("hidden state behind its draft", EAGLE3, "TRT-120")
def hidden_of_the_draft(patch: Patch) -> None:
    """The next call is fed the hidden state after the draft, not the one it was chosen from."""
    edit(
        patch, linear, "chain",
        lambda made, text, *_: made._replace(hidden=[*made.hidden[1:], *made.hidden[-1:]]),
    )  # fmt: skip


@rule("positions one ahead in the loop", MTP_EAGLE, "TRT-120")
def positions_ahead(patch: Patch) -> None:
    """Draft call i stands at the cached tokens plus i."""
    edit(
        patch, linear.LinearWorker, "_extend",
        lambda call, self, of, chains, i: replace(call, position_ids=[row.end + i for row in of.rows]),
    )  # fmt: skip


@rule("contexts do not move", DRAFT_TARGET, "TRT-03")
def contexts_stay(patch: Patch) -> None:
    """The draft loop moves the KV lengths of generations only."""

    def change(made: interface.Drafting, self: Any, of: batch.Batch) -> interface.Drafting:
        return replace(made, kv_lens=[row.kv for row in of.contexts] + made.kv_lens[of.num_contexts :])

    edit(patch, linear.LinearWorker, "draft", change)


@rule("no ingestion with draft length 0", MTP_EAGLE, "TRT-110/hole")
def no_ingestion(patch: Patch) -> None:
    """A step that drafts nothing calls no draft model."""
    edit(
        patch, linear.LinearWorker, "draft",
        lambda made, self, of: made if of.draft_len else replace(made, calls=[]),
    )  # fmt: skip


@rule("lengths saved in every phase", DRAFT_TARGET, "TRT-120")
def lengths_saved_always(patch: Patch) -> None:
    """``kv_lens_cuda`` is saved in every forward, not in graph warm-up alone."""
    right = interface.SpecWorker.saved_fields
    patch(interface.SpecWorker, "saved_fields", lambda self, phase: right(self, "graph_warmup"))


@rule("PARD takes its drafts back", PARD, "TRT-01/rewind-restored")
def pard_at_target(patch: Patch) -> None:
    """After its call PARD's lengths are those of the target's forward."""
    edit(patch, pard.PARDWorker, "draft", lambda made, self, of: replace(made, kv_lens=of.kv_lens))


@rule("the first generated token is ingested", PARD, "SGL-12")
def first_token_ingested(patch: Patch) -> None:
    """PARD's cache has the first generated token, as all others."""
    patch(pard, "unshifted_slots", lambda of: of.text.slots(of.past))


@rule("the shifted token not known yet", EAGLE3, "TRT-03")
def shifted_is_empty(patch: Patch) -> None:
    """A drafter with shift 1 leaves the slot of the last cached token as it is in the target's cache."""
    patch(
        linear, "shifted_slots",
        lambda of: [entry(n, of.text.token(min(n + 1, of.past - 1))) for n in range(of.past)],
    )  # fmt: skip


@rule("a block as wide as the draft length", DFLASH, "TRT-102/width")
def block_of_k(patch: Patch) -> None:
    """DFlash queries K rows, not Kmax."""
    right = dflash.DFlashWorker._block
    patch(dflash.DFlashWorker, "_block", lambda self, of: right(self, replace(of, max_draft_len=of.draft_len)))


@rule("columns of rejected tokens stay", DFLASH, "SGL-12")
def rejected_columns(patch: Patch) -> None:
    """The context of DFlash grows by all tokens that a step feeds."""

    def own_state(self: Any, of: batch.Batch, *, after: bool) -> Fields:
        return {} if of.has_dummies else {"ctx_len": [row.kv if after else row.past for row in of.generations]}

    patch(dflash.DFlashWorker, "own_state", own_state)


@rule("layers look from the drafts", MTP, "SGL-01")
def layers_look_ahead(patch: Patch) -> None:
    """The layers of a generation look from what the target was fed, rejected or not."""
    patch(
        mtp, "span",
        lambda row, draft_len: range(row.past, row.end) if row.is_context else range(row.kv - draft_len, row.kv),
    )  # fmt: skip


@rule("no slot is left out", MTP, "SGL-12")
def no_slot_left_out(patch: Patch) -> None:
    """Vanilla MTP writes a slot for each cached token, also where K + 1 are accepted."""
    patch(mtp, "skipped", lambda of: set())


@rule("Eagle3 announces by the step", EAGLE3, "TRT-102/width")
def announces_by_step(patch: Patch) -> None:
    """Eagle3's ``num_tokens`` takes off K per generation, not Kmax."""
    patch(eagle3.Eagle3OneModelWorker, "announced", lambda self, of: of.width + 1 - of.draft_len)


@rule("the text ends with the chunk", SA, "in chunks")
def text_ends_with_chunk(patch: Patch) -> None:
    """A suffix automaton knows of a prompt what is cached."""

    def continuation(row: batch.Row, draft_len: int) -> list[int]:
        return drafter.rollout(row.text, row.end + 1, draft_len, row.agree) if row.agree else []

    patch(sa_worker, "continuation", continuation)


@rule("the token after the prompt at once", EAGLE3, "TRT-110/kept")
def text_with_next_token(patch: Patch) -> None:
    """The automaton beside a model has what the prompt ends with as soon as it is sampled."""
    patch(enhancer, "_text", lambda of: of.said)


# Trees.


@rule("best nodes first", MTP_EAGLE_TREE, "TRT-01/rewind-twice")
def best_nodes_first(patch: Patch) -> None:
    """The nodes that are kept stand in the order of their scores."""

    def kept(self: tree.Growth, count: int) -> list[int]:
        return tree._best(self.made, range(len(self.made)), count)

    patch(tree.Growth, "kept", kept)


@rule("offsets count the node", EAGLE3_TREE, "TRT-120")
def offsets_count_the_node(patch: Patch) -> None:
    """The offset of a node counts itself."""

    def change(fields: Fields, *_: Any) -> Fields:
        offsets = fields.get("spec_decoding_position_offsets", [])
        return {**fields, "spec_decoding_position_offsets": [[n + 1 for n in row] for row in offsets]} if fields else {}

    patch(executor, "masks", lambda *args: change(tree_attention.masks(*args)))


@rule("a path as wide as the tree", MTP_EAGLE_TREE, "TRT-01/rewind-twice")
def path_as_wide_as_tree(patch: Patch) -> None:
    """The first draft call is fed all T + 1 tokens of a generation."""

    def ingest(of: batch.Batch) -> interface.DraftCall:
        call = right(of)
        lens = [*call.seq_lens[: of.num_contexts], *[of.width + 1] * len(of.generations)]
        return replace(call, seq_lens=lens)

    right = tree_worker._ingest
    patch(tree_worker, "_ingest", ingest)


# What one worker has of its own.


@rule("verified drafts announced", DRAFT_TARGET, "TRT-01/rewind-restored")
def verified_drafts_announced(patch: Patch) -> None:
    """DraftTarget counts the drafts that it verifies, too."""
    patch(draft_target.DraftTargetOneModelWorker, "announced", lambda self, of: of.width + 1)


@rule("a block that begins like DFlash's", DSPARK, "TRT-01/rewind-twice")
def dspark_like_dflash(patch: Patch) -> None:
    """The first row of DSpark's block drafts nothing."""
    patch(dspark.DSparkWorker, "leading_rows", 1)


@rule("all nodes announced", EAGLE3_TREE, "TRT-01/rewind-restored")
def all_nodes_announced(patch: Patch) -> None:
    """Eagle3's tree announces its drafts beside the root."""
    patch(eagle3_dynamic_tree.Eagle3OneModelDynamicTreeWorker, "announced", lambda self, of: of.width + 1)


@rule("lengths grow with the tree", MTP_EAGLE_TREE, "TRT-01/rewind-twice")
def lengths_grow(patch: Patch) -> None:
    """MTP-Eagle's tree leaves the KV lengths of its last layer, as Eagle3's does."""
    patch(mtp_eagle_dynamic_tree.MTPEagleDynamicTreeWorker, "returns_kv_lens", False)
