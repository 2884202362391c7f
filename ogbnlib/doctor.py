"""Checks of `python -m ogbnlib doctor`: versions, limits, disk, shared memory, leftovers, data sets."""

from __future__ import annotations

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

from .errors import InputError, format_bytes
from .files import abandoned, home
from .memory.cgroup import effective_limit
from .memory.limits import make_limit

_PACKAGE = "ogbnlib"
_SHOWN = ("torch", "torch_geometric", "ogb", "numba", "pandas")
_SHM_BYTES = 2**30  # DataLoader workers pass batches through /dev/shm; Docker's default of 64 MB ends in SIGBUS
_DISK_BYTES = 2 * 2**30  # enough for the notebooks' generated data


@dataclass(frozen=True)
class Check:
    """Result of one check. `mend` is the command or step that fixes a failure, else empty."""

    name: str
    ok: bool
    found: str
    mend: str = ""


def _packages() -> Check:
    """Conflicts of this package's requirements, by pip, else the important versions."""
    mend = "pip install -e ."
    try:
        importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return Check("packages", False, f"{_PACKAGE} is not installed, only its folder is on the path", mend)
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    if done.stderr and not done.stdout:
        return Check("packages", False, done.stderr.splitlines()[-1], "python -m ensurepip")
    wrong = [line for line in done.stdout.splitlines() if line.startswith(f"{_PACKAGE} ")]
    if wrong:
        return Check("packages", False, "; ".join(wrong), mend)
    return Check("packages", True, ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _SHOWN))


def machine() -> str:
    """Versions and machine in two lines, for figures measured on it. Imports torch only if there is a GPU."""
    from . import __version__

    versions = [f"{_PACKAGE} {__version__}", *(f"{name} {importlib.metadata.version(name)}" for name in _SHOWN[:2])]
    gpu = "no GPU"
    if Path("/proc/driver/nvidia").exists():
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else gpu
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    kind = re.search(r"^model name\s*: (.+)$", info, re.MULTILINE)
    where = [platform.system(), kind[1] if kind else platform.machine(), f"{len(os.sched_getaffinity(0))} cores"]
    where += [f"{format_bytes(effective_limit()[0])} of memory", gpu]
    return f"{', '.join(versions)}, Python {platform.python_version()}\n{', '.join(where)}"


def _limits() -> list[Check]:
    limit, source = effective_limit()
    checks = [Check("memory limit", True, f"{format_bytes(limit)}, from {source}")]
    try:
        trial, refusals = make_limit(min(limit, 2**30))
        trial.close()
    except InputError as error:
        return [*checks, Check("limit by", False, str(error), "run as a user who may create memory cgroups")]
    name = trial.name if trial.name != "watchdog" else f"watchdog ({'; '.join(refusals)})"
    return [*checks, Check("limit by", True, name)]


def _space(root: Path) -> list[Check]:
    shm = Path("/dev/shm")
    total = shutil.disk_usage(shm).total if shm.is_dir() else 0
    here = root if root.is_dir() else Path.cwd()
    free = shutil.disk_usage(here).free
    grow = "docker run --shm-size=8g ..., or mount -t tmpfs -o size=8g tmpfs /dev/shm, or keep num_workers=0"
    clear = f"free {format_bytes(_DISK_BYTES)} under {here.resolve()}, or work in another folder"
    return [
        Check("/dev/shm", total >= _SHM_BYTES, format_bytes(total), "" if total >= _SHM_BYTES else grow),
        Check("disk", free >= _DISK_BYTES, f"{format_bytes(free)} free", "" if free >= _DISK_BYTES else clear),
    ]


def _accelerator() -> Check:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU, training runs on the CPU"
    return Check("devices", True, device)


def _datasets(root: Path) -> Check:
    names = sorted(path.name for path in root.glob("ogbn_*") if (path / "raw").is_dir())
    return Check("data sets", True, f"{', '.join(names) or 'none'} in {root} (generated data needs none)")


def _leftovers(root: Path) -> Check:
    """Files of killed conversions and propagations; only a new one to the same place would clear or resume them."""
    here = Path.cwd()
    folders = {folder.resolve() for folder in (root, here, *here.iterdir()) if os.access(folder, os.R_OK | os.X_OK)}
    paths = [path for folder in sorted(folders) if folder.is_dir() for path in abandoned(folder)]
    if not paths:
        return Check("leftovers", True, f"none of killed processes in {root} and {here}")
    size = sum(file.stat().st_size for path in paths for file in path.rglob("*") if file.is_file())
    names = shlex.join(map(str, paths))
    return Check("leftovers", False, f"{format_bytes(size)} of killed processes", f"rm -r {names}")


def examine(root: Path) -> list[Check]:
    """Run all checks, in the order of the report."""
    root = home(root)
    packages = _packages()
    devices = [_accelerator()] if packages.ok else []
    return [packages, *devices, *_limits(), *_space(root), _leftovers(root), _datasets(root)]
