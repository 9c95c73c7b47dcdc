"""The tracer's trees taken literally: caches slot by slot, rows that read them through a mask, a drafter that branches.

The oracle speaks of texts and paths. Run on what the oracle says is fed, slots that know of nothing else must give
the same tokens, trees and hidden states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import given

from reference import trace
from scenarios import Config, Context, Generation, Scenario, StepTrace
from scenarios.tracer import (
    EMPTY,
    PAD_TOKEN,
    PRIME,
    SCORE_RANK,
    SCORE_SPREAD,
    SCORE_STEP,
    alternative,
    choose,
    disagree,
    entry,
    entry_fields,
    term,
)
from tests.reference.cases import TREES, at, scenarios
from tests.reference.slots import Pools, by_row


class Fed(NamedTuple):
    """A token that a forward feeds to a row: where it goes, what it is, and which slots of this forward it sees."""

    first: int
    slot: int
    position: int
    token: int
    sees: list[int]


def fed(fields: dict[str, Any]) -> list[list[Fed]]:
    """The tokens of a forward, row by row. Where no mask speaks of a row it is causal."""
    positions, tokens = by_row(fields, fields["position_ids"]), by_row(fields, fields["input_ids"])
    masks = [None] * fields["num_contexts"] + fields["spec_decoding_packed_mask"]
    rows = []
    for kv, of_row, ids, mask in zip(fields["kv_lens_cuda"], positions, tokens, masks, strict=True):
        first = kv - len(ids)
        seen = mask or [range(j + 1) for j in range(len(ids))]
        rows.append([
            Fed(first, first + j, x, t, [first + i for i in sees])
            for j, (x, t, sees) in enumerate(zip(of_row, ids, seen, strict=True))
        ])  # fmt: skip
    return rows


def position(slot: int) -> int:
    fields = entry_fields(slot)
    assert fields is not None
    return fields[0]


def following(slot: int) -> tuple[int, int]:
    """Index and entry of the token that a slot of the drafter stands for: it is one position on."""
    fields = entry_fields(slot)
    assert fields is not None
    return fields[0] + 1, entry(fields[0] + 1, fields[1])


def target(pools: Pools, row: list[Fed]) -> list[int]:
    """Hidden states of a row."""
    pool = pools.target
    pool |= {t.slot: entry(t.position, t.token) for t in row}
    return [
        sum([term(s, pool.get(s, EMPTY)) for s in range(t.first)] + [term(position(pool[s]), pool[s]) for s in t.sees])
        % PRIME
        for t in row
    ]


def drafter(pools: Pools, row: list[Fed], hidden: list[int]) -> list[tuple[int, int]]:
    """Choices and hidden states of a row, by a drafter with shift 1."""
    pools.draft |= {t.slot: entry(t.position, t.token) for t in row}
    answers = []
    for t, state in zip(row, hidden, strict=True):
        digest = term(0, pools.target.get(0, EMPTY))
        for s in range(t.first):
            filled = pools.draft.get(s, EMPTY)
            digest += term(s + 1, following(filled)[1] if filled else pools.target.get(s + 1, EMPTY))
        digest = (digest + sum(term(*following(pools.draft[s])) for s in t.sees)) % PRIME
        own = term(t.position + 1, entry(t.position + 1, t.token))
        answers.append((choose((2 * (state + own) - digest) % PRIME), digest))
    return answers


class Tree:
    """What the drafter makes for one row. A node is the ranks of the candidates on its path."""

    def __init__(self, config: Config, agree: int) -> None:
        self.config, self.agree = config, agree
        self.made: dict[tuple[int, ...], tuple[int, int]] = {}
        """Tokens and scores, in the order in which they were made."""
        self.digests: dict[tuple[int, ...], int] = {}
        self.fed: list[tuple[int, ...]] = []

    def branch(self, node: tuple[int, ...], choice: int, digest: int) -> None:
        """The candidates for what follows ``node``."""
        self.digests[node] = digest
        score = self.made[node][1] if node else 0
        first = choice if len(node) < self.agree else disagree(choice)
        self.made[(*node, 0)] = first, score - SCORE_STEP
        last = len(node) == self.config.max_draft_len - 1
        changes = choice % 2 == 1 and last and self.config.max_total_draft_tokens > self.config.max_draft_len
        if changes:
            self.made[(*node, 0)] = alternative(choice, 1), score - SCORE_STEP
            self.made[(*node, 1)] = first, score - 2 * SCORE_STEP
        for rank in range(2 if changes else 1, self.config.dynamic_tree_max_topK):
            token = alternative(choice, rank)
            self.made[(*node, rank)] = token, score - SCORE_STEP - rank * SCORE_RANK - token % SCORE_SPREAD

    def go_on(self, depth: int) -> None:
        """Choose the nodes of the last layer that the next call is fed too."""
        layer = [node for node in self.made if len(node) == depth]
        self.fed += self.best(layer)[: self.config.dynamic_tree_max_topK]

    def best(self, nodes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        order = list(self.made)
        return sorted(nodes, key=lambda node: (-self.made[node][1], order.index(node)))

    def kept(self) -> list[tuple[int, ...]]:
        best = self.best(list(self.made))[: self.config.max_total_draft_tokens]
        return [node for node in self.made if node in best]


def parents(nodes: list[tuple[int, ...]]) -> list[int]:
    return [nodes.index(node[:-1]) if node[:-1] else -1 for node in nodes]


@given(scenarios(workers=TREES))
def test_the_tracer_over_slots_gives_the_same_tokens_and_trees(scenario: Scenario) -> None:
    kept: dict[int, Pools] = {}
    for step, taken in zip(scenario.steps, trace(scenario).steps, strict=True):
        pools = [Pools() if row.request is None else kept.setdefault(row.request, Pools()) for row in step.rows]
        for run in range(len(list(taken.named("entered")))):
            grown = forward(scenario.config, pools, step.rows, taken, run)
        updated = taken.substeps[-1]
        for row, tree in zip(step.rows, grown, strict=True):
            if row.request is not None:
                assert updated["draft_tree"][row.request] == (
                    [] if isinstance(row, Context) else parents(tree.kept())
                )  # fmt: skip
        for request, shown in updated["target_kv"].items():
            assert shown == [kept[request].target.get(s, EMPTY) for s in range(len(shown))]
            shown = updated["draft_kv"][request]
            assert shown == [kept[request].draft.get(s, EMPTY) for s in range(len(shown))]


def forward(
    config: Config, pools: list[Pools], rows: tuple[Context | Generation, ...], taken: StepTrace, run: int
) -> list[Tree]:
    """One forward of target and drafter over the slots, whose inputs and outputs are those of the trace."""
    inputs = {**at(taken, "prepared").fields, **at(taken, "entered", run).fields}
    calls = [dict(s.fields) for s in taken.named("draft") if s.run == run]
    outputs = at(taken, "restored", run)
    ingested = zip(by_row(calls[0], calls[0]["input_ids"]), by_row(calls[0], calls[0]["hidden_states"]), strict=True)
    trees = []
    for i, (row, of_row, (ids, states)) in enumerate(zip(rows, fed(inputs), ingested, strict=True)):
        hidden = target(pools[i], of_row)
        if isinstance(row, Context):
            standing = [len(hidden) - 1]
            assert states == hidden
        else:
            standing = verify(of_row, [choose(h) for h in hidden])
            moved = [pools[i].target[of_row[node].slot] for node in standing]
            pools[i].target |= {of_row[0].slot + j: slot for j, slot in enumerate(moved)}
            room = config.max_draft_len + 1 - len(standing)
            assert ids == [choose(hidden[node]) for node in standing] + [PAD_TOKEN] * room
            assert states == [hidden[node] for node in standing] + [hidden[0]] * room
        assert outputs["new_tokens"][i] == [choose(hidden[node]) for node in standing]
        answers = drafter(pools[i], fed(calls[0])[i], states)
        trees.append(Tree(config, row.agree))
        trees[i].branch((), *answers[standing[-1] if isinstance(row, Context) else len(standing) - 1])
    for depth, call in enumerate(calls[1:], start=1):
        lay_on(call, depth, pools, trees)
    for row, tree, drafts in zip(rows, trees, outputs["next_draft_tokens"], strict=True):
        made = [tree.made[node][0] for node in tree.kept()]
        assert drafts == ([PAD_TOKEN] * len(made) if isinstance(row, Context) else made)
    return trees


def verify(row: list[Fed], choices: list[int]) -> list[int]:
    """Nodes from the root on, each the child whose token the target chose."""
    path = [0]
    while True:
        above = [row[0].slot + node for node in path]
        children = [n for n, t in enumerate(row) if t.sees[:-1] == above and t.token == choices[path[-1]]]
        if not children:
            return path
        path += children


def lay_on(call: dict[str, Any], depth: int, pools: list[Pools], trees: list[Tree]) -> None:
    """A later draft call, fed with all nodes so far; each row gets one layer more."""
    states, masks = by_row(call, call["hidden_states"]), call["spec_decoding_packed_mask"]
    for tree, of_row, hidden, mask, cache in zip(trees, fed(call), states, masks, pools, strict=True):
        tree.go_on(depth)
        nodes = tree.fed
        assert [t.token for t in of_row] == [tree.made[node][0] for node in nodes]
        assert hidden == [tree.digests[node[:-1]] for node in nodes]
        assert mask == [
            [j for j, other in enumerate(nodes) if node[: len(other)] == other] for node in nodes
        ]  # fmt: skip
        answers = drafter(cache, of_row, hidden)
        for node, answer in list(zip(nodes, answers, strict=True))[-tree.config.dynamic_tree_max_topK :]:
            tree.branch(node, *answer)
