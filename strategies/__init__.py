"""Hypothesis strategies for scenarios and their parts. Public: import them in tests of your own.

Plural nouns, keyword-only options, a one-line ``UsageError`` for arguments that make no sense. Draws are valid by
construction, with ``scenarios.Schedule`` as the judge of what can happen next.
"""

from strategies.config import configs, requests
from strategies.drafting import agreements, draft_lengths
from strategies.fault import KINDS, faults
from strategies.layout import Layout, layouts
from strategies.machine import ScenarioMachine, make_machine
from strategies.phase import phases
from strategies.scenario import faulted_scenarios, scenarios

__all__ = [
    "KINDS",
    "Layout",
    "ScenarioMachine",
    "agreements",
    "configs",
    "draft_lengths",
    "faulted_scenarios",
    "faults",
    "layouts",
    "make_machine",
    "phases",
    "requests",
    "scenarios",
]
