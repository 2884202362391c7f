"""Checks of `python -m ogbnlib doctor`: versions, limits, disk, shared memory, data sets.

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
from dataclasses import dataclass
from pathlib import Path

from .errors import format_bytes
from .files import home
from .memory.cgroup import effective_limit
from .memory.limits import make_limit

_SHOWN = ("torch", "torch_geometric", "ogb", "numba", "pandas")


@dataclass(frozen=True)
class _Check:
    """Result of one check. `fix` is the command or step after a failure, else empty."""

    name: str
    ok: bool
    result: str
    fix: str = ""


def _packages() -> _Check:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    wrong = [line for line in done.stdout.splitlines() if line.startswith("ogbnlib ")]
    if not any(importlib.metadata.distributions(name="ogbnlib")):
        wrong = ["ogbnlib is not installed, only its folder is on the path"]
    if wrong:
        remedy = "install ogbnlib, or the named package in the required version, with pip"
        return _Check("packages", False, "; ".join(wrong), remedy)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _SHOWN)
    if done.stderr and not done.stdout:  # no pip, as in an environment made by uv
        versions += "; conflicts are not known, as pip is not installed here: try `uv pip check`"
    return _Check("packages", True, versions)


def machine() -> str:
    """Versions and machine in two lines, to print with measured figures. Imports torch only if
    there is an NVIDIA driver."""
    from . import __version__

    versions = [
        f"ogbnlib {__version__}",
        *(f"{name} {importlib.metadata.version(name)}" for name in _SHOWN[:2]),
    ]
    gpu = _gpu() if Path("/proc/driver/nvidia").exists() else ""
    kinds = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    where = [
        platform.system(),
        *(kinds[:1] or [platform.machine()]),
        f"{len(os.sched_getaffinity(0))} cores",
        f"{format_bytes(effective_limit()[0])} of memory",
        gpu or "no GPU",
    ]
    return f"{', '.join(versions)}, Python {platform.python_version()}\n{', '.join(where)}"


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def examine(root: Path) -> list[_Check]:
    """Run all checks, in the order of the report."""
    root = home(root)
    checks = [_packages()]
    if checks[0].ok:
        checks.append(_Check("devices", True, _gpu() or "no GPU, training runs on the CPU"))
    limit_bytes, source = effective_limit()
    trial, refusals = make_limit(min(limit_bytes, 2**30))  # a watchdog is possible everywhere
    trial.close()
    reasons = f" ({'; '.join(refusals)})" if trial.name == "watchdog" else ""
    # DataLoader workers pass batches through /dev/shm; with Docker's 64 MB they die of SIGBUS.
    shm_bytes = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    grow = "docker run --shm-size=8g ..., or mount -t tmpfs -o size=8g tmpfs /dev/shm, or keep num_workers=0"
    folder = (root if root.is_dir() else Path.cwd()).resolve()
    free_bytes = shutil.disk_usage(folder).free
    names = sorted(path.name for path in root.glob("ogbn_*") if (path / "raw").is_dir())
    return [
        *checks,
        _Check("memory limit", True, f"{format_bytes(limit_bytes)}, from {source}"),
        _Check("limit by", True, f"{trial.name}{reasons}"),
        _at_least("/dev/shm", shm_bytes, 2**30, format_bytes(shm_bytes), grow),
        _at_least(
            "disk",
            free_bytes,
            2**31,  # enough for the notebooks' generated data
            f"{format_bytes(free_bytes)} free",
            f"free 2 GB under {folder}, or work in another folder",
        ),
        _Check(
            "data sets", True, f"{', '.join(names) or 'none'} in {root} (generated data needs none)"
        ),
    ]


def _at_least(name: str, size_bytes: int, least_bytes: int, result: str, fix: str) -> _Check:
    is_large = size_bytes >= least_bytes
    return _Check(name, is_large, result, "" if is_large else fix)
