"""Hypothesis profiles: for development, for CI, for a nightly run.

Each names its parent. A profile without one takes the profile that is active for its parent, and under ``CI=true``
that is Hypothesis's own ``ci``: a nightly run would inherit ``derandomize=True, database=None`` and repeat the same
cases for ever.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from scenarios import UsageError, closest

DEVELOPMENT: Final = "specfuzz"
CI: Final = "specfuzz-ci"
NIGHTLY: Final = "specfuzz-nightly"
PROFILES: Final = (DEVELOPMENT, CI, NIGHTLY)


def register_profiles() -> None:
    """Register the profiles; their database lies under ``SPECFUZZ_HOME``, by default ``.specfuzz``, as a cache only.

    specfuzz          random, 200 examples, failures remembered
    specfuzz-ci       the same 300 examples on every run, nothing remembered
    specfuzz-nightly  random, 20,000 examples, failures remembered

    None has a deadline, as the first case warms up a device, nor an explain phase, as that takes the monitoring tool
    that coverage or fault injection may need.
    """
    home = Path(os.environ.get("SPECFUZZ_HOME") or ".specfuzz")
    database = DirectoryBasedExampleDatabase(home / "hypothesis")
    common = settings(
        settings.get_profile("default"),
        deadline=None,
        phases=tuple(p for p in Phase if p is not Phase.explain),
        print_blob=True,
        suppress_health_check=(HealthCheck.too_slow,),
        stateful_step_count=20,
        derandomize=False,
        database=database,
    )
    settings.register_profile(DEVELOPMENT, parent=common, max_examples=200)
    settings.register_profile(CI, parent=common, max_examples=300, derandomize=True, database=None)
    settings.register_profile(NIGHTLY, parent=common, max_examples=20_000)


def load_profile(name: str) -> None:
    """Register the profiles and make one of them the active one; ``UsageError`` for an unknown name."""
    if name not in PROFILES:
        raise UsageError(f"profile: {name!r} does not exist; {closest(name, PROFILES)}")
    register_profiles()
    settings.load_profile(name)
