"""Forced acceptance: how many tokens a benchmark makes generations accept, whatever was drafted (upstream:
``SpecWorkerBase._apply_force_accepted_tokens``).

The forced number counts accepted drafts; the target's own token comes on top of it. Its fraction is the chance of one
draft more, decided by a pool of uniform numbers that a device-side counter walks through, so that all ranks decide
alike and a captured graph decides anew at each replay.
"""

from __future__ import annotations

import struct
from functools import cache
from random import Random
from typing import Final

SEED: Final = 0xACCE9D
POOL_SIZE: Final = 65_536
COUNTER_STRIDE: Final = 6_007
ROW_STRIDE: Final = 1_009

_STATE_WORDS: Final = 624
_MANTISSA_BITS: Final = 24


@cache
def uniforms() -> tuple[float, ...]:
    """The pool: what a CPU generator of torch draws as float32 ``[POOL_SIZE]`` in ``[0, 1)`` from ``SEED``.

    That generator is the Mersenne Twister with its first seeding rule, and takes the low 24 bits of each word.
    """
    words = [SEED]
    for i in range(1, _STATE_WORDS):
        words.append((1_812_433_253 * (words[-1] ^ words[-1] >> 30) + i) % 2**32)
    twister = Random()
    twister.setstate((3, (*words, _STATE_WORDS), None))
    return tuple(twister.getrandbits(32) % 2**_MANTISSA_BITS / 2**_MANTISSA_BITS for _ in range(POOL_SIZE))


def least(force: float, draft_len: int) -> int:
    """Tokens that every generation accepts at least, its own included."""
    return min(int(force) + 1, draft_len + 1)


def draws(force: float, draft_len: int) -> bool:
    """Whether a forward with this draft length draws from the pool, and so moves the counter on by one."""
    return force > int(force) and least(force, draft_len) <= draft_len


def most(force: float, draft_len: int) -> int:
    """Tokens that a generation accepts at most."""
    return least(force, draft_len) + draws(force, draft_len)


def counts(force: float, draft_len: int, counter: int, generations: int) -> list[int]:
    """Tokens that each generation of a forward accepts. ``counter``: what the forward has moved it on to."""
    low = least(force, draft_len)
    if not draws(force, draft_len):
        return [low] * generations
    pool, chance = uniforms(), _float32(force - int(force))
    places = ((counter * COUNTER_STRIDE + row * ROW_STRIDE) % POOL_SIZE for row in range(generations))
    return [low + (pool[place] < chance) for place in places]


def _float32(value: float) -> float:
    """The float32 that the pool is compared with."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)
