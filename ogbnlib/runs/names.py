"""Names of new run folders."""

import itertools
import os
from collections import Counter
from pathlib import Path

from ..environment import AGAIN_VARIABLE
from ..files import StrPath, home

_calls: Counter[Path] = Counter()  # number of calls of `next_run_dir` by first name


def next_run_dir(runs_dir: StrPath, name: str, *, again: bool = False) -> Path:
    """Return `runs_dir/name`, or `name-2`, `name-3`, ... if it exists, so that a repeated cell
    overwrites no run.

    With `again`, when a requeued job executes a notebook again, the n-th call returns the n-th
    name, the same as in the first execution.
    """
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    paths = (home(runs_dir) / name for name in names)
    if again and AGAIN_VARIABLE in os.environ:
        first = home(runs_dir) / name
        _calls[first] += 1
        return next(itertools.islice(paths, _calls[first] - 1, None))  # the n-th path
    return next(path for path in paths if not path.exists())
