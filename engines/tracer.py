"""The tracer model of ``scenarios.tracer`` on int64 tensors, for any engine that keeps a paged cache in torch.

The definitions there (``entry``, ``term``, ``choose``, ``disagree``) use only arithmetic that int64 tensors share
with Python's integers, so they are applied as they are; this module adds what a batch needs: where a row's slot
is, and its digest out of the pages that the block table names.

A *pool* is int64 [pages, tokens_per_block]; a *table* is int32 [n, pages per row], below 0 where there is no page.
Target and drafter may each have a cache of their own, with pages of another size. Nothing here waits for the
device, so all of it can be captured in a CUDA graph. It stands for a model's kernels and is no part of an engine:
torch function modes, and so fault sites, do not see its calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from engines.kernels import triton_for
from engines.unseen import unseen
from scenarios import tracer
from scenarios.tracer import (
    EMPTY,
    MASK_TOKEN,
    NEAR_GAP,
    POSITION_FACTOR,
    POSITION_OFFSET,
    PRIME,
    SCORE_RANK,
    SCORE_SPREAD,
    SCORE_STEP,
    VOCAB_SIZE,
)

entry = cast(Callable[[Tensor, Tensor], Tensor], tracer.entry)
term = cast(Callable[[Tensor, Tensor], Tensor], tracer.term)

_ONE_POSITION: Final = VOCAB_SIZE
"""By how much an entry grows when its position grows by one."""
_FIRST: Final = 20.0
"""Logit of a first choice, beside which one of 0 counts for nothing."""
_SECOND_BELOW: Final = math.log((1 - NEAR_GAP) / (1 + NEAR_GAP))


choose = unseen(cast(Callable[[Tensor], Tensor], tracer.choose))
disagree = unseen(cast(Callable[[Tensor], Tensor], tracer.disagree))
near = unseen(cast(Callable[[Tensor], Tensor], tracer.near))
grammar_state = unseen(cast(Callable[[Tensor, Tensor], Tensor], tracer.grammar_state))
grammar_allows = unseen(cast(Callable[[Tensor, Tensor], Tensor], tracer.grammar_allows))
_alternative = cast(Callable[[Tensor, Tensor], Tensor], tracer.alternative)


@dataclass(frozen=True)
class Rows:
    """Where the rows of one forward are: their sequences and KV indices, int64 [rows] each."""

    sequence: Tensor
    index: Tensor


@dataclass(frozen=True)
class Cache:
    """A pool with the table of a batch in it."""

    pool: Tensor
    table: Tensor


@unseen
def locate(cu_q: Tensor, cu_kv: Tensor, rows: int) -> Rows:
    """Place ``rows`` rows, given the running totals of query and KV lengths (int [n + 1], from 0 on).

    The last row of a sequence is at index ``kv_len - 1``, the others before it. Rows beyond the total belong to
    the last sequence: wrong lengths give wrong digests, never an access outside the table.
    """
    ends = cu_q[1:]
    row = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    sequence = torch.searchsorted(ends, row, right=True).clamp_(max=len(ends) - 1)
    first = cu_kv[1:] - cu_kv[:-1] - ends
    return Rows(sequence, (row + first.index_select(0, sequence)).long())


@unseen
def own_terms(rows: Rows, positions: Tensor, tokens: Tensor) -> Tensor:
    """What each target row adds to the digest of its sequence: int64 [rows]."""
    return term(rows.index, entry(positions.long(), tokens.long()))


@unseen
def block_digests(
    ctx_positions: Tensor, ctx_values: Tensor, num_ctx: Tensor, positions: Tensor, tokens: Tensor
) -> Tensor:
    """Digests of blocks of query rows over a context of columns: int64 [n, block + 1].

    The first is that of the columns, each other one includes one row more: the first row with its token, those behind
    it with what the target would choose there.

    ctx_positions, ctx_values  int64 [n, columns], of which the first ``num_ctx``, int64 [n], are read
    positions, tokens          int [n, block]
    """
    index = torch.arange(ctx_values.shape[1], device=ctx_values.device)
    columns = ctx_values + POSITION_FACTOR * (ctx_positions - index)
    digests = [torch.where(index < num_ctx.unsqueeze(1), columns, 0).sum(1) % PRIME]
    token = tokens[:, 0].long()
    for row, position in enumerate(positions.long().unbind(1)):
        digests.append((digests[-1] + term(num_ctx + row, entry(position, token))) % PRIME)
        token = choose(digests[-1])
    return torch.stack(digests, dim=1)


def write(cache: Cache, rows: Rows, values: Tensor) -> None:
    """Put the entries of ``rows``, int64 [rows], where they belong."""
    tokens_per_block, pages = cache.pool.shape[1], cache.table.shape[1]
    index = rows.index.clamp(0, pages * tokens_per_block - 1)
    page = torch.take(cache.table, rows.sequence * pages + index // tokens_per_block).clamp(min=0)
    cache.pool.view(-1).scatter_(0, page * tokens_per_block + index % tokens_per_block, values)


def _shifted(target: Tensor, draft: Tensor, shift: int = 1) -> Tensor:
    """Tokens that a drafter sees, by what lies in its slot ``shift`` before each token's and in the target's."""
    return torch.where(draft == EMPTY, target, draft + shift * _ONE_POSITION)


def filled(target: Tensor, draft: Tensor) -> Tensor:
    """Tokens that a drafter without shift sees."""
    return torch.where(draft == EMPTY, target, draft)


def digest_of(totals: Tensor, rows: Rows, ahead: int = 0) -> Tensor:
    """The running total of each row's sequence at its own index plus ``ahead``, modulo PRIME."""
    index = (rows.index + ahead).clamp_(0, totals.shape[1] - 1)
    return torch.take(totals, rows.sequence * totals.shape[1] + index) % PRIME


class Tracer:
    """Target and drafters over pools whose block tables span up to ``slots`` tokens per row.

    ``target_cache`` is what the target wrote to last: a drafter sees it where its own cache is empty, whichever
    that is.
    """

    target_cache: Cache

    def __init__(self, slots: int, device: torch.device, max_shift: int = 1) -> None:
        # A drafter with a shift sees so many tokens more than it has slots.
        self._index = torch.arange(slots + max_shift, device=device)
        self._slots = slots

    @unseen
    def target(self, cache: Cache, rows: Rows, positions: Tensor, tokens: Tensor) -> Tensor:
        """Digests of target rows, once their entries are written: int64 [rows]."""
        write(cache, rows, entry(positions.long(), tokens.long()))
        if kernels := triton_for(cache.pool):
            return cast(Tensor, kernels.digest(cache, cache, rows, self._slots, 0))
        return digest_of(self._scores(self._read(cache)).cumsum(1), rows)

    @unseen
    def shifted(
        self, target: Cache, draft: Cache, rows: Rows, positions: Tensor, tokens: Tensor, shift: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Digests of draft rows that are given the token ``shift`` after their position, and each row's own term."""
        own = entry(positions.long(), tokens.long())
        write(draft, rows, own)
        if kernels := triton_for(draft.pool):
            digests = kernels.digest(target, draft, rows, self._slots, shift)
        else:
            digests = digest_of(self._scores(self._read_shifted(target, draft, shift)).cumsum(1), rows, ahead=shift)
        return digests, term(rows.index + shift, own + shift * _ONE_POSITION)

    @unseen
    def parallel(
        self, target: Cache, draft: Cache, rows: Rows, positions: Tensor, tokens: Tensor, masks: int
    ) -> Tensor:
        """Digests of draft rows given tokens at their own positions, masks standing for unknown ones: int64 [rows].

        A row at the end of a run of up to ``masks`` masks has the digest that the target would have there if it
        had chosen each of them.
        """
        write(draft, rows, entry(positions.long(), tokens.long()))
        seen = filled(self._read(target), self._read(draft))
        start = self._last_known(seen, rows)
        digests = digest_of(self._scores(seen).cumsum(1), Rows(rows.sequence, start))
        for step in range(1, masks + 1):
            index, guess = self._guess(seen, rows, start + step, digests)
            digests = torch.where(start + step <= rows.index, (digests + term(index, guess)) % PRIME, digests)
        return digests

    @unseen
    def continue_text(self, text: Tensor, lens: Tensor, count: int) -> Tensor:
        """The ``count`` tokens that the target would choose after each text: int64 [rows, count].

        Of the rows of ``text``, int32 [rows, columns], the first ``lens`` tokens (int64 [rows]) count.
        """
        index = torch.arange(text.shape[1], device=text.device)
        terms = torch.where(index < lens.unsqueeze(1), term(index, entry(index, text.long())), 0)
        tokens = torch.empty(len(text), count, dtype=torch.int64, device=text.device)
        for step in range(count):
            terms = self._attended(terms)
            token = choose(terms.sum(1))
            tokens[:, step] = token
            terms = torch.cat([terms, term(lens + step, entry(lens + step, token)).unsqueeze(1)], dim=1)
        return tokens

    def _attended(self, terms: Tensor) -> Tensor:
        """What a row's next token depends on, of the terms of all before it, int64 [rows, terms]: all of them."""
        return terms

    def _scores(self, seen: Tensor) -> Tensor:
        """Terms of every sequence's tokens, the first one in column 0."""
        return term(self._index[: seen.shape[1]], seen)

    def _read(self, cache: Cache) -> Tensor:
        """Slots of every sequence in order, EMPTY behind those that its pages have: int64 [n, slots]."""
        pages = cache.pool.index_select(0, cache.table.reshape(-1).clamp(min=0))
        slots = pages.view(cache.table.shape[0], -1)
        return torch.nn.functional.pad(slots, (0, self._slots - slots.shape[1]), value=EMPTY)

    def _read_shifted(self, target: Cache, draft: Cache, shift: int = 1) -> Tensor:
        """Tokens that a drafter with this shift sees in every sequence: int64 [n, slots + shift]."""
        seen = torch.nn.functional.pad(self._read(target), (0, shift), value=EMPTY)
        seen[:, shift:] = _shifted(seen[:, shift:], self._read(draft), shift)
        return seen

    def _last_known(self, seen: Tensor, rows: Rows) -> Tensor:
        """Index of the token before the run of masks that ends at each row; the row's own if it is no mask."""
        known = (seen == EMPTY) | ((seen - tracer.entry(0, MASK_TOKEN)) % _ONE_POSITION != 0)
        last_known = torch.where(known, self._index[: self._slots], -1).cummax(1).values
        return torch.take(last_known, rows.sequence * self._slots + rows.index.clamp(0, self._slots - 1))

    def _guess(self, seen: Tensor, rows: Rows, index: Tensor, digests: Tensor) -> tuple[Tensor, Tensor]:
        """``index`` within the table, and the entry there with the token that the digests choose for the mask."""
        index = index.clamp(max=self._slots - 1)
        return index, torch.take(seen, rows.sequence * self._slots + index) - MASK_TOKEN + choose(digests)


@dataclass(frozen=True)
class Masks:
    """Which rows of a forward see which others of their sequence, as the kernels are told.

    first    the first sequence that the masks speak of; the rows of those before it see all rows before them
    past     int [n]: tokens that each sequence had cached before the forward
    packed   int32 [n - first or more, Q, words]: bit ``v`` of row ``q`` says whether it sees row ``v``
    lengths  int32 [n - first or more]: rows of each sequence
    """

    first: int
    past: Tensor
    packed: Tensor
    lengths: Tensor


class TreeTracer(Tracer):
    """The same where the rows of a generation are nodes of a tree, which see those on their path alone."""

    @unseen
    def target_tree(self, cache: Cache, rows: Rows, masks: Masks, positions: Tensor, tokens: Tensor) -> Tensor:
        """Digests of target rows, once their entries are written: int64 [rows]."""
        write(cache, rows, entry(positions.long(), tokens.long()))
        return self._digests(self._read(cache), rows, masks, ahead=0)

    @unseen
    def shifted_tree(
        self, target: Cache, draft: Cache, rows: Rows, masks: Masks, positions: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Digests of draft rows that are given the token after their position, and each row's own term in it."""
        own = entry(positions.long(), tokens.long())
        write(draft, rows, own)
        digests = self._digests(self._read_shifted(target, draft), rows, masks, ahead=1)
        place = torch.where(rows.sequence < masks.first, rows.index, positions)
        return digests, term(place + 1, own + _ONE_POSITION)

    def _digests(self, seen: Tensor, rows: Rows, masks: Masks, ahead: int) -> Tensor:
        """What each row sees of the tokens of its sequence, of which ``ahead`` are counted before slot 0.

        What the cache held counts by its place, a row of this forward by its position.
        """
        totals = self._scores(seen).cumsum(1)
        if masks.first == len(masks.past):
            return digest_of(totals, rows, ahead)
        past = masks.past.long() + ahead
        cached = torch.where(past > 0, totals.gather(1, (past - 1).clamp(min=0).unsqueeze(1)).squeeze(1), 0)
        nodes = past.unsqueeze(1) + torch.arange(masks.packed.shape[1], device=past.device)
        entries = seen.gather(1, nodes.clamp(max=seen.shape[1] - 1))
        terms = term((entries - 1) // VOCAB_SIZE - POSITION_OFFSET, entries)
        of_path = torch.where(self._visible(rows, masks), terms.index_select(0, rows.sequence), 0).sum(1)
        digests = (cached.index_select(0, rows.sequence) + of_path) % PRIME
        return torch.where(rows.sequence < masks.first, digest_of(totals, rows, ahead), digests)

    def _visible(self, rows: Rows, masks: Masks) -> Tensor:
        """Bits of each row: bool [rows, Q]; whatever they are for rows that the masks do not speak of."""
        width = masks.packed.shape[1]
        generation = (rows.sequence - masks.first).clamp(min=0)
        node = (rows.index - masks.past.index_select(0, rows.sequence)).clamp(0, width - 1)
        words = masks.packed.flatten(0, 1).index_select(0, generation * width + node)
        column = torch.arange(width, device=words.device)
        bits = (words.index_select(1, column // 32) >> (column % 32).int()) & 1
        return (bits == 1) & (column < masks.lengths.index_select(0, generation).unsqueeze(1))


@dataclass(frozen=True)
class Selection:
    """Tokens that rows attend to, ``k`` per list: int64 [rows, lists, k] each.

    tokens  their numbers in the sequence, in no order; -1 for none
    ranks   what they were selected by, higher first; -1 for none
    """

    tokens: Tensor
    ranks: Tensor


class SparseTracer(Tracer):
    """The same where each row sees the ``index_topk`` tokens that an indexer selects.

    Whose pages the selected tokens are read from is for the engine to say: between ``select...`` and ``attend...``
    it turns numbers of tokens into slots, counted through the pool; -1 stands for a slot that there is not.

    Beside ``target_cache`` there are ``target_keys``, that of the indexer, and ``target_selected``, whose table the
    selected tokens are read through.
    """

    target_keys: Cache
    target_selected: Cache

    def __init__(self, slots: int, device: torch.device, index_topk: int) -> None:
        super().__init__(slots, device)
        self._topk = index_topk

    @unseen
    def store(
        self, cache: Cache, rows: Rows, key_pool: Tensor, key_slots: Tensor, positions: Tensor, tokens: Tensor
    ) -> None:
        """Write the entries of rows to their slots of the main pool, and to the given ones of the indexer's."""
        entries = entry(positions.long(), tokens.long())
        write(cache, rows, entries)
        key_pool.view(-1).scatter_(0, key_slots, entries)

    @unseen
    def select(self, keys: Cache, rows: Rows, last: Tensor) -> Selection:
        """What target rows see of the tokens up to ``last`` (int64 [rows]) of their sequences: one list per row."""
        return self._select(self._read(keys), rows, last.unsqueeze(1))

    @unseen
    def attend(self, pool: Tensor, chosen: Selection, slots: Tensor) -> Tensor:
        """Digests of target rows: int64 [rows]. ``slots`` of the selected tokens, int64 [rows, k]."""
        return _total(chosen.tokens[:, 0], _at(pool, slots))

    @unseen
    def select_shifted(self, target_keys: Cache, draft_keys: Cache, rows: Rows, last: Tensor) -> Selection:
        """The same for draft rows with shift 1: up to the token after ``last``, then up to ``last``."""
        seen = self._read_shifted(target_keys, draft_keys)
        return self._select(seen, rows, torch.stack([last + 1, last], dim=1))

    @unseen
    def written(self, rows: Rows, tokens: Tensor, target_keys: Cache, draft_keys: Cache | None = None) -> Tensor:
        """``tokens`` of rows, int64 [rows, lists, k], with -1 for those that no key was written for.

        With the drafter's keys they are tokens that a drafter with shift 1 sees.
        """
        keys = self._read(target_keys) if draft_keys is None else self._read_shifted(target_keys, draft_keys)
        place = rows.sequence.view(-1, 1, 1) * keys.shape[1] + tokens.clamp(0, keys.shape[1] - 1)
        return torch.where(torch.take(keys, place) == EMPTY, -1, tokens)

    @unseen
    def attend_shifted(
        self, target_pool: Tensor, draft_pool: Tensor, chosen: Selection, slots: Tensor, slots_before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Digests of draft rows with shift 1, and what each row's own token adds to it: two of int64 [rows].

        ``slots`` of the selected tokens in the target's pool, and those of the tokens before them in the drafter's,
        int64 [rows, 2 * k] each.
        """
        entries = _shifted(_at(target_pool, slots), _at(draft_pool, slots_before))
        with_own, without = _total(chosen.tokens, entries.view_as(chosen.tokens)).unbind(1)
        return with_own, (with_own - without) % PRIME

    @unseen
    def select_known(
        self, caches: tuple[Cache, Cache], keys: tuple[Cache, Cache], rows: Rows
    ) -> tuple[Tensor, Tensor, Selection]:
        """For draft rows without shift, whose runs of masks are guessed later: what comes before the run.

        Both pairs are of the target and of the drafter. Returns the tokens of the sequences, int64 [n, slots], the last
        one before each row's run, and the selection.
        """
        seen = filled(*map(self._read, caches))
        start = self._last_known(seen, rows)
        chosen = self._select(filled(*map(self._read, keys)), rows, start.unsqueeze(1))
        return seen, start, chosen

    @unseen
    def attend_parallel(
        self, pools: tuple[Tensor, Tensor], chosen: Selection, slots: tuple[Tensor, Tensor], seen: Tensor, rows: Rows,
        start: Tensor, masks: int,
    ) -> Tensor:  # fmt: skip
        """Digests of draft rows without shift, with up to ``masks`` masks guessed one by one: int64 [rows].

        ``slots`` of the selected tokens in the pools of target and drafter, int64 [rows, k] each. A guess competes with
        what was selected before it; what lost once cannot come back.
        """
        tokens, ranks = chosen.tokens[:, 0], chosen.ranks[:, 0]
        terms = _terms(tokens, filled(*map(_at, pools, slots)))
        digests = terms.sum(1) % PRIME
        for step in range(1, masks + 1):
            index, guess = self._guess(seen, rows, start + step, digests)
            score = term(index, guess)
            rank = torch.where(start + step <= rows.index, self._rank(score, index), -1)
            best = torch.cat([ranks, rank.unsqueeze(1)], dim=1).topk(ranks.shape[1], sorted=False)
            added = torch.where(rank < 0, 0, score).unsqueeze(1)
            ranks, terms = best.values, torch.cat([terms, added], dim=1).gather(1, best.indices)
            digests = terms.sum(1) % PRIME
        return digests

    def _attended(self, terms: Tensor) -> Tensor:
        """Of all terms those with the highest scores, which they are themselves; what is left out cannot come back."""
        return terms.topk(min(self._topk, terms.shape[1]), sorted=False).values

    def _rank(self, scores: Tensor, index: Tensor) -> Tensor:
        """A number for each score that no other has: of equal scores the lower index is first."""
        return scores * (self._slots + 1) + (self._slots - index)

    def _select(self, keys: Tensor, rows: Rows, last: Tensor) -> Selection:
        """Of each row's tokens up to ``last``, int64 [rows, lists], those with the highest scores."""
        index = self._index[: keys.shape[1]]
        ranks = torch.where(keys == EMPTY, -1, self._rank(self._scores(keys), index))
        of_rows = ranks.index_select(0, rows.sequence).unsqueeze(1)
        allowed = torch.where(index <= last.unsqueeze(2), of_rows, -1)
        best = allowed.topk(min(self._topk, len(index)), sorted=False)
        return Selection(torch.where(best.values < 0, -1, best.indices), best.values)


def _at(pool: Tensor, slots: Tensor) -> Tensor:
    """Entries in slots that are counted through the pool; EMPTY for -1."""
    return torch.where(slots < 0, EMPTY, torch.take(pool, slots.clamp(min=0)))


def _terms(tokens: Tensor, entries: Tensor) -> Tensor:
    return torch.where(tokens < 0, 0, term(tokens, entries))


def _total(tokens: Tensor, entries: Tensor) -> Tensor:
    """Digests of lists of tokens, -1 for none."""
    return _terms(tokens, entries).sum(-1) % PRIME


@unseen
def one_hot(tokens: Tensor) -> Tensor:
    """Logits that choose ``tokens`` (int64 [rows]) beyond doubt: float32 [rows, VOCAB_SIZE]."""
    logits: Any = torch.zeros(tokens.shape[0], VOCAB_SIZE, device=tokens.device)
    return cast(Tensor, logits.scatter_(1, tokens.unsqueeze(1), 1.0))


@unseen
def two_choices(tokens: Tensor) -> Tensor:
    """Logits that choose ``tokens`` (int64 [rows]) first and ``near(tokens)`` second: float32 [rows, VOCAB_SIZE].

    The second one's probability is ``NEAR_GAP`` below the first one's; all others have none to speak of.
    """
    logits: Any = torch.zeros(tokens.shape[0], VOCAB_SIZE, device=tokens.device)
    logits.scatter_(1, near(tokens).unsqueeze(1), _FIRST + _SECOND_BELOW)
    return cast(Tensor, logits.scatter_(1, tokens.unsqueeze(1), _FIRST))


@unseen
def log_probabilities(tokens: Tensor, first: Tensor, candidates: int, with_decoys: bool) -> Tensor:
    """Logits of a head that offers several tokens: float32 [rows, VOCAB_SIZE], minus infinity for the others.

    The first candidate of a row is ``first``, the others are alternatives to ``tokens`` (both int64 [rows]). With
    decoys the first alternative to an odd token comes before it. Their logarithms are whole numbers, so that sums of
    them are exact.
    """
    rank = torch.arange(candidates, device=tokens.device)
    offered = torch.where(rank == 0, first.unsqueeze(1), _alternative(tokens.unsqueeze(1), rank))
    logits: Any = torch.full((tokens.shape[0], VOCAB_SIZE), -torch.inf, device=tokens.device)
    behind = torch.where(rank == 0, 0, SCORE_RANK * rank + offered % SCORE_SPREAD)
    if with_decoys:
        decoy = (tokens % 2 == 1).unsqueeze(1)
        behind = torch.where(decoy & (rank < 2), SCORE_STEP * (rank == 0), behind)
    return cast(Tensor, logits.scatter_(1, offered, (-SCORE_STEP - behind).float()))
