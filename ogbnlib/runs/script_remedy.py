"""Remedy for a killed script or cell, from the facts of its record.

The planner knows nothing of a script's content. So each sentence names what was recorded: a call
that was open at the end, the graphs that PyG's loaders keep, or where and by how much memory grew.
"""

from ..errors import format_bytes
from ..memory.killed import KEPT, KilledBy
from ..memory.record import Phase, Record

PAGE = "notebooks/guide/memory.md#a-killed-script"
REFUSED = f"ask for less at once in the line that the traceback names; {PAGE} has the usual causes"
_NUM_LINES = 3  # most lines that a remedy lists
_LETTERS = 60  # most letters of a phase or of a printed line


def script_remedy(
    record: Record, killed: KilledBy, phase: Phase | None, line: str, printed_bytes: int
) -> str:
    """Text of what helps a killed script or cell, of at most 60 words.

    Args:
        phase: The innermost phase that was open at the end.
        line: The last line that the command printed.
        printed_bytes: Memory in use when it printed that line.
    """
    if record.growth and record.growth.verdict == "climbs":
        slope = format_bytes(record.growth.slope_bytes)
        text = f"find what keeps {slope} in each epoch: {KEPT} ({PAGE})"
    else:
        text = _of_call(record) or _of_graphs(record)
    # the last sample may be 50 ms older than the kill, which came at the limit
    held_bytes = killed.left_bytes if killed.limit_bytes else record.held_bytes or 0
    text = text or _of_growth(record, phase, line, printed_bytes, held_bytes)
    if killed.limit_bytes is None:
        return text
    return f"{text}; or raise {'the limit' if killed.cgroup else 'memory_limit'}"


def _of_call(record: Record) -> str:
    """Text for a file that was being read whole; "" if none was."""
    call = record.call
    if call is None or not call.get("argument"):
        return ""
    return (
        f"map the file in place of reading it whole: {call['call']}(..., {call['argument']}) in "
        f"{call['line']}, whose file has {format_bytes(call.get('bytes'))}"
    )


def _of_graphs(record: Record) -> str:
    """Text for several loaders of PyG that keep a graph each; "" for fewer."""
    sizes = [*record.graphs.values()]
    lines = [name.partition(", ")[2] for name in record.graphs]
    if record.call is not None and not record.call.get("argument"):  # a loader is being built
        lines.append(record.call["line"])
    if len(lines) < 2:
        return ""
    listed = [*dict.fromkeys(lines)]
    more = ", ..." if len(listed) > _NUM_LINES else ""
    return (
        f"let {len(lines)} loaders share one graph (each keeps {format_bytes(max(sizes))}): pass "
        "neighbor_sampler=first_loader.node_sampler to each NeighborLoader after the first "
        f"({', '.join(listed[:_NUM_LINES])}{more}); all then sample by the first one's num_neighbors"
    )


def _of_growth(
    record: Record, phase: Phase | None, line: str, printed_bytes: int, held_bytes: int
) -> str:
    """Text of how much memory grew, to `held_bytes` in the end, and where."""
    where = ""
    since_bytes = printed_bytes
    if record.call is not None:
        where = f"in {record.call['line']}"
        since_bytes = record.call.get("held_bytes") or 0
    elif phase is not None:
        where = f"in '{phase.label[:_LETTERS]}'"
        since_bytes = phase.info.get("held_bytes") or 0
    elif line:
        where = f"after it printed '{line[:_LETTERS]}'"
    text = f"hold less at once: memory in use grew to {format_bytes(held_bytes)}"
    if where:
        text += f", {format_bytes(max(0, held_bytes - since_bytes))} of it {where}"
    return f"{text}; {PAGE} has the usual causes"
