"""The folder of compiled kernels (numba functions), one of 5 MB for each version of their sources.

numba's own cache checks only the file that declares a kernel, so after a change of a callee in
another file it loads old machine code. The cache consists of pickles: a user with write access to
the folder can run code in this process.
"""

import functools
import hashlib
import os
import stat
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

from .errors import MB, InputError, naming

PACKAGE = Path(__file__).parent
_ROOM_BYTES = 8 * MB  # all kernels take 5 MB


def sources() -> list[Path]:
    """List the package's files that declare kernels, or intrinsics, which go into kernels."""
    marks = (b"\n@kernel", b"\n@intrinsic")  # decorators at the beginning of a line
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if any(mark in path.read_bytes() for mark in marks)
    ]


@functools.cache
def folder() -> Path | None:
    """Return the folder of the present sources' machine code; None if it can't be written."""
    place = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return _prepare(Path(place).expanduser().absolute())
    except (InputError, OSError, RuntimeError) as error:  # the last one without a home folder
        warnings.warn(
            f"compiled kernels can't be stored: {error}. Each process compiles them again, which "
            "takes half a minute and 100 MB; set NUMBA_CACHE_DIR to a folder of your own",
            stacklevel=2,
        )
        return None


def complete_marker() -> Path | None:
    """Return the file that exists once all training kernels are compiled for this processor."""
    cache = folder()
    return None if cache is None else cache / _marker()


@functools.cache
def _marker() -> str:
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    kinds = (b"model name", b"flags", b"Features")  # what numba compiles for; Features: on ARM
    processor = sorted({line for line in lines if line.startswith(kinds)})  # once for all cores
    return f"complete-{hashlib.sha256(b''.join(processor)).hexdigest()[:8]}"


def _prepare(parent: Path) -> Path:
    """Create and return the folder in `parent`; an error says why `parent` can't be used."""
    cache = parent / f"ogbnlib-kernels-{os.geteuid()}"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = cache.lstat()  # of a link itself, which another user may have put there
    parent_mode = parent.stat().st_mode
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & 0o077:  # others can write or read it
        raise InputError(f"{cache}: expected a folder that is yours alone, mode 700")
    if parent_mode & stat.S_IWOTH and not parent_mode & stat.S_ISVTX:  # unlike /tmp's mode 1777
        raise InputError(f"{parent}: everyone can rename what is in it")
    target = cache / _content()
    target.mkdir(exist_ok=True)
    with naming(target), tempfile.TemporaryFile(dir=target) as probe:
        if not (target / _marker()).is_file():  # kernels will be stored: fail now on a full disk
            os.posix_fallocate(probe.fileno(), 0, _ROOM_BYTES)
    return target


def _content() -> str:
    """Hash everything that decides the machine code but the processor, which numba checks."""
    versions = [version(name) for name in ("numba", "llvmlite", "numpy")]
    content = hashlib.sha256(repr([str(PACKAGE), sys.implementation.cache_tag, versions]).encode())
    for path in sources():
        text = path.read_bytes()
        content.update(f"{path.relative_to(PACKAGE)} {len(text)} ".encode() + text)
    return content.hexdigest()[:16]
