"""The folder of compiled kernels (numba functions), one for each version of their source files
and each kind of processor.

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
MOST_FOLDERS = 8  # each change of the sources or processor adds one; older ones are deleted
_ROOM_BYTES = 8 * MB  # all kernels take 5 MB
_COMPLETE = "complete"


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
        else:
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
    """Return the file that exists once all training kernels are compiled."""
    cache = folder()
    return None if cache is None else cache / _COMPLETE


def _parents() -> Iterator[Path]:
    home_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    places = [
        os.environ.get("NUMBA_CACHE_DIR"),  # the user's own choice first
        os.environ.get(KERNELS_VARIABLE),
        str(PACKAGE / "__pycache__"),
        home_cache,
    ]
    with contextlib.suppress(OSError):  # no temporary folder can be written
        places.append(tempfile.gettempdir())
    for place in filter(None, places):
        path = os.path.expanduser(place)
        if not path.startswith("~"):  # as for a user without a home folder
            yield Path(os.path.abspath(path))


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
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryFile(dir=target) as probe:
        if not (target / _COMPLETE).is_file():  # a full disk has room for an empty file
            os.posix_fallocate(probe.fileno(), 0, _ROOM_BYTES)
    os.utime(target)
    with contextlib.suppress(FileNotFoundError):  # another process deletes them
        for old in sorted(cache.iterdir(), key=os.path.getmtime)[:-MOST_FOLDERS]:
            shutil.rmtree(old, ignore_errors=True)
    return target


def _content() -> str:
    """Hash everything that decides the machine code: versions, processor and sources."""
    versions = [version(name) for name in ("numba", "llvmlite", "numpy")]
    content = hashlib.sha256(repr([str(PACKAGE), sys.implementation.cache_tag, versions]).encode())
    cpu_lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    kinds = (b"model name", b"flags", b"Features")
    content.update(b"".join(sorted({line for line in cpu_lines if line.startswith(kinds)})))
    for path in sources():
        text = path.read_bytes()
        content.update(f"{path.relative_to(PACKAGE)} {len(text)} ".encode() + text)
    return content.hexdigest()[:16]
