"""Wrong rules of the oracle about the overlap scheduler and block reuse beside other dimensions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from museum.bug import EAGLE3, Patch
from reference import backend_fields, executor, overlap
from reference.batch import Batch, Row
from reference.block_reuse import Pages
from scenarios import Config, Peer, Step, StepTrace
from tests.quality.wrong_rules import edit, rule

Continued = tuple[int, overlap.OverlappedRow | None]


@rule("a dummy goes on from the one before", EAGLE3, "ranks overlapped")
def dummies_go_on(patch: Patch) -> None:
    """A dummy has a row in the step in flight if that had one, too."""

    def change(found: Continued, row: Row, last: Batch | None) -> Continued:
        if last is None or row.request is not None or row.is_context:
            return found
        for index, before in enumerate(last.rows):
            if before.request is None:
                return index, overlap.OverlappedRow(before.past, len(before.accepted), last.width + 1, row.query)
        return found

    edit(patch, overlap, "_continued", change)


@rule("a page table is corrected", EAGLE3, "pages overlapped")
def pages_corrected(patch: Patch) -> None:
    """The pages of a row are counted anew once its length is corrected."""
    right = backend_fields.tables
    patch(backend_fields, "tables", lambda forward, host, config: right(forward, _lengths(forward, host), config))


def _lengths(forward: Any, host: Batch) -> Batch:
    return forward if isinstance(forward, Batch) else host


@rule("an iteration without rows draws a number", EAGLE3, "waiting, forced")
def waiting_draws(patch: Patch) -> None:
    """The counter of forced acceptance counts iterations, not forwards."""
    right = executor.Session._idle

    def idle(self: executor.Session, step: Step) -> StepTrace:
        self._counter = None if self._counter is None else self._counter + 1
        return right(self, step)

    patch(executor.Session, "_idle", idle)


@rule("ranks are told whole prompts", EAGLE3, "sharing beside a rank")
def whole_prompts(patch: Patch) -> None:
    """What a prompt reuses counts among the tokens that the other ranks are told of."""

    def change(batch: Batch, step: Step, config: Config, histories: Any) -> Batch:
        own = Peer(contexts=tuple(row.kv for row in batch.contexts), generations=len(batch.generations))
        ranks = [own if rank == config.attention_dp_rank else of for rank, of in enumerate(batch.ranks)]
        return replace(batch, ranks=ranks)

    edit(patch, executor, "lay_out", change)


@rule("dummies need no room", EAGLE3, "padded beside known pages")
def no_room(patch: Patch) -> None:
    """Pages that dummies are lent were blank before."""
    patch(Pages, "lend", lambda self, dummies: None)
