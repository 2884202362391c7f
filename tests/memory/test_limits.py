"""Promises of `limits`: what passes the limit really dies, the whole tree with it, and nothing is
left behind."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MB, is_alive, python_child, touched, tree, wait_until

from ogbnlib.errors import InputError
from ogbnlib.memory import limits
from ogbnlib.memory.cgroup import Cgroup
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


def test_a_process_past_the_limit_is_killed_by_the_kernel(
    tmp_path: Path, kernel_limit: Callable[[int], Limit]
) -> None:
    limit = kernel_limit(80 * MB)
    outcome = start(HOG, tmp_path, limit)
    assert (outcome.exit_code, outcome.evidence["killed_by"]) == (137, "kernel")
    assert (outcome.evidence["oom_kills"] or 0) >= 1
    assert 0 < (outcome.peak_bytes or 0) <= 80 * MB
    assert limit.cgroup is not None
    assert not limit.cgroup.path.exists()


def test_cgroups_of_killed_parents_go_with_the_next_one(
    kernel_limit: Callable[[int], Limit],
) -> None:
    code = "import os\nfrom ogbnlib.memory.limits import make_limit\nmake_limit(2**30)\nprint('ready', flush=True)\n"
    with python_child(code + "import time; time.sleep(60)") as child:
        pass  # which kills it
    limit = kernel_limit(80 * MB)
    assert limit.cgroup is not None
    parent = limit.cgroup.path.parent
    assert not list(parent.glob(f"ogbnlib-{child.pid}-*"))
    mine = parent / f"ogbnlib-{os.getpid()}-0"
    mine.mkdir()
    try:
        assert kernel_limit(80 * MB).name == limit.name
        assert mine.is_dir()  # as this process lives
    finally:
        mine.rmdir()


def test_a_parent_ending_after_its_worker_was_killed_ends_in_137(
    tmp_path: Path, kernel_limit: Callable[[int], Limit]
) -> None:
    # The parent is gone before the next sample, so only the counter that is read at the end can
    # tell.
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = start(
            WORKER + f"os.waitpid(pid, 0); os._exit({number})", folder, kernel_limit(80 * MB)
        )
        assert (outcome.evidence["oom_kills"] or 0) >= 1
        assert (outcome.exit_code, outcome.evidence["killed_by"]) == (137, "kernel")


def test_page_cache_does_not_kill_under_a_cgroup(
    tmp_path: Path, kernel_limit: Callable[[int], Limit]
) -> None:
    path = tmp_path / "large"
    with open(path, "wb") as file:
        for _ in range(200):
            file.write(os.urandom(MB))
        os.fsync(file.fileno())
        # else it is cached on another's account
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    code = "import sys\nwith open(sys.argv[1], 'rb') as f:\n    while f.read(1 << 20): pass"
    outcome = start(code, tmp_path, kernel_limit(80 * MB), str(path))
    assert (outcome.exit_code, outcome.evidence["killed_by"], outcome.evidence["oom_kills"]) == (
        0,
        None,
        0,
    )


@pytest.mark.parametrize(
    "code", [HOG, WORKER + "time.sleep(60)"], ids=["the process itself", "its worker"]
)
def test_the_watchdog_kills_what_passes_the_limit(tmp_path: Path, code: str) -> None:
    slow = code.replace("(1 << 20))", "(1 << 20)); time.sleep(0.001)").replace(
        "held = []", "import time; held = []"
    )
    outcome = start(slow, tmp_path, make_limit(80 * MB, "watchdog")[0])
    assert (outcome.exit_code, outcome.evidence["killed_by"]) == (137, "watchdog")
    assert outcome.evidence["oom_kills"] is None


@pytest.mark.skipif(
    not read_sums([os.getpid()], "smaps_rollup")[1],
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


@pytest.mark.parametrize("limit_by", ["auto", "watchdog"])
def test_no_process_of_the_tree_outlives_the_run(tmp_path: Path, limit_by: str) -> None:
    # The parent has ended and been reaped: its child belongs to init, and only session or cgroup
    # still name it.
    code = "import subprocess; print(subprocess.Popen(['sleep', '300']).pid, flush=True)"
    outcome = start(code, tmp_path, make_limit(200 * MB, limit_by)[0])
    orphan = int(outcome.tail)
    try:
        assert outcome.exit_code == 0
        wait_until(lambda: not is_alive(orphan), "the orphan's end")
    finally:
        if is_alive(orphan):
            os.kill(orphan, 9)


def test_a_limit_that_is_no_longer_watched_ends_the_run(tmp_path: Path) -> None:
    limit, _ = make_limit(200 * MB, "watchdog")

    def full_disk(reading: Reading) -> None:
        raise OSError(28, "No space left on device")

    limit.check = full_disk  # type: ignore[method-assign]
    code = "import sys, time; time.sleep(60); open(sys.argv[1], 'w')"
    with pytest.raises(OSError, match="No space left"):
        start(code, tmp_path, limit, str(tmp_path / "went-on"))
    assert not (tmp_path / "went-on").exists()


def fake_systemd(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    (folder / "bin").mkdir()
    script = folder / "bin" / "systemd-run"
    script.write_text("#!/bin/sh\n" + body)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return folder / "arguments"


def test_systemd_run_gets_the_limit_and_runs_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f'printf "%s\\n" "$@" > {tmp_path}/arguments\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n'
    log = fake_systemd(tmp_path, monkeypatch, body)
    monkeypatch.setattr(limits, "find_cgroup", lambda pid="self": None)
    limit, refused = make_limit(300 * MB, "systemd-run")
    assert (limit.name, refused) == ("systemd-run", [])
    outcome = start("print('hello'); raise SystemExit(7)", tmp_path, limit)
    assert (outcome.exit_code, outcome.tail, outcome.evidence["killed_by"]) == (7, "hello\n", None)
    given = log.read_text().splitlines()
    assert given[:2] == ["--user", "--scope"]
    assert {f"MemoryMax={300 * MB}", "MemorySwapMax=0"} <= set(given)
    assert given[given.index("--") + 1] == sys.executable


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("systemd-run", "limit_by: systemd-run: Failed to connect to bus.*limit_by='auto'"),
        ("cgroup v2", "limit_by: cgroup v2: no memory controller"),
        ("docker", "limit_by: expected auto or one of cgroup v2, cgroup v1.*'docker'"),
    ],
)
def test_an_impossible_kind_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    fake_systemd(
        tmp_path, monkeypatch, "echo 'Failed to connect to bus: No medium found' >&2; exit 1\n"
    )
    monkeypatch.setattr(limits, "find_cgroup", lambda pid="self": None)
    with pytest.raises(InputError, match=words):
        make_limit(300 * MB, kind)


@pytest.fixture
def cgroup_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """mount/job/step with this process in `step`, where new folders come with the kernel's files
    and go with them."""
    mount = tmp_path / "cgroup"
    make, remove = Path.mkdir, Path.rmdir

    def mkdir(path: Path, *args: object, **kwargs: object) -> None:
        make(path, *args, **kwargs)  # type: ignore[arg-type]
        if path.is_relative_to(mount):
            for name, text in (
                ("memory.max", "max"),
                ("memory.swap.max", "max"),
                ("memory.oom.group", "0"),
            ):
                (path / name).write_text(text)
            (path / "cgroup.procs").touch()
            (path / "cgroup.subtree_control").write_text("cpu")

    def rmdir(path: Path) -> None:
        if path.is_relative_to(mount):
            for file in path.iterdir():
                file.unlink()
        remove(path)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", rmdir)
    for folder in (mount, mount / "job", mount / "job" / "step"):
        folder.mkdir()
    monkeypatch.setattr(
        limits, "find_cgroup", lambda pid="self": (Cgroup(mount / "job" / "step", 2), mount)
    )
    return mount


def occupied(cgroup: Path) -> None:
    """Have `cgroup` refuse to hand controllers to children, as the kernel does while it holds
    processes."""
    (cgroup / "cgroup.subtree_control").unlink()
    os.mkdir(cgroup / "cgroup.subtree_control")


@pytest.mark.parametrize("has_manager", [False, True])
def test_a_scope_of_systemd_leaves_no_limit_around_this_process(
    cgroup_v2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_manager: bool
) -> None:
    fake_systemd(tmp_path, monkeypatch, 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')
    (cgroup_v2 / "job" / "memory.max").write_text(str(200 * MB))
    if has_manager:  # the scope is inside the job, too
        (cgroup_v2 / "job" / "step" / f"user@{os.getuid()}.service").mkdir()
    for group in (cgroup_v2 / "job" / "step", cgroup_v2 / "job"):
        occupied(group)
    limit, refused = make_limit(300 * MB)
    assert limit.name == ("systemd-run" if has_manager else "watchdog")
    left = f"systemd-run: its scope would leave the limit of {cgroup_v2}/job"
    assert (left in refused) != has_manager


def test_a_v2_cgroup_gets_limit_no_swap_and_a_common_end(cgroup_v2: Path) -> None:
    limit, refused = make_limit(300 * MB)
    assert (limit.name, refused) == ("cgroup v2", [])
    assert limit.cgroup is not None
    path = limit.cgroup.path
    assert path.parent == cgroup_v2 / "job" / "step"
    assert (path / "memory.max").read_text() == str(300 * MB)
    assert (path / "memory.swap.max").read_text() == "0"
    assert (path / "memory.oom.group").read_text() == "1"
    assert "+memory" in (path.parent / "cgroup.subtree_control").read_text()
    limit.close()
    assert not path.exists()


def test_a_job_never_escapes_an_ancestor_with_a_limit(
    cgroup_v2: Path,
) -> None:
    occupied(cgroup_v2 / "job" / "step")
    (cgroup_v2 / "job" / "memory.max").write_text(str(2**30))
    limit, _ = make_limit(300 * MB, "cgroup v2")
    assert limit.cgroup is not None
    assert limit.cgroup.path.parent == cgroup_v2 / "job"
    limit.close()
    occupied(cgroup_v2 / "job")
    before = tree(cgroup_v2)
    with pytest.raises(InputError, match=r"limit_by: cgroup v2: .*job/step: .*; .*job: ") as caught:
        make_limit(300 * MB, "cgroup v2")
    assert f"{cgroup_v2}:" not in str(caught.value)
    assert tree(cgroup_v2) == before


INSIDE = """
import json, os, subprocess, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from ogbnlib.memory.limits import make_limit
from ogbnlib.runs.supervise import supervise
limit, _ = make_limit(int(sys.argv[2]) or None)
os.environ["BEGUN"] = f"{sys.argv[3]}/begun"
neighbour = subprocess.Popen([sys.executable, "-c", sys.argv[5]]) if sys.argv[5] else None
os.environ["NEIGHBOUR"] = str(neighbour and neighbour.pid)
done = supervise([sys.executable, "-c", sys.argv[4]], Path(sys.argv[3]), limit, echo=False)
ended = neighbour.wait() if neighbour else None
print(json.dumps([done.exit_code, done.evidence, done.peak_bytes, done.record.held_peak_bytes, ended]))
"""
# The neighbour fills memory once the run has its own, and the run ends after the neighbour.
HOG_THEN = (
    "import os, time\nwhile not os.path.exists(os.environ['BEGUN']): time.sleep(0.01)\n" + HOG
)
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
) -> tuple[int, dict[str, Any], int | None, int, int | None]:
    """Supervise `code` from within the cgroup of `outer`: exit code, evidence, peaks, and the
    neighbour's status."""
    assert outer.cgroup is not None
    if outer.cgroup.version == 2:
        pytest.skip("under v2 a cgroup that holds processes has no others below it")
    command = [
        sys.executable,
        "-c",
        INSIDE,
        str(outer.cgroup.path),
        str(limit_bytes),
        str(folder),
        code,
        neighbour,
    ]
    keep = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    done = subprocess.run(command, capture_output=True, text=True, env={**keep, **env}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    answer: tuple[int, dict[str, Any], int | None, int, int | None] = json.loads(
        done.stdout.splitlines()[-1]
    )
    return answer


@pytest.mark.parametrize("exit_code", [0, 7])
def test_in_a_job_another_killed_process_is_not_the_runs_end(
    tmp_path: Path, kernel_limit: Callable[[int], Limit], exit_code: int
) -> None:
    job = kernel_limit(400 * MB)
    env = {"SLURM_JOB_ID": "1", "EXIT_CODE": str(exit_code)}
    done = inside(job, 0, tmp_path, SMALL, HOG_THEN, **env)
    code, evidence, peak, held, neighbour = done
    assert neighbour == -9
    assert job.oom_kills() == 1
    assert (code, evidence["killed_by"], evidence["oom_kills"], evidence["kills_around"]) == (
        exit_code,
        None,
        None,
        1,
    )
    assert peak is None
    assert 30 * MB < held < 80 * MB  # not the job's, which had 400 MB


@pytest.mark.parametrize(
    ("outer_mb", "own_mb", "env"),
    [(300, 4096, {}), (300, 0, {"SLURM_JOB_ID": "1"})],
    ids=["outer limit", "job without own limit"],
)
def test_a_kill_is_blamed_on_the_limit_that_was_met(
    tmp_path: Path,
    kernel_limit: Callable[[int], Limit],
    outer_mb: int,
    own_mb: int,
    env: dict[str, str],
) -> None:
    outer = kernel_limit(outer_mb * MB)
    code, evidence, peak, _, _ = inside(outer, own_mb * MB, tmp_path, HOG, **env)
    assert (code, evidence["killed_by"], evidence["kills_around"]) == (137, "kernel", 0)
    assert outer.cgroup is not None
    others_bytes = evidence["outer_limit"].pop("others_bytes")
    assert 5 * MB < others_bytes < 100 * MB  # of the watching process, when the run has ended
    assert evidence["outer_limit"] == {
        "limit_bytes": outer_mb * MB,
        "cgroup": str(outer.cgroup.path),
    }
    assert (peak or 0) < outer_mb * MB


def test_in_a_job_a_killed_worker_is_the_runs_own(
    tmp_path: Path, kernel_limit: Callable[[int], Limit]
) -> None:
    told = "os.waitpid(pid, 0); sys.exit(f'RuntimeError: DataLoader worker (pid {pid}) is killed by signal: Killed. ')"
    code, evidence, _, _, _ = inside(
        kernel_limit(300 * MB), 0, tmp_path, WORKER + told, SLURM_JOB_ID="1"
    )
    assert (code, evidence["killed_by"], evidence["oom_kills"]) == (137, "kernel", 1)
