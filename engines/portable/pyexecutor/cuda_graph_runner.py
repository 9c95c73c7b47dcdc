"""Captures the forward of a generation-only batch in a CUDA graph, and replays it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engines.portable.graphs import Graph, capture
from engines.portable.memory_buffer_utils import Buffers
from engines.portable.speculative.draft_kv_cache import draft_kv_cache_context

GraphKey = tuple[int, int, int]
"""Batch size, draft tokens of each generation at most, and rows of all of them."""
Inputs = dict[str, Any]
ForwardFn = Callable[[Inputs], dict[str, Tensor]]


@dataclass
class CapturedGraph:
    """A graph with the objects that it was captured with: their addresses are part of it."""

    attn_metadata: Any
    spec_metadata: Any
    graph: Graph | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)


class CUDAGraphRunner:
    """Graphs by batch size, draft length and number of rows, over input buffers that all of them share.

    ``warmup_steps`` forwards run before a capture (upstream: ``WARMUP_STEPS``). Without CUDA the graphs are
    emulated, see ``graphs``; ``replays`` says which of them will be replayed, for the others need not be recorded.
    """

    def __init__(self, warmup_steps: int, max_num_tokens: int, device: torch.device) -> None:
        self.warmup_steps = warmup_steps
        self.device = device
        self.graphs: dict[GraphKey, CapturedGraph] = {}
        self.memory_pool: Any = None
        self.replays: Callable[[GraphKey], bool] = lambda key: True
        self.cuda_graph_buffers = Buffers(device)
        self.static_inputs = {
            "input_ids": torch.zeros(max_num_tokens, dtype=torch.int32, device=device),
            "position_ids": torch.zeros(1, max_num_tokens, dtype=torch.int32, device=device),
        }

    def get_graph_metadata(self, key: GraphKey, attn_metadata: Any, spec_metadata: Any) -> tuple[Any, Any]:
        """Attention and spec metadata of the graph; made from the given ones when there is no such graph yet."""
        if key not in self.graphs:
            batch_size, draft_len, _ = key
            self.graphs[key] = CapturedGraph(
                attn_metadata.create_cuda_graph_metadata(
                    batch_size, max_draft_tokens=draft_len, buffers=self.cuda_graph_buffers
                ),
                spec_metadata.create_cuda_graph_metadata(batch_size),
            )
        captured = self.graphs[key]
        return captured.attn_metadata, captured.spec_metadata

    def capture(
        self, key: GraphKey, forward_fn: ForwardFn, inputs: Inputs, postprocess_fn: Callable[[Inputs], None]
    ) -> dict[str, Tensor]:
        """Run the forward ``warmup_steps`` times and capture it; all of them on one preparation.

        ``postprocess_fn`` takes back what a forward did to its inputs. If one of them fails, graph and metadata are
        dropped: the draft loop may have left some of it as it had it.

        Before each, ``kv_lens_cuda`` is what ``prepare`` wrote: a draft loop moves it, and without that it would
        drift past the pages (PR #11696).
        """
        try:
            return self._warm_up_and_capture(key, forward_fn, inputs, postprocess_fn)
        except BaseException:  # nor may an interrupt leave half of a graph behind
            self.graphs.pop(key, None)
            if not any(captured.graph for captured in self.graphs.values()):
                # A pool ends with its last graph, and its handle with it.
                self.memory_pool = None
            raise

    def _warm_up_and_capture(
        self, key: GraphKey, forward_fn: ForwardFn, inputs: Inputs, postprocess_fn: Callable[[Inputs], None]
    ) -> dict[str, Tensor]:
        attn_metadata = inputs["attn_metadata"]
        kv_lens = getattr(attn_metadata, "kv_lens_cuda", None)
        kv_lens = None if kv_lens is None else kv_lens[: attn_metadata.num_seqs].clone()
        static_inputs = self._copy_to_static_inputs(inputs)
        for _ in range(self.warmup_steps):
            forward_fn(static_inputs)
            postprocess_fn(static_inputs)
            self._restore_kv_lens(attn_metadata, kv_lens)
        self.capture_graph(key, forward_fn, static_inputs)
        postprocess_fn(static_inputs)
        self._restore_kv_lens(attn_metadata, kv_lens)
        return self.graphs[key].outputs

    def capture_graph(self, key: GraphKey, forward_fn: ForwardFn, static_inputs: Inputs) -> None:
        """Capture one forward, and let it take effect once."""
        if self.memory_pool is None and self.device.type == "cuda":
            self.memory_pool = torch.cuda.graph_pool_handle()
        captured = self.graphs[key]
        with draft_kv_cache_context(captured.attn_metadata):
            # Writes what the draft calls read: while a graph is captured nothing is copied from the host.
            pass
        captured.graph, captured.outputs = capture(
            lambda: forward_fn(static_inputs), self.device, self.memory_pool, replayable=self.replays(key)
        )

    def replay(self, key: GraphKey, inputs: Inputs) -> dict[str, Tensor]:
        """Replay the graph on new inputs; the tensors returned are overwritten by its next replay."""
        captured = self.graphs[key]
        assert captured.graph is not None, f"no graph is captured for {key}"
        assert inputs["attn_metadata"] is captured.attn_metadata, "a graph replays with the metadata of its capture"
        self._copy_to_static_inputs(inputs)
        with draft_kv_cache_context(captured.attn_metadata):
            captured.graph.replay()
        return captured.outputs

    def clear(self) -> None:
        """Drop all graphs, now rather than when the collector gets to it."""
        self.graphs.clear()

    def _copy_to_static_inputs(self, inputs: Inputs) -> Inputs:
        static_inputs = dict(inputs)
        for name, buffer in self.static_inputs.items():
            static_inputs[name] = buffer[..., : inputs[name].shape[-1]]
            static_inputs[name].copy_(inputs[name])
        return static_inputs

    def _restore_kv_lens(self, attn_metadata: Any, kv_lens: Tensor | None) -> None:
        if kv_lens is None:
            return
        attn_metadata.kv_lens_cuda[: len(kv_lens)].copy_(kv_lens)
        attn_metadata.on_update_kv_lens()
