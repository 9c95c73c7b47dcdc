"""Seeded defects on the device, in a process that they may cost: ``python -m gpu_tests.hunting ID...``.

Prints two lines of JSON for each, for the engine as it is and with the defect: invariants that are violated, and the
error if the device was lost to it. That ends the process.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext

from engines.portable.pyexecutor.py_executor import is_cuda_error
from gpu_tests import driving
from gpu_tests.crashing import what_the_device_says
from invariants import all_invariants, verify
from invariants.registry import Relation
from museum import BUGS, seeded
from tests.museum.scenario_of import scenario_of

PREDICATES = {one.slug for one in all_invariants() if not isinstance(one, Relation)}
"""On a device a defect may be noticed elsewhere than where it is without."""


def hunt(id: str, *, with_bug: bool) -> dict[str, object]:
    """What is seen in the smallest scenario of the defect."""
    scenario, asked = scenario_of(BUGS[id]), PREDICATES | {*BUGS[id].caught_by}
    with seeded(id) if with_bug else nullcontext():
        try:
            violations = verify(scenario, driving.drive, only=asked).violations
        except RuntimeError as error:
            if not is_cuda_error(error):
                raise
            return {"noticed": [], "lost": str(error).splitlines()[0]}
    # What is noticed of a step that has cost the device is noticed; the next scenario would find out.
    lost = what_the_device_says() if driving.DEVICE == "cuda" else ""
    return {"noticed": sorted({violation.invariant for violation in violations}), "lost": lost}


if __name__ == "__main__":
    for id in sys.argv[1:]:
        for with_bug in (False, True):
            seen = hunt(id, with_bug=with_bug)
            print(json.dumps({"id": id, "with_bug": with_bug, **seen}), flush=True)
            if seen["lost"]:
                # A device that is lost is not taken down.
                os._exit(0)
