"""What `python -m ogbnlib doctor` looks at: versions, limits, disk, shared memory, data sets."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError, format_bytes
from ..memory.cgroup import effective_limit
from ..memory.limits import make_limit

_PACKAGE = "ogbnlib"
_SHM_BYTES = 2**30  # DataLoader workers pass batches through /dev/shm; Docker's default of 64 MB ends in SIGBUS
_DISK_BYTES = 2 * 2**30  # enough for the notebooks' generated data


@dataclass(frozen=True)
class Check:
    """One finding. `mend` is a command or a step to take where `ok` is false, else empty."""

    name: str
    ok: bool
    found: str
    mend: str = ""


def _versions() -> list[Check]:
    """Every pinned or bounded requirement of this package against what is installed."""
    from packaging.requirements import Requirement

    checks = []
    try:
        requirements = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return [Check(_PACKAGE, False, "not installed, only its folder is on the path", "pip install -e .")]
    for line in requirements:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        mend = f'pip install "{wanted.name}{wanted.specifier}"'
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(wanted.name, False, f"not installed, needs {wanted.specifier}", mend))
            continue
        # A local label such as +cpu or +cu126 names the build, not another version.
        fits = wanted.specifier.contains(re.sub(r"\+.*", "", version), prereleases=True)
        checks.append(Check(wanted.name, fits, f"{version}, needs {wanted.specifier}", "" if fits else mend))
    return checks


def _limits() -> list[Check]:
    limit, source = effective_limit()
    checks = [Check("memory limit", True, f"{format_bytes(limit)}, from {source}")]
    try:
        engine, refused = make_limit(min(limit, 2**30))
        name = engine.name
        engine.close()
    except InputError as error:
        return [*checks, Check("limit engine", False, str(error), "run as a user who may create memory cgroups")]
    found = name if name != "watchdog" else f"watchdog ({'; '.join(refused)})"
    return [*checks, Check("limit engine", True, found)]


def _space(root: Path) -> list[Check]:
    checks = []
    shm = Path("/dev/shm")
    if shm.is_dir():
        total = shutil.disk_usage(shm).total
        mend = "docker run --shm-size=8g ..., or mount -o remount,size=8g /dev/shm, or keep num_workers=0"
        checks.append(Check("/dev/shm", total >= _SHM_BYTES, format_bytes(total), "" if total >= _SHM_BYTES else mend))
    else:
        checks.append(Check("/dev/shm", False, "missing", "mount -t tmpfs -o size=8g tmpfs /dev/shm"))
    here = root if root.is_dir() else Path.cwd()
    free = shutil.disk_usage(here).free
    mend = f"free {format_bytes(_DISK_BYTES)} under {here.resolve()}, or work in another folder"
    checks.append(Check("disk", free >= _DISK_BYTES, f"{format_bytes(free)} free", "" if free >= _DISK_BYTES else mend))
    return checks


def _accelerator() -> Check:
    import torch
    import torch_geometric.typing as installed

    samplers = [
        name
        for name, has in (("pyg-lib", installed.WITH_PYG_LIB), ("torch-sparse", installed.WITH_TORCH_SPARSE))
        if has
    ]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU, training runs on the CPU"
    return Check("devices", True, f"{device}; sampler='pyg': {', '.join(samplers) or 'not installed (optional)'}")


def _datasets(root: Path) -> Check:
    found = sorted(path.name for path in root.glob("ogbn_*") if (path / "raw").is_dir()) if root.is_dir() else []
    return Check("data sets", True, f"{', '.join(found) or 'none'} in {root} (generated data needs none)")


def examine(root: Path) -> list[Check]:
    """All checks, in the order they are shown."""
    checks = _versions()
    if all(check.ok for check in checks):
        checks.append(_accelerator())
    return [*checks, *_limits(), *_space(root), _datasets(root)]
