"""Memory that a process may still plan to use."""

import os

import psutil

from ..errors import MB
from ..launcher import local_ranks
from ..memory.cgroup import effective_limit
from ..memory.reading import own_memory, read_sums


def usable_bytes(limit_bytes: int) -> int:
    """Return the part of a limit to plan with.

    5 % of the limit, and at least 60 MB, are left for memory that no estimate covers.
    """
    return max(0, min(int(0.95 * limit_bytes), limit_bytes - 60 * MB))


def available_bytes() -> int:
    """Return the bytes that this process may still use under its limit and the host's free memory.

    The ranks on a node share both equally. Their launcher's memory also counts against the limit.
    """
    ranks = local_ranks()
    launcher = None  # bytes; None also if its memory can't be read
    if ranks > 1:
        launcher = read_sums([os.getppid()], "status")[0]  # RssAnon
    limit_bytes = usable_bytes(effective_limit()[0]) - (launcher or 0)
    free_bytes = usable_bytes(psutil.virtual_memory().available)
    # the limit counts what this process uses already, the host's free memory does not
    return max(0, min(limit_bytes // ranks - own_memory()[0], free_bytes // ranks))
