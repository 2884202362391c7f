"""How files of ours come to be: whole or not at all, and by one process at a time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .errors import InputError, format_bytes

StrPath = str | os.PathLike[str]


def write_atomically(path: str | os.PathLike[str], write: Callable[[Any], object]) -> None:
    """Make `path` appear whole or not at all: `write(file)` goes to a neighbour, which is fsynced and then renamed.

    `file` is open for binary writing. A reader sees the old content or the new, never a part, whatever is killed.
    """
    path = Path(path)
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file 0600; results in a shared project folder must be readable by the group.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(beside, 0o666 & ~umask)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """`value` as indented JSON at `path`, atomically."""
    write_atomically(path, lambda file: file.write((json.dumps(value, indent=2) + "\n").encode()))


@contextlib.contextmanager
def new_folder(path: StrPath) -> Iterator[Path]:
    """A hidden neighbour of `path` to build in, which takes its place once the block ends without an error.

    Raises:
        InputError: when `path` is a file or a folder with anything in it.
    """
    path = Path(path).absolute()
    check_new(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    try:
        yield beside
        for file in sorted(beside.rglob("*")):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
        umask = os.umask(0)
        os.umask(umask)
        beside.chmod(0o777 & ~umask)
        os.replace(beside, path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def check_new(path: Path) -> None:
    """Refuse a target that is a file or a folder with anything in it."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        found = "other content" if path.is_dir() else "a file"
        raise InputError(f"{path}: expected a new or empty folder, found {found}; name another one or delete it")


def check_space(path: StrPath, needed_bytes: int, what: str) -> None:
    """Refuse to write where the disk has less than `needed_bytes` left; `what` says what is needed, and for what."""
    path = Path(path).absolute()
    free = shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.is_dir())).free
    if free < needed_bytes:
        raise InputError(f"{path}: expected {what}, found {format_bytes(free)}")


@contextlib.contextmanager
def locked(path: Path, what: str, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Keep other processes, on this machine or another that shares the disk, out of what the lock file `path` guards.

    The lock ends with the process at the latest; the file stays behind and means nothing by itself.

    Args:
        what: begins the sentence that a process reads which is kept out.
        wait: called twice a second while another process holds the lock.

    Raises:
        InputError: without `wait`, when another process holds it.
    """
    lock = FileLock(path, thread_local=False)
    while True:
        try:
            lock.acquire(blocking=False)
            break
        except Timeout:
            if wait is None:
                holder = path.read_text().strip() or "another process"
                raise InputError(f"{what} by {holder}; wait for it, end it or name another folder") from None
            wait()
            time.sleep(0.5)
    try:
        path.write_text(f"pid {os.getpid()} on {socket.gethostname()} (since {time.strftime('%Y-%m-%d %H:%M:%S')})\n")
        yield
    finally:
        lock.release()


def next_run_dir(runs_dir: str | os.PathLike[str], name: str) -> Path:
    """`runs_dir/name`, or `name-2`, `name-3`, ... where it is taken: a repeated cell never overwrites a run."""
    base = Path(runs_dir) / name
    candidate, number = base, 1
    while candidate.exists():
        number += 1
        candidate = base.with_name(f"{name}-{number}")
    return candidate


DROP_BYTES = 32 * 2**20  # of written pages at most that wait for the disk, per file


class Stream:
    """A file that is appended to; written pages leave the page cache every `DROP_BYTES`.

    Dirty pages count against a memory cgroup and, unlike clean ones, can't be taken back at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self.size = self._dropped = 0

    def append(self, data: Any) -> None:
        """Append the bytes of an array or a bytes object."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while len(view):
            written = os.write(self.fd, view[:DROP_BYTES])
            view = view[written:]
            self.size += written
            if self.size - self._dropped >= DROP_BYTES:
                self.drop()

    def drop(self) -> None:
        os.fdatasync(self.fd)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._dropped = self.size

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
