"""Errors in one sentence, and sizes such as "8 GB". Imports neither torch nor numpy."""

import contextlib
import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

# The units of every text, table and plot.
MB = 2**20
GB = 2**30
_BINARY = {"": 1, "K": 2**10, "M": MB, "G": GB, "T": 2**40}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(i?)([bB]?)\s*$")


class InputError(ValueError):
    """A user's mistake: names the file or parameter, expected and actual value, and the remedy."""

    def _render_traceback_(self) -> list[str]:  # IPython shows this line, not the traceback
        return [printable(f"{type(self).__name__}: {self}")]


def shortened(error: BaseException, lines: list[str] | None = None) -> BaseException:
    """Make IPython show these lines, by default one, in place of the error's traceback."""
    shown = lines or [f"{type(error).__name__}: {error}"]
    error._render_traceback_ = lambda: shown  # type: ignore[attr-defined]  # IPython calls it
    return error


class Diverged(ArithmeticError):
    """A loss or a weight is not finite. Earlier checkpoints are finite."""


_REMEDIES = {
    errno.EACCES: "change its permissions, or name a place of your own",
    errno.ENOSPC: "the disk is full: free space on it, or name a place on another",
    errno.EDQUOT: "your share of the disk is full: delete something, or name a place on another",
    errno.EFBIG: "its file system or the limit of `ulimit -f` allows no larger file",
    errno.EIO: "its disk failed; look at `dmesg`, and bring the data to another disk",
    errno.EMFILE: "raise the limit of `ulimit -n`, or lower num_workers",
}
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # explained without a path, too


def explained(error: BaseException) -> BaseException:
    """Return a file-system error as `InputError` with path, cause and remedy, others as they are."""
    if not isinstance(error, OSError) or error.errno is None or isinstance(error, ConnectionError):
        return error  # of a library or the network, with a sentence of its own
    has_path = isinstance(error.filename, str | bytes | os.PathLike)  # not None or a descriptor
    where = os.fsdecode(error.filename) if has_path else "a file"
    # a refused map of a file (ENOMEM) says nothing of the file
    if error.errno == errno.ENOMEM or (not has_path and error.errno not in _DISK):
        return error
    remedy = _REMEDIES.get(error.errno, "check the path and its disk")
    return InputError(f"{where}: {os.strerror(error.errno).lower()}; {remedy}")


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Raise the errors of a block, or a decorated function, as `explained` returns them."""
    try:
        yield
    except OSError as error:
        clear = explained(error)
        if clear is error:
            raise  # with its whole traceback
        raise clear from None


@contextlib.contextmanager
def naming(path: object, expected: str = "", remedy: str = "") -> Iterator[None]:
    """Add `path`, if it is not None, to errors without a path, such as those of write(2).

    If `expected` describes the content, a library's error about it becomes an `InputError`, which
    ends with `remedy`.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # from the system
            error.filename = error.filename or (path and str(path))
            raise
        if not expected or isinstance(error, InputError | MemoryError):  # not about the content
            raise
        problem = " ".join(str(error).split())  # on one line
        text = f"{path}: expected {expected}, found damage or other content ({problem})"
        raise InputError(f"{text}; {remedy}" if remedy else text) from None


def parse_bytes(value: object, name: str = "memory_limit") -> int:
    """Parse `"8 GB"`, `"512MiB"`, `"1.5g"` or a whole number of bytes from 1 MB on; 1 GB is 2**30.

    A small number without a unit is an `InputError`, because `8` may mean 8 bytes, 8 MB as in
    Slurm, or 8 GB.
    """
    expected = f'{name}: expected a size such as "8 GB" or "512 MB"'
    text = str(value).strip()
    match = _SIZE.match(text)
    if not match:
        raise InputError(f"{expected}, got {value!r}")
    number, prefix, _, suffix = match.groups()  # "1.5", "G", "i", "B"
    if not prefix and not suffix and 0 < float(number) < 2**20:  # no unit, less than 1 MB
        raise InputError(
            f'{expected}, got {value!r}, ambiguous without a unit; write "{text} GB" or "{text} MB"'
        )
    count = float(number) * _BINARY[prefix.upper()]
    if not 1 <= count < 2**60:
        raise InputError(f"{expected}, above zero and below 2**60 bytes, got {value!r}")
    return int(count)


# Control characters but tab and newline. In a file's name they could move the cursor or, by a change
# of direction, show another text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: object) -> str:
    """Return a text for a terminal or a page: no control characters, invalid ones escaped."""
    return _CONTROL.sub("", str(text)).encode(errors="backslashreplace").decode()


def format_bytes(count: float | None) -> str:
    """Format a size in binary units: `1.25 GB`, `310 MB`."""
    if count is None:
        return "unknown"
    if abs(count) >= GB:
        return f"{count / GB:.2f} GB"
    if abs(count) >= MB:
        return f"{count / MB:.0f} MB"
    return f"{count / 2**10:.0f} kB"


def split_name(name: Any) -> Any:
    """Return "valid" for "val", the name in PyG and many data sets; other names unchanged."""
    # of another type, such as an array, `==` may have no truth value
    return "valid" if isinstance(name, str) and name == "val" else name


def unknown_name(name: str, names: Iterable[str], kind: str) -> str:
    """Return the message for a misspelt name, with the closest known name and all of them."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}"
