"""The fourteen statements that a speculative-decoding engine's book-keeping can be held to, by number.

Each is about the engine, not about a scenario; an invariant says at its registration which of them it holds. They
reject most public defects between them, and ``tests/invariants/test_registry.py`` asks that none is left to nobody.
"""

from __future__ import annotations

from typing import Final

PREDICATES: Final = {
    "P1": "Counters follow from the lengths and the number of contexts, on host and device.",
    "P2": "What a forward borrows it gives back, the very objects, whether it succeeds or fails.",
    "P3": "A linear draft loop runs with one token per row, one token further in each call.",
    "P4": "A parallel drafter moves the lengths once before its forward and back once after it.",
    "P5": "In a dynamic tree all widths are one stride, and mask and offsets are those of the nodes.",
    "P6": "With overlap the device corrects what the host assumed about the step in flight.",
    "P7": "A derived buffer is what its inputs make of it, wherever anybody can read it.",
    "P8": "A row accepts 1 to K + 1 tokens, and a request counts and rewinds accordingly.",
    "P9": "Tokens and pages balance in each pool: granted, written, rewound, freed.",
    "P10": "Row r of every tensor of one launch belongs to the same request.",
    "P11": "Padding and dummies write to scratch alone and change no real row.",
    "P12": "Ranks agree on counts, on graphs and on the sequence of collectives.",
    "P13": "Capture is a fixed point: no value, address or flag of it reaches into a replay.",
    "P14": "A drafter that says what the target says is accepted, and speculation changes no text.",
}
