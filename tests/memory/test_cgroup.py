"""Promises of `cgroup`: mount points with blanks are found, and a `memory.high` that slows a run down
is read and told."""

import os
from pathlib import Path

import pytest

from ogbnlib.memory import cgroup
from ogbnlib.memory.cgroup import Cgroup, Throttle, find_cgroup, high_events, throttled_since
from ogbnlib.runs.attempt import Attempt, open_run_dir
from ogbnlib.runs.folder import Run

MB = 2**20


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    files = {
        "/proc/self/cgroup": b"0::/user.slice/run.scope\n",
        "/proc/self/mountinfo": f"30 23 0:26 / {point} rw - cgroup2 cgroup2 rw\n".encode(),
    }
    read = cgroup.read_whole
    monkeypatch.setattr(
        cgroup, "read_whole", lambda path: files[path] if path in files else read(path)
    )
    return mount


def test_a_mount_point_with_blanks_and_backslashes_is_found(tree: Path) -> None:
    assert find_cgroup() == (Cgroup(tree / "user.slice" / "run.scope", 2), tree)


def test_in_a_new_namespace_the_cgroup_that_lists_us_is_ours(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as `unshare --cgroup` leaves it
    read = cgroup.read_whole

    def read_inside(path: str) -> bytes | None:
        text = read(path)
        if path == "/proc/self/cgroup":
            return b"0::/\n"
        return text and text.replace(b" 0:26 / ", b" 0:26 /../.. ")

    monkeypatch.setattr(cgroup, "read_whole", read_inside)
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


def test_a_run_that_met_no_memory_high_is_told_nothing_of_it(tree: Path, tmp_path: Path) -> None:
    with open_run_dir(None, tmp_path / "run", resume=False) as (before, _):
        attempt = Attempt(before, command=["python", "train.py"])
        attempt.recorder.stop()
        attempt.end(0)
    assert Run.open(tmp_path / "run").diagnosis.facts.throttled == []
