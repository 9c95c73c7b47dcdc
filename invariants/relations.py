"""Relations: what a run must have in common with a second run that differs in a way that must not be seen.

They need no oracle and see what it does not specify, but for dummies: what it leaves open of these may differ. Each
makes at most one twin, so a scenario costs at most as many extra runs as relations apply to it. Two of them speak about
scenarios with faults, too: ``next-step-equals-never-failed-twin`` of these alone, and ``ranks-of-a-replica-agree``.
"""

from __future__ import annotations

from typing import Final

from invariants import drafting_twins, rank_twins, startup_twins, twins
from invariants.history import KEPT
from invariants.kv_cache import CONTENT
from invariants.registry import Twin, relation
from scenarios import FIELDS, Config, Phase, Scenario
from scenarios.trace import ENTERED

_OBJECTS: Final = frozenset(
    {
        "identity",
        *("kv_blocks", "kv_cache_block_offsets", "block_ids_per_seq", "kv_pool_indices"),
        *("draft_kv_blocks", "draft_kv_cache_block_offsets", "draft_block_ids_per_seq", "draft_kv_pool_indices"),
        *("kv_block_ids_per_seq", "gen_block_ids_per_seq"),
        *("known_page_ids", "draft_known_page_ids"),
        "connector_block_ids",
        "block_table",
        "sliding_block_tables",
        "compress_block_tables",
        "_paged_kv_indices",
        "cache_indices",
        "block_table_expanded",
        "indexer_k_cache_block_offsets",
        "slot_mapping_fp8",
        "slot_ids",
        "spec_slots",
        *("state_indices", "mamba_slots", "batch_slot_ids", "seq_slots"),
    }
)
"""Which tensor objects, pages and slots serve a request is the engine's choice; it may differ from run to run."""
_DECIDED: Final = frozenset({"skip_indexer_for_ctx_reqs", "skip_indexer_for_gen_reqs", "topk_indices_buffer"})
"""A graph cannot decide anew whether rows are short enough to go without their indexer."""
_OF_PYTHON: Final = frozenset({"worker_state", "left_open", "shared_with_eager", "collectives", "graph_key"})
"""What a replay, which runs no Python of the worker, cannot touch or list."""
_OF_FORWARDS: Final = frozenset({"collectives", "max_gen_seq_len"})
"""What grows with the number of forwards, and what is the first forward's own until the next ``prepare``."""
_STATE: Final = (*CONTENT, *KEPT, "recurrent_states", "kept_draft_probs")
_TOKENS: Final = ("kv_tokens", "draft_kv_tokens")
_MANAGERS: Final = (*_TOKENS, "free_blocks", "draft_free_blocks")
_REUSABLE: Final = frozenset(name for name in FIELDS if "known_" in name or "reclaim_order" in name)
"""Which pages are known depends on who has been there before."""
_STORED: Final = ("emitted", "draft_tree", "matchers", "relaxed_delta", *_STATE)
_RESULTS: Final = (*_STORED, *_MANAGERS)
_SEEN: Final = tuple(field for field in FIELDS if field not in _OBJECTS)


def _results(config: Config) -> tuple[str, ...]:
    """What a step leaves. With block reuse another order of steps or rows shares other pages, so others are free."""
    if not config.enable_block_reuse:
        return _RESULTS
    return tuple(field for field in _RESULTS if field not in ("free_blocks", "draft_free_blocks"))


def _regrouped(config: Config) -> tuple[str, ...]:
    """What a step leaves where other steps follow it: under the overlap scheduler these have been granted theirs."""
    return _STORED if config.overlap else _results(config)


@relation(
    "next-step-equals-never-failed-twin",
    reads=_SEEN,
    museum=("TRT-01", "TRT-02", "TRT-03", "TRT-06"),
    predicates=("P2",),
)
def next_step_equals_never_failed_twin(scenario: Scenario) -> Twin | None:
    """After a failure that is tolerated, each step is as if the failing one had never been.

    Every field but page ids and labels of objects is compared. In the twin the requests that the failure ended
    finish in the step before it, or never come.
    """
    edited = twins.never_failed(scenario)
    # How many pages prompts share goes by whose became known first, perhaps one's that the failure made forgotten.
    shared = {"free_blocks", "draft_free_blocks"} if scenario.config.enable_block_reuse else set()
    drawn = {"force_accept_counter"} if twins.may_have_drawn(scenario) else set()
    return Twin(*edited, ignore=_OBJECTS | _REUSABLE | shared | drawn) if edited else None


@relation(
    "replay-equals-eager",
    reads=_SEEN,
    museum=("TRT-85", "TRT-87", "TRT-88", "VLL-11", "VLL-12", "SGL-07"),
    predicates=("P13",),
)
def replay_equals_eager(scenario: Scenario) -> Twin | None:
    """Replaying a graph does what running the step by Python does."""
    edited = twins.eager(scenario) if twins.fault_free(scenario) else None
    # Under the overlap scheduler a graph is entered with the lengths of the host, and Python with the true ones.
    skip = frozenset({ENTERED}) if scenario.config.overlap else frozenset()
    return Twin(*edited, ignore=_OBJECTS | _DECIDED | _OF_PYTHON, skip=skip) if edited else None


@relation("startup-leaves-no-trace", reads=_SEEN, museum=("TRT-03", "TRT-04", "TRT-07", "TRT-52"), predicates=("P13",))
def startup_leaves_no_trace(scenario: Scenario) -> Twin | None:
    """General warm-up, and capture of a graph that is not replayed, change nothing in what comes after."""
    if not twins.repeatable(scenario):
        return None
    replays = any(step.phase is Phase.REPLAY for step in scenario.steps)
    idle = (Phase.WARMUP,) if replays else (Phase.WARMUP, Phase.CAPTURE)
    edited = twins.without(scenario, lambda step: step.phase in idle)
    if edited is None or len(edited[0].steps) == len(scenario.steps):
        return None
    return Twin(*edited, ignore=_OBJECTS)


@relation(
    "captured-values-do-not-matter", reads=_SEEN, museum=("TRT-85", "TRT-88", "VLL-11", "VLL-12"), predicates=("P13",)
)
def captured_values_do_not_matter(scenario: Scenario) -> Twin | None:
    """What a graph was captured with, lengths, accepted counts and drafts, is in nothing that is served.

    In the twin every number that the host knew at capture is another one.
    """
    edited = startup_twins.other_values(scenario) if twins.repeatable(scenario) else None
    return Twin(*edited, ignore=_OBJECTS) if edited else None


@relation("warm-up-forward-is-a-fixed-point", reads=_SEEN, museum=("TRT-04", "TRT-07"), predicates=("P13",))
def warm_up_forward_is_a_fixed_point(scenario: Scenario) -> Twin | None:
    """Forwards that run before a graph is captured change neither the capture nor what follows, however many they are.

    PR #11696: they moved the lengths on. In the twin there are none, or four if the scenario has none.
    """
    edited = startup_twins.other_warmup_runs(scenario) if twins.repeatable(scenario) else None
    return Twin(*edited, ignore=_OBJECTS | _OF_FORWARDS) if edited else None


@relation(
    "batch-equals-requests-alone",
    reads=_RESULTS,
    museum=("TRT-12", "TRT-24", "TRT-37", "VLL-03", "SGL-06"),
    predicates=("P10",),
)
def batch_equals_requests_alone(scenario: Scenario) -> Twin | None:
    """A batch gives each of its requests what it gets when it is served alone: text, caches and tokens held."""
    edited = twins.served_alone(scenario) if twins.repeatable(scenario) else None
    return Twin(*edited, fields=_regrouped(scenario.config)) if edited else None


@relation(
    "row-order-does-not-matter",
    reads=(*_RESULTS, "py_rewind_len", "py_num_accepted_draft_tokens"),
    museum=("TRT-12", "TRT-24", "TRT-25", "TRT-27", "VLL-15"),
    predicates=("P10",),
)
def row_order_does_not_matter(scenario: Scenario) -> Twin | None:
    """Reversing the order of contexts and of generations in every batch changes nothing for any request."""
    edited = twins.reversed_rows(scenario) if twins.repeatable(scenario) else None
    fields = (*_results(scenario.config), "py_rewind_len", "py_num_accepted_draft_tokens")
    return Twin(*edited, fields=fields) if edited else None


@relation(
    "chunked-equals-one-shot",
    reads=("emitted", *_STATE),
    museum=("TRT-94",),
    trait="chunked_prefill",
    predicates=("P14",),
)
def chunked_equals_one_shot(scenario: Scenario) -> Twin | None:
    """A prompt computed in chunks leaves the text and both caches as if it had been computed at once."""
    edited = twins.one_shot(scenario) if twins.repeatable(scenario) else None
    return Twin(*edited, fields=("emitted", *_STATE), known=True) if edited else None


@relation(
    "draft-lengths-do-not-matter",
    reads=("emitted",),
    museum=("TRT-17",),
    trait="varies_draft_len",
    predicates=("P14",),
)
def draft_lengths_do_not_matter(scenario: Scenario) -> Twin | None:
    """With another draft length in each step the same text is given out, sooner or later."""
    edited = drafting_twins.other_draft_lengths(scenario) if twins.repeatable(scenario) else None
    return Twin(*edited, fields=("emitted",), prefix=True) if edited else None


@relation(
    "verify-widths-do-not-matter",
    reads=("emitted",),
    museum=("TRT-20", "TRT-37", "TRT-88"),
    trait="ragged_verify",
    predicates=("P14",),
)
def verify_widths_do_not_matter(scenario: Scenario) -> Twin | None:
    """Where each generation verifies all of its drafts the same text is given out, sooner."""
    edited = drafting_twins.all_verified(scenario) if twins.repeatable(scenario) else None
    return Twin(*edited, fields=("emitted",), prefix=True) if edited else None


@relation(
    "cache-layout-does-not-matter",
    reads=(*_RESULTS, "py_num_accepted_draft_tokens"),
    museum=("TRT-62", "TRT-64", "TRT-65", "VLL-08"),
    predicates=("P7", "P14"),
)
def cache_layout_does_not_matter(scenario: Scenario) -> Twin | None:
    """A drafter's own cache, V2 managers and pages that move change nothing: all is as with one V1 manager, in place.

    Issue #18662: with one version of the manager no draft was ever accepted, and all else worked.
    """
    edited = twins.one_manager(scenario) if twins.fault_free(scenario) else None
    return Twin(*edited, fields=(*_results(scenario.config), "py_num_accepted_draft_tokens")) if edited else None


@relation(
    "overlap-equals-no-overlap",
    reads=(*_STORED, "py_rewind_len", "py_num_accepted_draft_tokens"),
    museum=("TRT-24", "TRT-30", "TRT-32", "TRT-34", "TRT-35", "TRT-36", "TRT-37", "VLL-03", "VLL-04", "VLL-05"),
    predicates=("P6", "P14"),
)
def overlap_equals_no_overlap(scenario: Scenario) -> Twin | None:
    """The overlap scheduler, which launches each step before the last one is known, changes nothing for any request.

    Text, accepted drafts, what is rewound and what caches and drafters keep of each request are as without it.
    """
    edited = twins.landing(scenario) if twins.repeatable(scenario) else None
    return Twin(*edited, fields=(*_STORED, "py_rewind_len", "py_num_accepted_draft_tokens")) if edited else None


@relation(
    "block-reuse-equals-no-reuse",
    reads=(*_STORED, *_TOKENS, "py_rewind_len", "py_num_accepted_draft_tokens"),
    museum=("TRT-66", "SGL-11"),
    trait="reuses_blocks",
    predicates=("P9", "P14"),
)
def block_reuse_equals_no_reuse(scenario: Scenario) -> Twin | None:
    """A prompt that begins with pages of an earlier one is served as if it were computed whole.

    Text, accepted drafts, caches and tokens held are the same; pages are fewer.
    """
    edited = twins.computing_all(scenario) if twins.repeatable(scenario) else None
    fields = (*_STORED, *_TOKENS, "py_rewind_len", "py_num_accepted_draft_tokens")
    return Twin(*edited, fields=fields) if edited else None


@relation(
    "recurrent-layers-change-nothing",
    reads=(*_RESULTS, "py_rewind_len", "py_num_accepted_draft_tokens"),
    museum=("TRT-57", "TRT-95", "VLL-03"),
    trait="recurrent",
    predicates=("P14",),
)
def recurrent_layers_change_nothing(scenario: Scenario) -> Twin | None:
    """A target with recurrent layers says what it says without them, as long as each request has its own state.

    The tracer's layers are made so. A state that is not promoted, or is another request's, changes every token after.
    """
    edited = twins.plain(scenario, "recurrent") if twins.fault_free(scenario) else None
    return Twin(*edited, fields=(*_RESULTS, "py_rewind_len", "py_num_accepted_draft_tokens")) if edited else None


@relation(
    "rejection-sampling-accepts-the-same",
    reads=(*_RESULTS, "py_rewind_len", "py_num_accepted_draft_tokens"),
    museum=("TRT-10", "VLL-18"),
    trait="rejection_sampling",
    predicates=("P14",),
)
def rejection_sampling_accepts_the_same(scenario: Scenario) -> Twin | None:
    """Rejection sampling accepts what is accepted without it, as long as each draft is verified by its own proposal.

    The tracer's drafter is sure of what it drafts and the target of what it chooses, so that there is no chance in it.
    """
    edited = twins.plain(scenario, "rejection_sampling") if twins.fault_free(scenario) else None
    return Twin(*edited, fields=(*_RESULTS, "py_rewind_len", "py_num_accepted_draft_tokens")) if edited else None


@relation(
    "stalled-copies-change-nothing",
    reads=tuple(field for field in _SEEN if field != "racing_copies"),
    museum=("TRT-90", "TRT-91", "TRT-93"),
    predicates=("P7",),
)
def stalled_copies_change_nothing(scenario: Scenario) -> Twin | None:
    """Copies to the device that run as late as the host lets them bring what they would have brought at once.

    Under the overlap scheduler the host is a step ahead of them (PR #15546).
    """
    edited = twins.stalled(scenario) if twins.repeatable(scenario) else None
    return Twin(*edited, ignore=_OBJECTS | {"racing_copies"}) if edited else None


@relation(
    "pipeline-ranks-prepare-the-same",
    reads=tuple(field for field in _SEEN if field != "racing_copies"),
    museum=("VLL-06",),
    predicates=("P12",),
)
def pipeline_ranks_prepare_the_same(scenario: Scenario) -> Twin | None:
    """A rank of a pipeline without the worker, told what the last rank returned, prepares the same batches.

    Its host makes the same of each step. In the twin what is prepared, and what the host makes of it, are that rank's.
    """
    edited = rank_twins.next_stage(scenario) if twins.fault_free(scenario) else None
    return Twin(*edited, ignore=_OBJECTS | {"racing_copies"}) if edited else None


@relation(
    "ranks-run-the-same-collectives",
    reads=("collectives", "graph_key"),
    museum=("TRT-81", "TRT-82", "TRT-83", "VLL-19"),
    predicates=("P12",),
)
def ranks_run_the_same_collectives(scenario: Scenario) -> Twin | None:
    """The next rank runs the same collectives in each step, with the same counts, and in the same graph.

    Else all of them wait for ever. In the twin this engine is the next rank, with requests like those that it is said
    to have.
    """
    edited = rank_twins.next_rank(scenario) if twins.fault_free(scenario) else None
    return Twin(*edited, fields=("collectives", "graph_key")) if edited else None


@relation(
    "ranks-of-a-replica-agree",
    reads=_SEEN,
    museum=("TRT-80", "VLL-06"),
    trait="shares_draft_head",
    predicates=("P12",),
)
def ranks_of_a_replica_agree(scenario: Scenario) -> Twin | None:
    """Ranks that share each request decide alike: what they draft and accept, and all that follows from it.

    With tensor parallelism the draft head of each has a part of the vocabulary; in the twin this engine has the next.
    """
    edited = rank_twins.next_of_replica(scenario)
    return Twin(*edited, ignore=_OBJECTS) if edited else None


@relation("padded-equals-unpadded", reads=_RESULTS, museum=("TRT-121",), predicates=("P11",))
def padded_equals_unpadded(scenario: Scenario) -> Twin | None:
    """A batch that is padded to the size of a graph gets what it gets from a graph of its own size."""
    edited = startup_twins.exact_size(scenario) if twins.repeatable(scenario) else None
    return Twin(*edited, fields=_results(scenario.config)) if edited else None


@relation(
    "other-ranks-do-not-matter", reads=_RESULTS, museum=("TRT-80", "TRT-121", "VLL-10"), predicates=("P11", "P12")
)
def other_ranks_do_not_matter(scenario: Scenario) -> Twin | None:
    """What other ranks run changes nothing for a request: text, caches and tokens held are those of a single rank."""
    edited = rank_twins.single_rank(scenario) if twins.repeatable(scenario) else None
    return Twin(*edited, fields=_regrouped(scenario.config)) if edited else None
