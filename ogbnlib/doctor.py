"""Checks of `python -m ogbnlib doctor`: versions, limits, disk, shared memory.

No file is written. A memory cgroup is made and removed, since only that shows whether one can be
made.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import format_bytes
from .memory.cgroup import effective_limit
from .memory.limits import make_limit

_SHOWN = ("torch", "torch_geometric", "ogb", "numba", "pandas")


@dataclass(frozen=True)
class _Check:
    """Result of one check; `fix` is the command or step after a failure, else empty."""

    name: str
    result: str
    fix: str = ""

    def __str__(self) -> str:
        if not self.fix:
            return f"ok   {self.name:<14} {self.result}"
        return f"FAIL {self.name:<14} {self.result}\n{'':<19} fix: {self.fix}"


def examine() -> list[_Check]:
    """Run all checks, in the order of the report."""
    checks = [_packages()]
    if not checks[0].fix:  # else torch may be missing or broken
        checks.append(_Check("devices", _gpu() or "no GPU, training runs on the CPU"))
    limit_bytes, source = effective_limit()
    # The strictest kind that this machine allows; `refusals` say why stricter ones can't be made.
    trial, refusals = make_limit(min(limit_bytes, 2**30))  # any size: nothing runs in it
    trial.close()  # removes the cgroup
    kind = trial.name
    if kind == "watchdog":
        kind += f" ({'; '.join(refusals)})"
    grow = "docker run --shm-size=8g ..., or mount -t tmpfs -o size=8g tmpfs /dev/shm, or keep num_workers=0"
    return [
        *checks,
        _Check("memory limit", f"{format_bytes(limit_bytes)}, from {source}"),
        _Check("limit by", kind),
        # DataLoader workers pass batches through /dev/shm; with Docker's 64 MB they die of SIGBUS.
        _room("/dev/shm", "/dev/shm", 2**30, grow),
        # 2 GB are enough for the notebooks' generated data
        _room("disk", ".", 2**31, f"free 2 GB under {Path.cwd()}, or work in another folder"),
    ]


def _packages() -> _Check:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    # "ogbnlib 0.2.0 has requirement torch==..., but you have torch ...": a line a conflict
    wrong = [line for line in done.stdout.splitlines() if line.startswith("ogbnlib ")]
    if not any(importlib.metadata.distributions(name="ogbnlib")):
        wrong = ["ogbnlib is not installed, only its folder is on the path"]
    if wrong:
        remedy = "install ogbnlib, or the named package in the required version, with pip"
        return _Check("packages", "; ".join(wrong), remedy)
    versions = _versions(_SHOWN)
    if done.stderr and not done.stdout:  # no pip, as in an environment made by uv
        versions += "; conflicts are not known, as pip is not installed here: try `uv pip check`"
    return _Check("packages", versions)


def _versions(names: Iterable[str]) -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _room(name: str, folder: str, least_bytes: int, fix: str) -> _Check:
    free_bytes = shutil.disk_usage(folder).free if Path(folder).is_dir() else 0
    needed_fix = fix if free_bytes < least_bytes else ""
    return _Check(name, f"{format_bytes(free_bytes)} free", needed_fix)


def machine() -> str:
    """Versions and machine in two lines, to print with measured figures. Imports torch only if
    there is an NVIDIA driver."""
    from . import __version__

    gpu = _gpu() if Path("/proc/driver/nvidia").exists() else ""
    kinds = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    where = [
        platform.system(),
        *(kinds[:1] or [platform.machine()]),  # on ARM /proc/cpuinfo has no model names
        f"{len(os.sched_getaffinity(0))} cores",
        f"{format_bytes(effective_limit()[0])} of memory",
        gpu or "no GPU",
    ]
    versions = f"ogbnlib {__version__}, {_versions(_SHOWN[:2])}, Python {platform.python_version()}"
    return f"{versions}\n{', '.join(where)}"
