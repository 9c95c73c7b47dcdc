"""Scenarios of a served batch, of any size, in graph replays or in eager steps."""

from __future__ import annotations

from random import Random

from scenarios import WORKERS, Config, Context, Generation, Phase, Request, Scenario, Step, check


def serving(
    worker: str,
    *,
    batch: int,
    draft_len: int,
    steps: int,
    phase: Phase = Phase.REPLAY,
    backend: str = "TRTLLM",
    seed: int = 0,
) -> Scenario:
    """A graph is captured, ``batch`` prompts are computed, then all requests generate in ``steps`` steps.

    How good the drafts are is drawn for each row. Without replays no graph is captured.
    """
    random, traits = Random(seed), WORKERS[worker]
    longest = 4 + steps * (draft_len + 1)
    topk, nodes = (2, 2 * draft_len) if traits.tree else (0, 0)
    width = max(2 * draft_len, nodes + 1, draft_len + 1)
    config = Config(
        worker=worker,
        max_draft_len=draft_len,
        attention_backend=backend,
        index_topk=8 if backend == "DSA" else 0,
        max_num_requests=batch,
        max_num_tokens=batch * width,
        max_seq_len=min(4096, longest + 4 * width),
        tokens_per_block=32,
        num_blocks=batch * (2 + (longest + 4 * width) // 32),
        dynamic_tree_max_topK=topk,
        max_total_draft_tokens=nodes,
        seed=seed,
    )
    requests = tuple(Request(id=i, prompt_len=draft_len) for i in range(batch))
    dummies = tuple(Generation(request=None, past=draft_len, accept=1) for _ in requests)
    capture = [Step(draft_len=draft_len, phase=Phase.CAPTURE, generations=dummies)] if phase is Phase.REPLAY else []
    most = draft_len if traits.drafts_for_contexts else 0
    contexts = tuple(Context(request=r.id, chunk=r.prompt_len, agree=random.randint(0, most)) for r in requests)
    served = [
        Step(
            draft_len=draft_len,
            phase=phase,
            generations=tuple(Generation(request=r.id, agree=random.randint(0, draft_len)) for r in requests),
        )
        for _ in range(steps)
    ]
    prefill = Step(draft_len=draft_len, contexts=contexts)
    return check(Scenario(config=config, requests=requests, steps=(*capture, prefill, *served)))
