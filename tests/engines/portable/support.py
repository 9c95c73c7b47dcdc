"""A batch on the portable engine's real metadata, with a draft model that notes what it is called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engines.portable.attention.backends.interface import KVCacheParams
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from engines.portable.heads import Steering
from engines.portable.models import HIDDEN_SIZE
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.resource_manager import KVCacheManager
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.drafter import Setting
from engines.portable.speculative.utils import MODES, get_spec_metadata, get_spec_worker
from engines.tracer import Tracer
from scenarios import WORKERS as TRAITS

CPU = torch.device("cpu")
MASK = 99
WORKERS = tuple(MODES)
LINEAR = WORKERS[:3]
CHUNKED = tuple(worker for worker in WORKERS if TRAITS[worker].chunked_prefill)
SPARSE = tuple(worker for worker in WORKERS if TRAITS[worker].sparse)
BLOCK = tuple(worker for worker in WORKERS if TRAITS[worker].keeps_context)
TREES = tuple(worker for worker in WORKERS if TRAITS[worker].tree)


def tree_options(worker: str, depth: int) -> dict[str, int]:
    """What a configuration says of trees of that depth: two candidates per node, two nodes per layer on average."""
    return {"dynamic_tree_max_topK": 2, "max_total_draft_tokens": 2 * depth} if TRAITS[worker].tree else {}


def ints(values: Sequence[Any], dtype: torch.dtype = torch.int32) -> Tensor:
    """An integer tensor."""
    return torch.tensor(values, dtype=dtype)


def kv_cache_manager(
    *, num_blocks: int = 64, tokens_per_block: int = 4, extra: int = 2, version: type = KVCacheManager, **options: Any
) -> KVCacheManager:
    """A manager for requests of up to 64 tokens."""
    manager: KVCacheManager = version(
        num_layers=2,
        num_blocks=num_blocks,
        tokens_per_block=tokens_per_block,
        max_seq_len=64,
        max_total_draft_tokens=7,
        num_extra_kv_tokens=extra,
        device=CPU,
        **options,
    )
    return manager


def attention_metadata(manager: KVCacheManager | None = None, max_num_requests: int = 4) -> TrtllmAttentionMetadata:
    """Metadata on a manager; nothing is set yet."""
    return TrtllmAttentionMetadata(
        max_num_requests=max_num_requests,
        max_num_tokens=64,
        device=CPU,
        kv_cache_manager=manager or kv_cache_manager(),
        max_total_draft_tokens=7,
    )


def state(attn: Any) -> dict[str, Any]:
    """What a draft loop changes in the attention metadata."""
    n = len(attn._seq_lens)
    return {
        "seq_lens": attn._seq_lens.tolist(),
        "seq_lens_cuda": attn._seq_lens_cuda.tolist(),
        "kv": attn.kv_lens_cuda[:n].tolist(),
        "counters": (attn.num_contexts, attn.num_ctx_tokens, attn.num_generations, attn.num_tokens),
        "types": attn.host_request_types[:n].tolist(),
        "use_spec_decoding": attn.use_spec_decoding,
    }


class DraftModel:
    """Called as any of upstream's draft models; row ``r`` of its output is ``r`` and it drafts ``call * 10 + row``.

    calls  per call the state of the attention metadata, and the inputs
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.lm_head = self.embed_tokens = self.attn = None
        self.mtp_layers = [self.MTPLayer(self)]

    class MTPLayer:
        """The layer of MTP-Eagle."""

        def __init__(self, owner: DraftModel) -> None:
            self._owner = owner

        def __call__(self, **kwargs: Any) -> Tensor:
            del kwargs["embed_tokens"]
            return self._owner.note(**kwargs)

        def shared_head(self, *args: Any) -> Tensor:
            return self._owner.logits_processor(*args)

    def apply_eagle3_fc(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, :HIDDEN_SIZE]

    def model(self, **kwargs: Any) -> Any:
        hidden = self.note(**kwargs)
        return (hidden, hidden) if "hidden_states" in kwargs else hidden

    def project_target_hidden(self, hidden_states: Tensor) -> Tensor:
        return 100 + torch.arange(len(hidden_states))

    def precompute_context_kv(self, projected: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return positions.long(), projected

    def dflash_forward(self, *, ctx_k_cache: Tensor, ctx_v_cache: Tensor, **inputs: Any) -> Tensor:
        inputs["input_ids"] = inputs.pop("noise_embedding")
        return self.note(self.attn, None, **inputs)

    def markov_head(self, block_logits: Tensor, attn_metadata: Any) -> Tensor:
        """Each draft becomes the one after it."""
        return block_logits.roll(1, dims=-1)

    def note(self, attn_metadata: Any, spec_metadata: Any, **inputs: Any) -> Tensor:
        noted = {k: v.flatten().tolist() if isinstance(v, Tensor) else v for k, v in inputs.items()}
        self.calls.append(state(attn_metadata) | noted)
        return torch.arange(len(noted["input_ids"])).unsqueeze(1).expand(-1, HIDDEN_SIZE)

    def logits_processor(self, rows: Tensor, lm_head: Any, attn_metadata: Any, return_context_logits: bool) -> Tensor:
        self.calls[-1]["gathered"] = rows[:, 0].tolist()
        drafts = 10 * len(self.calls) + torch.arange(len(rows))
        return torch.nn.functional.one_hot(drafts, 100)


class Batch:
    """One step of a worker, prepared: a context of 5 tokens, generations with 10 and 20 tokens cached, K = 3.

    ``accepted`` per generation; row ``r`` of the target says ``40 + r``.
    """

    def __init__(
        self,
        worker: str,
        *,
        prompts: Sequence[int] = (5,),
        pasts: Sequence[int] = (10, 20),
        accepted: Sequence[int] = (3, 2),
        draft_len: int = 3,
        max_draft_len: int | None = None,
        graph: bool = False,
    ) -> None:
        extra = max(draft_len - 1, 1)
        config = DecodingConfig(MODES[worker], max_draft_len or max(draft_len, 1), extra, MASK)
        width = config.get_runtime_tokens_per_gen_step(draft_len)
        self.manager = kv_cache_manager(extra=extra)
        contexts = [LlmRequest(i, [7 + i] * n, context_chunk_size=n) for i, n in enumerate(prompts)]
        gens = [LlmRequest(10 + i, [1] * n, generated=[1]) for i, n in enumerate(pasts)]
        for request in [*contexts, *gens]:
            request.py_draft_tokens = [0] * (width - 1)
        self.manager.add_dummy_requests(gens)
        self.manager.prepare_resources(ScheduledRequests(tuple(contexts), tuple(gens)))
        setting = Setting(
            spec_config=config,
            max_num_requests=4,
            max_num_tokens=64,
            max_seq_len=64,
            num_slots=4,
            tracer=Tracer(64, CPU),
            steering=Steering(4, CPU),
            device=CPU,
        )
        self.worker: Any = get_spec_worker(setting)
        self.draft_model = DraftModel()
        self.attn: Any = attention_metadata(self.manager)
        self.slots = SeqSlotManager(4) if config.keeps_context else None
        if self.slots is not None:
            for request in [*gens, *contexts]:
                self.slots.slot_manager.add_slot(request.py_request_id)
            self.worker._ctx_len[: len(gens)] = torch.tensor(pasts, dtype=torch.int64)
        self.spec: Any = get_spec_metadata(setting, self.slots)
        if graph:
            self.attn = self.attn.create_cuda_graph_metadata(len(gens), max_draft_tokens=width - 1)
            self.spec = self.spec.create_cuda_graph_metadata(len(gens))
        self.draft_model.attn = self.attn
        self._lens = [*prompts, *[width] * len(gens)]
        self._cached = [0] * len(contexts) + list(pasts)
        self._requests = [*contexts, *gens]
        self._num_contexts = len(contexts)
        self.spec.runtime_draft_len, self.spec.runtime_tokens_per_gen_step = draft_len, width
        self.prepare()
        self._inputs(width, accepted)

    def prepare(self) -> None:
        """What the engine's input preparation does with the attention metadata."""
        attn = self.attn
        if not attn.is_cuda_graph:
            attn.seq_lens = ints(self._lens)
        attn.request_ids = [r.py_request_id for r in self._requests]
        attn.prompt_lens = [max(r.py_prompt_len, 1) for r in self._requests]
        attn.num_contexts = self._num_contexts
        attn.kv_cache_params = KVCacheParams(True, self._cached, self.manager.num_extra_kv_tokens)
        attn.prepare()
        attn.use_spec_decoding = True

    def _inputs(self, width: int, accepted: Sequence[int]) -> None:
        contexts, draft_len = self._num_contexts, self.spec.runtime_draft_len
        ends = [sum(self._lens[: i + 1]) for i in range(contexts)]
        first = ends[-1] if ends else 0
        rows = len(self._requests) - contexts
        self.spec.gather_ids = ints([e - 1 for e in ends] + list(range(first, first + rows * width)))
        self.spec.request_ids = self.attn.request_ids
        self.spec.num_tokens = sum(self._lens)
        self.spec.populate_context_prompt_lookahead(self._requests[:contexts])
        self.spec.prepare()
        drafts = []
        for row, count in enumerate(accepted):
            target = [40 + contexts + row * width + j for j in range(draft_len)]
            drafts += [t if j < count - 1 else 0 for j, t in enumerate(target)] + [0] * (width - 1 - draft_len)
        self.spec.draft_tokens = ints(drafts)
        positions = [p for c, n in zip(self._cached, self._lens) for p in range(c, c + n)]
        tokens = list(range(1, 1 + sum(self._lens)))
        logits = torch.nn.functional.one_hot(40 + torch.arange(contexts + rows * width), 100)
        self.arguments: dict[str, Any] = {
            "input_ids": ints(tokens),
            "position_ids": ints([positions]),
            "hidden_states": torch.arange(len(tokens)).unsqueeze(1).expand(-1, HIDDEN_SIZE),
            "logits": logits,
            "attn_metadata": self.attn,
            "spec_metadata": self.spec,
            "draft_model": self.draft_model,
        }

    def forward(self) -> dict[str, Tensor]:
        """One forward of the worker."""
        outputs: dict[str, Tensor] = self.worker(**self.arguments)
        return outputs
