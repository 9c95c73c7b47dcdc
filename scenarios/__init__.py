"""The vocabulary: scenarios, traces, findings and their JSON. Imports nothing else of the project."""

from scenarios.codec import dumps, loads, scenario_from_json, scenario_to_json
from scenarios.errors import ScenarioError, UsageError, closest
from scenarios.finding import Finding, Violation, finding_from_json, finding_loads, finding_to_json
from scenarios.model import (
    FORMAT_VERSION,
    KV_CACHE_MANAGERS,
    Config,
    Context,
    Fault,
    FaultKind,
    Generation,
    Peer,
    Phase,
    Request,
    Scenario,
    Step,
)
from scenarios.plans import RequestState, RowPlan
from scenarios.ranks import batches, kept_in_step, padding
from scenarios.schedule import Schedule, check, walk
from scenarios.trace import FIELDS, StepTrace, Substep, Trace
from scenarios.traits import BACKENDS, WORKERS, BackendTraits, WorkerTraits

__all__ = [
    "BACKENDS",
    "FIELDS",
    "FORMAT_VERSION",
    "KV_CACHE_MANAGERS",
    "WORKERS",
    "BackendTraits",
    "Config",
    "Context",
    "Fault",
    "FaultKind",
    "Finding",
    "Generation",
    "Peer",
    "Phase",
    "Request",
    "RequestState",
    "RowPlan",
    "Scenario",
    "ScenarioError",
    "Schedule",
    "Step",
    "StepTrace",
    "Substep",
    "Trace",
    "UsageError",
    "Violation",
    "WorkerTraits",
    "batches",
    "check",
    "closest",
    "dumps",
    "finding_from_json",
    "finding_loads",
    "finding_to_json",
    "kept_in_step",
    "loads",
    "padding",
    "scenario_from_json",
    "scenario_to_json",
    "walk",
]
