"""The folder of compiled kernels (numba functions), one for each version of their source files.

numba's own cache checks only the file that declares a kernel. Kernels call each other across files,
so after a change of one file it loads old machine code for the callers in other files. The cache
consists of pickles: a user with write access to the folder can run code in this process.
"""

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from .environment import KERNELS_VARIABLE
from .errors import MB

PACKAGE = Path(__file__).parent
MOST_FOLDERS = 4  # each change of the sources adds one; older ones are deleted
_ROOM_BYTES = 8 * MB  # all kernels take 5 MB


def sources() -> list[Path]:
    """List the package's files that declare kernels, or intrinsics, which go into kernels."""
    marks = (b"\n@kernel", b"\n@intrinsic")
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if any(mark in path.read_bytes() for mark in marks)
    ]


@functools.cache
def folder() -> Path | None:
    """Return the folder of the present sources' machine code; None if no folder can be written."""
    refused = []
    for parent in _parents():
        try:
            prepared = _prepare(parent)
        except OSError as error:
            refused.append(f"{parent} ({(error.strerror or str(error)).lower()})")
            continue
        os.environ[KERNELS_VARIABLE] = str(parent)
        return prepared
    if os.environ.get(KERNELS_VARIABLE) != "":
        warnings.warn(
            f"compiled kernels can't be stored in {', '.join(refused)}: each process compiles them "
            "again, which takes half a minute and 100 MB; set NUMBA_CACHE_DIR to a folder of your "
            "own",
            stacklevel=2,
        )
    os.environ[KERNELS_VARIABLE] = ""
    return None


def complete_marker() -> Path | None:
    """Return the file that exists once all training kernels are compiled for this processor."""
    cache = folder()
    return None if cache is None else cache / _marker()


@functools.cache
def _marker() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    kind = {line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}
    return f"complete-{hashlib.sha256(b''.join(sorted(kind))).hexdigest()[:8]}"


def _parents() -> Iterator[Path]:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.expanduser("~/.cache")
    # the user's own choice first
    named = [os.environ.get("NUMBA_CACHE_DIR", ""), os.environ.get(KERNELS_VARIABLE, "")]
    parents = [
        *(os.path.abspath(os.path.expanduser(path)) for path in named if path),
        *(str(PACKAGE / "__pycache__"), cache),
    ]
    with contextlib.suppress(OSError):  # no temporary folder can be written
        parents.append(os.path.realpath(tempfile.gettempdir()))
    # if the user has no home folder, `~` is left in the path
    yield from (Path(path) for path in dict.fromkeys(parents) if os.path.isabs(path))


def _prepare(parent: Path) -> Path:
    """Create and return the folder in `parent`; an `OSError` says why `parent` can't be used."""
    parent.mkdir(parents=True, exist_ok=True)
    user = os.geteuid()
    cache = parent / f"ogbnlib-kernels-{user}"
    cache.mkdir(mode=0o700, exist_ok=True)
    status = cache.lstat()
    above = parent.stat().st_mode
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o077:
        raise PermissionError(
            errno.EPERM, f"expected {cache.name} in it to be yours alone, mode 700"
        )
    if above & stat.S_IWOTH and not above & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, "everyone can rename what is in it")
    target = cache / _content()
    is_new = not target.exists()
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryFile(dir=target) as probe:
        if not (target / _marker()).is_file():  # on a full disk only writing fails
            probe.write(bytes(_ROOM_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    os.utime(target)
    if is_new:
        _delete_old(cache)
    return target


def _content() -> str:
    """Hash everything that decides the machine code but the processor, which numba checks."""
    versions = [version(name) for name in ("numba", "llvmlite", "numpy")]
    content = hashlib.sha256(repr([str(PACKAGE), sys.implementation.cache_tag, versions]).encode())
    for path in sources():
        text = path.read_bytes()
        content.update(f"{path.relative_to(PACKAGE)} {len(text)} ".encode() + text)
    return content.hexdigest()[:16]


def _delete_old(cache: Path) -> None:
    used = []
    for entry in cache.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it
            used.append((entry.stat().st_mtime_ns, entry))
    for _, entry in sorted(used)[:-MOST_FOLDERS]:
        shutil.rmtree(entry, ignore_errors=True)
