"""Wrong rules of the oracle about block reuse."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP_EAGLE, PARD, Patch
from reference.block_reuse import BlockReuse, Pages
from reference.workers.linear import LinearWorker
from tests.quality.wrong_rules import edit, rule


@rule("a page is its own tokens", EAGLE3, "sharing")
def own_tokens(patch: Patch) -> None:
    """What a page holds follows from the tokens in it, whatever is before."""

    def change(keys: list[Any], pages: Pages, prompt: Any) -> list[Any]:
        return [key[-pages.size - pages.ahead :] for key in keys]

    edit(patch, Pages, "keys", change)


@rule("a drafter needs no token more", MTP_EAGLE, "sharing")
def looks_at_its_page(patch: Patch) -> None:
    """A drafter's slots depend on the tokens of their page alone."""
    patch(LinearWorker, "looks_ahead", 0)


@rule("a whole page is left to compute", PARD, "sharing")
def page_to_compute(patch: Patch) -> None:
    """Of a prompt a page is computed at least, not a token."""

    def change(found: int, reuse: BlockReuse, prompt: Any) -> int:
        size = reuse._pools[0].size
        return min(found, (len(prompt) - size) // size * size)

    edit(patch, BlockReuse, "_reusable", change)


@rule("pages of the target's size", EAGLE3, "known in two caches")
def target_decides(patch: Patch) -> None:
    """What is reused fills pages of the target's cache, and of the drafter's as many as it may."""

    def reusable(self: BlockReuse, prompt: Any) -> int:
        most = min(len(prompt) - 1, *(pool.matched(prompt) for pool in self._pools))
        return most - most % self._pools[0].size

    patch(BlockReuse, "_reusable", reusable)


@rule("known from its first chunk on", EAGLE3, "known in two caches")
def known_early(patch: Patch) -> None:
    """The pages of a prompt are known as soon as it has started."""
    right = BlockReuse.grant

    def grant(self: BlockReuse, rows: Any, after: Any) -> None:
        right(self, rows, after)
        for row in rows.contexts:
            for pool in self._pools if row.request is not None else ():
                pool.store(row.request, after[row.request].prompt)

    patch(BlockReuse, "grant", grant)


@rule("the first page gives way first", EAGLE3, "giving way")
def first_page_first(patch: Patch) -> None:
    """Of the pages that are released the first one is the oldest."""
    right = Pages.release

    def release(self: Pages, request: int) -> None:
        before = len(self.idle)
        right(self, request)
        self.idle[before:] = self.idle[before:][::-1]

    patch(Pages, "release", release)


@rule("known pages are not free", EAGLE3, "giving way")
def known_are_kept(patch: Patch) -> None:
    """What is known takes room, whoever owns it."""
    right = Pages.free.fget  # type: ignore[attr-defined]
    patch(Pages, "free", property(lambda self: right(self) - len(self.idle)))


@rule("pages leave with their first owner", EAGLE3, "sharing")
def first_owner_decides(patch: Patch) -> None:
    """A page that is released once is free, whoever else owns it."""
    right = Pages.release

    def release(self: Pages, request: int) -> None:
        for key in self.held.get(request, []):
            if key is not None:
                self.owners[key] = 1
        right(self, request)

    patch(Pages, "release", release)


@rule("a failure leaves what is known", EAGLE3, "giving way")
def failure_forgets_nothing(patch: Patch) -> None:
    """The requests of a step that fails end as any others do."""

    def forget(self: BlockReuse) -> None:
        self.release(list(self._reused))

    patch(BlockReuse, "forget", forget)
