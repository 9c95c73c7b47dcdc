"""How much memory a process has had."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Final

MOST_MIB: Final = 600
"""What a process that searches may have resident: more than twice what torch takes as it is imported."""
GROWTH_MIB: Final = 200
"""How much more it may have than after its first scenarios: a torch that is built for CUDA takes 500 by itself."""
_STATUS: Final = Path("/proc/self/status")
_KIB, _MIB = 1024, 1024**2


def peak_mib() -> int:
    """MiB that this process has had resident at most."""
    # Of a process that was spawned, getrusage also counts what its parent had at that moment.
    if _STATUS.exists():
        return next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if "VmHWM" in line) // _KIB
    unit = _MIB if sys.platform == "darwin" else _KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
