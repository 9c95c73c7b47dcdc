"""For every invariant, falsified traces that it must notice. One that cannot fail is a fault of this suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from scenarios import Substep, Trace
from tests.invariants import enhancer_mutations, rank_mutations, sparse_mutations
from tests.invariants.cases import (
    DFLASH,
    DRAFT_TARGET,
    EAGLE,
    EAGLE_TREE,
    MTP,
    MTP_TREE,
    PARD,
    SA,
    failing,
    forced,
    served,
    started_up,
)
from tests.invariants.mutation import Mutation, at, bump, drop, put, set_to, swap, whole
from tests.invariants.synthetic import edit, edit_step


def _fails(trace: Trace) -> Trace:
    """Step 1 fails though nothing was planned."""
    failed = replace(trace.steps[1].substeps[0], name="failed", fields={"exception": "AssertionError", "message": ""})
    return edit_step(trace, 1, outcome="tolerated", substeps=(*trace.steps[1].substeps[:3], failed))


def _without_draft(trace: Trace) -> Trace:
    """Step 1 makes one draft call fewer."""
    return edit_step(trace, 1, substeps=tuple(s for s in trace.steps[1].substeps if s.name != "draft[2]"))


def _unreadable(trace: Trace) -> Trace:
    """What step 1 shows of its draft calls and of its end could not be read."""
    why = {"exception": "TypeError", "message": "drafting: no tensor"}
    lost = ("saved", "restored")
    return edit_step(
        trace,
        1,
        substeps=tuple(
            Substep("unreadable", s.run, s.phase, why) if s.name in lost else s for s in trace.steps[1].substeps
        ),
    )


def _lengths_of_prepared(by: int) -> Callable[[Trace], Trace]:
    """Every length that step 1 prepares is too long, and all of them agree."""

    def falsify(trace: Trace) -> Trace:
        for field in ("kv_lens_cuda", "kv_lens_runtime", "kv_lens"):
            trace = edit(trace, 1, "prepared", field, bump(1, by=by))
        return edit(trace, 1, "prepared", "host_total_kv_lens", bump(1, by=by))

    return falsify


MIXED, PARALLEL = served(EAGLE), served(PARD)
STARTED, TARGET_STARTED = started_up(EAGLE), started_up(DRAFT_TARGET)
FAILING, PARALLEL_FAILING = failing(EAGLE), failing(PARD)
LAYERED, LAYERED_STARTED, LAYERED_FAILING = served(MTP), started_up(MTP), failing(MTP)
TEXTUAL, TEXTUAL_FAILING = served(SA), failing(SA)
OWN, OWN_STARTED, OWN_FAILING = served(DFLASH), started_up(DFLASH), failing(DFLASH)
TREE, TREE_STARTED, TREE_FAILING = served(EAGLE_TREE), started_up(EAGLE_TREE), failing(EAGLE_TREE)
MTP_TREE_SERVED, MTP_TREE_FAILING = served(MTP_TREE), failing(MTP_TREE)
FORCED, COUNTER = forced(EAGLE), "force_accept_counter"
MASK, OFFSETS = "spec_decoding_packed_mask", "spec_decoding_position_offsets"
LENGTHS = "spec_decoding_generation_lengths"
GRAPH_RUN = 2
"""The run of the capture itself: two warm-up runs come before."""

_LIFECYCLE = [
    Mutation(
        "forward-not-overridden",
        MIXED,
        lambda trace: replace(trace, classes={"forward_defined_in": ["PARDWorker", "SpecWorkerBase"]}),
        0,
    ),
    Mutation("forward-not-overridden", MIXED, lambda trace: replace(trace, classes={"forward_defined_in": []}), 0),
    Mutation("steps-complete", MIXED, _fails, 1, "failed", "exception"),
    whole("steps-complete", MIXED, 1, outcome="fatal"),
    # A step after which a request would have ended.
    whole("steps-complete", MIXED, 4, outcome="tolerated"),
    Mutation("state-can-be-read", MIXED, _unreadable, 1, "unreadable", "exception"),
    Mutation("run-complete", MIXED, lambda trace: replace(trace, steps=trace.steps[:4]), 3),
    whole("fault-surfaces", FAILING, 0, fired=0),
    whole("fault-surfaces", FAILING, 2, fired=2),
    whole("fault-surfaces", FAILING, 0, outcome="fatal"),
    Mutation("fault-surfaces", FAILING, lambda t: edit_step(t, 2, injected=False), 2, "failed", "exception"),
    set_to("saved-state-empty", FAILING, 0, "failed", "_saved_tensors", ["_seq_lens"]),
    set_to("saved-state-empty", MIXED, 1, "restored", "_saved_tensors", ["_seq_lens", "_seq_lens_cuda"]),
    set_to("saved-state-empty", MIXED, 2, "prepared", "_saved_tensors", ["_seq_lens_cuda"]),
    set_to("graph-fits-the-batch", STARTED, 3, "updated", "graph_key", [1, 3, 8]),
    set_to("graph-fits-the-batch", MIXED, 1, "updated", "graph_key", [1, 3, 4]),
    set_to("forward-closes-what-it-opens", MIXED, 1, "restored", "left_open", ["_seq_lens"]),
    set_to("forward-closes-what-it-opens", STARTED, 0, "restored", "left_open", ["_kv_rewind_pending"]),
    set_to("saved-fields", MIXED, 1, "verified", "_saved_tensors", ["_seq_lens"]),
    set_to("saved-fields", MIXED, 1, "saved", "_saved_tensors", ["_seq_lens"]),
    set_to("saved-fields", MIXED, 1, "draft[2]", "_saved_tensors", []),
    set_to("saved-fields", TARGET_STARTED, 1, "saved", "_saved_tensors", ["_seq_lens", "_seq_lens_cuda"]),
    at("restored-identity", MIXED, 1, "restored", "identity", put("_seq_lens", "clone of _seq_lens")),
    at("restored-identity", FAILING, 0, "failed", "identity", put("_seq_lens_cuda", "clone of _seq_lens_cuda")),
    at("restored-identity", STARTED, 1, "entered", "identity", put("kv_lens_cuda", "another"), GRAPH_RUN),
    set_to("restored-layout", MIXED, 1, "restored", "num_contexts", 0),
    set_to("restored-layout", MIXED, 1, "restored", "_seq_lens", [1, 1]),
    set_to("restored-layout", FAILING, 0, "failed", "host_request_types", [1, 1]),
    set_to("restored-layout", FAILING, 2, "failed", "num_tokens", 2),
    Mutation("substeps-in-order", MIXED, _without_draft, 1),
    at("graph-buffers-stable", STARTED, 3, "entered", "identity", put("_seq_lens_cuda", "step3.cuda")),
    at(
        "graph-copies-share-no-state",
        STARTED,
        1,
        "entered",
        "shared_with_eager",
        lambda names: [*names, "_saved_tensors"],
    ),
    set_to("graph-copies-share-no-state", STARTED, 3, "entered", "shared_with_eager", ["device"]),
    at("graph-buffers-apart", STARTED, 1, "prepared", "identity", put("kv_lens_cuda", "kv")),
    at("graph-buffers-apart", STARTED, 4, "prepared", "identity", put("kv_lens_cuda", "graphs.kv")),
]

_COUNTERS = [
    set_to("derived-counters-consistent", MIXED, 1, "draft[1]", "num_ctx_tokens", 4),
    set_to("derived-counters-consistent", MIXED, 1, "restored", "num_contexts", 5),
    set_to("derived-counters-consistent", MIXED, 1, "prepared", "num_generations", 2),
    set_to("derived-counters-consistent", FAILING, 0, "failed", "num_tokens", 2),
    # The counters of a block that is wider than the rows of the target, which they stay with.
    set_to("derived-counters-consistent", OWN, 4, "draft[0]", "num_tokens", 8),
    set_to("request-types-match-layout", MIXED, 1, "draft[1]", "host_request_types", [0, 1]),
    at("request-types-match-layout", MIXED, 1, "verified", "host_request_types", drop),
    set_to("request-types-match-layout", MIXED, 1, "prepared", "host_request_types", [1, 0]),
    set_to("host-equals-device", MIXED, 1, "draft[1]", "_seq_lens_cuda", [4, 4]),
    set_to("host-equals-device", MIXED, 1, "prepared", "prompt_lens_cuda", [5, 4]),
]

_KV_LENS = [
    at("kv-lens-balanced", MIXED, 1, "verified", "kv_lens_cuda", bump(0)),
    at("kv-lens-balanced", MIXED, 1, "draft[1]", "kv_lens_cuda", bump(1, by=3)),
    at("kv-lens-balanced", MIXED, 3, "restored", "kv_lens_cuda", bump(0)),
    at("kv-lens-balanced", PARALLEL, 2, "draft[0]", "kv_lens_cuda", bump(1, by=-1)),
    at("kv-lens-balanced", PARALLEL, 2, "restored", "kv_lens_cuda", bump(0)),
    at("kv-lens-balanced", OWN, 4, "draft[0]", "kv_lens_cuda", bump(0, by=-1)),
    at("kv-lens-balanced", OWN, 4, "restored", "kv_lens_cuda", bump(1)),
    at("kv-lens-balanced", OWN, 3, "restored", "kv_lens_cuda", bump(0)),
    at("kv-lens-balanced", OWN_STARTED, 1, "restored", "kv_lens_cuda", bump(0)),
    at("kv-lens-balanced", TARGET_STARTED, 1, "restored", "kv_lens_cuda", bump(0)),
    at("kv-lens-balanced", STARTED, 3, "restored", "kv_lens_cuda", bump(1)),
    at("kv-lens-balanced", FAILING, 0, "failed", "kv_lens_cuda", bump(1, by=9)),
    # The increment of a parallel drafter left alone: neither undone nor made up to the accepted count.
    set_to("kv-lens-balanced", PARALLEL_FAILING, 0, "failed", "kv_lens_cuda", [9, 9]),
    # Layers that are left the lengths of the target, and lengths that are counted back again after them.
    set_to("kv-lens-balanced", LAYERED, 3, "draft[0]", "kv_lens_cuda", [17, 13]),
    at("kv-lens-balanced", LAYERED, 2, "draft[2]", "kv_lens_cuda", bump(0)),
    at("kv-lens-balanced", LAYERED, 3, "restored", "kv_lens_cuda", bump(1)),
    at("kv-lens-balanced", LAYERED_STARTED, 1, "restored", "kv_lens_cuda", bump(1, by=-3)),
    set_to("kv-lens-balanced", LAYERED_FAILING, 0, "failed", "kv_lens_cuda", [9, 4]),
    at("kv-lens-balanced", TEXTUAL, 2, "restored", "kv_lens_cuda", bump(0)),
    at("kv-lens-balanced", TEXTUAL_FAILING, 0, "failed", "kv_lens_cuda", bump(1)),
    set_to("kv-lens-balanced", OWN_FAILING, 0, "failed", "kv_lens_cuda", [9, 7]),
    at("warmup-fixed-point", STARTED, 1, "entered", "kv_lens_cuda", bump(0, by=3), 1),
    set_to("warmup-fixed-point", STARTED, 1, "entered", "_seq_lens", [1, 1], GRAPH_RUN),
    at("host-kv-lens-consistent", MIXED, 1, "prepared", "kv_lens", bump(0, by=-2)),
    at("host-kv-lens-consistent", MIXED, 1, "prepared", "kv_lens_runtime", bump(0, by=2)),
    set_to("host-kv-lens-consistent", MIXED, 1, "prepared", "host_total_kv_lens", [16, 0]),
    at("host-kv-lens-consistent", MIXED, 1, "prepared", "kv_lens", bump(1, by=1000)),
    Mutation("host-kv-lens-consistent", MIXED, _lengths_of_prepared(200), 1, "prepared", "kv_lens"),
    at("draft-position-is-kv-minus-one", MIXED, 1, "draft[2]", "position_ids", bump(0)),
    at("draft-position-is-kv-minus-one", MIXED, 1, "draft[1]", "position_ids", lambda ids: ids[:1]),
    at("draft-position-is-kv-minus-one", PARALLEL, 2, "draft[0]", "position_ids", bump(3, by=-1)),
    at("draft-position-is-kv-minus-one", MIXED, 2, "prepared", "position_ids", bump(5)),
    at("draft-position-is-kv-minus-one", OWN, 2, "prepared", "position_ids", bump(5)),
    at("kv-lens-within-pages", MIXED, 1, "draft[2]", "kv_lens_cuda", bump(0, by=40)),
    at("kv-lens-within-pages", STARTED, 1, "entered", "kv_lens_cuda", lambda kv: kv[:1], 1),
    at("kv-lens-equals-reference", MIXED, 2, "draft[2]", "kv_lens_cuda", bump(1)),
    at("kv-lens-equals-reference", MIXED, 2, "prepared", "kv_lens", bump(1)),
    at("kv-lens-equals-reference", OWN, 2, "restored", "ctx_len", bump(1)),
]

_ROWS = [
    set_to("layout-equals-reference", MIXED, 1, "draft[1]", "num_contexts", 1),
    set_to("layout-equals-reference", MIXED, 5, "prepared", "runtime_draft_len", 3),
    set_to("speculation-flag-equals-reference", MIXED, 1, "draft[1]", "use_spec_decoding", True),
    set_to("speculation-flag-equals-reference", MIXED, 1, "restored", "use_spec_decoding", False),
    at("gather-ids-match-layout", MIXED, 1, "prepared", "gather_ids", bump(0, by=-1)),
    at("gather-ids-match-layout", MIXED, 1, "prepared", "gather_ids", lambda ids: ids[:1]),
    at("rows-belong-to-requests", MIXED, 2, "prepared", "request_ids", swap),
    at("rows-belong-to-requests", MIXED, 0, "prepared", "input_ids", swap),
    at("rows-belong-to-requests", MIXED, 2, "prepared", "input_ids", bump(4)),
    at("rows-belong-to-requests", STARTED, 0, "prepared", "input_ids", bump(0)),
    at("drafts-carried-over", MIXED, 2, "prepared", "draft_tokens", lambda ids: ids[3:] + ids[:3]),
    at("drafts-carried-over", PARALLEL, 4, "prepared", "draft_tokens", bump(0)),
    at("inputs-equal-reference", MIXED, 0, "draft[0]", "input_ids", bump(7)),
    at("inputs-equal-reference", MIXED, 1, "draft[1]", "hidden_states", swap),
    at("inputs-equal-reference", MIXED, 1, "prepared", "gather_ids", swap),
    at("inputs-equal-reference", OWN, 2, "draft[0]", "num_ctx_per_req", bump(0)),
]

_DRAFT_CONTEXT = [
    # A context that a step without drafts left a hole in, one that was dropped, one counted twice or in another order.
    at("ctx-len-counts-committed", OWN, 4, "entered", "ctx_len", bump(0, by=-1)),
    set_to("ctx-len-counts-committed", OWN, 2, "entered", "ctx_len", [0, 8]),
    at("ctx-len-counts-committed", OWN, 3, "restored", "ctx_len", bump(1, by=-1)),
    at("ctx-len-counts-committed", OWN, 2, "restored", "ctx_len", swap),
    at("ctx-len-counts-committed", OWN_STARTED, 3, "restored", "ctx_len", bump(0, by=3)),
    at("ctx-len-rolled-back", OWN_FAILING, 0, "failed", "ctx_len", bump(0, by=3)),
    at("ctx-len-rolled-back", OWN_FAILING, 2, "failed", "ctx_len", bump(0)),
    at("ctx-len-rolled-back", OWN_STARTED, 1, "restored", "ctx_len", bump(1), 1),
    at("draft-block-follows-context", OWN, 2, "draft[0]", "num_ctx_per_req", bump(1, by=-1)),
    at("draft-block-follows-context", OWN, 2, "draft[0]", "num_ctx_per_req", swap),
    at("draft-block-follows-context", OWN, 2, "draft[0]", "position_ids", bump(4)),
    at("draft-block-follows-context", OWN, 1, "draft[0]", "position_ids", lambda ids: [x - 1 for x in ids]),
    at("draft-context-equals-cache", OWN, 3, "updated", "draft_context", put(0, [])),
    at("draft-context-equals-cache", OWN, 3, "updated", "draft_context", lambda c: {0: c[1], 1: c[0]}),
    set_to("draft-context-equals-cache", OWN, 3, "updated", "draft_context", {}),
    at("draft-context-equals-cache", OWN, 6, "updated", "draft_context", lambda c: {**c, 2: [[1, c[2][0][1]]]}),
]

_TREES = [
    # Step 2 verifies no tree for request 1 and one of depth 3 for request 0.
    set_to("tree-widths-share-one-stride", TREE, 2, "draft[1]", LENGTHS, [4, 4]),
    at("tree-widths-share-one-stride", TREE, 2, "draft[0]", MASK, lambda masks: [mask[:3] for mask in masks]),
    at("tree-widths-share-one-stride", TREE, 2, "prepared", OFFSETS, lambda rows: [*rows[:1], rows[1][:4]]),
    at("tree-widths-share-one-stride", TREE, 2, "draft[2]", LENGTHS, lambda lengths: lengths[:1]),
    set_to("tree-widths-share-one-stride", TREE_FAILING, 0, "failed", LENGTHS, [4]),
    at("chain-masks-are-causal", MIXED, 1, "restored", MASK, lambda masks: [[[0], [1], *masks[0][2:]]]),
    at("chain-masks-are-causal", PARALLEL, 2, "entered", OFFSETS, lambda rows: [rows[0][::-1], rows[1]]),
    at("chain-masks-are-causal", STARTED, 3, "prepared", LENGTHS, bump(1)),
    at("tree-masks-put-back", TREE, 2, "restored", MASK, lambda masks: [masks[0]] * 2),
    at("tree-masks-put-back", TREE, 2, "restored", OFFSETS, swap),
    set_to("tree-masks-put-back", TREE_STARTED, 1, "entered", LENGTHS, [4, 4], GRAPH_RUN),
    set_to("tree-masks-put-back", TREE_FAILING, 2, "failed", LENGTHS, [2]),
    # A node that sees its sibling; one that does not see the root; an offset that counts no ancestors.
    at("tree-mask-is-ancestry", TREE, 2, "prepared", MASK, lambda masks: [masks[0], put(2, [0, 1, 2])(masks[1])]),
    at("tree-mask-is-ancestry", TREE, 2, "prepared", MASK, lambda masks: [masks[0], put(4, [1, 4])(masks[1])]),
    at("tree-mask-is-ancestry", TREE, 2, "entered", MASK, lambda masks: [masks[0], put(4, [])(masks[1])]),
    at("tree-mask-is-ancestry", TREE, 2, "draft[2]", MASK, lambda masks: [put(2, [0, 1, 2])(masks[0]), masks[1]]),
    at("tree-mask-is-ancestry", TREE, 2, "draft[2]", OFFSETS, lambda rows: [put(2, 2)(rows[0]), rows[1]]),
    at("tree-mask-is-ancestry", TREE, 2, "draft[0]", MASK, lambda masks: [put(1, [0, 1, 2])(masks[0]), masks[1]]),
    at("verified-tree-is-the-drafted-one", TREE, 1, "prepared", MASK, lambda masks: [put(2, [0, 1, 2])(masks[0])]),
    at("verified-tree-is-the-drafted-one", TREE, 2, "prepared", MASK, swap),
    at("verified-tree-is-the-drafted-one", TREE, 3, "prepared", MASK, swap),
    at("verified-tree-is-the-drafted-one", TREE_STARTED, 1, "prepared", MASK, lambda masks: [
        put(2, [0, 1, 2])(masks[0]), masks[1]
    ]),
    at("draft-tree-well-formed", TREE, 2, "updated", "draft_tree", put(0, [-1, -1, 0, 1, 2, 2])),
    at("draft-tree-well-formed", TREE, 2, "updated", "draft_tree", put(0, [-1] * 7)),
    at("draft-tree-well-formed", TREE, 2, "updated", "draft_tree", put(0, [-1, 2, 0, 1, 2, 2, 3])),
    at("draft-tree-well-formed", TREE, 2, "updated", "draft_tree", put(1, [])),
    at("draft-tree-well-formed", TREE, 1, "updated", "draft_tree", put(1, [-1, -1, 0, 1, 2, 2, 3])),
    at("chain-masks-are-causal", TREE, 2, "draft[0]", MASK, lambda masks: [masks[0], put(2, [0, 2])(masks[1])]),
    at("layers-grow-the-tree", TREE, 2, "draft[1]", MASK, lambda masks: [masks[0], put(1, [0, 1])(masks[1])]),
    at("layers-grow-the-tree", TREE, 2, "draft[2]", MASK, lambda masks: [masks[0], put(3, [3])(masks[1])]),
    at("layers-grow-the-tree", TREE, 2, "draft[2]", MASK, lambda masks: [masks[0], put(1, [0, 1])(masks[1])]),
    at("trees-equal-reference", TREE, 2, "draft[2]", MASK, swap),
    at("trees-equal-reference", TREE, 2, "updated", "draft_tree", lambda trees: {0: trees[1], 1: trees[0]}),
    at("kv-lens-balanced", TREE, 2, "draft[0]", "kv_lens_cuda", bump(0, by=4)),
    # Upstream's MTP-Eagle gives a generation one layer less, so that the nodes overwrite accepted tokens.
    at("kv-lens-balanced", MTP_TREE_SERVED, 1, "draft[1]", "kv_lens_cuda", bump(1, by=-2)),
    Mutation(
        "draft-position-is-kv-minus-one",
        MTP_TREE_SERVED,
        lambda trace: edit(trace, 1, "draft[2]", "kv_lens_cuda", bump(1, by=-2)),
        1,
        "draft[2]",
        "position_ids",
    ),
    at("draft-position-is-kv-minus-one", TREE, 2, "prepared", "position_ids", bump(12)),
    at("kv-lens-balanced", TREE, 2, "restored", "kv_lens_cuda", bump(0)),
    at("kv-lens-balanced", TREE, 2, "restored", "kv_lens_cuda", lambda kv: [length - 2 for length in kv]),
    at("kv-lens-balanced", TREE, 2, "restored", "kv_lens_cuda", bump(1, by=-2)),
    at("kv-lens-balanced", TREE_FAILING, 0, "failed", "kv_lens_cuda", bump(1)),
    set_to("kv-lens-equals-reference", MTP_TREE_FAILING, 0, "failed", "kv_lens_cuda", [9, 6]),
    set_to("kv-lens-equals-reference", TREE, 1, "restored", "kv_lens_cuda", [7, 13]),
    at("drafts-carried-over", TREE, 3, "prepared", "draft_tokens", bump(6)),
    set_to("speculation-flag-equals-reference", TREE, 0, "draft[0]", "use_spec_decoding", True),
    at("batch-equals-requests-alone", TREE, 2, "updated", "draft_tree", lambda trees: {0: trees[1], 1: trees[0]}),
]  # fmt: skip

_ACCEPTANCE = [
    # The first draft of another branch; one token less than the drafts that follow each other; one more.
    at(
        "accepted-drafts-lie-on-a-path",
        TREE,
        2,
        "verified",
        "accepted_tokens",
        lambda rows: [rows[0], [3, *rows[1][1:]]],
    ),
    at("accepted-drafts-lie-on-a-path", TREE, 2, "verified", "accepted_tokens", lambda rows: [rows[0], rows[1][:3]]),
    at("accepted-drafts-lie-on-a-path", MIXED, 2, "verified", "accepted_tokens", lambda rows: [[*rows[0], 3], rows[1]]),
    at("accepted-drafts-lie-on-a-path", PARALLEL, 2, "verified", "accepted_tokens", lambda r: [r[0], r[1][1:]]),
    set_to("acceptance-in-range", MIXED, 2, "verified", "num_accepted_tokens", [3, 5]),
    set_to("acceptance-in-range", MIXED, 1, "restored", "new_tokens_lens", [2, 4]),
    set_to("acceptance-in-range", MIXED, 1, "restored", "new_tokens_lens", [1, 0]),
    set_to("acceptance-in-range", MIXED, 1, "restored", "new_tokens_lens", [1]),
    at("acceptance-in-range", MIXED, 2, "updated", "py_rewind_len", put(1, 3)),
    Mutation(
        "acceptance-in-range",
        MIXED,
        lambda t: edit(
            edit(t, 2, "updated", "py_rewind_len", put(1, -1)),
            2,
            "updated",
            "py_num_accepted_draft_tokens",
            put(1, 4),
        ),
        2,
        "updated",
        "py_rewind_len",
    ),
    set_to("acceptance-follows-agreement", MIXED, 2, "verified", "num_accepted_tokens", [1, 1]),
    at("acceptance-follows-agreement", MIXED, 2, "updated", "py_num_accepted_draft_tokens", put(0, 2)),
    set_to("acceptance-follows-agreement", STARTED, 3, "restored", "new_tokens_lens", [4, 1]),
    set_to("oracle-drafter-accepts-all", MIXED, 2, "verified", "num_accepted_tokens", [3, 3]),
    set_to("oracle-drafter-accepts-all", STARTED, 3, "restored", "new_tokens_lens", [3, 2]),
    at("acceptance-equals-reference", MIXED, 2, "verified", "accepted_tokens", swap),
    at("acceptance-equals-reference", MIXED, 2, "restored", "new_tokens", swap),
    at("drafts-equal-reference", MIXED, 2, "restored", "next_draft_tokens", swap),
    at("new-tokens-plumbed", MIXED, 2, "restored", "next_new_tokens", swap),
    at("new-tokens-plumbed", MIXED, 2, "restored", "new_tokens", swap),
    at("new-tokens-plumbed", MIXED, 2, "restored", "new_tokens_lens", bump(0)),
    at("new-tokens-plumbed", STARTED, 3, "restored", "next_new_tokens", swap),
]

_FORCED = [
    # A pool that is made by the first forward that needs it; a graph that draws the same numbers again and again;
    # numbers that a warm-up draws; a counter that starts anew with serving; one that a failure takes back.
    set_to("forced-counter-moves-once", FORCED, 0, "entered", COUNTER, None),
    at("forced-counter-moves-once", FORCED, 3, "restored", COUNTER, lambda n: n - 1),
    at("forced-counter-moves-once", FORCED, 1, "restored", COUNTER, lambda n: n + 1, 1),
    set_to("forced-counter-moves-once", FORCED, 2, "entered", COUNTER, 0),
    at("forced-counter-moves-once", FORCED, 5, "failed", COUNTER, lambda n: n - 1),
    set_to("acceptance-follows-agreement", FORCED, 1, "verified", "num_accepted_tokens", [2, 2]),
    at("accepted-drafts-lie-on-a-path", FORCED, 4, "verified", "accepted_tokens", lambda r: [r[0], r[1][1:] + r[0]]),
]

_SPEC_METADATA = [
    set_to("spec-counts-equal-reference", MIXED, 2, "prepared", "num_capture_tokens", 2),
    at("spec-counts-equal-reference", MIXED, 2, "prepared", "spec_num_tokens", lambda n: n - 6),
    # Slots of a request that has ended, of one whose batch has failed, of two at once, and another one each step.
    at("slots-belong-to-requests", MIXED, 5, "updated", "spec_slots", put(0, 9)),
    set_to("slots-belong-to-requests", FAILING, 2, "failed", "spec_slots", {0: 0}),
    at("slots-belong-to-requests", MIXED, 0, "updated", "spec_slots", put(1, 0)),
    at("slots-belong-to-requests", MIXED, 3, "updated", "spec_slots", lambda slots: {0: slots[1], 1: slots[0]}),
    at("slots-belong-to-requests", MIXED, 2, "prepared", "slot_ids", swap),
    at("slots-belong-to-requests", STARTED, 1, "prepared", "slot_ids", lambda ids: ids[:1] * 2),
]

_KV_CACHE = [
    at("kv-ledger-balanced", MIXED, 2, "updated", "kv_tokens", bump(0)),
    set_to("managers-forget-the-ended", MIXED, 5, "updated", "held_for_nobody", ["KVCacheManager._num_tokens"]),
    set_to("managers-forget-the-ended", FAILING, 0, "failed", "held_for_nobody", ["KvCacheConnector._block_ids"]),
    at("kv-ledger-balanced", MIXED, 2, "updated", "free_blocks", lambda n: n - 1),
    at("kv-ledger-balanced", MIXED, 2, "updated", "kv_blocks", put(0, [0, 1])),
    at("kv-ledger-balanced", MIXED, 2, "updated", "kv_blocks", lambda b: {r: [7] * len(p) for r, p in b.items()}),
    at("kv-ledger-balanced", MIXED, 5, "updated", "free_blocks", lambda n: n - 4),
    at("kv-ledger-balanced", FAILING, 0, "failed", "free_blocks", lambda n: n - 4),
    set_to("kv-ledger-balanced", FAILING, 2, "failed", "kv_tokens", {0: 11}),
    at("tables-name-owned-pages", MIXED, 2, "prepared", "kv_cache_block_offsets", swap),
    at("tables-name-owned-pages", MIXED, 2, "prepared", "kv_cache_block_offsets", lambda t: [t[0][:-1], t[1]]),
    at("tables-name-owned-pages", MIXED, 0, "prepared", "kv_cache_block_offsets", lambda t: [t[1], t[1]]),
    at("tables-name-owned-pages", MIXED, 0, "prepared", "kv_cache_block_offsets", lambda t: [t[0][::-1], t[1]]),
    at("tables-name-owned-pages", MIXED, 0, "prepared", "kv_cache_block_offsets", lambda t: [[*t[0], 39], t[1]]),
    at("tables-name-owned-pages", STARTED, 0, "prepared", "kv_cache_block_offsets", put(1, [0, 5, 6])),
    # A request in the middle of its life whose pages were moved, in a step that gets no further.
    at("tables-name-owned-pages", FAILING, 2, "prepared", "kv_cache_block_offsets", lambda t: [t[0], t[1][::-1]]),
    # The accepted path of a tree left where its nodes lay, and tokens at positions of others.
    at("target-cache-holds-the-text", TREE, 2, "updated", "target_kv", lambda kv: {**kv, 0: [*kv[0][:-1], kv[0][-2]]}),
    at("target-cache-holds-the-text", MIXED, 2, "updated", "target_kv", lambda kv: {0: kv[1], 1: kv[0]}),
    at("kv-ledger-equals-reference", MIXED, 2, "updated", "kv_tokens", bump(1)),
    at("kv-ledger-equals-reference", FAILING, 0, "failed", "free_blocks", lambda n: n - 1),
    at("kv-content-equals-reference", MIXED, 2, "updated", "draft_kv", put(0, [0])),
    at("kv-content-equals-reference", MIXED, 2, "updated", "target_kv", lambda kv: {0: kv[1], 1: kv[0]}),
    at("kv-content-equals-reference", OWN, 2, "updated", "draft_context", put(0, [])),
    # A layer without a cache of its own.
    at("kv-content-equals-reference", LAYERED, 1, "updated", "draft_layers_kv", lambda kv: {**kv, 0: kv[0][:2]}),
]

_HISTORY = [
    # One token too many or too few is shifted in, the hidden states stay behind, rows of two requests are exchanged.
    at("pools-match-history", LAYERED, 2, "updated", "mtp_past_tokens", lambda p: {**p, 1: [*p[1][1:], 7]}),
    at("pools-match-history", LAYERED, 2, "updated", "mtp_past_hidden_states", lambda p: {**p, 0: [0, *p[0][:-1]]}),
    at("pools-match-history", LAYERED, 5, "updated", "mtp_past_tokens", lambda p: {1: p[2], 2: p[1]}),
    at("layers-look-ahead", LAYERED, 2, "updated", "draft_layers_kv", lambda kv: {**kv, 1: [kv[1][0]] * 3}),
    at("layers-look-ahead", LAYERED, 3, "updated", "draft_layers_kv", lambda kv: {0: kv[1], 1: kv[0]}),
    at("layers-look-ahead", LAYERED, 0, "updated", "draft_layers_kv", lambda kv: {0: [[*s[:-1], 9] for s in kv[0]]}),
    at("automaton-holds-text", TEXTUAL, 3, "updated", "automaton", lambda texts: {**texts, 0: texts[0][:-1]}),
    # A prompt that is known as far as its first chunk, and a token sampled in its middle.
    at("automaton-holds-text", TEXTUAL, 0, "updated", "automaton", lambda texts: {**texts, 1: texts[1][:3]}),
    at("automaton-holds-text", TEXTUAL, 0, "updated", "automaton", lambda texts: {**texts, 1: [*texts[1], 5]}),
    at("automaton-holds-text", TEXTUAL, 5, "updated", "automaton", lambda texts: {**texts, 0: [1]}),
    at("history-equals-reference", LAYERED, 2, "updated", "mtp_past_hidden_states", lambda p: {0: p[1], 1: p[0]}),
    at("history-equals-reference", TEXTUAL, 2, "updated", "automaton", lambda texts: {0: texts[0]}),
]

_OUTPUT = [
    at("output-lossless", MIXED, 2, "updated", "emitted", lambda e: {**e, 1: [*e[1][:-1], 3]}),
    at("output-lossless", STARTED, 3, "updated", "emitted", lambda e: {0: e[1], 1: e[0]}),
    at("emitted-follows-acceptance", MIXED, 2, "updated", "emitted", lambda e: {**e, 1: e[1][:-1]}),
    set_to("emitted-follows-acceptance", MIXED, 0, "updated", "emitted", {0: [5], 1: [7]}),
]

_RELATIONS = [
    set_to("next-step-equals-never-failed-twin", FAILING, 1, "prepared", "use_spec_decoding", False),
    at("next-step-equals-never-failed-twin", FAILING, 3, "updated", "free_blocks", lambda n: n - 1),
    whole("next-step-equals-never-failed-twin", FAILING, 3, outcome="fatal"),
    at("replay-equals-eager", STARTED, 3, "restored", "kv_lens_cuda", bump(0)),
    at("replay-equals-eager", STARTED, 3, "updated", "target_kv", put(0, [0])),
    at("startup-leaves-no-trace", STARTED, 1, "entered", "kv_lens_cuda", bump(0)),
    set_to("startup-leaves-no-trace", STARTED, 2, "prepared", "all_rank_num_tokens", [13]),
    at("captured-values-do-not-matter", STARTED, 3, "restored", "kv_lens_cuda", bump(0)),
    at("captured-values-do-not-matter", STARTED, 2, "prepared", "gather_ids", bump(0)),
    at("warm-up-forward-is-a-fixed-point", STARTED, 1, "entered", "kv_lens_cuda", bump(0), GRAPH_RUN),
    at("warm-up-forward-is-a-fixed-point", STARTED, 3, "updated", "target_kv", put(0, [0])),
    at("batch-equals-requests-alone", MIXED, 2, "updated", "emitted", lambda e: {**e, 1: e[1][:-1]}),
    at("batch-equals-requests-alone", MIXED, 1, "updated", "draft_kv", put(0, [0])),
    at("batch-equals-requests-alone", LAYERED, 3, "updated", "mtp_past_tokens", lambda p: {0: p[1], 1: p[0]}),
    at("batch-equals-requests-alone", TEXTUAL, 3, "updated", "automaton", put(0, [0])),
    at("row-order-does-not-matter", MIXED, 2, "updated", "py_rewind_len", put(0, 1)),
    at("chunked-equals-one-shot", MIXED, 1, "updated", "draft_kv", put(1, [0])),
    at("chunked-equals-one-shot", TEXTUAL, 1, "updated", "automaton", put(1, [0])),
    at("chunked-equals-one-shot", MIXED, 6, "updated", "emitted", put(1, [])),
    at("draft-lengths-do-not-matter", MIXED, 2, "updated", "emitted", lambda e: {0: e[1], 1: e[0]}),
    at("draft-lengths-do-not-matter", MIXED, 6, "updated", "emitted", lambda e: {**e, 2: [3, *e[2][1:]]}),
]  # fmt: skip

MUTATIONS = [
    *_LIFECYCLE,
    *_COUNTERS,
    *_KV_LENS,
    *_ROWS,
    *sparse_mutations.MUTATIONS,
    *rank_mutations.MUTATIONS,
    *_DRAFT_CONTEXT,
    *enhancer_mutations.MUTATIONS,
    *_TREES,
    *_ACCEPTANCE,
    *_FORCED,
    *_SPEC_METADATA,
    *_KV_CACHE,
    *_HISTORY,
    *_OUTPUT,
    *_RELATIONS,
]
