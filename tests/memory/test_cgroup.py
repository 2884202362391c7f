"""Promises of `cgroup`: this process's cgroup is found, wherever its tree is mounted."""

from pathlib import Path

import pytest
from conftest import MB

from ogbnlib.memory import cgroup
from ogbnlib.memory.cgroup import Cgroup, effective_limit, find_cgroup


def test_limits_below_another_mount_point_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = tmp_path / "user.slice"  # the limit of this process's cgroup is that of the outer one
    inner = outer / "run.scope"
    inner.mkdir(parents=True)
    for folder, limit in ((outer, 64 * MB), (inner, "max")):
        (folder / "memory.current").write_text("1\n")
        (folder / "memory.max").write_text(f"{limit}\n")
    files = {"/proc/self/cgroup": b"0::/user.slice/run.scope\n"}
    files["/proc/self/mountinfo"] = f"30 23 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n".encode()
    read = cgroup.read_whole
    monkeypatch.setattr(cgroup, "read_whole", lambda path: files.get(path) or read(path))
    assert find_cgroup() == Cgroup(inner, 2, tmp_path)
    for name in ("OGBNLIB_MEMORY_LIMIT_BYTES", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU"):
        monkeypatch.delenv(name, raising=False)
    assert effective_limit() == (64 * MB, f"memory cgroup v2 {outer}")
