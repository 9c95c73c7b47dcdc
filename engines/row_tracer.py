"""The tracer model of recurrent layers and of proposals: what belongs to one row of a batch, and to no other.

As ``engines.tracer``: int64 tensors, no waiting for the device, out of sight of torch function modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import torch
from torch import Tensor

from engines.tracer import entry, term
from engines.unseen import unseen
from scenarios import tracer
from scenarios.tracer import PRIME, VOCAB_SIZE

_DIGITS: Final = 1 << 16
"""A digest is two numbers below this one: exact as float32."""

proposal = unseen(cast(Callable[[Tensor, Tensor], Tensor], tracer.proposal))


@unseen
def with_digests(logits: Tensor, digests: Tensor) -> Tensor:
    """Logits that also say what each row was chosen from: two columns behind the vocabulary, which nobody chooses.

    logits   float32 [rows, VOCAB_SIZE]
    digests  int64 [rows]
    """
    digits = torch.stack([digests // _DIGITS, digests % _DIGITS], dim=1)
    return torch.cat([logits, -1.0 - digits.to(logits.dtype)], dim=1)


@unseen
def digests_of(logits: Tensor) -> Tensor:
    """What ``with_digests`` put behind the vocabulary of logits of any leading shape: int64."""
    high, low = (-1.0 - logits[..., VOCAB_SIZE:]).long().unbind(-1)
    return high * _DIGITS + low


@unseen
def steps_of(positions: Tensor, tokens: Tensor) -> Tensor:
    """What each row adds to a state: int64 [rows]."""
    return term(positions.long(), entry(positions.long(), tokens.long()))


@unseen
def context_states(steps: Tensor, lens: Tensor, initial: Tensor) -> Tensor:
    """States after each row of the contexts: int64 [rows].

    steps    int64 [rows]: what each row adds
    lens     int [C]: rows of each context
    initial  int64 [C]: state before its first one
    """
    totals = torch.nn.functional.pad(steps.cumsum(0), (1, 0))
    ends = lens.long().cumsum(0)
    offsets = initial - totals.index_select(0, ends - lens)
    return (totals[1:] + torch.repeat_interleave(offsets, lens.long(), output_size=len(steps))) % PRIME


@unseen
def chain_states(steps: Tensor, initial: Tensor) -> Tensor:
    """States after each row of generations that feed chains, int64 [G, w], from what each row adds."""
    return (steps.cumsum(1) + initial.unsqueeze(1)) % PRIME


@unseen
def tree_states(steps: Tensor, initial: Tensor, packed_mask: Tensor) -> Tensor:
    """The same where the rows are nodes of trees: each goes on from its parent.

    packed_mask  int32 [G or more, w or more, words]: bit ``v`` of row ``q`` says whether ``v`` is on the path to ``q``
    """
    gens, width = steps.shape
    column = torch.arange(width, device=steps.device)
    words = packed_mask[:gens, :width].index_select(2, column // 32)
    on_path = (words >> (column % 32).int()) & 1
    return ((steps.unsqueeze(1) * on_path).sum(2) + initial.unsqueeze(1)) % PRIME


@unseen
def mixed(digests: Tensor, states: Tensor, is_dummy: Tensor) -> Tensor:
    """Hidden states of rows from their digests and recurrent states: the digests themselves where all is right."""
    return torch.where(is_dummy, digests, (2 * digests - states) % PRIME)
