"""Promises of `written`: what a command writes to shared memory counts under the watchdog, once."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MB, python_child, wait_until

from ogbnlib.memory.limits import make_limit
from ogbnlib.memory.reading import read_memory
from ogbnlib.memory.tree import Tree
from ogbnlib.memory.written import Written
from ogbnlib.runs.supervise import supervise

# Each puts 60 MB into shared memory and keeps it; then waits.
WAYS = {
    "a file that stays open": "f = open(path, 'wb', buffering=0); f.write(block)",
    "a file closed at once": "open(path, 'wb').write(block)",
    "many small files": "for i in range(240): open(f'{path}-{i}', 'wb').write(block[: 2**18])",
    "a file in a folder": "os.mkdir(path); open(path + '/a', 'wb').write(block)",
    "a removed file": "f = open(path, 'wb', buffering=0); f.write(block); os.unlink(path)",
    "a memfd": "fd = os.memfd_create('a'); os.write(fd, block)",
    "allocated only": "f = open(path, 'wb'); os.posix_fallocate(f.fileno(), 0, len(block))",
    "written, then mapped unread": "open(path, 'wb').write(block); f = open(path, 'rb'); "
    "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)",
    "written, then mapped and read": "open(path, 'wb').write(block); f = open(path, 'rb'); "
    "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); sum(m[::4096])",
    "mapped and filled": "f = open(path, 'wb+'); f.truncate(len(block)); "
    "m = mmap.mmap(f.fileno(), 0); m[:] = block",
    "by a child that ended": "subprocess.run(['dd', 'if=/dev/zero', f'of={path}', 'bs=1M', 'count=60'], "
    "stderr=subprocess.DEVNULL)",
}
CODE = "import mmap, os, subprocess, sys\npath, block = sys.argv[1], bytes(60 * 2**20)\n"
WAIT = "\ndel block\nprint('ready', flush=True)\nsys.stdin.readline()"


@pytest.fixture
def path() -> Iterator[str]:
    """A name in /dev/shm; whatever begins with it is removed at the end."""
    name = f"/dev/shm/ogbnlib-test-{uuid.uuid4().hex}"
    yield name
    subprocess.run(f"rm -rf {name}*", shell=True, check=True)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_command_wrote_to_shared_memory_counts_once(path: str, way: str) -> None:
    written = Written()
    with python_child(CODE + WAYS[way] + WAIT, path) as child:
        tree = Tree(child.pid)
        tree.written = written
        wait_until(
            lambda: (read_memory(tree).rss_shmem_bytes or 0) >= 59 * MB, "60 MB to be counted", 20
        )
        for pss in (False, True):
            reading = read_memory(tree, pss=pss)
            shares = (reading.rss_shmem_bytes, reading.pss_shmem_bytes)
            assert all(share is None or 59 * MB <= share < 65 * MB for share in shares), shares


def test_files_of_others_do_not_count(path: str) -> None:
    Path(path + "-before").write_bytes(bytes(20 * MB))
    written = Written()
    code = CODE + "f = open(path, 'wb+'); f.truncate(len(block)); m = mmap.mmap(f.fileno(), 0)"
    code += "; m[:] = block; f.close()" + WAIT
    with python_child("print('ready', flush=True); input()") as child, python_child(code, path):
        tree = Tree(child.pid)
        tree.written = written
        assert (read_memory(tree).rss_shmem_bytes or 0) < MB  # another process maps it
        if os.geteuid() == 0:
            Path(path + "-theirs").write_bytes(bytes(20 * MB))
            os.chown(path + "-theirs", 65534, 65534)
            written._due_s = 0.0
            assert (read_memory(tree).rss_shmem_bytes or 0) < MB


def test_a_file_that_others_hand_over_does_not_count(path: str) -> None:
    written = Written()
    with python_child("print('ready', flush=True); input()") as child:
        Path(path).write_bytes(bytes(20 * MB))  # and for a moment nobody has it open
        assert written.read([child.pid]) == 0
        with open(path, "rb"):  # by this process, which is no part of the tree
            written._due_s = 0.0
            assert written.read([child.pid]) == 0
        written._due_s = 0.0
        assert written.read([child.pid]) == 0


def test_the_watchdog_kills_for_what_was_written_to_shared_memory(
    tmp_path: Path, path: str
) -> None:
    code = "import sys, time\nf = open(sys.argv[1], 'wb', buffering=0)\n"
    code += "for _ in range(600):\n    f.write(bytes(2**20)); time.sleep(0.005)"
    argv = [sys.executable, "-c", code, path]
    done = supervise(argv, tmp_path, make_limit(150 * MB, "watchdog")[0], echo=False)
    assert (done.exit_code, done.evidence["killed_by"]) == (137, "watchdog")
    assert done.record.last["shmem"] > 50 * MB
