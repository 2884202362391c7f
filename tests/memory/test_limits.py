"""Promises of `limits`: what passes the limit dies with its whole tree, and leaves nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MB, touched, uncached_file

from ogbnlib.errors import InputError
from ogbnlib.memory import limits
from ogbnlib.memory.limits import Limit, make_limit
from ogbnlib.memory.reading import Reading, read_sums
from ogbnlib.runs.folder import Run
from ogbnlib.runs.supervise import Outcome, supervise

HOG = "held = []\nwhile True: held.append(b'x' * (1 << 20))"
# The worker is the larger of the two, so the kernel picks it.
WORKER = (
    "import os, sys, time\npid = os.fork()\n"
    "if pid == 0:\n    held = []\n    while True: held.append(b'x' * (1 << 20))\n"
)


def start(code: str, folder: Path, limit: Limit, *arguments: str) -> Outcome:
    return supervise([sys.executable, "-c", code, *arguments], folder, limit, echo=False)


def test_a_parent_ending_after_its_worker_was_killed_ends_in_137(
    tmp_path: Path, kernel_limit: Callable[[int], Limit]
) -> None:
    # The parent is gone before the next sample: only the counter that is read at the end can tell.
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        limit = kernel_limit(80 * MB)
        outcome = start(WORKER + f"os.waitpid(pid, 0); os._exit({number})", folder, limit)
        assert (outcome.evidence["oom_kills"] or 0) >= 1
        assert (outcome.exit_code, outcome.evidence["killed_by"]) == (137, "kernel")
        assert 0 < outcome.evidence["kernel_peak_bytes"] <= 80 * MB
        assert limit.cgroup is not None
        assert not limit.cgroup.path.exists()


def test_page_cache_does_not_kill_under_a_cgroup(
    tmp_path: Path, kernel_limit: Callable[[int], Limit]
) -> None:
    path = uncached_file(tmp_path / "large", 200 * MB)
    code = "import sys\nwith open(sys.argv[1], 'rb') as f:\n    while f.read(1 << 20): pass"
    outcome = start(code, tmp_path, kernel_limit(80 * MB), str(path))
    assert (outcome.exit_code, outcome.evidence["killed_by"]) == (0, None)
    assert outcome.evidence["oom_kills"] == 0


@pytest.mark.skipif(
    not read_sums([os.getpid()], "smaps_rollup")[0],
    reason="this kernel's /proc/PID/smaps_rollup gives no Pss_Anon",
)
def test_the_watchdog_counts_shared_pages_once(tmp_path: Path) -> None:
    code = (
        "import os, time\nblock = b'x' * (60 << 20)\n"
        "for _ in range(2):\n    if os.fork() == 0: break\n"
        f"while not os.path.exists({str(tmp_path / 'seen')!r}): time.sleep(0.01)"
    )

    def all_three() -> bool:
        file = tmp_path / "timeline.csv"
        return file.exists() and Run(tmp_path).timeline["rss_anon_bytes"].max() > 180 * MB

    with touched(tmp_path / "seen", all_three):
        outcome = start(code, tmp_path, make_limit(120 * MB, "watchdog")[0])
    assert Run(tmp_path).timeline["rss_anon_bytes"].max() > 180 * MB
    assert (outcome.exit_code, outcome.evidence["killed_by"]) == (0, None)


def test_a_limit_that_is_no_longer_watched_ends_the_run(tmp_path: Path) -> None:
    limit, _ = make_limit(200 * MB, "watchdog")

    def full_disk(reading: Reading) -> None:
        raise OSError(28, "No space left on device")

    limit.check = full_disk  # type: ignore[method-assign]
    code = "import sys, time; time.sleep(60); open(sys.argv[1], 'w')"
    with pytest.raises(OSError, match="No space left"):
        start(code, tmp_path, limit, str(tmp_path / "went-on"))
    assert not (tmp_path / "went-on").exists()


@pytest.fixture
def systemd_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in place of systemd-run, where no cgroup has a limit."""
    script = tmp_path / "bin" / "systemd-run"
    script.parent.mkdir()
    script.touch(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(limits, "find_cgroup", lambda pid="self": None)
    return script


def test_systemd_run_gets_the_limit_and_runs_the_command(tmp_path: Path, systemd_run: Path) -> None:
    systemd_run.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\n'
        'while [ "$1" != -- ]; do shift; done; shift; exec "$@"\n'
    )
    limit, refused = make_limit(300 * MB, "systemd-run")
    assert (limit.name, refused) == ("systemd-run", [])
    outcome = start("print('hello'); raise SystemExit(7)", tmp_path, limit)
    assert (outcome.exit_code, outcome.tail, outcome.evidence["killed_by"]) == (7, "hello\n", None)
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[:2] == ["--user", "--scope"]
    assert {f"MemoryMax={300 * MB}", "MemorySwapMax=0"} <= set(arguments)
    assert arguments[arguments.index("--") + 1] == sys.executable


def test_an_impossible_kind_is_refused_with_the_reason(systemd_run: Path) -> None:
    systemd_run.write_text("#!/bin/sh\necho 'Failed to connect to bus: No medium' >&2; exit 1\n")
    for kind, words in {
        "systemd-run": "limit_by: systemd-run: Failed to connect to bus.*limit_by='auto'",
        "cgroup v2": "limit_by: cgroup v2: no memory controller",
        "docker": "limit_by: expected auto or one of cgroup v2, cgroup v1.*'docker'",
    }.items():
        with pytest.raises(InputError, match=words):
            make_limit(300 * MB, kind)


INSIDE = """
import json, os, subprocess, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from ogbnlib.memory.limits import make_limit
from ogbnlib.runs.folder import Run
from ogbnlib.runs.supervise import supervise
limit, _ = make_limit(int(sys.argv[2]) or None)
os.environ["BEGUN"] = f"{sys.argv[3]}/begun"
neighbour = subprocess.Popen([sys.executable, "-c", sys.argv[5]]) if sys.argv[5] else None
os.environ["NEIGHBOUR"] = str(neighbour and neighbour.pid)
done = supervise([sys.executable, "-c", sys.argv[4]], Path(sys.argv[3]), limit, echo=False)
ended = neighbour.wait() if neighbour else None
held_bytes = Run(sys.argv[3]).record.held_peak_bytes
print(json.dumps([done.exit_code, done.evidence, done.evidence.get("kernel_peak_bytes"), held_bytes, ended]))
"""
# The neighbour fills memory once the run has its own, and the run ends after the neighbour.
WAIT = "import os, time\nwhile not os.path.exists(os.environ['BEGUN']): time.sleep(0.01)\n"
SMALL = """
import os, sys, time
held = b"x" * (30 << 20)
time.sleep(1)  # several samples
open(os.environ["BEGUN"], "w").close()
while " Z " not in open(f"/proc/{os.environ['NEIGHBOUR']}/stat").read():
    time.sleep(0.01)
time.sleep(1)
sys.exit(int(os.environ["EXIT_CODE"]))
"""


def inside(
    outer: Limit, limit_bytes: int, folder: Path, code: str, neighbour: str = "", **env: str
) -> tuple[Any, ...]:
    """Supervise `code` in `outer`'s cgroup: exit code, evidence, peaks, neighbour's status."""
    assert outer.cgroup is not None
    if outer.cgroup.version == 2:
        pytest.skip("under v2 a cgroup that holds processes has no others below it")
    arguments = [str(outer.cgroup.path), str(limit_bytes), str(folder), code, neighbour]
    command = [sys.executable, "-c", INSIDE, *arguments]
    keep = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    done = subprocess.run(command, capture_output=True, text=True, env={**keep, **env}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("exit_code", [0, 7])
def test_in_a_job_another_killed_process_is_not_the_runs_end(
    tmp_path: Path, kernel_limit: Callable[[int], Limit], exit_code: int
) -> None:
    job = kernel_limit(400 * MB)
    env = {"SLURM_JOB_ID": "1", "EXIT_CODE": str(exit_code)}
    done = inside(job, 0, tmp_path, SMALL, WAIT + HOG, **env)
    code, evidence, peak, held, neighbour = done
    assert neighbour == -9
    assert job.oom_kills() == 1
    assert (code, evidence["killed_by"], evidence["oom_kills"]) == (exit_code, None, None)
    assert evidence["kills_around"] == 1
    assert peak is None
    assert 30 * MB < held < 80 * MB  # not the job's, which had 400 MB


@pytest.mark.parametrize(
    ("own_mb", "env"),
    [(4096, {}), (0, {"SLURM_JOB_ID": "1"})],
    ids=["outer limit", "job without own limit"],
)
def test_a_kill_is_blamed_on_the_limit_that_was_met(
    tmp_path: Path, kernel_limit: Callable[[int], Limit], own_mb: int, env: dict[str, str]
) -> None:
    outer = kernel_limit(300 * MB)
    code, evidence, peak, _, _ = inside(outer, own_mb * MB, tmp_path, HOG, **env)
    assert (code, evidence["killed_by"], evidence["kills_around"]) == (137, "kernel", 0)
    assert outer.cgroup is not None
    others_bytes = evidence["outer_limit"].pop("others_bytes")
    assert 5 * MB < others_bytes < 100 * MB  # of the watching process, when the run has ended
    assert evidence["outer_limit"] == {"limit_bytes": 300 * MB, "cgroup": str(outer.cgroup.path)}
    assert (peak or 0) < 300 * MB


def test_in_a_job_a_killed_worker_is_the_runs_own(
    tmp_path: Path, kernel_limit: Callable[[int], Limit]
) -> None:
    told = "os.waitpid(pid, 0); sys.exit(f'RuntimeError: DataLoader worker (pid {pid}) is killed by signal: Killed. ')"
    limit = kernel_limit(300 * MB)
    code, evidence, *_ = inside(limit, 0, tmp_path, WORKER + told, SLURM_JOB_ID="1")
    assert (code, evidence["killed_by"], evidence["oom_kills"]) == (137, "kernel", 1)
