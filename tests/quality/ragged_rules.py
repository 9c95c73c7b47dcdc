"""Wrong rules of the oracle about generations that verify different numbers of drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP_EAGLE, SA, Patch
from reference import batch, kv_cache, overlap, proposals, ragged
from reference.batch import Batch, Row
from scenarios import Config
from tests.quality.wrong_rules import Fields, edit, rule

Continued = tuple[int, overlap.OverlappedRow | None]


@rule("drafts, not rows", EAGLE3, "ragged")
def drafts_not_rows(patch: Patch) -> None:
    """Kernels are told how many drafts a generation verifies, not how many rows it has."""
    widths = {"gen_token_repeats_cuda", "ragged_verify_lens"}

    def change(fields: Fields, *_: Any) -> Fields:
        return {name: [n - 1 for n in value] if name in widths else value for name, value in fields.items()}

    edit(patch, ragged, "widths", change)
    edit(patch, ragged, "published", change)


@rule("rows see their whole request", MTP_EAGLE, "ragged on DSA")
def rows_see_all(patch: Patch) -> None:
    """Each row of a generation has the length of the last one, as in tables with a column for each."""

    def change(fields: Fields, forward: Any, config: Config) -> Fields:
        if not fields:
            return fields
        return {**fields, "row_kv_lens_cuda": [forward.kv_lens[row] for row in fields["row_req_idx_cuda"]]}

    edit(patch, ragged, "row_lengths", change)


@rule("rows counted without contexts", EAGLE3, "ragged beside a prompt")
def contexts_not_counted(patch: Patch) -> None:
    """The first generation's rows are those of request 0, whatever comes before it in the batch."""

    def change(fields: Fields, forward: Any, config: Config) -> Fields:
        owners = [row - forward.num_contexts for row in fields.get("row_req_idx_cuda", ())]
        return {**fields, "row_req_idx_cuda": owners} if fields else fields

    edit(patch, ragged, "row_lengths", change)


@rule("room for all drafts", DRAFT_TARGET, "ragged")
def room_for_all(patch: Patch) -> None:
    """A generation is granted room for the step's draft length."""
    right = kv_cache.granted

    def granted(row: Row, first_turn: bool, width: int, config: Config) -> int:
        return right(row, first_turn, width, config) if row.is_context else 1 + width

    patch(kv_cache, "granted", granted)


@rule("all in flight are as wide", EAGLE3, "ragged in flight")
def one_width_in_flight(patch: Patch) -> None:
    """The host counts K + 1 rows of each request in flight."""

    def change(found: Continued, row: Row, last: Batch) -> Continued:
        index, guess = found
        return index, replace(guess, fed=last.width + 1) if guess else guess

    edit(patch, overlap, "_continued", change)


@rule("a prompt in flight is one row wide", EAGLE3, "ragged in flight")
def prompts_in_flight(patch: Patch) -> None:
    """Of a prompt that ends in flight the host counts the one token that it accepts."""

    def change(found: Continued, row: Row, last: Batch) -> Continued:
        index, guess = found
        return index, replace(guess, fed=1) if guess and last.rows[index].is_context else guess

    edit(patch, overlap, "_continued", change)


@rule("the last drafts are verified", SA, "ragged")
def last_drafts(patch: Patch) -> None:
    """A row that verifies fewer drafts than were made verifies those at the end."""

    def change(row: Row, asked: Any, draft_len: int, width: int, config: Config, histories: Any) -> Row:
        if asked.verify is None or asked.request is None:
            return row
        made = histories[asked.request].drafts.tokens
        drafts = [*made[len(made) - asked.verify :]] if len(made) > asked.verify else row.tokens[1:]
        return replace(row, tokens=[row.tokens[0], *drafts])

    edit(patch, batch, "_generation", change)


@rule("asked for all proposals", EAGLE3, "hybrid ragged")
def all_proposals(patch: Patch) -> None:
    """A generation is verified by the proposals of all its drafts, verified or not."""

    def change(fields: Fields, of: Batch, config: Config) -> Fields:
        rows = [proposals.filled(row.proposals, of.draft_len) if row.request is not None else None
                for row in of.generations]  # fmt: skip
        return {**fields, "draft_probs": rows} if fields else fields

    edit(patch, proposals, "asked", change)
