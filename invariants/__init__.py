"""Named statements about what a speculative-decoding engine did: predicates over one run, relations between two.

``verify`` runs a scenario and asks them all; ``all_invariants`` lists them; ``invariants.testing`` has what other
people's tests need. One step of an engine, and the modules that speak about it:

========  ==================================================================  =========================================
prepared  lengths, counts, tables and inputs of the batch are written         counters, kv_lens, rows, kv_cache, sparse
          compressed tokens; page tables as running totals                    compressed, page_arrays
          masks of trees and chains; rows so short that they select all       trees, selection
          page tables of both KV-cache managers                               two_managers
          where a prompt starts that finds its first pages known              block_reuse
          the worker's own metadata; what all ranks tell each other           spec_metadata, ranks
          what the host supposes of the step in flight, and corrections       overlap
          how many rows each generation verifies                              ragged
entered   a forward starts, and finds what was prepared                       kv_lens, sparse, trees, draft_context,
                                                                              selection, compressed, page_arrays,
                                                                              overlap
verified  drafts are accepted, by the target's choices or by force            acceptance, forced, guided
          the proposal by which each draft is judged                          proposals
saved     the worker borrows the metadata: originals are put aside            lifecycle
draft[i]  a linear drafter: one token per row, no contexts, one token further kv_lens, rows, counters, sparse, selection
          a tree: all nodes so far of each row, and their mask                trees
          a drafter with a context of its own: a block of rows                draft_context
          a drafter that reads a view of the metadata                         page_arrays
          a drafter with a KV cache of its own                                two_managers
restored  all is given back, but for the KV lengths, which moved on           lifecycle, kv_lens, acceptance, trees,
                                                                              draft_context
          drafts of an automaton in place of a model's                        enhancer
          the recurrent state after the last accepted token is the live one   recurrent
updated   tokens are emitted, unused cache is taken back, in both managers    output, kv_cache, two_managers, sparse
          what a drafter keeps of each request                                trees, history, draft_context, enhancer
          what compressed tokens are made of                                  compressed
          which pages are known, and by whom they are owned                   block_reuse
          how later drafts will be judged                                     guided, relaxed
failed    a forward broke off somewhere, and all is given back all the same   lifecycle, kv_lens, kv_cache, trees,
                                                                              draft_context, two_managers, enhancer
========  ==================================================================  =========================================

``ranks`` also asks what all ranks run together. ``relations`` asks about none of them by name: two runs must end up
alike.
"""

from importlib import import_module
from typing import Final

from invariants.predicates import PREDICATES
from invariants.registry import Invariant, Predicate, Relation, Twin, all_invariants, find, invariant, relation
from invariants.verdict import Tally, Verdict, verify

__all__ = [
    "PREDICATES",
    "Invariant",
    "Predicate",
    "Relation",
    "Tally",
    "Twin",
    "Verdict",
    "all_invariants",
    "find",
    "invariant",
    "relation",
    "verify",
]

_CAUSES_FIRST: Final = (
    *("lifecycle", "two_managers", "counters", "ranks", "trees", "kv_lens", "overlap", "rows", "sparse", "ragged"),
    *("selection", "compressed", "page_arrays", "draft_context", "enhancer", "forced", "guided", "relaxed"),
    *("spec_metadata", "recurrent", "proposals", "acceptance", "block_reuse", "kv_cache", "history", "output"),
    "relations",
)
"""Modules that register invariants. Their order is that of severity: the first of two at one sub-step is reported."""

for _module in _CAUSES_FIRST:
    import_module(f"{__name__}.{_module}")
