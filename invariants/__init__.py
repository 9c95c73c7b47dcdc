"""Named statements about what a speculative-decoding engine did: predicates over one run, relations between two.

``verify`` runs a scenario and asks them all; ``all_invariants`` lists them; ``invariants.testing`` has what other
people's tests need. One step of an engine, and the modules that speak about it:

========  ==================================================================  =========================================
prepared  lengths, counts, tables and inputs of the batch are written         counters, kv_lens, rows, kv_cache, sparse
          and tokens that stand for several, and pages as running totals      compressed, page_arrays
          and masks, for trees and chains, and short rows select all          trees, selection
          in pages of whichever manager it refers to                          two_managers
          and prompts go on from what is known of them                        block_reuse
          and the worker's own metadata, and what all ranks tell each other   spec_metadata, ranks
          as far as the host knows, and what the device is to correct         overlap
          and how many rows each generation has, where they differ            ragged
entered   a forward finds them so, each time that one starts                  kv_lens, sparse, trees, draft_context,
                                                                              selection, compressed, page_arrays,
                                                                              overlap
verified  the target's choices meet the drafts, or a number is forced         acceptance, forced, guided
          by what each draft was proposed for                                 proposals
saved     the worker borrows the metadata: originals are put aside            lifecycle
draft[i]  it edits them: one token per row, no contexts, one token further    kv_lens, rows, counters, sparse, selection
          or all nodes so far of a tree per row, and their mask               trees
          or a block of rows over a context of its own                        draft_context
          or a view of them, whose lengths alone move                         page_arrays
          in pages of its own, which another manager grants                   two_managers
restored  all is given back, but for the KV lengths, which moved on           lifecycle, kv_lens, acceptance, trees,
                                                                              draft_context
          and an automaton's drafts take the place of a model's               enhancer
          and the last accepted token's state is the live one                 recurrent
updated   tokens are emitted, unused cache is taken back, from both managers  output, kv_cache, two_managers, sparse,
          and what a drafter keeps of each request follows                    trees, history, draft_context, enhancer
          and what compressed tokens are made of                              compressed
          and pages are known by the beginnings that they hold                block_reuse
          and how its drafts are to be judged                                 guided, relaxed
failed    or it broke off somewhere, and all is given back just the same      lifecycle, kv_lens, kv_cache, trees,
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
