"""KV lengths: how far each row's cache reaches, at every moment of a draft loop.

Notation: ``kv0`` is the length that ``prepare`` wrote (tokens cached before the step, then the step's own),
K the draft length, w the tokens that a generation feeds (K + 1, unless it says how many drafts it verifies), ``acc``
those that it accepts, the target's own included.

==================== =========================== ===========================
before               contexts                    generations
==================== =========================== ===========================
draft call 0         kv0                         kv0
draft call i >= 1    kv0 + i                     kv0 - (w - acc) + i
the loop's end       kv0 + K                     kv0 + K - (w - acc)
==================== =========================== ===========================

is the course of a linear drafter that calls its draft model K times. Others differ:

- A drafter of one call, parallel or with a context of its own: a context stays at ``kv0``. A generation is at
  ``kv0 + 1`` before the call and at ``kv0 + acc`` at the end.
- A drafter that is fed the last cached tokens again: from its first call on a context is at ``kv0``, a generation at
  ``kv0 - (w - acc)``, and they stay there.
- A drafter that reads a view of the target's cache adds nothing to it: in all of its calls the view has what is cached
  after the step, ``kv0`` for a context and ``kv0 - (w - acc)`` for a generation.
- Without drafts, or without a draft model, nothing moves.
- A worker that saves ``kv_lens_cuda`` itself, as some do while a graph is warmed up, gives ``kv0`` back at the end.

A drafter of trees is fed paths of K + 1 tokens first, where the target was fed T + 1 nodes, then layers of k
(``dynamic_tree_max_topK``) nodes that follow the accepted tokens:

==================== =========================== ===========================
draft call 0         kv0                         kv0 - (T - K)
draft call i >= 1    kv0 + i k                   kv0 - (T + 1 - acc) + i k
the loop's end       kv0 + K k, or kv0           as for i = K, or kv0
==================== =========================== ===========================
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Final

from invariants.case import Moment, Run, StepCase
from invariants.check import Check
from invariants.lifecycle import LAYOUT
from invariants.pools import read_by
from invariants.registry import REFERENCE, invariant
from invariants.trees import OFFSETS
from scenarios import BACKENDS

_OF_VIEW: Final = "_draft_kv_runtime_lens"
"""KV lengths that a view of the metadata reads."""
OFFSETS_OF_LENGTHS: Final = "previous_kv_lens_offsets_cuda"
"""What the device adds to the KV lengths of generations under the overlap scheduler."""
_LENGTHS: Final = ("kv_lens_cuda", "kv_lens", "kv_lens_runtime", "host_total_kv_lens", "ctx_len")


class Course:
    """The values that ``kv_lens_cuda`` takes in one forward: the table above."""

    def __init__(self, step: StepCase, run: Run, start: list[int], accepted: list[int]) -> None:
        self.start = start
        self.contexts = step.num_contexts
        self.fed = [row.query for row in step.rows[self.contexts :]]
        self.topk = step.config.dynamic_tree_max_topK
        self.accepted = accepted[self.contexts :]
        self.draft_len = step.draft_len
        self.traits = step.traits
        self.one_call = step.traits.parallel or step.traits.keeps_context
        self.saved: bool | None = False
        """Whether the lengths themselves are saved, which some workers do in graph warm-up; None if unknown."""
        if run.phase == "graph_warmup" and step.draft_len:
            saved = run.saved.seen.get("_saved_tensors") if run.saved is not None else None
            self.saved = None if saved is None else "kv_lens_cuda" in saved

    def during(self, i: int) -> list[int]:
        """Before draft call ``i``; for a linear drafter ``i == K`` is the end of the loop."""
        contexts, generations = self.start[: self.contexts], self.start[self.contexts :]
        if self.one_call:
            return contexts + [kv + 1 for kv in generations]
        if self.traits.feeds_history:
            return contexts + self._committed(generations)
        if i == 0 or self.draft_len == 0:
            return self.start
        return [kv + i for kv in contexts] + [kv + i for kv in self._committed(generations)]

    def ends(self) -> list[list[int]]:
        """When the worker's forward has returned; several where workers differ."""
        if self.saved or self.draft_len == 0 or not self.traits.draft_model:
            return [self.start]
        if not self.one_call:
            return [self.during(self.draft_len)]
        generations = self._accepting(self.start[self.contexts :])
        return [self.start[: self.contexts] + [kv + acc for kv, acc in generations]]

    def _accepting(self, generations: list[int]) -> zip[tuple[int, int]]:
        return zip(generations, self.accepted, strict=False)

    def _committed(self, generations: list[int]) -> list[int]:
        """Lengths of the generations with the accepted tokens and no other that was fed."""
        rows = zip(generations, self.fed, self.accepted, strict=False)
        return [kv - fed + accepted for kv, fed, accepted in rows]

    def after_failure(self) -> list[list[int]]:
        """What a failed forward may leave behind: a loop stops anywhere, others undo or complete their one move.

        A loop moves the generations before the contexts. The next ``prepare`` writes all of it anew.
        """
        loops = self.traits.draft_model and not (self.one_call or self.traits.feeds_history)
        if self.saved or not loops:
            return [self.start, *self.ends()]
        between = self.start[: self.contexts] + self.during(1)[self.contexts :]
        return [self.during(i) for i in range(self.draft_len + 1)] + [between]


class TreeCourse(Course):
    """The same for a drafter of trees: the second table."""

    def during(self, i: int) -> list[int]:
        """Before draft call ``i``; ``i == K`` is the end of the loop."""
        contexts, generations = self.start[: self.contexts], self.start[self.contexts :]
        if i == 0:
            paths = self.draft_len + 1
            return contexts + [kv - fed + paths for kv, fed in zip(generations, self.fed, strict=False)]
        return [kv + i * self.topk for kv in contexts] + [kv + i * self.topk for kv in self._committed(generations)]

    def ends(self) -> list[list[int]]:
        """At the end of the loop, or where it began: Eagle3 leaves the lengths, MTP-Eagle puts a copy back."""
        return [self.during(self.draft_len), self.start]

    def after_failure(self) -> list[list[int]]:
        """A loop stops anywhere, with the accepted tokens alone too, and moves the generations before the contexts."""
        contexts, generations = self.start[: self.contexts], self.start[self.contexts :]
        lengths = [self.start, *(self.during(i) for i in range(self.draft_len + 1))]
        between = [contexts + self._committed(generations)]
        between += [one[: self.contexts] + other[self.contexts :] for one, other in pairwise(lengths)]
        return lengths + between


class SharedCourse(Course):
    """The same for a drafter that reads a view of the target's cache."""

    def during(self, i: int) -> list[int]:
        """Before any draft call."""
        return self.start[: self.contexts] + self._committed(self.start[self.contexts :])


@invariant(
    "kv-lens-balanced",
    reads=(
        "kv_lens_cuda",
        _OF_VIEW,
        OFFSETS_OF_LENGTHS,
        "num_accepted_tokens",
        "new_tokens_lens",
        "_saved_tensors",
    ),
    museum=("TRT-01", "TRT-04", "TRT-37", "VLL-23"),
    predicates=("P3", "P4", "P5"),
)
def kv_lens_balanced(step: StepCase, check: Check) -> None:
    """Every forward moves ``kv_lens_cuda`` along its drafter's course, by the counts that it accepted itself.

    After a failure it lies on that course; the increment for an only call is either undone or made up to the
    accepted count, never left alone.
    """
    start = corrected(step)
    if start is None or step.prepared is None:
        return
    for run in step.runs:
        for moment in (run.verified, run.saved):
            _kv(check, moment, start, "nothing has moved it yet")
        course = _course(step, run, start)
        if course is not None:
            why = f"prepare wrote {start} and {run.accepted} were accepted"
            for i, moment in run.drafts.items():
                _kv(check, moment, course.during(i), why)
            _kv(check, run.restored, _one_of(course.ends(), run.restored), why)
    if step.failed is not None and "kv_lens_cuda" in step.failed.seen:
        _kv_after_failure(check, step, step.failed, start, step.prepared.seen["kv_lens_cuda"])


def _course(step: StepCase, run: Run, start: list[int]) -> Course | None:
    """The course of a forward; None if what determines it was not observed."""
    accepted = run.accepted
    if accepted is None:
        return None
    kind = SharedCourse if step.config.shares_target_kv else TreeCourse if step.traits.tree else Course
    course = kind(step, run, start, accepted)
    return None if course.saved is None else course


def corrected(step: StepCase) -> list[int] | None:
    """``kv_lens_cuda`` at the start of each forward; None if it was not observed.

    It is what ``prepare`` wrote; under the overlap scheduler the device first takes back what was not accepted. A
    target that is told pages instead has no lengths, but the view of its drafter has.
    """
    if step.prepared is not None and BACKENDS[step.config.attention_backend].draft_view:
        return [row.past + row.query for row in step.rows]
    seen = step.prepared.seen if step.prepared is not None else {}
    if "kv_lens_cuda" not in seen or not step.config.overlap:
        return seen.get("kv_lens_cuda")
    if OFFSETS_OF_LENGTHS not in seen:
        return None
    offsets = [0] * step.num_contexts + seen[OFFSETS_OF_LENGTHS]
    return [kv + offset for kv, offset in zip(seen["kv_lens_cuda"], offsets, strict=False)]


def _kv_after_failure(check: Check, step: StepCase, failed: Moment, start: list[int], prepared: list[int]) -> None:
    run = step.runs[-1] if step.runs else None
    if run is None or not run.begun or not step.draft_len:
        allowed = [start, prepared]
    else:
        course = _course(step, run, start)
        if course is None:
            return
        allowed = course.after_failure()
    kv = failed.seen["kv_lens_cuda"]
    message = f"kv_lens_cuda is {kv}, which no point of the forward explains; prepare wrote {start}"
    check.that(kv in allowed, failed, "kv_lens_cuda", allowed, kv, message)


def _one_of(allowed: list[list[int]], moment: Moment | None) -> list[int]:
    """The value that was seen if it is allowed, else the first that is."""
    seen: list[int] | None = moment.seen.get("kv_lens_cuda") if moment is not None else None
    return seen if seen is not None and seen in allowed else allowed[0]


def _kv(check: Check, moment: Moment | None, expected: list[int], why: str) -> None:
    for field in ("kv_lens_cuda", _OF_VIEW):
        if moment is not None and field in moment.seen:
            check.equal(moment, field, expected, moment.seen[field], why)


@invariant(
    "warmup-fixed-point",
    reads=("kv_lens_cuda", _OF_VIEW, OFFSETS_OF_LENGTHS, *LAYOUT, "use_spec_decoding", "_saved_tensors"),
    museum=("TRT-04", "TRT-03", "TRT-40"),
    predicates=("P13",),
)
def warmup_fixed_point(step: StepCase, check: Check) -> None:
    """Each forward on one preparation finds the state that ``prepare`` left, however many ran before it.

    PR #11696: the warm-up runs of a graph let ``kv_lens_cuda`` drift past the pages.
    """
    if step.prepared is None:
        return
    for run in step.runs:
        if run.entered is None:
            continue
        check.kept(run.entered, step.prepared, (*LAYOUT, "use_spec_decoding", "_saved_tensors"))
        # Inside a graph the lengths of the host are corrected when it runs.
        start = step.prepared.seen.get("kv_lens_cuda") if run.phase == "replay" else corrected(step)
        if start is not None:
            _kv(check, run.entered, start, "so prepare and the correction leave it")


@invariant(
    "host-kv-lens-consistent",
    reads=("kv_lens_cuda", "kv_lens", "kv_lens_runtime", "host_total_kv_lens"),
    museum=("TRT-32", "TRT-33", "TRT-41"),
    predicates=("P7",),
)
def host_kv_lens_consistent(step: StepCase, check: Check) -> None:
    """What ``prepare`` tells the kernels is the device's lengths; only the capacity lengths hold the extra tokens.

    ``kv_lens_runtime == kv_lens_cuda``, ``kv_lens == kv_lens_runtime + num_extra_kv_tokens <= max_seq_len``,
    ``host_total_kv_lens`` = their sums over contexts and over generations.
    """
    moment = step.prepared
    if moment is None or "kv_lens_cuda" not in moment.seen:
        return
    seen, contexts = moment.seen, step.num_contexts
    kv = seen["kv_lens_cuda"]
    if "kv_lens_runtime" in seen:
        check.agree(moment, "kv_lens_runtime", kv, seen["kv_lens_runtime"], "kv_lens_cuda")
    if "host_total_kv_lens" in seen:
        totals = [sum(kv[:contexts]), sum(kv[contexts:])]
        check.equal(moment, "host_total_kv_lens", totals, seen["host_total_kv_lens"], "sums of kv_lens_cuda")
    if "kv_lens" in seen:
        extra, most = step.config.num_extra_kv_tokens, step.config.max_seq_len
        capacity = seen["kv_lens"]
        check.equal(moment, "kv_lens", [n + extra for n in kv], capacity, f"kv_lens_cuda and {extra} extra tokens")
        longest = max(capacity, default=0)
        check.that(longest <= most, moment, "kv_lens", most, longest, f"{longest} tokens exceed max_seq_len {most}")


@invariant(
    "draft-position-is-kv-minus-one",
    reads=("position_ids", "kv_lens_cuda", _OF_VIEW, "_seq_lens", OFFSETS),
    museum=("TRT-04", "TRT-30", "TRT-37", "TRT-45", "VLL-23"),
    predicates=("P3",),
)
def draft_position_is_kv_minus_one(step: StepCase, check: Check) -> None:
    """In every forward the positions of a row run up to its KV length: the last one is ``kv_lens_cuda - 1``.

    Of the target and of each draft call that reads the cache; position and length are advanced by different code. A
    node of a tree is as far behind the first position of its row as its offset says. What is not added to the cache
    that is read has the position behind it.
    """
    for moment in step.moments:
        if step.reads_own_context(moment) or (step.config.overlap and moment in _uncorrected(step)):
            continue
        seen = moment.seen
        lens = seen.get("kv_lens_cuda", seen.get(_OF_VIEW))
        if "position_ids" not in seen or lens is None or "_seq_lens" not in seen:
            continue
        if step.traits.tree and OFFSETS not in seen:
            continue
        rows = list(zip(lens, seen["_seq_lens"], strict=False))
        nodes: list[list[int]] = seen.get(OFFSETS, [])
        offsets = [range(query) for _, query in rows[: len(rows) - len(nodes)]]
        behind = step.config.shares_target_kv and moment.name.startswith("draft[")
        expected = [
            kv - query + offset + behind
            for (kv, query), of_row in zip(rows, chain(offsets, nodes), strict=False)
            for offset in of_row
        ]
        check.equal(moment, "position_ids", expected, seen["position_ids"], "so say kv_lens_cuda and _seq_lens")


def _uncorrected(step: StepCase) -> list[Moment | None]:
    """Moments of the overlap scheduler that show positions which are not those of the lengths beside them."""
    replays = [run.entered for run in step.runs if run.phase == "replay"]
    return [step.prepared, *replays, *(run.restored for run in step.runs)]


@invariant(
    "kv-lens-within-pages",
    reads=("kv_lens_cuda", "kv_cache_block_offsets", "draft_kv_cache_block_offsets"),
    museum=("TRT-04", "TRT-13", "TRT-34", "TRT-39", "TRT-42", "TRT-68", "VLL-07", "VLL-08"),
    predicates=("P9",),
)
def kv_lens_within_pages(step: StepCase, check: Check) -> None:
    """No forward, target's or drafter's, reaches past the pages that its row was granted in the pool that it reads."""
    tables = step.prepared.seen if step.prepared is not None else {}
    for run in step.runs:
        for moment in (run.entered, *run.drafts.values()):
            if moment is not None and "kv_lens_cuda" in moment.seen and not step.reads_own_context(moment):
                pool, kv = read_by(step.config, moment), moment.seen["kv_lens_cuda"]
                field = pool.field("kv_cache_block_offsets")
                if field not in tables:
                    continue
                room = [len(pages) * pool.tokens_per_block for pages in tables[field]]
                fits = len(kv) == len(room) and all(map(int.__le__, kv, room))
                check.that(fits, moment, "kv_lens_cuda", room, kv, f"lengths {kv} exceed the granted {room} tokens")


@invariant(
    "kv-lens-equals-reference",
    reads=_LENGTHS,
    museum=("TRT-02", "TRT-04", "TRT-32", "TRT-37", "VLL-23"),
    kind=REFERENCE,
    predicates=("P3", "P4", "P5"),
)
def kv_lens_equals_reference(step: StepCase, check: Check) -> None:
    """At every sub-step of a forward the KV lengths, host's and device's, and a drafter's own are the reference's.

    After a failure only those of a worker that puts them back itself, once the step had been prepared.
    """
    for moment in step.moments:
        if moment is not step.failed or step.prepared is not None:
            check.said(moment, _LENGTHS)
