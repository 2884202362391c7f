"""Checks of `python -m ogbnlib doctor`: versions, limits, disk, shared memory, leftovers, data
sets.

No file is written; whether a memory cgroup can be made is known only by making one, which is
removed.
"""

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import format_bytes
from .files import abandoned, home
from .memory.cgroup import effective_limit
from .memory.limits import make_limit
from .memory.reading import huge_pages

_SHOWN = ("torch", "torch_geometric", "ogb", "numba", "pandas")


@dataclass(frozen=True)
class Check:
    """Result of one check. `fix` is the command or step after a failure, else empty."""

    name: str
    ok: bool
    result: str
    fix: str = ""


def _packages() -> Check:
    """Conflicts of this package's requirements, by pip, else the important versions."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    if done.stderr and not done.stdout:
        return Check("packages", False, done.stderr.splitlines()[-1], "python -m ensurepip")
    wrong = [line for line in done.stdout.splitlines() if line.startswith("ogbnlib ")]
    if not any(importlib.metadata.distributions(name="ogbnlib")):
        wrong = ["ogbnlib is not installed, only its folder is on the path"]
    if wrong:
        return Check("packages", False, "; ".join(wrong), "pip install -e .")
    return Check(
        "packages", True, ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _SHOWN)
    )


def machine() -> str:
    """Versions and machine in two lines, for figures measured on it. Imports torch only if there is
    a GPU."""
    from . import __version__

    versions = [
        f"ogbnlib {__version__}",
        *(f"{name} {importlib.metadata.version(name)}" for name in _SHOWN[:2]),
    ]
    gpu = "no GPU"
    if Path("/proc/driver/nvidia").exists():
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else gpu
    kind = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    where = [
        platform.system(),
        kind[1] if kind else platform.machine(),
        f"{len(os.sched_getaffinity(0))} cores",
    ]
    where += [f"{format_bytes(effective_limit()[0])} of memory", gpu]
    return f"{', '.join(versions)}, Python {platform.python_version()}\n{', '.join(where)}"


def examine(root: Path) -> list[Check]:
    """Run all checks, in the order of the report."""
    root, here, checks = home(root), Path.cwd(), [_packages()]
    if checks[0].ok:
        import torch

        device = (
            torch.cuda.get_device_name()
            if torch.cuda.is_available()
            else "no GPU, training runs on the CPU"
        )
        checks.append(Check("devices", True, device))
    limit, source = effective_limit()
    checks.append(Check("memory limit", True, f"{format_bytes(limit)}, from {source}"))
    trial, refusals = make_limit(min(limit, 2**30))  # a watchdog is possible everywhere
    trial.close()
    more = f" ({'; '.join(refusals)})" if trial.name == "watchdog" else ""
    checks.append(Check("limit by", True, trial.name + more))
    pages = {"always": "on", "madvise": "on where asked for, as run() does"}.get(huge_pages())
    pages = (
        pages or "off, large steps take a third longer; an administrator can switch them to madvise"
    )
    checks.append(Check("huge pages", True, pages))
    # DataLoader workers pass batches through /dev/shm; Docker's default of 64 MB ends in SIGBUS.
    shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    grow = "docker run --shm-size=8g ..., or mount -t tmpfs -o size=8g tmpfs /dev/shm, or keep num_workers=0"
    checks.append(Check("/dev/shm", shm >= 2**30, format_bytes(shm), "" if shm >= 2**30 else grow))
    place = (root if root.is_dir() else here).resolve()
    free = shutil.disk_usage(place).free
    # enough for the notebooks' generated data
    clear = f"free 2 GB under {place}, or work in another folder"
    checks.append(
        Check("disk", free >= 2**31, f"{format_bytes(free)} free", "" if free >= 2**31 else clear)
    )
    # Only a new conversion or propagation to the same place would clear or resume what a killed one
    # left.
    folders = {
        folder.resolve()
        for folder in (root, here, *here.iterdir())
        if os.access(folder, os.R_OK | os.X_OK)
    }
    parts = [path for folder in sorted(folders) if folder.is_dir() for path in abandoned(folder)]
    size = sum(file.stat().st_size for path in parts for file in path.rglob("*") if file.is_file())
    text = (
        f"{format_bytes(size)} of killed processes"
        if parts
        else f"none of killed processes in {root} and {here}"
    )
    checks.append(
        Check("leftovers", not parts, text, f"rm -r {shlex.join(map(str, parts))}" if parts else "")
    )
    names = sorted(path.name for path in root.glob("ogbn_*") if (path / "raw").is_dir())
    return [
        *checks,
        Check(
            "data sets", True, f"{', '.join(names) or 'none'} in {root} (generated data needs none)"
        ),
    ]
