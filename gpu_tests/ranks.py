"""One rank of two, in a process of its own: ``python -m gpu_tests.ranks RANK PORT WORKER...`` lives their scenarios.

``WORKER+overlap`` lives it with a step in flight.

Collectives go to the other rank. A line is printed per worker, as JSON: what both ranks have run together, and what
differs from the same scenario on a CPU whose other rank is data.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from engines import run
from engines.portable import PortableEngine
from engines.portable.distributed import Distributed
from engines.portable.pyexecutor import py_executor_creator
from gpu_tests.driving import K, config, differing, dummies, generation
from scenarios import Context, Peer, Phase, Request, Scenario, Step, check, padding

OVERLAP: Final = "+overlap"
PROMPTS: Final = ((5, 3, 9), (4, 7, 3))
"""Of each rank."""
Part = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
"""Requests that begin, and (request, agree) of those that generate."""
SERVED: Final[tuple[tuple[Phase, tuple[Part, Part]], ...]] = (
    (Phase.EAGER, (((0, 1, 2), ()), ((0, 1), ()))),
    (Phase.EAGER, (((), ((0, 1), (2, K))), ((2,), ((1, 0),)))),
    (Phase.REPLAY, (((), ((1, K), (0, 2))), ((), ((0, K), (1, K))))),
    (Phase.EAGER, (((), ((2, 1), (1, 0), (0, K))), ((), ()))),
    (Phase.REPLAY, (((), ((2, K),)), ((), ((2, 1), (0, 0))))),
    (Phase.EAGER, (((), ((0, 0), (2, 0))), ((), ((1, 1), (2, 2))))),
)
"""Steps with what each rank has in them; in one of them a rank is idle, in another its graph is padded."""


class RealDistributed(Distributed):
    """A rank whose collectives run; what the other contributes must be what the scenario says of it."""

    device = torch.device("cuda")

    def tp_allgather(self, name: str, own: int, others: Sequence[int]) -> list[int]:
        """As its base; raises ``RuntimeError`` if the others tell something else."""
        said = super().tp_allgather(name, own, others)
        told = torch.empty(self.tp_size, dtype=torch.int64, device=self.device)
        torch.distributed.all_gather_into_tensor(told, torch.tensor([own], device=self.device))
        if told.tolist() != said:
            raise RuntimeError(f"{name}: the ranks tell {told.tolist()}, and the scenario has {said}")
        return said

    def allgather_rows(self, name: str, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """As its base, with the rows of the others; all of them send as many as the rank with most."""
        super().allgather_rows(name, rows, sizes)
        most, shape = max(sizes), rows.shape[1:]
        sent = torch.cat([rows, rows.new_zeros(most - len(rows), *shape)])
        gathered = rows.new_empty(self.tp_size * most, *shape)
        torch.distributed.all_gather_into_tensor(gathered, sent)
        return torch.cat([part[:size] for part, size in zip(gathered.split(most), sizes, strict=True)])


def scenario_of(name: str, rank: int) -> Scenario:
    """What the rank lives: of a worker, with ``OVERLAP`` behind its name under the overlap scheduler."""
    worker = name.removesuffix(OVERLAP)
    settings = replace(config(worker, "TRTLLM"), attention_dp_size=2, attention_dp_rank=rank, overlap=name != worker)
    steps = [Step(draft_len=K, phase=Phase.CAPTURE, generations=dummies(worker, 10, 20))]
    for phase, parts in SERVED:
        own, other = parts[rank], parts[1 - rank]
        peer = Peer(contexts=tuple(PROMPTS[1 - rank][i] for i in other[0]), generations=len(other[1]))
        contexts = tuple(Context(request=i, chunk=PROMPTS[rank][i]) for i in own[0])
        real = tuple(generation(request, agree) for request, agree in own[1])
        step = Step(draft_len=K, phase=phase, contexts=contexts, generations=real, peers=(peer,))
        steps.append(replace(step, generations=(*real, *padding(settings, step))))
    requests = tuple(Request(id=i, prompt_len=n) for i, n in enumerate(PROMPTS[rank]))
    return check(Scenario(config=settings, requests=requests, steps=tuple(steps)))


def main(rank: int, port: int, workers: Sequence[str], device: str = "cuda") -> None:
    """Live the scenarios of these workers as one of the ranks."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    RealDistributed.device = torch.device(device, rank) if device == "cuda" else torch.device(device)
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=2,
        rank=rank,
        device_id=RealDistributed.device if device == "cuda" else None,
    )
    for worker in workers:
        scenario = scenario_of(worker, rank)
        expected = run(PortableEngine("cpu"), scenario)
        py_executor_creator.Distributed = RealDistributed
        seen = run(PortableEngine(device), scenario)
        py_executor_creator.Distributed = Distributed
        print(json.dumps({"worker": worker, **_account(seen, expected)}), flush=True)
    torch.distributed.barrier()
    # Graphs that hold collectives are best left to the end of the process.
    os._exit(0)


def _account(seen: Any, expected: Any) -> dict[str, Any]:
    collectives = [step.substeps[-1].fields.get("collectives") for step in seen.steps]
    errors = [s.fields.get("message") for step in seen.steps for s in step.substeps if s.name == "failed"]
    return {"collectives": collectives, "errors": errors, "differences": differing(seen, expected)[:3]}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
