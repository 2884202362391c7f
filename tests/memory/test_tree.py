"""Promises of `tree`: daemons stay in the tree, count and end with it; a stopped watcher stops it."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MB, is_alive, touched, wait_until

from ogbnlib.memory.limits import make_limit
from ogbnlib.memory.tree import _state_of, process_tree
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import watch
from ogbnlib.runs.supervise import supervise

# Becomes a daemon, fills memory, and tells its number by a file that appears whole.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        held = []
        for _ in range(int(sys.argv[2])):
            held.append(b"x" * 2**20)
            time.sleep(0.002)
        with open(sys.argv[1] + ".part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(sys.argv[1] + ".part", sys.argv[1])
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1] + ".seen"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("limit_by", ["auto", "watchdog"])
def test_a_daemon_counts_and_is_ended_at_the_end(tmp_path: Path, limit_by: str) -> None:
    file = tmp_path / "daemon"
    argv = [sys.executable, "-c", DAEMON, str(file), "100"]

    def seen() -> bool:
        return (Run(tmp_path).record.held_peak_bytes or 0) > 100 * MB and file.exists()

    with touched(tmp_path / "daemon.seen", seen):
        done = supervise(argv, tmp_path, make_limit(300 * MB, limit_by)[0], echo=False)
    daemon = int(file.read_text())
    assert done.exit_code == 0
    assert not is_alive(daemon)
    assert (Run(tmp_path).record.held_peak_bytes or 0) > 100 * MB


def test_a_daemon_past_the_limit_is_killed_by_the_watchdog(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", DAEMON, str(tmp_path / "daemon"), "1000"]
    done = supervise(argv, tmp_path, make_limit(100 * MB, "watchdog")[0], echo=False)
    assert (done.exit_code, done.evidence["killed_by"]) == (137, "watchdog")
    assert done.evidence["oom_kills"] is None
    assert not (tmp_path / "daemon").exists()


def test_a_daemon_with_an_empty_environment_is_known(tmp_path: Path) -> None:
    code = f"env -i setsid sleep 600 & echo $! > {tmp_path}/pid; sleep 1; exit 3"
    done = supervise(["sh", "-c", code], tmp_path, make_limit(None, "watchdog")[0], echo=False)
    assert done.exit_code == 3
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_other_children_are_left_alone_and_none_is_adopted_later(tmp_path: Path) -> None:
    others = [subprocess.Popen(["sleep", "600"], start_new_session=new) for new in (False, True)]
    try:
        code = "import time; time.sleep(0.5)"
        watch([sys.executable, "-c", code], run_dir=tmp_path / "run", echo=False)
        assert all(is_alive(other.pid) for other in others)
        assert [other.poll() for other in others] == [None, None]
    finally:
        for other in others:
            other.kill()
            other.wait()
    adopts = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(37, ctypes.byref(adopts))  # PR_GET_CHILD_SUBREAPER
    assert adopts.value == 0


@pytest.mark.parametrize("limit_by", ["auto", "watchdog"])
def test_a_stopped_watcher_stops_its_command(tmp_path: Path, limit_by: str) -> None:
    ready = tmp_path / "ready"
    child = f"import time\nopen({str(ready)!r}, 'w')\nwhile True:\n    time.sleep(0.01)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    options = ["--run-dir", str(tmp_path / "run"), "--memory-limit", "1 GB", "--limit-by", limit_by]
    argv = [sys.executable, "-m", "ogbnlib", "watch", *options, "--", sys.executable, "-c", code]
    watcher = subprocess.Popen(argv, stderr=subprocess.DEVNULL, start_new_session=True)
    members: list[int] = []

    def states() -> set[str]:
        return {_state_of(pid) for pid in (watcher.pid, *members)}

    try:
        wait_until(ready.exists, "the command's child")
        members += process_tree(watcher.pid)[1:]
        for _ in range(2):
            os.kill(watcher.pid, signal.SIGTSTP)
            wait_until(lambda: states() == {"T"}, "all to stop")
            os.kill(watcher.pid, signal.SIGCONT)
            wait_until(lambda: "T" not in states(), "all to go on")
        os.kill(watcher.pid, signal.SIGTERM)
        wait_until(lambda: not any(is_alive(pid) for pid in members), "their end")
        wait_until(lambda: Run(tmp_path / "run").exit_code == 143, "the result")
    finally:
        for pid in [watcher.pid, *members]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        watcher.wait()
