"""Promises of `cgroup`: mount points with blanks are found, and a `memory.high` that slows a run down
is read and told."""

import os
from pathlib import Path

import pytest

from ogbnlib.memory import cgroup
from ogbnlib.memory.cgroup import (
    Cgroup,
    Throttle,
    effective_limit,
    find_cgroup,
    high_events,
    throttled_since,
)
from ogbnlib.runs.attempt import Attempt, open_run_dir
from ogbnlib.runs.folder import Run

MB = 2**20


@pytest.fixture
def proc_files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Contents of files of the kernel in place of the real ones."""
    files: dict[str, bytes] = {}
    read = cgroup.read_whole
    monkeypatch.setattr(cgroup, "read_whole", lambda path: files.get(path) or read(path))
    return files


@pytest.fixture
def tree(tmp_path: Path, proc_files: dict[str, bytes]) -> Path:
    """A cgroup v2 tree at a mount point with blanks; this process is in user.slice/run.scope."""
    mount = tmp_path / "c group\\s"
    inner = mount / "user.slice" / "run.scope"
    inner.mkdir(parents=True)
    for folder, high in ((mount / "user.slice", str(100 * MB)), (inner, "max")):
        (folder / "memory.current").write_text("1\n")
        (folder / "memory.max").write_text("max\n")
        (folder / "memory.high").write_text(f"{high}\n")
        (folder / "memory.events").write_text("low 0\nhigh 7\nmax 0\noom 0\noom_kill 0\n")
    point = str(mount).replace("\\", "\\134").replace(" ", "\\040")
    proc_files["/proc/self/cgroup"] = b"0::/user.slice/run.scope\n"
    mountinfo = f"30 23 0:26 / {point} rw - cgroup2 cgroup2 rw\n"
    proc_files["/proc/self/mountinfo"] = mountinfo.encode()
    return mount


def test_limits_below_a_mount_point_with_blanks_are_found(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_cgroup() == (Cgroup(tree / "user.slice" / "run.scope", 2), tree)
    for name in ("OGBNLIB_MEMORY_LIMIT_BYTES", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU"):
        monkeypatch.delenv(name, raising=False)
    (tree / "user.slice" / "memory.max").write_text(str(64 * MB))
    assert effective_limit() == (64 * MB, f"memory cgroup v2 {tree / 'user.slice'}")


def test_in_a_new_namespace_the_cgroup_that_lists_us_is_ours(
    tree: Path, proc_files: dict[str, bytes]
) -> None:
    # as `unshare --cgroup` leaves it
    proc_files["/proc/self/cgroup"] = b"0::/\n"
    mounts = proc_files["/proc/self/mountinfo"]
    proc_files["/proc/self/mountinfo"] = mounts.replace(b" 0:26 / ", b" 0:26 /../.. ")
    assert find_cgroup() is None  # nowhere listed, and the mount counts no memory
    inner = tree / "user.slice" / "run.scope"
    (inner / "cgroup.procs").write_text(f"1\n{os.getpid()}\n")
    assert find_cgroup() == (Cgroup(inner, 2), tree)


def test_a_memory_high_that_slowed_a_run_down_is_a_fact(tree: Path, tmp_path: Path) -> None:
    assert high_events() == {str(tree / "user.slice"): 7}
    assert throttled_since(high_events()) == []
    run_dir = tmp_path / "run"
    with open_run_dir(None, run_dir, resume=False) as (before, _):
        attempt = Attempt(before, command=["python", "train.py"])
        assert Run(run_dir).diagnosis.facts.throttled == []
        events = tree / "user.slice" / "memory.events"
        events.write_text("low 0\nhigh 1007\nmax 0\noom 0\noom_kill 0\n")
        assert Run(run_dir).diagnosis.facts.throttled[0].times == 1000  # at work
        attempt.recorder.stop()
        attempt.end(0)
    found = Run.open(run_dir)
    throttle = Throttle(str(tree / "user.slice"), 100 * MB, 1000)
    assert found.diagnosis.facts.throttled == [throttle]
    for word in ("slowed down 1000 times", "memory.high (100 MB)", "user.slice", "MemoryHigh="):
        assert word in found.diagnosis.text
