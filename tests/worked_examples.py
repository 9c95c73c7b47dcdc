"""Worked examples of the specification: inputs and expected values, as plain data for whoever computes them.

Rows are contexts, then generations. Lengths are in tokens; a number of accepted tokens counts the target's own one.
Where what upstream does is a fault that this suite excludes, its value stands beside the right one, named ``upstream``.
"""

from __future__ import annotations

from types import SimpleNamespace as Example
from typing import Final

# Attention metadata, by the numbers of the specification.

COUNTERS: Final = Example(
    seq_lens=[4, 1, 1],
    num_contexts=1,
    cached=[0, 9, 20],
    extra=2,
    counters=(4, 2, 6),  # num_ctx_tokens, num_generations, num_tokens
    kv=[4, 10, 21],
    kv_lens=[6, 12, 23],
    host_total_kv_lens=[4, 31],
    host_request_types=[0, 1, 1],
    filled_with_1=(1, 2, 3),
    then_no_contexts=(0, 3, 3),
    restored=(4, 2, 6),
    restored_upstream=(0, 3, 6),  # before PR #17381
)
"""1: a draft loop fills seq_lens with 1, sets num_contexts to 0, and restores."""

LAYOUT: Final = Example(
    prompt=5,
    past=[10, 20],
    draft_len=3,
    seq_lens=[5, 4, 4],
    positions=[0, 1, 2, 3, 4, 10, 11, 12, 13, 20, 21, 22, 23],
    gather_ids=[4, 5, 6, 7, 8, 9, 10, 11, 12],
    cached=[0, 10, 20],
    kv=[5, 14, 24],
    draft_lens=[0, 3, 3],
)
"""2: flattened inputs without overlap."""

OVERLAP: Final = Example(
    last_token=10,  # M - 1: the tokens that the host knows, but for the last one
    width=4,
    accepted=2,
    host_cached=14,
    host_kv=18,
    host_positions=[10, 11, 12, 13],
    kv_offset=-2,
    position_offset=2,
    device_kv=16,
    device_positions=[12, 13, 14, 15],
)
"""3: the step is prepared before the host knows what the last one accepted."""

DRAFT_LOOP: Final = Example(
    prompt=5, past=10, accepted=2, draft_len=3, kv=[[5, 14], [6, 13], [7, 14]], after=[8, 15]
)  # fmt: skip
"""4: what the forwards of a linear loop see, context first, and what stays."""

STALE_MAP: Final = Example(
    draft_len=4,
    past=[97, 107, 117, 127, 137, 147, 157, 167],
    accepted=[2] * 8,
    kv=[100, 110, 120, 130, 140, 150, 160, 170],
    right=list(range(8)),
    stale=[0, 0, 0, 0, 0, 1, 1, 1],
    right_positions=[99, 109, 119, 129, 139, 149, 159, 169],
    stale_positions=[99, 100, 101, 102, 103, 113, 114, 115],
    mixed=([4, 5, 5], [0, 0, 0]),  # lengths before the loop, stale map of its rows
    # seq_lens, tokens, map
    maps=[([3, 1, 4, 1], 9, [0, 0, 0, 1, 2, 2, 2, 2, 3]), ([2, 0, 1], 3, [0, 0, 2])],
)
"""5: the map from tokens to rows in the second forward of a loop (PR #16925)."""

SLOTS: Final = Example(
    tokens_per_block=64,
    index_head_dim=128,
    quant_block_size=128,
    pages=[7, 3, 9],
    positions=[0, 63, 64, 130],
    fp8=[59136, 67200, 25344, 76288],
    fp8_scales=[67328, 67580, 33536, 84232],
    fp8_page_bytes=8448,
    fp4=[30464, 34496, 13056, 39296],
    fp4_scales=[34560, 34812, 17152, 43272],
    fp4_page_bytes=4352,
)
"""6: byte offsets in the indexer's pool."""

LINEAR_MASK: Final = Example(
    of_4_rows=[[1], [3], [7], [15]],
    row_31_of_32=[-1],
    rows_31_and_32_of_33=[[-1, 0], [0, 1]],
)
"""7: the lower word of row 32 is 0, as upstream has it."""

REWIND: Final = [
    # K, drafts reserved, drafts accepted, tokens granted then taken back, net
    (3, 3, 1, [4, -2], 2),
    (3, 8, 1, [9, -2, -5], 2),
    (3, 3, 3, [4], 4),
    (3, 3, 0, [4, -3], 1),
]
"""8: the ledger of a generation step."""

LAST_PAGE: Final = Example(
    page_size=64,
    # length, pages, tokens of the last page
    lengths=[(1, 1, 1), (63, 1, 63), (64, 1, 64), (65, 2, 1), (128, 2, 64)],
)
"""9: FlashInfer's page table."""

SHARED_KV_VIEW: Final = Example(
    kv=[10, 20, 30], seq_lens=[4, 2, 3], num_contexts=1, accepted=[4, 1, 2], view=[10, 19, 29]
)  # fmt: skip
"""10: device lengths of the draft view."""

DSL_SPLIT: Final = Example(
    num_sms=148,
    max_kv=4096,
    atoms=(1, 2, 3),
    # next_n, generations, (factor, atom)
    picks=[(4, 1, (4, 1)), (4, 32, (2, 2)), (2, 1, (2, 1)), (5, 8, (5, 1))],
)
"""11: how the paged-logits kernel splits the rows of a generation."""

GRAPH_DUMMY: Final = Example(draft_len=3, extra=2, token_num=4, prompt_len=3, cached=3, seq_len=4, kv=7, granted=9)
"""12: a dummy generation of a graph."""

RANKS: Final = Example(
    draft_len=3,
    # prompts and number of generations per rank
    ranks=[([5], 2), ([], 3)],
    all_rank_num_tokens=[13, 12],
    all_rank_num_seqs=[3, 3],
    subseq_all_rank_num_tokens=[3, 3],
)
"""13: attention data parallelism over two ranks."""

CHUNK_PLANS: Final = [
    Example(
        total=8,
        cached=[3, 20, 2, 0],
        chunked_seq_len=[[3, 5, 0, 0], [0, 8, 0, 0], [0, 7, 1, 0], [0, 0, 1, 0]],
        chunked_global_offset=[[0, 0, 0, 0], [3, 5, 0, 0], [0, 13, 0, 0], [0, 20, 1, 0], [0, 0, 2, 0]],
        merge_op=[[2, 2, 0, 0], [0, 1, 0, 0], [0, 1, 2, 0], [0, 0, 1, 0], [1, 1, 1, 2]],
        max_chunk_len_per_loop=[5, 8, 7, 1],
    ),
    Example(
        total=8,
        cached=[8, 8],
        chunked_seq_len=[[8, 0], [0, 8]],
        chunked_global_offset=[[0, 0], [8, 0], [0, 8]],
        merge_op=[[2, 0], [0, 2], [1, 1]],
        max_chunk_len_per_loop=[8, 8],
    ),
    Example(
        total=8,
        cached=[0, 0],
        chunked_seq_len=[],
        chunked_global_offset=[[0, 0]],
        merge_op=[[2, 2]],
        max_chunk_len_per_loop=[],
    ),
]
"""14: context MLA over what is cached, in loops of ``total`` tokens; merge_op 2 copies and 1 merges."""

DSA_LOOPS: Final = [
    Example(
        prompts=[],
        past=[10, 20],
        draft_len=2,
        accepted=[2, 3],
        kv=[[13, 23], [13, 24]],
        # (row, position) that each token writes, per forward
        written=[[(0, 10), (0, 11), (0, 12), (1, 20), (1, 21), (1, 22)], [(0, 12), (1, 23)]],
        stale=[[(0, 10), (0, 11), (0, 12), (1, 20), (1, 21), (1, 22)], [(0, 12), (0, 13)]],
    ),
    Example(
        prompts=[5],
        past=[10, 20],
        draft_len=3,
        accepted=[1, 2, 4],
        kv=[[5, 14, 24], [6, 13, 25], [7, 14, 26]],
        written=[
            [*((0, i) for i in range(5)), *((1, i) for i in range(10, 14)), *((2, i) for i in range(20, 24))],
            [(0, 5), (1, 12), (2, 24)],
            [(0, 6), (1, 13), (2, 25)],
        ],
        stale=[
            [*((0, i) for i in range(5)), *((1, i) for i in range(10, 14)), *((2, i) for i in range(20, 24))],
            [(0, 5), (0, 6), (0, 7)],
            [(0, 6), (0, 7), (0, 8)],
        ],
    ),
]
"""15: the draft loop on DSA."""

DSA_TREE_LIKE: Final = Example(
    before=[5, 5, 5],
    seq_lens=[2, 2, 2],
    kv=[15, 25, 12],
    map=[0, 0, 1, 1, 2, 2],
    positions=[13, 14, 23, 24, 10, 11],
    stale_map=[0, 0, 0, 0, 0, 1],
    stale_positions=[13, 14, 15, 16, 17, 26],
)
"""15, last part: rows of two tokens each."""

SWAP_UNDER_OVERLAP: Final = Example(
    width=4,
    host_cached=[14, 24],
    accepted=[2, 3],
    device_kv=[16, 27],
    written=[(0, 12), (0, 13), (0, 14), (0, 15), (1, 23), (1, 24), (1, 25), (1, 26)],
    from_host=[(0, 14), (0, 15), (0, 16), (0, 17), (1, 24), (1, 25), (1, 26), (1, 27)],
)
"""16: slots that are recomputed on the host while it still counts what was not accepted."""

SKIP_FLAGS: Final = Example(
    index_topk=16,
    extra=1,
    context=30,
    past=[4, 6],
    draft_len=2,
    accepted=2,
    flags=(False, True),  # contexts, generations
    draft_kv=[31, 7, 9],
    upstream_dense_columns=[16, 7, 9],
    upstream_missing_in_row_0=list(range(16, 31)),
    flags_in_the_loop=(False, False),
)
"""17: upstream keeps the generations' flag when contexts become rows of them; here a long one takes it back."""

PREFILL_CHUNKS: Final = Example(
    max_chunk_size=4,
    seq_lens=[3, 2, 9, 1],
    cached=[4, 0, 3, 0],
    # tokens and keys of each chunk, from and to
    chunks=[
        ((0, 3), (0, 7)),
        ((3, 5), (7, 9)),
        ((5, 9), (9, 16)),
        ((9, 13), (9, 20)),
        ((13, 14), (9, 21)),
        ((14, 15), (21, 22)),
    ],
    third=([0, 0, 0, 0], [4, 5, 6, 7]),  # cu_seqlen_ks, cu_seqlen_ke
)
"""18: chunks of the indexer's prefill."""

COMPRESSED: Final = Example(
    ratio=4,
    # new tokens, tokens before them, positions of new compressed tokens
    new=[(3, 5, [1]), (9, 0, [0, 1])],
    seq_lens=[3, 9],
    cached=[5, 0],
    ks=[0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2],
    ke=[1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4],
    generation_kv=[(10, 2), (23, 5)],
)
"""19: an indexer over every fourth token."""

# Workers: one context of 5 tokens, generations with 10 and 20 tokens cached, K = 3, accepted [1, 3, 2].

PROMPT: Final = 5
PAST: Final = [10, 20]
DRAFT_LEN: Final = 3
ACCEPTED: Final = [1, 3, 2]
TREE: Final = Example(topk=2, nodes=6)


def _worker(
    kv0: list[int], drafting: list[list[int]], after: list[int], seq_lens: list[list[int]], **more: list[int]
) -> Example:
    """A row of the table.

    kv0, after       KV lengths before and after the worker's forward
    drafting         KV lengths that each draft call sees
    seq_lens         lengths that each draft call sees
    after_warmup     KV lengths after the forward of a graph that warms up, where they differ from ``after``
    after_failure    KV lengths after a failure in the last draft call, where the table has them
    """
    rest = {"after_warmup": after, "num_contexts_after": 1} | more
    return Example(kv0=kv0, drafting=drafting, after=after, seq_lens=seq_lens, **rest)


_ONES: Final = [1, 1, 1]
_LOOP: Final = [[5, 14, 24], [6, 14, 23], [7, 15, 24]]
_LOOP_LENS: Final = [[5, 4, 4], _ONES, _ONES]
_TREE_KV: Final = [[5, 14, 24], [7, 15, 24], [9, 17, 26]]
_TREE_LENS: Final = [[5, 4, 4], [2, 2, 2], [4, 4, 4]]
_BLOCK: Final = _worker(
    [5, 14, 24], [[5, 15, 25]], [5, 17, 26], [[5, 4, 4]], after_warmup=[5, 14, 24], after_failure=[5, 17, 26]
)  # fmt: skip

WORKERS: Final = {
    "Eagle3OneModelWorker": _worker([5, 14, 24], _LOOP, [8, 16, 25], _LOOP_LENS),
    "MTPEagleWorker": _worker([5, 14, 24], _LOOP, [8, 16, 25], _LOOP_LENS),
    "DraftTargetOneModelWorker": _worker(
        [5, 14, 24], _LOOP, [8, 16, 25], _LOOP_LENS, after_warmup=[5, 14, 24]
    ),
    "MTPWorker": _worker([5, 14, 24], [[5, 13, 22]] * 3, [5, 13, 22], [[5, 3, 3]] * 3),
    "PARDWorker": _worker(
        [5, 16, 26], [[5, 17, 27]], [5, 19, 28], [[5, 6, 6]], after_warmup=[5, 16, 26], after_failure=[5, 19, 28]
    ),
    "DFlashWorker": _BLOCK,
    # The version that is a subclass of DFlashWorker; the one before it left the metadata alone.
    "DSparkWorker": _BLOCK,
    "SAWorker": _worker([5, 14, 24], [], [5, 14, 24], []),
    "Eagle3OneModelDynamicTreeWorker": _worker([5, 17, 27], _TREE_KV, [11, 19, 28], _TREE_LENS),
    # Its lengths are copied back. Upstream's generations see one layer less: [7, 13, 22] and [9, 15, 24].
    "MTPEagleDynamicTreeWorker": _worker([5, 17, 27], _TREE_KV, [5, 17, 27], _TREE_LENS),
}  # fmt: skip
"""The table. Upstream before PR #17381 left num_contexts 0 behind a linear loop or tree; here it is as before."""

DRAFT_POSITIONS: Final = [
    [0, 1, 2, 3, 4, 10, 11, 12, 13, 20, 21, 22, 23],
    [5, 13, 22],
    [6, 14, 23],
]
"""Positions that the draft calls of a linear loop are given."""

GATHERED: Final = [[4, 7, 10], [0, 1, 2], [0, 1, 2]]
"""Rows of each draft call of a linear loop that get logits."""

EAGLE_FAILURE_IN_DRAFT_1: Final = Example(
    seq_lens=[5, 4, 4], kv=[6, 14, 23], num_contexts=1, num_contexts_upstream=0
)  # fmt: skip
"""Where nothing is left saved, and the next forward can prepare."""

EAGLE_WITHOUT_PREPARING: Final = Example(accepted=[3, 2], kv=[[16, 25], [18, 26], [20, 27]])
"""Three forwards of two generations, K = 3, on one preparation."""

MTP_WITHOUT_PREPARING: Final = [5, 12, 20]
"""KV lengths after a second forward of the first table's batch."""

DFLASH: Final = [
    # prompts, past, accepted (generations), K, kv0, in the draft call, after it, first positions of the queries
    ([5], [10, 20], [3, 2], 3, [5, 14, 24], [5, 15, 25], [5, 17, 26], [13, 22]),
    ([], [4, 10, 20], [1, 4, 2], 3, [8, 14, 24], [9, 15, 25], [9, 18, 26], [5, 14, 22]),
    ([5], [10, 20], [1, 2], 1, [5, 12, 22], [5, 13, 23], [5, 13, 24], [11, 22]),
    ([5], [10, 20], [1, 3], 2, [5, 13, 23], [5, 14, 24], [5, 14, 26], [11, 23]),
    ([5], [10, 20], [1, 5], 4, [5, 15, 25], [5, 16, 26], [5, 16, 30], [11, 25]),
]
"""DFlash with other K and batches; contexts of the drafter hold past + accepted columns afterwards."""

MTP: Final = [
    # prompts, past, accepted (generations), K, Kmax, kv0, what all layers see, after, positions of the generations
    ([5], [10, 20], [3, 2], 3, 3, [5, 14, 24], [5, 13, 22], [5, 3, 3], [10, 11, 12, 19, 20, 21]),
    ([], [10, 20, 7], [3, 2, 1], 3, 3, [14, 24, 11], [13, 22, 8], [3, 3, 3], [10, 11, 12, 19, 20, 21, 5, 6, 7]),
    ([5], [10, 20], [3, 1], 2, 2, [5, 13, 23], [5, 13, 21], [5, 2, 2], [11, 12, 19, 20]),
    ([5], [10, 20], [2, 1], 1, 1, [5, 12, 22], [5, 12, 21], [5, 1, 1], [11, 20]),
    ([5], [10, 20], [5, 2], 4, 4, [5, 15, 25], [5, 15, 22], [5, 4, 4], [11, 12, 13, 14, 18, 19, 20, 21]),
    ([3, 2], [], [], 3, 3, [3, 2], [3, 2], [3, 2], []),
    ([], [1, 0], [1, 1], 3, 3, [5, 4], [3, 3], [3, 3], [-1, 0, 1, -2, -1, 0]),
    ([], [2, 1], [1, 2], 3, 3, [6, 5], [3, 3], [3, 3], [0, 1, 2, 0, 1, 2]),
]
"""Vanilla MTP: KV lengths and lengths in all layers, the KV lengths also after them; the last two at the clamp."""

CONTEXTS_ONLY: Final = Example(
    prompts=[3, 2], draft_len=3, kv0=[3, 2], gathered=[2, 4], next_draft_tokens=(2, 3), eagle_after=[6, 5]
)  # fmt: skip
"""No generations: Eagle drafts for contexts, PARD and DFlash draft nothing and leave the KV lengths alone."""

NO_DRAFTS: Final = Example(
    new_tokens=(3, 1), new_tokens_lens=(3,), next_draft_tokens=(3, 0), next_new_tokens=(3, 1)
)  # fmt: skip
"""K = 0: shapes of what a worker returns for three rows."""
