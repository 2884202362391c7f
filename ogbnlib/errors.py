"""A user's mistake as one exception, and sizes as people write and read them. Imports neither torch nor numpy."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable

MB, GB = 2**20, 2**30  # the units of every text, table and plot
_BINARY = {"": 1, "K": 2**10, "M": MB, "G": GB, "T": 2**40}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(i?)([bB]?)\s*$")


class InputError(ValueError):
    """A mistake in what the user gave: names the file or parameter, what was expected, what was found, what to do."""


class Diverged(ArithmeticError):
    """Training came to a loss or a weight that is not finite. What was saved before is finite."""


def parse_bytes(value: object, name: str = "memory_limit") -> int:
    """A byte count from `"8 GB"`, `"512MiB"`, `"1.5g"` or a whole number of bytes of at least 1 MiB.

    Units are binary, as Slurm's `--mem` and the kernel's cgroup files have them: 1 GB is 2**30 bytes.

    Raises:
        InputError: for a bare number too small to be a count of bytes (`8` may mean 8 bytes, 8 MB as in Slurm, or
            8 GB), for a size of zero or below, and for anything else that is not a size.
    """
    example = f'{name}: expected a size such as "8 GB" or "512 MB"'
    text = str(value).strip()
    match = _SIZE.match(text)
    if not match:
        raise InputError(f"{example}, got {value!r}")
    number, prefix, _, suffix = match.groups()
    if not prefix and not suffix and float(number) < 2**20:
        raise InputError(
            f'{example}, got {value!r}, which is ambiguous without a unit; write "{text} GB" or "{text} MB"'
        )
    count = int(float(number) * _BINARY[prefix.upper()])
    if count <= 0:
        raise InputError(f"{example} above zero, got {value!r}")
    return count


def format_bytes(count: float | None) -> str:
    """A size for people: `1.25 GB`, `310 MB` (binary units, as in `parse_bytes`)."""
    if count is None:
        return "unknown"
    if abs(count) >= 2**30:
        return f"{count / 2**30:.2f} GB"
    if abs(count) >= 2**20:
        return f"{count / 2**20:.0f} MB"
    return f"{count / 2**10:.0f} kB"


def unknown_name(name: str, known: Iterable[str], what: str) -> str:
    """The sentence for a misspelt name: the closest known one, then all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {what} {name!r}: {hint}known: {', '.join(known)}"


def is_interactive() -> bool:
    """Whether a person watches: a terminal, or a notebook opened in JupyterLab (papermill sets no session name)."""
    return sys.stderr.isatty() or "JPY_SESSION_NAME" in os.environ
