"""Two ranks of attention data parallelism on two GPUs, one process a rank, with collectives over NCCL.

What is verified:

1. Each rank's run, a graph with collectives in it included, is the run on a CPU whose other rank is data, value by
   value; so what the other rank tells and sends is what the scenario says.
2. Both ranks record the same collectives in the same order, step by step, also where one of them is idle or its graph
   is padded.
3. It is skipped, with a reason that is printed, where there is one GPU.

A run takes half of the workers under the overlap scheduler, the next day's the others (``--whole``: all either way).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from itertools import chain
from typing import Any

import pytest
import torch

from gpu_tests.processes import ROOT, SECONDS
from gpu_tests.ranks import OVERLAP
from gpu_tests.requirements import ONE_GPU
from gpu_tests.sampling import Sampled
from scenarios import WORKERS

PARTS = 3
"""In which the workers are lived; two processes start for each."""


def lived(workers: list[str]) -> list[dict[str, Any]]:
    """What each rank says of each of these workers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "gpu_tests.ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(port), *workers],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, error[-3000:]
    lines = [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output, _ in outputs]
    return [{entry["worker"]: entry for entry in entries} for entries in lines]


@pytest.mark.parametrize("part", range(PARTS))
def test_two_ranks_over_nccl(part: int, sampled: Sampled) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{ONE_GPU}: torch finds {torch.cuda.device_count()}")
    names = (sampled.every((worker, worker + OVERLAP), 2, begin) for begin, worker in enumerate(WORKERS))
    workers = list(chain.from_iterable(names))[part::PARTS]
    one, other = lived(workers)
    assert list(one) == list(other) == workers
    for worker in workers:
        for rank in (one, other):
            assert (rank[worker]["errors"], rank[worker]["differences"]) == ([], []), worker
        assert one[worker]["collectives"] == other[worker]["collectives"], worker
        assert all(one[worker]["collectives"]), worker
