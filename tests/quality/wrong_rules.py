"""Wrong rules of the oracle: each a plausible misreading, which comparing it with the engine has to bring to light.

A mistake on either side of a comparison looks the same, so the search should find these as quickly as the museum's
defects of the engine. ``python -m tests.quality.hunt`` shows that it does, ``test_wrong_rules.py`` that each is
noticed at all. They cover every module of ``reference/`` that scenarios reach; the others answer to worked examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from museum.bug import (
    DRAFT_TARGET,
    EAGLE3,
    EAGLE3_TREE,
    MTP_EAGLE,
    PARD,
    SA,
    Patch,
)
from reference import (
    attention,
    attention_metadata,
    batch,
    dense_selection,
    executor,
    guided_decoding,
    history,
    kv_cache,
    ranks,
    sparse_attention,
)
from scenarios import Phase


@dataclass(frozen=True)
class WrongRule:
    """A misreading.

    name      what is confused, in a few words
    worker    whose scenarios show it
    scenario  the one of `rule_cases.SCENARIOS` that shows it
    title     what the rule says
    apply     makes the oracle say so
    """

    name: str
    worker: str
    scenario: str
    title: str
    apply: Callable[[Patch], None]


RULES: Final[dict[str, WrongRule]] = {}
"""Every wrong rule by name."""


def rule(name: str, worker: str, scenario: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register the decorated function, whose docstring is the title."""

    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        RULES[name] = WrongRule(name, worker, scenario, (apply.__doc__ or "").strip(), apply)
        return apply

    return register


@contextmanager
def planted(name: str) -> Iterator[WrongRule]:
    """Have the oracle follow a wrong rule for the duration of the block."""
    with ExitStack() as stack:
        RULES[name].apply(Patch(stack))
        yield RULES[name]


def edit(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Let ``change`` have what ``owner.name`` returns, followed by the arguments, and return something else."""
    right = getattr(owner, name)
    patch(owner, name, lambda *args, **kwargs: change(right(*args, **kwargs), *args, **kwargs))


Fields = Mapping[str, Any]


# The batch and its metadata.


@rule("context tokens counted with the cached ones", EAGLE3, "TRT-17/windows")
def cached_context_tokens(patch: Patch) -> None:
    """``num_ctx_tokens`` counts what is cached of contexts, too."""

    def change(fields: Fields, seq_lens: list[int], kv_lens: list[int], num_contexts: int, **rest: Any) -> Fields:
        return {**fields, "num_ctx_tokens": sum(kv_lens[:num_contexts])}

    edit(patch, attention_metadata, "metadata", change)


@rule("generations before contexts in totals", MTP_EAGLE, "TRT-01/rewind-restored")
def totals_swapped(patch: Patch) -> None:
    """``host_total_kv_lens`` has generations first."""
    edit(
        patch, attention_metadata, "prepared",
        lambda fields, *_: {**fields, "host_total_kv_lens": fields["host_total_kv_lens"][::-1]},
    )  # fmt: skip


@rule("prompt of a chunk is the whole prompt", DRAFT_TARGET, "TRT-17/windows")
def prompt_of_chunk(patch: Patch) -> None:
    """``prompt_lens`` of a chunk has the length of the whole prompt."""

    def change(fields: Fields, of: batch.Batch, *_: Any) -> Fields:
        lens = [row.prompt_len for row in of.rows]
        return {**fields, "prompt_lens_cpu": lens, "prompt_lens_cuda": lens}

    edit(patch, attention_metadata, "prepared", change)


@rule("capacity without extra tokens", EAGLE3, "TRT-01/rewind-restored")
def no_extra_tokens(patch: Patch) -> None:
    """``kv_lens`` of the host is the bare KV length, without room for the draft loop."""
    edit(patch, attention_metadata, "prepared", lambda fields, of, *_: {**fields, "kv_lens": of.kv_lens})


@rule("logits of the last token alone", MTP_EAGLE, "TRT-01/rewind-restored")
def one_logit_per_row(patch: Patch) -> None:
    """A generation gets logits at its last token, as a context does."""
    ends = property(lambda self: [sum(self.seq_lens[: i + 1]) - 1 for i in range(len(self.rows))])
    patch(batch.Batch, "gather_ids", ends)


@rule("last drafts kept when the draft length shrinks", EAGLE3, "shrinking")
def last_drafts_kept(patch: Patch) -> None:
    """Of more drafts than are verified the last ones are, not the first ones."""

    def change(row: batch.Row, asked: Any, draft_len: int, width: int, config: Any, histories: Any) -> batch.Row:
        made = list(histories[row.request].drafts.tokens) if row.request is not None else []
        return (
            row if len(made) <= row.drafts else replace(row, tokens=[row.tokens[0], *made[-row.drafts or len(made) :]])
        )

    edit(patch, batch, "_generation", change)


@rule("nodes of a tree one after the other", EAGLE3_TREE, "TRT-01/rewind-restored")
def positions_of_slots(patch: Patch) -> None:
    """The position of a node is that of its slot."""
    patch(batch.Row, "positions", property(lambda self: list(range(self.past, self.kv))))


# Acceptance.


@rule("the last draft never accepted", PARD, "TRT-01/rewind-twice")
def last_draft_lost(patch: Patch) -> None:
    """Of K drafts that agree K - 1 are accepted."""
    edit(patch, batch, "agreed", lambda path, tokens, *_, **__: path[: max(1, len(tokens) - 1)])


@rule("second choices for everybody", MTP_EAGLE, "TRT-131")
def everybody_thinks(patch: Patch) -> None:
    """Second choices are accepted of requests that do not think, too."""
    right = batch.agreed
    patch(
        batch, "agreed", lambda tokens, parents, choices, relaxed=False: right(tokens, parents, choices, relaxed=True)
    )


# The ledger.


@rule("no room for the target's token", SA, "SGL-12")
def no_bonus_token(patch: Patch) -> None:
    """A generation is granted its drafts only."""
    edit(patch, kv_cache, "granted", lambda tokens, row, *_: tokens if row.is_context else tokens - 1)


@rule("a chunk grants itself", EAGLE3, "TRT-17/windows")
def chunk_grants_itself(patch: Patch) -> None:
    """Each chunk of a prompt grants its own tokens, not the first one all of them."""

    def change(tokens: int, row: batch.Row, first: bool, width: int, config: Any) -> int:
        if not row.is_context:
            return tokens
        return row.query + (config.num_extra_kv_tokens + width if first else 0)

    edit(patch, kv_cache, "granted", change)


@rule("rewind counts the target's token", DRAFT_TARGET, "TRT-102/width")
def rewind_off_by_one(patch: Patch) -> None:
    """The rewind takes the target's token for an accepted draft."""
    patch(kv_cache, "rewound", lambda row: 0 if row.is_context else max(0, row.query - 1 - len(row.accepted)))


@rule("a page more at a border", MTP_EAGLE, "TRT-13")
def page_at_border(patch: Patch) -> None:
    """Tokens that fill their pages exactly take one more."""

    def change(fields: Fields, kv_tokens: Mapping[int, int], config: Any) -> Fields:
        blocks, size = config.num_blocks, config.tokens_per_block
        return {**fields, "free_blocks": blocks - sum(tokens // size + 1 for tokens in kv_tokens.values())}

    edit(patch, kv_cache, "ledgers", change)


@rule("the last rewind forgotten", EAGLE3, "TRT-102/width")
def last_rewind_forgotten(patch: Patch) -> None:
    """The ledger is one step behind in what it takes back."""
    patch(
        history.History, "kv_tokens",
        property(lambda self: sum(t.granted for t in self.turns) - sum(t.rewound for t in self.turns[:-1])),
    )  # fmt: skip


# Sparse attention.


@rule("prefix sums over contexts, too", MTP_EAGLE, "TRT-13")
def sums_over_all(patch: Patch) -> None:
    """``gen_kv_indptr`` runs over all rows of the batch."""

    def change(fields: Fields, forward: Any, *_: Any, **__: Any) -> Fields:
        sums = [sum(forward.kv_lens[:i]) for i in range(len(forward.kv_lens) + 1)]
        return {**fields, "gen_kv_indptr": sums} if fields else {}

    edit(patch, executor, "derived", change)


@rule("columns of the step", EAGLE3, "shrinking")
def columns_of_the_step(patch: Patch) -> None:
    """``kv_lens_cuda_2d`` has 1 + K columns, not 1 + Kmax."""

    def change(fields: Fields, forward: Any, *_: Any, **__: Any) -> Fields:
        if not fields or not isinstance(forward, batch.Batch):
            return fields
        return {**fields, "kv_lens_cuda_2d": [row[: 1 + forward.draft_len] for row in fields["kv_lens_cuda_2d"]]}

    edit(patch, executor, "derived", change)


@rule("a window without its own token", MTP_EAGLE, "TRT-13")
def window_without_itself(patch: Patch) -> None:
    """A token of a context sees the keys before its own."""
    edit(patch, sparse_attention, "windows", lambda seen, *_: [(start, end - 1) for start, end in seen])


@rule("skipped up to the width", EAGLE3, "just selected")
def skipped_up_to_width(patch: Patch) -> None:
    """The indexer is skipped for rows of exactly as many tokens as are selected, too."""
    right = dense_selection.skips
    patch(dense_selection, "skips", lambda kv_lens, extra, topk: right(kv_lens, extra, topk + 1))


@rule("a token less is selected", MTP_EAGLE, "just selected")
def selects_less(patch: Patch) -> None:
    """The indexer selects one token less than it may, at least one."""
    right = attention.Reading.__init__

    def init(self: Any, index_topk: int, *more: Any) -> None:
        right(self, max(1, index_topk - 1) if index_topk else 0, *more)

    patch(attention.Reading, "__init__", init)


# Ranks, grammars and failures.


@rule("all sequences are generations", MTP_EAGLE, "TRT-120")
def sequences_are_generations(patch: Patch) -> None:
    """Ranks announce their sequences as generations."""
    edit(
        patch, ranks, "announced",
        lambda fields, *_: {**fields, "all_rank_num_gens": fields["all_rank_num_seqs"]} if fields else {},
    )  # fmt: skip


@rule("this rank comes first", EAGLE3, "SGL-12")
def own_rank_first(patch: Patch) -> None:
    """Counts of the executor's batch start with this rank's."""

    def real(step: Any, config: Any) -> list[int]:
        own = sum(row.request is not None for row in step.rows)
        return [own, *(len(peer.contexts) + peer.generations for peer in step.peers)]

    patch(ranks, "_real", real)


@rule("matchers read all that is emitted", MTP_EAGLE, "TRT-71")
def matchers_read_all(patch: Patch) -> None:
    """Between two steps a matcher has read the last emitted token, too."""

    def matchers(histories: Any, config: Any) -> Fields:
        if not config.guided_decoding:
            return {}
        return {"matchers": {i: guided_decoding._matcher(of.emitted) for i, of in histories.items()}}

    patch(executor, "matchers", matchers)


@rule("those that stood aside survive", DRAFT_TARGET, "beside a failure")
def bystanders_survive(patch: Patch) -> None:
    """A failed step ends the requests of its batch only."""

    def survivors(self: executor.Session, step: Any) -> dict[int, history.History]:
        failed = {row.request for row in step.rows}
        return {i: of for i, of in self._active.items() if i not in failed}

    patch(executor.Session, "_survivors", survivors)


@rule("one warm-up is enough", MTP_EAGLE, "TRT-01/rewind-restored")
def one_forward_per_capture(patch: Patch) -> None:
    """A graph is captured without forwards that warm it up."""
    right = executor._phases
    patch(executor, "_phases", lambda step, config: ["capture"] if step.phase is Phase.CAPTURE else right(step, config))


@rule("thinking from the first chunk", EAGLE3, "thinking in chunks")
def thinks_at_once(patch: Patch) -> None:
    """A request thinks before the end of its prompt has been computed."""
    patch(history.History, "is_thinking", property(lambda self: self.thinking))
