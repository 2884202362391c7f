"""Promises of `cgroup`: this process's cgroup is found, wherever its tree is mounted."""

from pathlib import Path

import pytest
from conftest import MB

from ogbnlib.memory import cgroup
from ogbnlib.memory.cgroup import Cgroup, effective_limit, find_cgroup


@pytest.fixture
def proc_files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Contents of files of the kernel in place of the real ones."""
    files: dict[str, bytes] = {}
    read = cgroup.read_whole
    monkeypatch.setattr(cgroup, "read_whole", lambda path: files.get(path) or read(path))
    return files


@pytest.fixture
def tree(tmp_path: Path, proc_files: dict[str, bytes]) -> Path:
    """A cgroup v2 tree; this process is in user.slice/run.scope."""
    mount = tmp_path / "cgroup"
    inner = mount / "user.slice" / "run.scope"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "memory.current").write_text("1\n")
        (folder / "memory.max").write_text("max\n")
    proc_files["/proc/self/cgroup"] = b"0::/user.slice/run.scope\n"
    mountinfo = f"30 23 0:26 / {mount} rw - cgroup2 cgroup2 rw\n"
    proc_files["/proc/self/mountinfo"] = mountinfo.encode()
    return mount


def test_limits_below_another_mount_point_are_found(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_cgroup() == (Cgroup(tree / "user.slice" / "run.scope", 2), tree)
    for name in ("OGBNLIB_MEMORY_LIMIT_BYTES", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU"):
        monkeypatch.delenv(name, raising=False)
    (tree / "user.slice" / "memory.max").write_text(str(64 * MB))
    assert effective_limit() == (64 * MB, f"memory cgroup v2 {tree / 'user.slice'}")
