"""The dynamic tree of drafts that Eagle3 and MTP-Eagle share (upstream: their ``DynamicTreeWorker`` classes)."""

from __future__ import annotations

from abc import abstractmethod

from reference.batch import Batch, Row
from reference.drafter import shifted_slots
from reference.history import Drafts, History
from reference.tree import ROOT, Growth, grow, paths
from reference.workers.interface import DraftCall, Drafting, SpecWorker
from reference.workers.linear import shifted
from scenarios.tracer import PAD_TOKEN


class TreeWorker(SpecWorker):
    """Drafts one layer per call, each call fed with all nodes that the layers before it went on from.

    The first call ingests the step's tokens: a context its chunk, a generation the path that was accepted, K + 1
    wide. In the later ones each row lies behind its cached tokens, a call's nodes on those of the call before;
    nothing of them stays in the cache. Drafts of contexts are thrown away, so their first generation has no tree.
    """

    tells_sequences = True
    looks_ahead = 1

    def draft(self, batch: Batch) -> Drafting:
        """K calls."""
        trees = [grow(row.text, row.end + 1, batch.draft_len, batch.topk, row.agree, batch.width) for row in batch.rows]
        drafts = [
            Drafts() if row.is_context else _kept(tree, batch.width)
            for row, tree in zip(batch.rows, trees, strict=True)
        ]
        kv_lens = [row.end + batch.draft_len * batch.topk for row in batch.rows]
        calls = [_ingest(batch), *(_extend(batch, trees, layer) for layer in range(1, batch.draft_len))]
        return Drafting(
            calls=[self.counted(call, batch, layer) for layer, call in enumerate(calls)],
            drafts=drafts,
            kv_lens=batch.kv_lens if self.returns_kv_lens else kv_lens,
        )

    @abstractmethod
    def counted(self, call: DraftCall, batch: Batch, layer: int) -> DraftCall:
        """A call with the token counts of the ranks that it goes by, which the worker writes into the metadata."""

    def draft_slots(self, history: History) -> list[int]:
        """Each cached position with the token of the next one."""
        return shifted_slots(history)


def _ingest(batch: Batch) -> DraftCall:
    width = batch.draft_len + 1
    fed = [(shifted(row), row.hidden, row.past) for row in batch.contexts]
    fed += [(*accepted_path(row, width), row.past) for row in batch.generations]
    return DraftCall(
        input_ids=[token for tokens, _, _ in fed for token in tokens],
        position_ids=[past + j for tokens, _, past in fed for j in range(len(tokens))],
        seq_lens=[len(tokens) for tokens, _, _ in fed],
        kv_lens=[past + len(tokens) for tokens, _, past in fed],
        num_contexts=batch.num_contexts,
        use_spec_decoding=bool(batch.generations),
        hidden_states=[digest for _, hidden, _ in fed for digest in hidden],
        paths=[paths(range(ROOT, width - 1)) for _ in batch.generations],
    )


def accepted_path(row: Row, width: int) -> tuple[list[int], list[int]]:
    """What the first call feeds for a generation: the accepted tokens with the target's hidden states of their nodes.

    Placeholders with the root's hidden state fill it up to ``width``.
    """
    room = width - len(row.accepted)
    return row.accepted + [PAD_TOKEN] * room, [row.hidden[node] for node in row.standing + [0] * room]


def _extend(batch: Batch, trees: list[Growth], layer: int) -> DraftCall:
    fed = [(row, tree, tree.fed(layer)) for row, tree in zip(batch.rows, trees, strict=True)]
    seen = [paths(tree.parents(nodes)) for _, tree, nodes in fed]
    width = layer * batch.topk
    return DraftCall(
        input_ids=[tree.made[node].token for _, tree, nodes in fed for node in nodes],
        position_ids=[row.end + len(path) - 1 for row, of_row in zip(batch.rows, seen, strict=True) for path in of_row],
        seq_lens=[width] * len(batch.rows),
        kv_lens=[row.end + width for row in batch.rows],
        num_contexts=0,
        updated=True,
        hidden_states=[tree.reading(tree.made[node].parent).digest for _, tree, nodes in fed for node in nodes],
        paths=seen,
    )


def _kept(tree: Growth, count: int) -> Drafts:
    nodes = tree.kept(count)
    return Drafts([tree.made[node].token for node in nodes], tree.parents(nodes))
