"""The tracer model taken literally: caches slot by slot, and rows that read them through the metadata."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from reference.attention import EVERYTHING, Sight
from scenarios.tracer import (
    EMPTY,
    MASK_TOKEN,
    POSITION_FACTOR,
    PRIME,
    choose,
    compress,
    compressed_digest,
    entry,
    entry_fields,
    term,
)


class Pools:
    """What a request's pages hold: the caches of the target and of the drafter, main ones and the indexer's.

    ``columns`` is the context of a drafter that keeps one of its own: position and value of each.
    """

    def __init__(self) -> None:
        self.target: dict[int, int] = {}
        self.draft: dict[int, int] = {}
        self.target_indexer: dict[int, int] = {}
        self.draft_indexer: dict[int, int] = {}
        self.layers: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """The drafter's main cache, if each of its layers has one of its own."""
        self.columns: list[list[int]] = []
        self.compressed: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """The target's compressed tokens, by ratio."""


class Fed(NamedTuple):
    """A token that a forward feeds, as the metadata says.

    row, slot   its row and KV index
    reads       row whose pages its selected positions are read through (``req_idx_per_token``)
    indexed     [row, KV index] that its entry goes to in the indexer's cache (``slot_owners``)
    """

    row: int
    slot: int
    position: int
    token: int
    reads: int
    indexed: Sequence[int]


def fed(fields: dict[str, Any]) -> list[Fed]:
    """The tokens of a forward with this metadata and these inputs. A dense backend maps each to itself.

    Where the metadata has pages instead of lengths, what is cached before the forward says as much.
    """
    queries = fields["_seq_lens_cuda"]
    kv_lens = fields.get("kv_lens_cuda") or list(map(int.__add__, fields["_cached_token_lens"], queries))
    own = [(row, kv - q + j) for row, (q, kv) in enumerate(zip(queries, kv_lens, strict=True)) for j in range(q)]
    reads = fields.get("req_idx_per_token", [row for row, _ in own])
    # Keys of compressed tokens go by themselves.
    indexed = own if "cu_new_comp_kv" in fields else fields.get("slot_owners", own)
    inputs = zip(own, fields["position_ids"], fields["input_ids"], reads, indexed, strict=True)
    return [Fed(row, slot, x, t, read, index) for (row, slot), x, t, read, index in inputs]


def by_row(fields: dict[str, Any], values: Sequence[Any]) -> list[list[Any]]:
    """``values`` of the tokens of a forward, row by row."""
    ends = accumulate(fields["_seq_lens_cuda"], initial=0)
    return [list(values[start:end]) for start, end in pairwise(ends)]


class Model:
    """Target and drafter over the pools of a batch's rows, of which they see what ``sight`` says."""

    def __init__(self, rows: Sequence[Pools], sight: Sight = EVERYTHING) -> None:
        self.rows = rows
        self.index_topk = sight.index_topk
        self.sight = sight

    def target(self, tokens: Sequence[Fed], fields: dict[str, Any]) -> list[int]:
        """Hidden state of each token of a forward with this metadata."""
        for t in tokens:
            self.rows[t.row].target[t.slot] = entry(t.position, t.token)
            self.rows[t.indexed[0]].target_indexer[t.indexed[1]] = entry(t.position, t.token)
        if self.sight.ratios:
            return self._compressed(tokens, fields)
        return [
            self._digest(
                _unshifted({}, self.rows[t.reads].target, t.slot + 1),
                _unshifted({}, self.rows[t.row].target_indexer, t.slot + 1),
            )
            for t in tokens
        ]

    def _compressed(self, tokens: Sequence[Fed], fields: dict[str, Any]) -> list[int]:
        """Hidden states over windows and caches of compressed tokens, to which the forward adds its own first."""
        first, *others = self.sight.ratios[1:]
        for ratio in (first, *others):
            added = fields["compressed_position_ids"][ratio]
            for row, (start, end) in zip(self.rows, pairwise(fields["cu_new_comp_kv"][ratio]), strict=True):
                for slot in added[start:end]:
                    entries = [row.target.get(s, EMPTY) for s in range(slot, slot + ratio)]
                    row.compressed[ratio][slot // ratio] = compress(slot, entries)
        digests = []
        for n, t in enumerate(tokens):
            row = self.rows[t.row]
            window = [s for s in fields["swa_local_indices"][n] if s in row.target]
            digest = len(self.sight.ratios) * sum(term(s, row.target[s]) for s in window)
            complete = [i for i in range((t.slot + 1) // first) if row.compressed[first].get(i, EMPTY)]
            scores = [term(i, row.compressed[first][i]) for i in complete]
            selected = fields["sparse_mla_topk_lens"][first][n] - self.sight.window
            digest += sum(sorted(scores, reverse=True)[:selected])
            for ratio in others:
                seen = [i for i in fields["compressed_local_indices"][n] if row.compressed[ratio].get(i, EMPTY)]
                digest += sum(term(i, row.compressed[ratio][i]) for i in seen)
            digests.append(digest % PRIME)
        return digests

    def viewed(self, row: int, length: int, x: int, token: int, state: Sequence[int]) -> tuple[int, list[int]]:
        """Choice and what is passed on of a drafter that reads the target's cache through a view of this length."""
        h, b = state
        step = b // PRIME
        h = (h + term(length + step, entry(x + step, token))) % PRIME
        seen = sum(term(s, self.rows[row].target.get(s, EMPTY)) for s in range(length))
        return choose((h + b - seen) % PRIME), [h, b + PRIME]

    def append(self, tokens: Sequence[Fed]) -> None:
        """Add a column for each token, projected from layers that hold 1, 2 and 3 times its value."""
        for t in tokens:
            layers = [k * term(t.slot, entry(t.position, t.token)) % PRIME for k in (1, 2, 3)]
            self.rows[t.row].columns.append([t.position, (layers[2] - layers[1]) % PRIME])

    def queried(self, row: int, count: int, position: int, token: int, draft_len: int) -> list[int]:
        """Choices of a block of queries that knows the first ``count`` columns of a row."""
        digest = sum(v + POSITION_FACTOR * (x - j) for j, (x, v) in enumerate(self.rows[row].columns[:count]))
        digest += term(count, entry(position, token))
        choices: list[int] = []
        for depth in range(1, draft_len + 1):
            choices.append(choose(digest % PRIME))
            digest += term(count + depth, entry(position + depth, choices[-1]))
        return choices

    def shifted(self, tokens: Sequence[Fed], hidden: Sequence[int | None]) -> list[tuple[int, int]]:
        """Choice and hidden state of each token, by a drafter with shift 1."""
        self._write_draft(tokens)
        return [self._shifted(t, h) for t, h in zip(tokens, hidden, strict=True)]

    def _shifted(self, t: Fed, hidden: int | None) -> tuple[int, int]:
        main = _shifted(self.rows[t.reads].draft, self.rows[t.reads].target, t.slot + 2)
        indexer = _shifted(self.rows[t.row].draft_indexer, self.rows[t.row].target_indexer, t.slot + 2)
        digest = self._digest(main, indexer)
        if hidden is None:
            return choose(digest), digest
        if self.index_topk:
            own = digest - self._digest(main[:-1], indexer[:-1])
        else:
            own = term(t.slot + 1, entry(t.position + 1, t.token))
        return choose((2 * (hidden + own) - digest) % PRIME), digest

    def layer(self, i: int, tokens: Sequence[Fed], hidden: Sequence[int]) -> list[tuple[int, int]]:
        """Choice and hidden state of each token, by layer ``i`` of vanilla MTP, in dense attention."""
        for t in tokens:
            self.rows[t.row].layers[i][t.slot] = entry(t.position, t.token)
        return [self._layer(i, t, h) for t, h in zip(tokens, hidden, strict=True)]

    def _layer(self, i: int, t: Fed, hidden: int) -> tuple[int, int]:
        row = self.rows[t.row]
        digest = self._digest(_shifted(row.layers[i], row.target, t.slot + 2 + i, 1 + i), ())
        own = term(t.slot + 1 + i, entry(t.position + 1 + i, t.token))
        return choose((2 * (hidden + own) - digest) % PRIME), digest

    def unshifted(self, tokens: Sequence[Fed]) -> list[int]:
        """Choice of each token, by a drafter with shift 0."""
        self._write_draft(tokens)
        return [self._unshifted(t) for t in tokens]

    def _unshifted(self, t: Fed) -> int:
        read, own = self.rows[t.reads], self.rows[t.row]
        first_mask = t.slot + 1
        positions: list[int] = []
        while first_mask and (fields := entry_fields(read.draft.get(first_mask - 1, EMPTY))):
            if fields[1] != MASK_TOKEN:
                break
            first_mask -= 1
            positions.insert(0, fields[0])
        main = _unshifted(read.draft, read.target, first_mask)
        indexer = _unshifted(own.draft_indexer, own.target_indexer, first_mask)
        for position in positions:
            guess = entry(position, choose(self._digest(main, indexer)))
            main.append(guess)
            indexer.append(guess)
        return choose(self._digest(main, indexer))

    def _write_draft(self, tokens: Sequence[Fed]) -> None:
        for t in tokens:
            self.rows[t.row].draft[t.slot] = entry(t.position, t.token)
            self.rows[t.indexed[0]].draft_indexer[t.indexed[1]] = entry(t.position, t.token)

    def _digest(self, main: Sequence[int], indexer: Sequence[int]) -> int:
        """The sum over the tokens that the indexer selects; over all of them in dense attention."""
        if self.sight.ratios:
            return compressed_digest(main, self.sight.window, self.sight.ratios, self.index_topk)
        selected: Sequence[int] = range(len(main))
        if self.index_topk:
            filled = [u for u in selected if indexer[u] != EMPTY]
            selected = sorted(filled, key=lambda u: (-term(u, indexer[u]), u))[: self.index_topk]
        return sum(term(u, main[u]) for u in selected) % PRIME


def _unshifted(draft: dict[int, int], target: dict[int, int], count: int) -> list[int]:
    return [draft.get(u, EMPTY) or target.get(u, EMPTY) for u in range(count)]


def _shifted(draft: dict[int, int], target: dict[int, int], count: int, shift: int = 1) -> list[int]:
    tokens = [target.get(u, EMPTY) for u in range(shift)]
    for u in range(shift, count):
        fields = entry_fields(draft.get(u - shift, EMPTY))
        tokens.append(target.get(u, EMPTY) if fields is None else entry(fields[0] + shift, fields[1]))
    return tokens
