"""Sparse attention in tensors against its definition, token by token; what is selected is read through other pages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engines.tracer import Cache, SparseTracer
from scenarios.tracer import EMPTY, MASK_TOKEN, PRIME, choose, entry, entry_fields, term
from tests.engines.portable.support import CPU, ints
from tests.engines.portable.test_tracer import PAGES, SIZE, SLOTS, TABLE, Case

NAMED = [TABLE[1], TABLE[2], TABLE[2]]
"""Whose pages each sequence's tokens are read from: a map as wrong as this is what shows who reads what."""
NOWHERE = 3
"""From this page on there are none."""
TOPK = pytest.mark.parametrize("topk", [1, 2, 5, 4 * SLOTS])
SEEDS = pytest.mark.parametrize("seed", range(3))


class SparseCase(Case):
    """A ``Case`` with indexers' pools that hold something else than the main ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rng = random.Random(-self.seed - 1)
        self.target_keys, self.draft_keys = (
            ints([[self._key(rng, empty) for _ in range(SIZE)] for _ in range(PAGES)], torch.int64)
            for empty in (0.1, 0.4)
        )
        self.main, self.keys = (self.target, self.draft), (self.target_keys, self.draft_keys)

    @property
    def key_caches(self) -> tuple[Cache, Cache]:
        return Cache(self.target_keys, ints(TABLE)), Cache(self.draft_keys, ints(TABLE))

    @staticmethod
    def _key(rng: random.Random, empty: float) -> int:
        return EMPTY if rng.random() < empty else entry(rng.randrange(30), rng.randrange(1, 1000))

    def store(self, tracer: SparseTracer, pool: Tensor, key_pool: Tensor) -> None:
        """Write the rows' entries, keys to the very slots of the main cache."""
        slots = [TABLE[s][i // SIZE] * SIZE + i % SIZE for s, i in self.places]
        tracer.store(Cache(pool, ints(TABLE)), self.rows, key_pool, ints(slots, torch.int64), *self.inputs())

    def named_slots(self, tokens: Tensor) -> Tensor:
        """What the engine makes of numbers of tokens: slots in the named sequence's first pages."""
        slots = [[self._named(s, u) for u in row] for (s, _), row in zip(self.places, tokens.tolist())]
        return ints(slots, torch.int64)

    @staticmethod
    def _named(sequence: int, u: int) -> int:
        inside = 0 <= u < NOWHERE * SIZE
        return NAMED[sequence][u // SIZE] * SIZE + u % SIZE if inside else -1

    def named(self, pool: Tensor, sequence: int) -> list[int]:
        """Content of the named sequence's slots."""
        return [EMPTY if (s := self._named(sequence, u)) < 0 else int(pool.view(-1)[s]) for u in range(SLOTS + 1)]

    def own_keys(self, pool: Tensor, sequence: int) -> list[int]:
        """Content of the sequence's own slots, and one more that there is not."""
        return [*self.slots(pool, sequence), EMPTY]


def best(keys: Sequence[int], topk: int) -> list[int]:
    """Tokens with the highest scores; of equal ones the first."""
    filled = [u for u, key in enumerate(keys) if key != EMPTY]
    return sorted(filled, key=lambda u: (-term(u, keys[u]), u))[:topk]


def total(keys: Sequence[int], entries: Sequence[int], topk: int) -> int:
    return sum(term(u, entries[u]) for u in best(keys, topk)) % PRIME


def merged(target: Sequence[int], draft: Sequence[int], shift: int) -> list[int]:
    """Tokens that a drafter sees."""
    before = [EMPTY] * shift + list(draft)
    return [t if d == EMPTY else d + 1024 * shift for t, d in zip(target, before)]


@TOPK
@SEEDS
def test_target(seed: int, topk: int) -> None:
    case, tracer = SparseCase(seed), SparseTracer(SLOTS, CPU, topk)
    case.store(tracer, case.target, case.target_keys)
    chosen = tracer.select(Cache(case.target_keys, ints(TABLE)), case.rows, case.rows.index)
    digests = tracer.attend(case.target, chosen, case.named_slots(chosen.tokens[:, 0]))
    for row, (sequence, index) in enumerate(case.places):
        own = case.own_keys(case.target_keys, sequence)[: index + 1]
        assert own[index] == entry(case.positions[row], case.tokens[row])
        assert digests[row] == total(own, case.named(case.target, sequence), topk)


@TOPK
@SEEDS
def test_shifted_drafter(seed: int, topk: int) -> None:
    case, tracer = SparseCase(seed), SparseTracer(SLOTS, CPU, topk)
    case.store(tracer, case.draft, case.draft_keys)
    chosen = tracer.select_shifted(*case.key_caches, case.rows, case.rows.index)
    tokens = chosen.tokens.flatten(1)
    slots, before = case.named_slots(tokens), case.named_slots(tokens - 1)
    digests, own = tracer.attend_shifted(*case.main, chosen, slots, before)
    for row, (sequence, index) in enumerate(case.places):
        keys = merged(*(case.own_keys(pool, sequence) for pool in case.keys), shift=1)
        entries = merged(*(case.named(pool, sequence) for pool in case.main), shift=1)
        with_own, without = (total(keys[:n], entries, topk) for n in (index + 2, index + 1))
        assert (digests[row], own[row]) == (with_own, (with_own - without) % PRIME)


@TOPK
@SEEDS
def test_parallel_drafter(seed: int, topk: int) -> None:
    case, tracer = SparseCase(seed, mask=True), SparseTracer(SLOTS, CPU, topk)
    case.store(tracer, case.draft, case.draft_keys)
    seen, start, chosen = tracer.select_known(case.caches, case.key_caches, case.rows)
    slots = case.named_slots(chosen.tokens[:, 0])
    digests = tracer.attend_parallel(case.main, chosen, (slots, slots), seen, case.rows, start, masks=SLOTS)
    runs = 0
    for row, (sequence, index) in enumerate(case.places):
        own = merged(*(case.slots(pool, sequence) for pool in case.main), shift=0)
        first = index + 1
        while first > 0 and entry_fields(own[first - 1])[1] == MASK_TOKEN:  # type: ignore[index]
            first -= 1
        keys = merged(*(case.own_keys(pool, sequence) for pool in case.keys), shift=0)[:first]
        entries = merged(*(case.named(pool, sequence) for pool in case.main), shift=0)[:first]
        for u in range(first, index + 1):
            position = entry_fields(own[u])[0]  # type: ignore[index]
            guess = entry(position, choose(total(keys, entries, topk)))
            keys, entries = [*keys, guess], [*entries, guess]
        assert digests[row] == total(keys, entries, topk)
        runs += first <= index
    assert runs > 0


def test_of_equal_scores_the_first_token_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.tracer.term", lambda index, value: value * 0 + 7)
    case, tracer = SparseCase(0), SparseTracer(SLOTS, CPU, 3)
    keys = case.target_keys.index_fill(0, ints([TABLE[0][0]]).long(), EMPTY)
    chosen = tracer.select(Cache(keys, ints(TABLE)), case.rows, case.rows.index)
    filled = [u for u, key in enumerate(case.slots(keys, 0)) if key != EMPTY]
    assert sorted(chosen.tokens[case.query[0] - 1, 0].tolist()) == filled[:3]


@pytest.mark.parametrize("call", ["target", "shifted"])
def test_a_full_table_loses_no_token(call: str) -> None:
    """A drafter with shift 1 sees one token more than there are slots."""
    tracer, slots = SparseTracer(SIZE, CPU, 4 * SIZE), ints([[*range(SIZE), -1]], torch.int64)
    case = SparseCase(1)
    rows = type(case.rows)(ints([0]), ints([SIZE - 1], torch.int64))

    def select(chosen: Tensor) -> Tensor:
        return slots.view(-1)[chosen]

    pools = [pool[:1].clamp(min=1) for pool in case.main]
    if call == "target":
        chosen = tracer.select(Cache(pools[0], ints([[0]])), rows, rows.index)
        digest = tracer.attend(pools[0], chosen, select(chosen.tokens[:, 0]))
        assert digest == sum(term(u, e) for u, e in enumerate(pools[0][0].tolist())) % PRIME
        return
    chosen = tracer.select_shifted(*(Cache(pool, ints([[0]])) for pool in pools), rows, rows.index)
    tokens = chosen.tokens.flatten(1)
    digest, own = tracer.attend_shifted(pools[0], pools[1], chosen, select(tokens), select((tokens - 1).clamp(min=-1)))
    seen = merged([*pools[0][0].tolist(), EMPTY], pools[1][0].tolist(), shift=1)
    assert digest == sum(term(u, e) for u, e in enumerate(seen)) % PRIME
    assert own == term(SIZE, seen[SIZE])
