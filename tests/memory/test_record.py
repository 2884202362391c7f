"""Promises of `record`: the phase at the end is open, and growth is that of the epochs."""

from typing import Any

import pytest

from ogbnlib.memory.growth import Growth
from ogbnlib.memory.record import Record

MB = 2**20


START = {"event": "start", "time_s": 0.0, "command": ["python", "train.py"]}


def record_of(*events: tuple[str, str]) -> Record:
    """The record of a command with these events, as (kind, name of the phase or mark)."""
    record = Record()
    record.event(START)
    for time_s, (kind, name) in enumerate(events, 1):
        kind, _, failed = kind.partition(" ")
        extra: dict[str, Any] = {"failed": failed} if failed else {}
        key = "name" if kind == "mark" else "phase"
        record.event({"event": kind, key: name, "time_s": float(time_s), **extra})
    return record


A, B = ("begin", "a"), ("begin", "b")
ENDS = {  # events -> the open phase, the phase that an exception left
    "none": ([], None, None),
    "open": ([A], "a", None),
    "inner": ([A, B], "b", None),
    "inner ended": ([A, B, ("end", "b")], "a", None),
    "all ended": ([A, ("end", "a")], None, None),
    "the same name twice": ([A, A, ("end", "a")], "a", None),
    "an end without a begin": ([A, ("end", "b")], "a", None),
    "raised": ([A, B, ("end E", "b"), ("end E", "a")], None, "b"),
    "caught inside": ([A, B, ("end E", "b")], "a", "b"),
    "caught, then another phase": ([A, ("end E", "a"), B, ("end", "b")], None, None),
    "caught, then a mark": ([A, ("end E", "a"), ("mark", "epoch")], None, None),
    "caught, then the outer one ended": ([A, B, ("end E", "b"), ("end", "a")], None, None),
    "caught, then another exception": ([A, B, ("end E", "b"), ("end F", "a")], None, "a"),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_phase_at_the_end_is_the_innermost_open_one(name: str) -> None:
    events, phase, failed = ENDS[name]
    record = record_of(*events)
    assert (record.phase and record.phase.name) == phase
    assert (record.failed and record.failed.name) == failed


def test_memory_climbs_only_where_each_epoch_keeps_some() -> None:
    for sizes, verdict in {
        (100, 110, 120, 130, 140, 150): "climbs",
        (272, 272, 400, 400, 400, 859, 859): "no steady climb",
        (272, 280, 281, 280, 282): "no steady climb",
        (81, 120, 141): "too few epochs",
    }.items():
        assert Growth.of([MB * size for size in sizes]).verdict == verdict


@pytest.mark.parametrize("epochs", [5, 199, 200, 403])
def test_growth_goes_to_the_last_epoch_however_many_there_are(epochs: int) -> None:
    growth = Growth.of([100 * MB + MB * epoch for epoch in range(epochs)])
    assert (growth.epochs, growth.slope_bytes) == (epochs, MB)
    assert (growth.first_bytes, growth.last_bytes) == (100 * MB, (99 + epochs) * MB)


def test_graphs_and_calls_are_those_that_are_alive_and_open() -> None:
    record = record_of()
    call = {"event": "call", "call": "torch.load", "line": "line 3 of t.py", "time_s": 1.0}
    for name, size in (("one", 5), ("two", 6), ("one", 0)):
        record.event({"event": "graph", "name": name, "bytes": size, "time_s": 1.0})
    record.event({"event": "part", "name": "cache", "bytes": 7, "time_s": 1.0})
    record.event(call)
    record.event(call | {"call": "numpy.load"})
    record.event({"event": "returned", "time_s": 2.0})
    assert (record.graphs, record.parts) == ({"two": 6}, {"two": 6, "cache": 7})
    assert record.call is not None
    assert record.call["call"] == "torch.load"
    record.event({"event": "returned", "time_s": 3.0})
    assert record.call is None
