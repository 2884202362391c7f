"""How files of ours come to be: whole or not at all, and by one process at a time."""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import os
import shutil
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .errors import InputError, clear_errors, format_bytes, shortened

StrPath = str | os.PathLike[str]


Stamp = tuple[int, int, int]


def stamp(file: StrPath | int) -> Stamp:
    """Return size, mtime in ns and inode of a file, or of an open descriptor."""
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns, found.st_ino


def replaced(path: StrPath) -> InputError:
    """Return the error for a file that is not the one that this process began with."""
    return InputError(
        f"{path}: expected the file as it was when this process opened the data, found it replaced, changed or gone: "
        "old and new values would mix; put the old data back to go on (--resume), or start a new run on the new data. "
        "Write new data to a new folder"
    )


def check_same(path: StrPath, before: Stamp) -> None:
    """Refuse a file whose size or mtime is not that of `before`, see `replaced`."""
    try:
        now = stamp(path)
    except FileNotFoundError:
        raise replaced(path) from None
    if now[:2] != before[:2]:
        raise replaced(path)


def home(path: StrPath) -> Path:
    """A path as people write it: `~` is their home, also where no shell has seen it (a notebook, `--set`, JSON).

    Raises:
        InputError: for `~NAME` of a user who is not known; for what no screen shows (the CR of a file from Windows,
            blanks at an end), which would name another place than the one that is meant.
    """
    text = os.fspath(path)
    if text != text.strip() or not text.isprintable():
        raise InputError(f"{text!r}: expected a path of characters that can be seen, no blanks at its ends; rename it")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{path}: expected a folder, found a user's home (~) that is not known here") from None


def whereabouts(path: StrPath) -> str:
    """The end of a sentence on a path that is not there: where it was looked for, and what there is instead."""
    path, here = Path(os.path.abspath(home(path))), Path.cwd()
    text = f"; the working folder is {here}"
    if path.is_relative_to(here):
        wanted = path.relative_to(here)
        if found := next((str(up / wanted) for up in here.parents if (up / wanted).exists()), None):
            return f"{text}, and there is {found}"
    around = next(folder for folder in path.parents if folder.is_dir())
    if names := sorted(entry.name for entry in around.iterdir() if not entry.name.startswith(".")):
        close = difflib.get_close_matches(path.name, names, 3, 0.5) or names
        text += f", and {around} has {', '.join(close[:5])}" + (", ..." if len(close) > 5 else "")
    return text


class _Output(io.FileIO):
    """Remembers why writing failed: torch.save makes "enforce fail at inline_container.cc" of a full disk."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def write_atomically(path: StrPath, write: Callable[[Any], object], keep: StrPath | None = None) -> None:
    """Make `path` appear whole or not at all: `write(file)` goes to a neighbour, which is fsynced and then renamed.

    `file` is open for binary writing. A reader sees the old content or the new, never a part, whatever is killed; with
    `keep` the old file is renamed to that, and between the two renames it is there under that name alone.

    Raises:
        InputError: when the disk is full, or refuses in another way; what was at `path` is still there then.
    """
    path = Path(path)
    beside = hidden(path, f"{uuid.uuid4().hex}.part")
    with clear_errors(path):
        try:
            with _Output(beside, "x") as raw:
                file = io.BufferedWriter(raw)
                try:
                    write(file)
                    file.flush()
                except Exception as error:
                    raise raw.error or error from None
                os.fsync(raw.fileno())
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


def likeness(path: StrPath) -> str:
    """What lies where a sound file was expected, as far as its beginning shows: what a failed download leaves, say."""
    with clear_errors(path), open(path, "rb") as file:
        start, size = file.read(512).lstrip().lower(), os.fstat(file.fileno()).st_size
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return f"a web page of {format_bytes(size)}"
    return "an empty file" if not size else "damage" if start.strip(b"\0") else "zeros"


@contextlib.contextmanager
def new_folder(path: StrPath) -> Iterator[Path]:
    """The hidden neighbour `.NAME.part` of `path` to build in; it takes its place once the block ends without an error.

    What a killed process left in it is cleared by the next one.

    Raises:
        InputError: when `path` is a file or a folder with anything in it, another process is building it, or the disk
            is full or refuses in another way, inside the block too. Nothing is left behind then.
    """
    with clear_errors(path):
        path = Path(os.path.realpath(home(path)))  # of a link, what it points to is replaced
        check_new(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = hidden(path, "part")
        with locked(hidden(path, "lock"), f"{path}: it is being written"):
            check_new(path)  # again: another process may have been faster
            if beside.exists():
                shutil.rmtree(beside)
            beside.mkdir()
            try:
                yield beside
                for file in beside.rglob("*"):
                    _sync(file)
                _sync(beside)
                check_new(path)
                os.replace(beside, path)
            except KeyboardInterrupt:
                raise shortened(KeyboardInterrupt(f"{path}: interrupted before it was whole; start it again")) from None
            finally:
                shutil.rmtree(beside, ignore_errors=True)
            _sync(path.parent)


def abandoned(folder: Path) -> list[Path]:
    """The `.NAME.part`, or a propagation's `.NAME.blocks`, that killed processes left in `folder`: nobody is at it."""
    found, locks = [], {".part": ".lock", ".blocks": ".hops.lock"}
    for part in sorted(path for path in folder.glob(".*.*") if path.suffix in locks and path.is_dir()):
        lock = part.with_suffix(locks[part.suffix])
        with contextlib.suppress(Timeout, PermissionError), contextlib.ExitStack() as stack:  # at work; another user's
            if lock.exists():
                stack.enter_context(FileLock(lock, timeout=0))
            found.append(part)
    return found


def check_new(path: Path) -> None:
    """Refuse a target that is a file or a folder with anything in it."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        found = "other content" if path.is_dir() else "a file"
        raise InputError(f"{path}: expected a new or empty folder, found {found}; name another one or delete it")


# Each machine keeps its own pages or locks there for a while, or altogether.
_LOOSE = ("nfs", "cifs", "smb", "9p", "afs", "fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "vboxsf")


def file_system(path: StrPath) -> str:
    """The kind of file system that a path lies on, such as "ext4", "tmpfs", "nfs4"; "" where that is not known."""
    import psutil

    place = Path(os.path.realpath(path))
    around = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    return max(around, key=lambda part: len(part.mountpoint)).fstype if around else ""


def warn_if_remote(path: StrPath, what: str) -> None:
    """Warn, once a folder, where its file system is one on which `what` can't be relied upon."""
    if (kind := file_system(path)).startswith(_LOOSE):
        place = os.path.realpath(path)
        warnings.warn(f"{place}: it lies on a network file system ({kind}): {what}", stacklevel=2)


def check_space(path: StrPath, needed_bytes: int, what: str) -> None:
    """Refuse to write where the disk has less than `needed_bytes` left; `what` says what is needed, and for what."""
    path = home(path).absolute()
    free = shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.is_dir())).free
    if free < needed_bytes:
        raise InputError(f"{path}: expected {what}, found {format_bytes(free)}")


@contextlib.contextmanager
def locked(path: StrPath, what: str, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Keep other processes, on this machine or another that shares the disk, out of what the lock file `path` guards.

    The lock ends with the process at the latest; a file that a killed one leaves behind means nothing by itself.

    Args:
        what: begins the sentence that a process reads which is kept out.
        wait: called twice a second while another process holds the lock.

    Raises:
        InputError: without `wait`, when another process holds it; when the file can't be made or locked.
    """
    path, lock = Path(path), FileLock(path, thread_local=False)
    with clear_errors(path):
        while True:
            try:
                lock.acquire(blocking=False)
                break
            except Timeout:
                if wait is None:
                    holder = path.read_text().strip() if path.exists() else ""
                    holder = holder or "another process"
                    raise InputError(f"{what} by {holder}; wait for it, end it or name another folder") from None
                wait()
                time.sleep(0.5)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        with clear_errors(path):
            path.write_text(f"pid {os.getpid()} on {socket.gethostname()} (since {since})\n")
        yield
    finally:
        # Before the lock goes: who opened the file and gets its lock now sees that it has no name any more, and opens
        # the next one (filelock 3.24; st_nlink).
        path.unlink(missing_ok=True)
        lock.release()


def next_run_dir(runs_dir: StrPath, name: str) -> Path:
    """`runs_dir/name`, or `name-2`, `name-3`, ... where it is taken: a repeated cell never overwrites a run."""
    base = home(runs_dir) / name
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
            with clear_errors(self.name):
                written = self.write(view[:DROP_BYTES])
            view = view[written:]
            self.size += written
            if self.size - self._dropped >= DROP_BYTES:
                self.drop()

    def drop(self) -> None:
        with clear_errors(self.name):
            os.fdatasync(self.fileno())
        os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._dropped = self.size
