"""A long run on the device, in small; ``python -m benchmarks.gpu.long_run`` is the long one, of 100,000 steps.

What is verified:

1. Drawn scenarios and served batches have no mismatch on the device over three hundred steps.
2. Device memory does not grow: the peak of the last steps, and what is left between two sessions, is no more than in
   the first ones, which are the same scenarios.
"""

from __future__ import annotations

from benchmarks.gpu.long_run import share

ENDS = 100


def test_no_finding_and_no_growth() -> None:
    done = share(process=0, steps=3 * ENDS, device="cuda", ends=ENDS)
    assert done.findings == []
    assert done.steps >= 3 * ENDS
    assert done.of["replay"] > 0
    assert done.first.peak > done.first.left > 0
    assert done.last.peak <= done.first.peak
    assert done.last.left <= done.first.left
