"""Promises of `memory`: every kind of byte under its own name, limits with their source."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import MB, python_child

from ogbnlib.memory import cgroup
from ogbnlib.memory.cgroup import Cgroup, effective_limit, find_cgroup
from ogbnlib.memory.reading import read_memory, read_sums
from ogbnlib.memory.tree import Tree

READY = "import sys; print('ready', flush=True); sys.stdin.read()"
MAPPED = (
    "import mmap, sys; file = open(sys.argv[1], 'r+b'); block = mmap.mmap(file.fileno(), 0)\n"
    "sum(block[i] for i in range(0, len(block), 4096))\n" + READY
)


@pytest.mark.skipif(
    not read_sums([os.getpid()], "smaps_rollup")[0],
    reason="this kernel's /proc/PID/smaps_rollup gives no Pss_Anon",
)
def test_shared_memory_is_seen_as_shared() -> None:
    if not os.access("/dev/shm", os.W_OK) or psutil.disk_usage("/dev/shm").free < 60 * MB:
        pytest.skip("no 60 MB of writable /dev/shm")
    path = Path(f"/dev/shm/ogbnlib-test-{os.getpid()}")
    try:
        path.write_bytes(b"x" * 50 * MB)
        with python_child(MAPPED, str(path)) as child:
            reading = read_memory(Tree(child.pid), pss=True)
    finally:
        path.unlink()
    assert (reading.rss_shmem_bytes or 0) >= 50 * MB
    assert (reading.pss_shmem_bytes or 0) >= 50 * MB
    assert (reading.rss_anon_bytes or 0) < 50 * MB


V1 = {
    "memory.limit_in_bytes": "9000\n",
    "memory.max_usage_in_bytes": "7000\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    "memory.stat": "cache 1\nrss 1\ntotal_cache 900\ntotal_rss 4000\ntotal_shmem 300\n",
    "cgroup.procs": "11\n12\n",
}
V2 = {
    "memory.max": "9000\n",
    "memory.peak": "7000\n",
    "memory.events": "low 0\nhigh 0\nmax 5\noom 1\noom_kill 3\noom_group_kill 0\n",
    "memory.stat": "anon 4000\nfile 900\nkernel 1\nshmem 300\n",
    "cgroup.procs": "11\n12\n",
}


@pytest.mark.parametrize("version", [1, 2])
def test_every_figure_of_a_cgroup_is_read_from_its_files(tmp_path: Path, version: int) -> None:
    for name, text in {1: V1, 2: V2}[version].items():
        (tmp_path / name).write_text(text)
    group = Cgroup(tmp_path, version, tmp_path)
    assert (group.size("limit"), group.size("peak")) == (9000, 7000)
    assert (group.count("oom_kill"), group.pids()) == (3, [11, 12])
    assert group.parts() == (4000, 600, 300)  # file memory without shared memory
    gone = Cgroup(tmp_path / "none", version, tmp_path)
    assert {gone.size(name) for name in ("limit", "peak")} == {None}
    assert (gone.count("oom_kill"), gone.parts(), gone.pids()) == (None, (None,) * 3, [])


def test_slurms_limit_is_the_effective_one_if_it_is_the_lowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    before = effective_limit()
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "0")  # all memory of the node
    assert effective_limit() == before
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "100")
    assert effective_limit() == (100 * MB, "Slurm --mem (SLURM_MEM_PER_NODE)")
    monkeypatch.delenv("SLURM_MEM_PER_NODE")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "50")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    assert effective_limit() == (200 * MB, "Slurm --mem-per-cpu (SLURM_MEM_PER_CPU)")


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


FAILING = """
import sys
from IPython.core.interactiveshell import InteractiveShell
import ogbnlib
shell = InteractiveShell.instance()
shell.run_cell("import numpy as np\\ndef f():\\n    x = np.ones(50 * 2**20)\\n    raise ValueError")
shell.run_cell(sys.argv[1])
print("freed", ogbnlib.release_memory()["last_error"])
"""


BY_CAUSE = """
try: f()
except ValueError as error: saved = error
raise RuntimeError from saved
"""


@pytest.mark.parametrize("end", ["f()", BY_CAUSE])
def test_the_arrays_of_a_cell_that_failed_are_given_back(end: str, tmp_path: Path) -> None:
    env = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    argv = [sys.executable, "-c", FAILING, end]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert int(done.stdout.rpartition("freed ")[2]) > 390 * MB, done
