"""How files of ours come to be: whole or not at all, and by one process at a time."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .errors import InputError, format_bytes

StrPath = str | os.PathLike[str]


def write_atomically(path: StrPath, write: Callable[[Any], object], keep: StrPath | None = None) -> None:
    """Make `path` appear whole or not at all: `write(file)` goes to a neighbour, which is fsynced and then renamed.

    `file` is open for binary writing. A reader sees the old content or the new, never a part, whatever is killed; with
    `keep` the old file is renamed to that, and between the two renames it is there under that name alone.
    """
    path = Path(path)
    beside = hidden(path, f"{uuid.uuid4().hex}.part")
    try:
        with open(beside, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    _sync(path.parent)


def hidden(path: Path, suffix: str) -> Path:
    """The neighbour of `path` that `ls` does not show: `.NAME.suffix`."""
    return path.with_name(f".{path.name}.{suffix}")


def _sync(path: Path) -> None:
    """fsync(2) of a file, or of a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: StrPath, value: Any) -> None:
    """`value` as indented JSON at `path`, atomically."""
    write_atomically(path, lambda file: file.write((json.dumps(value, indent=2) + "\n").encode()))


@contextlib.contextmanager
def new_folder(path: StrPath) -> Iterator[Path]:
    """The hidden neighbour `.NAME.part` of `path` to build in; it takes its place once the block ends without an error.

    What a killed process left in it is cleared by the next one.

    Raises:
        InputError: when `path` is a file or a folder with anything in it, or another process is building it.
    """
    path = Path(path).resolve()  # of a link, what it points to is replaced
    check_new(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = hidden(path, "part")
    with locked(hidden(path, "lock"), f"{path}: it is being written"):
        if beside.exists():
            shutil.rmtree(beside)
        beside.mkdir()
        try:
            yield beside
            for file in beside.rglob("*"):
                _sync(file)
            check_new(path)
            os.replace(beside, path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        _sync(path.parent)


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


def next_run_dir(runs_dir: StrPath, name: str) -> Path:
    """`runs_dir/name`, or `name-2`, `name-3`, ... where it is taken: a repeated cell never overwrites a run."""
    base = Path(runs_dir) / name
    candidate, number = base, 1
    while candidate.exists():
        number += 1
        candidate = base.with_name(f"{name}-{number}")
    return candidate


DROP_BYTES = 32 * 2**20  # of written pages at most that wait for the disk, per file


class Stream(io.FileIO):
    """A new file that is appended to; written pages leave the page cache every `DROP_BYTES`.

    Dirty pages count against a memory cgroup and, unlike clean ones, can't be taken back at once.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x+")
        self.size = self._dropped = 0

    def append(self, data: Any) -> None:
        """Append a bytes-like object."""
        view = memoryview(data)
        while len(view):
            written = self.write(view[:DROP_BYTES])
            view = view[written:]
            self.size += written
            if self.size - self._dropped >= DROP_BYTES:
                self.drop()

    def drop(self) -> None:
        os.fdatasync(self.fileno())
        os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._dropped = self.size
