"""A long run on the device, in small; ``python -m benchmarks.gpu.long_run`` is the long one, of 100,000 steps.

What is verified:

1. Drawn scenarios and served batches of every worker have no mismatch on the device over some thousand steps.
2. Device memory does not grow: the peak of the last thousand steps, and what is left between two sessions, is no more
   than in the first thousand, which are the same scenarios.
"""

from __future__ import annotations

from benchmarks.gpu.long_run import ENDS, share


def test_no_finding_and_no_growth() -> None:
    done = share(process=0, steps=3 * ENDS, device="cuda")
    assert done.findings == []
    assert done.steps >= 3 * ENDS
    assert done.replays >= ENDS // 4
    assert (done.last.peak, done.last.least) <= (done.first.peak, done.first.least)
    assert done.first.peak > 0
