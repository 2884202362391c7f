"""Times of a run that no change of the wall clock disturbs.

A run reads the wall clock once, at its start; from there the kernel's time since boot counts. All
its processes share that start, and it is recorded, so that a reader started later counts likewise.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .environment import CLOCK_VARIABLE


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# wall-clock time of the machine's boot, as it was when the run began
boot_s = float(os.environ.get(CLOCK_VARIABLE) or time.time() - _since_boot())


def now() -> float:
    """Return `time.time()` seconds by the clock of this process's run."""
    return boot_s + _since_boot()


def begin(after_s: float = 0.0) -> dict[str, Any]:
    """Read the wall clock for a run, never before its earlier attempt's end `after_s`; return the
    record for its start."""
    global boot_s
    if CLOCK_VARIABLE not in os.environ:
        boot_s = max(time.time(), after_s) - _since_boot()
    return {"boot": _boot(), "boot_s": boot_s}


def now_by(recorded: Mapping[str, Any] | None) -> float:
    """Return the present time by a run's recorded clock, if this is its machine since the same boot;
    else by the wall clock."""
    if recorded and recorded.get("boot") == _boot():
        return float(recorded["boot_s"]) + _since_boot()
    return time.time()


def _boot() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
