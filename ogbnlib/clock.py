"""Times of a run that do not jump when the wall clock is changed.

A run reads the wall clock once, at its start. From then on it counts with the kernel's time since
boot. All processes of the run share this start, which is recorded for processes that read the run
later.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .environment import CLOCK_VARIABLE


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# time of the machine's boot, according to the wall clock at the run's start
boot_s = float(os.environ.get(CLOCK_VARIABLE) or time.time() - _since_boot())


def now() -> float:
    """Return the time by the clock of this process's run, in seconds as `time.time()`."""
    return boot_s + _since_boot()


def begin(after_s: float = 0.0) -> dict[str, Any]:
    """Start a run's clock from the wall clock and return the record for its start event.

    The clock starts at `after_s` or later, the last time that an earlier attempt recorded. An
    inherited clock (`CLOCK_VARIABLE`) stays as it is.
    """
    global boot_s
    if CLOCK_VARIABLE not in os.environ:
        boot_s = max(time.time(), after_s) - _since_boot()
    return {"boot": _boot(), "boot_s": boot_s}


def now_by(recorded: Mapping[str, Any] | None) -> float:
    """Return the present time by a run's recorded clock.

    Without a record, on another machine or after a reboot, it is the wall clock's time.
    """
    if recorded and recorded.get("boot") == _boot():
        return float(recorded["boot_s"]) + _since_boot()
    return time.time()


def _boot() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
