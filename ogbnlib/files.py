"""Files and folders that are written whole or not at all, by one process at a time."""

import contextlib
import errno
import fcntl
import functools
import json
import os
import shutil
import socket
import stat
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import InputError, clear_errors, format_bytes, naming, printable

StrPath = str | os.PathLike[str]
_MOST_BYTES = 2**30  # of a file to read; a year's events and samples have less than 100 MB
LARGEST = 2.0**128  # of the numbers in a run's files; a loss of float32 is smaller


def home(path: StrPath) -> Path:
    """Expand `~` where no shell has done so (a notebook, `--set`, JSON); refuse unusable paths."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"expected a path, got {type(path).__name__}")
    text = os.fspath(path)
    if text != text.strip() or not text.isprintable():  # such as the CR of a Windows text file
        raise InputError(
            f"{text!r}: expected a path of visible characters, no blanks at its ends; rename it"
        )
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):  # a user without a home, or no HOME
        raise InputError(
            f"{text}: expected a path, found {text.partition('/')[0]} without a home folder; set "
            "HOME or write the path in full"
        )
    return Path(expanded)


def shown(path: Path) -> Path:
    """Return a path as messages show it: relative to the working folder, if it lies inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def whereabouts() -> str:
    """Return the end of a message about a missing path."""
    return f"; the working folder is {Path.cwd()}"


def write_atomically(path: StrPath, write: Callable[[Any], object], alone: bool = False) -> None:
    """Write a file whole or not at all.

    Args:
        path: The file to write or replace.
        write: Called with a hidden sibling, open for reading and writing bytes; the sibling is
            synced and then renamed to `path`.
        alone: Whether the caller has a lock, so that a call may overwrite what a killed one left.
    """
    path = Path(path)
    part = sibling_path(path, "part" if alone else f"{uuid.uuid4().hex}.part")
    with naming(path), open(part, "w+b", opener=open_to_write if alone else None) as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)  # after an error
        sync(path.parent)  # so that the new name survives a power cut


def sibling_path(path: Path, suffix: str) -> Path:
    """Return the hidden sibling `.NAME.suffix` of `path`."""
    return path.with_name(f".{path.name}.{suffix}")


def check_own(path: StrPath, is_kind: Callable[[int], bool] = stat.S_ISDIR) -> bool:
    """Return whether `path` exists, a name that others can guess and take first in a shared folder.

    Refused are a link, another user's file or folder, and one whose mode `is_kind` does not accept.
    """
    try:
        status = os.lstat(path)  # of a link itself, not of its target
    except FileNotFoundError:
        return False
    _check_status(status, path, is_kind)
    return True


def _check_status(status: os.stat_result, path: StrPath, is_kind: Callable[[int], bool]) -> None:
    owners = {os.geteuid(), 0}  # this user and root
    if owners == {0}:  # in a container root works in folders of the host's users
        owners.add(os.stat(os.path.dirname(os.path.abspath(path))).st_uid)
    is_file = stat.S_ISREG(status.st_mode)
    objections = {
        "a link": stat.S_ISLNK(status.st_mode),
        "another user's": status.st_uid not in owners,
        "something of another kind": not is_kind(status.st_mode),
        "a file with a second name (a hard link)": is_file and status.st_nlink > 1,
    }
    for objection, applies in objections.items():
        if applies:
            raise InputError(
                f"{path}: expected nothing, or a file or folder of your own, found "
                f"{objection}; delete it if nobody needs it, or name another place"
            )


@clear_errors()
def read_whole(path: Path) -> bytes:
    """Read a file of a run or a store; `InputError` for a pipe or a device, which would never end,
    and for a file above 1 GB."""
    status = path.stat()  # before `open`, which would wait for the writer of a pipe
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
        kind = f"{stat.filemode(status.st_mode)} of {status.st_size:,} bytes"  # "prw-r--r-- of"
        raise InputError(f"{path}: expected a file of at most 1 GB, found {kind}")
    return path.read_bytes()


def _number(kind: Callable[[str], float], largest: float, text: str) -> float:
    number = kind(text)
    if not abs(number) <= largest:  # also of NaN
        raise ValueError(f"{text[:20]}: expected a number of at most {largest:.1e}")
    return number


_whole = functools.partial(_number, int, 2**63)
_real = functools.partial(_number, float, LARGEST)
_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_real, parse_constant=_real)


def decode_json(data: bytes) -> dict[str, Any]:
    """Decode a JSON object: whole numbers up to 2**63, others up to `LARGEST`, 100 levels."""
    content = {**_DECODER.decode(data.decode(json.detect_encoding(data)))}  # only of an object
    may_be_deep = data.count(b"[") + data.count(b"{") > 100  # texts may have brackets, too
    # a line begins with a blank for each level around it
    if may_be_deep and "\n" + 101 * " " in json.dumps(content, indent=1):
        raise ValueError("more than 100 levels of lists and objects")
    return content


def parse_json(data: bytes, path: StrPath, expected: str, remedy: str = "") -> dict[str, Any]:
    """Decode a file's content; the `InputError` names its `path`, `expected` and the `remedy`."""
    with naming(path, expected, remedy):
        return decode_json(data)


def open_to_write(path: StrPath, flags: int = os.O_WRONLY) -> int:
    """Open a file of a guessable name for writing and create it if missing; an `opener` of `open`.

    A link is not followed. A file that `check_own` refuses raises an error and stays unchanged.
    """
    safe = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not block
    try:
        descriptor = os.open(path, (flags | safe) & ~os.O_TRUNC, 0o666)  # emptied below, if checked
    except OSError as error:
        if error.errno != errno.EISDIR:  # "is a directory" says enough
            check_own(path, stat.S_ISREG)  # raises the reason, such as a link
        raise
    try:
        _check_status(os.fstat(descriptor), path, stat.S_ISREG)  # of the opened file itself
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_all(descriptor: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Write all of `data`, at the descriptor's position or from byte `offset` on."""
    view = memoryview(data)  # a full disk takes a part of it; the next call then fails
    done = 0  # bytes
    while done < len(view):
        if offset is None:
            done += os.write(descriptor, view[done:])
        else:
            done += os.pwrite(descriptor, view[done:], offset + done)


def sync(path: Path) -> None:
    """Let the content of a file, or the entries of a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents, and let them survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]  # to be synced
    path.mkdir(mode, parents=True, exist_ok=True)
    for folder in missing:
        with contextlib.suppress(PermissionError):  # a parent that may be written but not read
            sync(folder.parent)


def write_json(path: StrPath, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomically(path, lambda file: file.write((json.dumps(value, indent=2) + "\n").encode()))


@contextlib.contextmanager
def new_folder(path: StrPath) -> Iterator[Path]:
    """Yield the hidden sibling `.NAME.part` of `path` to fill; rename it to `path` at the end."""
    with naming(path):
        path = Path(os.path.realpath(home(path)))  # if it is a link: replace its target
        make_folder(path.parent)
        part = sibling_path(path, "part")
        with locked(sibling_path(path, "lock"), f"{path}: it is being written"):
            check_new(path)
            if check_own(part):  # left by a killed process
                shutil.rmtree(part)
            part.mkdir()
            try:
                yield part
                for file in part.rglob("*"):
                    sync(file)
                sync(part)
                os.replace(part, path)  # also an empty folder `path`
            finally:
                shutil.rmtree(part, ignore_errors=True)  # after an error
            sync(path.parent)  # so that the new name survives a power cut


def check_new(path: Path) -> None:
    """Refuse a target that is a file, a folder with content, or the working folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(
            f"{path}: expected a new or empty folder, found "
            f"{'other content' if path.is_dir() else 'a file'}; name another one or delete it"
        )
    # The new folder replaces the old one, and the user's shell would stay in the deleted folder.
    if path.exists() and os.path.samefile(path, "."):
        raise InputError(f"{path}: expected a new folder, found the working folder; name one in it")


def file_system(path: StrPath) -> str:
    """Return the type of a path's file system, such as "ext4", "tmpfs", "nfs4"; "" if unknown."""
    import psutil

    real_path = Path(os.path.realpath(path))
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    # the longest mount point that contains the path
    return mounts.get(max(filter(real_path.is_relative_to, mounts), key=len, default=""), "")


def check_space(path: StrPath, needed_bytes: int, expected: str) -> None:
    """Refuse a disk with less than `needed_bytes` free, which the message calls `expected`."""
    path = home(path).absolute()
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())  # that exists
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise InputError(f"{path}: expected {expected}, found {format_bytes(free)}")


def is_held(path: StrPath) -> bool:
    """Whether a process has the lock `path`; some network file systems see no other machine's lock.

    Nothing is written. A link is not followed but raises OSError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # fails if another one has it
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)  # which releases the lock again
    return False


def _lock(path: StrPath) -> int | None:
    # Return the locked file's descriptor; None while another process has the lock. A killed process
    # loses it. A child that inherits the descriptor shares it, until the last of them ends.
    while True:
        descriptor = open_to_write(path, os.O_RDWR)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)  # unless the lock is taken, see `pop_all`
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            if os.fstat(descriptor).st_nlink:  # else the last owner has just deleted it: try again
                os.ftruncate(descriptor, 0)
                with contextlib.suppress(OSError):  # a full disk: the text is only for messages
                    text = f"process {os.getpid()} on {socket.gethostname()}\n"
                    write_all(descriptor, text.encode())
                stack.pop_all()  # keeps the descriptor open
                return descriptor


@contextlib.contextmanager
def locked(
    path: StrPath, problem: str, wait: Callable[[], None] | None = None, keep: bool = False
) -> Iterator[int]:
    """Lock a file, created if it is missing, during the block, and yield its descriptor.

    Args:
        problem: Beginning of the `InputError` while another process has the lock.
        wait: Called twice a second while another process has the lock, in place of the error.
        keep: Whether the file stays; then a child that inherits the descriptor keeps the lock
            until it ends.
    """
    path = Path(path)
    tries = 0
    try:
        while (descriptor := _lock(path)) is None:
            if wait is not None:
                wait()
            elif tries:
                holder = "another process"
                with contextlib.suppress(OSError):  # it may end now and delete the file
                    holder = printable(path.read_text(errors="replace")).strip() or holder
                raise InputError(f"{problem} by {holder}; wait for it or end it")
            tries += 1
            # the first failure may be due to `is_held` of another process, which locks for a moment
            time.sleep(0.5 if wait else 0.1)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # no locks there
            raise
        warnings.warn(
            f"{path}: no locks on its file system, so a second process is not refused", stacklevel=3
        )
        descriptor = open_to_write(path, os.O_RDWR)
    try:
        yield descriptor
    finally:
        if not keep:
            path.unlink(missing_ok=True)  # before the release: `_lock` sees that it has no name
            with contextlib.suppress(OSError):  # no locks on this disk
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for forks, which share it
        os.close(descriptor)
