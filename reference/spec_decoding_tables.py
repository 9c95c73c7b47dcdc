"""Tables that tell the attention kernels which drafts of a chain see each other, packed as upstream packs them."""

from __future__ import annotations

from typing import Final

WORD: Final = 32
"""Tokens per word of a mask."""


def linear_mask(width: int) -> list[list[int]]:
    """Per token of a chain the words of its mask (int32): bit b of word w stands for token 32 w + b.

    Upstream fills only the word that a token itself lies in, so beyond 32 tokens it does not see those of the
    words before: a limit of these tables, as drafts are fewer.
    """
    words = -(-width // WORD)
    return [[_causal(i % WORD) if word == i // WORD else 0 for word in range(words)] for i in range(width)]


def seen(words: list[int]) -> list[int]:
    """The tokens that a mask lets its token see."""
    return [WORD * place + bit for place, word in enumerate(words) for bit in range(WORD) if word >> bit & 1]


def _causal(last: int) -> int:
    """A word with bits 0 to ``last`` set, as a signed number."""
    word = (1 << last + 1) - 1
    return word - (1 << WORD) if last == WORD - 1 else word
