"""The tensor form of the tracer model against its definition, slot by slot."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from engines.tracer import Cache, Tracer, block_digests, locate, one_hot
from scenarios.tracer import (
    EMPTY,
    MASK_TOKEN,
    POSITION_FACTOR,
    PRIME,
    VOCAB_SIZE,
    choose,
    entry,
    entry_fields,
    term,
)
from tests.engines.portable.support import CPU, ints

PAGES, SIZE, ROWS = 12, 3, 3
SLOTS = 4 * SIZE
TABLE = [[7, 2, 9, 0], [4, 11, 1, 3], [5, 8, 6, 10]]


@dataclass
class Case:
    """Two pools with random content, and one forward: per sequence its KV length and the rows it feeds."""

    seed: int
    mask: bool = False
    target: torch.Tensor = field(init=False)
    draft: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)

        def slot() -> int:
            return entry(rng.randrange(30), rng.randrange(1, 1000))

        self.target = ints([[slot() for _ in range(SIZE)] for _ in range(PAGES)], torch.int64)
        cells = [[EMPTY if rng.random() < 0.4 else slot() for _ in range(SIZE)] for _ in range(PAGES)]
        self.draft = ints(cells, torch.int64)
        self.kv = [rng.randrange(4, SLOTS - 1) for _ in range(ROWS)]
        self.query = [rng.randrange(1, n) for n in self.kv]
        count = sum(self.query)
        self.positions = [rng.randrange(40) for _ in range(count)]
        self.tokens = [MASK_TOKEN if self.mask and rng.random() < 0.6 else rng.randrange(1, 1000) for _ in range(count)]
        self.hidden = [rng.randrange(PRIME) for _ in range(count)]
        totals = [[0], [0]]
        for lens, total in zip((self.query, self.kv), totals):
            for n in lens:
                total.append(total[-1] + n)
        self.rows = locate(ints(totals[0]), ints(totals[1]), count)
        self.places = [(s, kv - q + j) for s, (kv, q) in enumerate(zip(self.kv, self.query)) for j in range(q)]

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return ints(self.positions), ints(self.tokens)

    @property
    def caches(self) -> tuple[Cache, Cache]:
        return Cache(self.target, ints(TABLE)), Cache(self.draft, ints(TABLE))

    def slots(self, pool: torch.Tensor, sequence: int) -> list[int]:
        """Content of a sequence's slots, once the forward has written."""
        return [n for page in TABLE[sequence] for n in pool[page].tolist()]


TRACER = Tracer(SLOTS, CPU)
SEEDS = pytest.mark.parametrize("seed", range(5))


@SEEDS
def test_rows_are_placed_at_the_end_of_their_sequence(seed: int) -> None:
    case = Case(seed)
    assert list(zip(case.rows.sequence.tolist(), case.rows.index.tolist())) == case.places


@SEEDS
def test_target(seed: int) -> None:
    case = Case(seed)
    digests = TRACER.target(Cache(case.target, ints(TABLE)), case.rows, *case.inputs())
    for row, (sequence, index) in enumerate(case.places):
        slots = case.slots(case.target, sequence)
        assert slots[index] == entry(case.positions[row], case.tokens[row])
        assert digests[row] == sum(term(s, slots[s]) for s in range(index + 1)) % PRIME


@pytest.mark.parametrize("shift", [1, 2, 3])
@SEEDS
def test_shifted_drafter(seed: int, shift: int) -> None:
    case = Case(seed)
    tracer = Tracer(SLOTS, CPU, max_shift=3)
    digests, own = tracer.shifted(*case.caches, case.rows, *case.inputs(), shift)
    for row, (sequence, index) in enumerate(case.places):
        target, draft = case.slots(case.target, sequence), case.slots(case.draft, sequence)
        assert draft[index] == entry(case.positions[row], case.tokens[row])
        target += [EMPTY] * shift
        expected = sum(term(s, target[s]) for s in range(shift))
        for s in range(index + 1):
            given = entry_fields(draft[s])
            expected += term(s + shift, entry(given[0] + shift, given[1]) if given else target[s + shift])
        assert digests[row] == expected % PRIME
        assert own[row] == term(index + shift, entry(case.positions[row] + shift, case.tokens[row]))


@SEEDS
def test_parallel_drafter(seed: int) -> None:
    case = Case(seed, mask=True)
    digests = TRACER.parallel(*case.caches, case.rows, *case.inputs(), masks=SLOTS)
    runs = 0
    for row, (sequence, index) in enumerate(case.places):
        target, draft = case.slots(case.target, sequence), case.slots(case.draft, sequence)
        seen = [d if d != EMPTY else t for d, t in zip(draft, target)]
        first = index + 1
        while first > 0 and entry_fields(seen[first - 1])[1] == MASK_TOKEN:  # type: ignore[index]
            first -= 1
        digest = sum(term(s, seen[s]) for s in range(first)) % PRIME
        for s in range(first, index + 1):
            digest = (digest + term(s, entry(entry_fields(seen[s])[0], choose(digest)))) % PRIME  # type: ignore[index]
        if first > 0:
            assert digests[row] == digest
            runs += first <= index
    assert runs > 0


def test_slots_that_nothing_was_written_to_are_no_masks() -> None:
    """A dummy's past is empty in both pools."""
    pools = torch.zeros(2, PAGES, SIZE, dtype=torch.int64)
    rows = locate(ints([0, 2]), ints([0, 6]), 2)
    masks = ints([MASK_TOKEN, MASK_TOKEN])
    digests = TRACER.parallel(*(Cache(pool, ints(TABLE[:1])) for pool in pools), rows, ints([4, 5]), masks, masks=3)
    first = sum(term(s, EMPTY) for s in range(4)) % PRIME
    second = (first + term(4, entry(4, choose(first)))) % PRIME
    assert digests.tolist() == [second, (second + term(5, entry(5, choose(second)))) % PRIME]


def test_lengths_that_are_wrong_stay_inside_the_table() -> None:
    pool = torch.zeros(PAGES, SIZE, dtype=torch.int64)
    rows = locate(ints([0, 1, 2]), ints([0, 90, 180]), 4)
    assert TRACER.target(Cache(pool, ints(TABLE[:2])), rows, ints([0] * 4), ints([1] * 4)).shape == (4,)


def test_one_hot_logits_choose_their_token() -> None:
    logits = one_hot(ints([5, VOCAB_SIZE - 2], torch.int64))
    assert logits.shape == (2, VOCAB_SIZE)
    assert logits.argmax(1).tolist() == [5, VOCAB_SIZE - 2]


@pytest.mark.parametrize("seed", range(4))
def test_a_block_follows_its_columns_and_its_own_choices(seed: int) -> None:
    rng = random.Random(seed)
    counts, starts, bonus, width = [0, 5, 8], [0, 6, 8], [3, 500, 1000], 4
    columns = [[(rng.randrange(30), rng.randrange(PRIME)) for _ in range(8)] for _ in counts]
    positions, values = (ints([[c[part] for c in row] for row in columns], torch.int64) for part in (0, 1))
    tokens = ints([[token, *[MASK_TOKEN] * (width - 1)] for token in bonus])
    queries = ints([list(range(start, start + width)) for start in starts], torch.int64)
    digests = block_digests(positions, values, ints(counts, torch.int64), queries, tokens).tolist()
    for row, (count, start, token) in enumerate(zip(counts, starts, bonus)):
        d = sum(value + POSITION_FACTOR * (position - j) for j, (position, value) in enumerate(columns[row][:count]))
        expected = [d % PRIME]
        for i in range(width):
            expected.append((expected[-1] + term(count + i, entry(start + i, token))) % PRIME)
            token = choose(expected[-1])
        assert digests[row] == expected
