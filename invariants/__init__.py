"""Named statements about what a speculative-decoding engine did: predicates over one run, relations between two.

``verify`` runs a scenario and asks them all; ``all_invariants`` lists them; ``invariants.testing`` has what other
people's tests need. The modules below are imported causes first, which is the order of severity.
"""

from invariants import lifecycle, counters, kv_lens, rows, acceptance, kv_cache, output, relations  # noqa: F401, I001
from invariants.registry import Invariant, Predicate, Relation, Twin, all_invariants, find, invariant, relation
from invariants.verdict import Tally, Verdict, verify

__all__ = [
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
