"""Promises of `record`: what is said of growth is true of the recorded series."""

import math
import re
from collections.abc import Callable

import pytest

from ogbnlib.memory.reading import Reading
from ogbnlib.memory.record import Growth, Record

MB = 2**20


def recorded(
    shape: Callable[[float], float],
    seconds: float,
    *,
    phases: dict[str, tuple[float, float]] | None = None,
    processes: Callable[[float], int] = lambda time_s: 1,
) -> Record:
    """The record of a watched command that holds `shape` (MB by seconds), ten samples a second.

    `phases`: begin and end by name.
    """
    record = Record()
    record.event({"event": "start", "time_s": 0.0, "command": ["python", "train.py"]})
    events = []
    for name, (begin_s, end_s) in (phases or {}).items():
        events.append({"event": "begin", "phase": name, "time_s": begin_s})
        events.append({"event": "end", "phase": name, "time_s": end_s})
    events.sort(key=lambda event: event["time_s"])
    for i in range(int(10 * seconds)):
        while events and events[0]["time_s"] <= i / 10:
            record.event(events.pop(0))
        held_bytes = int((shape(i / 10) + (i % 7) * 3) * MB)
        number = processes(i / 10)
        part = {"rss_anon_bytes": held_bytes, "rss_shmem_bytes": 0}
        if number > 1:  # which only PSS counts once
            part |= {"pss_anon_bytes": held_bytes, "pss_shmem_bytes": 0, "pss_file_bytes": 0}
        record.sample(i / 10, Reading(number, **part))
    return record


GROWN: dict[str, Callable[[float], float]] = {  # from 272 to 859 MB in 33 s
    "a line": lambda t: 272 + 587 * t / 33,
    "four steps": lambda t: 272 + 147 * int(4.99 * t / 33),
    "two steps": lambda t: 272 + 300 * (t > 15) + 287 * (t > 26),
    "one step": lambda t: 272 + 587 * (t > 20),
    "one late step": lambda t: 272 + 587 * (t > 30),
    "ever more slowly": lambda t: 272 + 180 * math.log(1 + t),
    "ever faster": lambda t: 272 + 587 * (t / 33) ** 3,
    "up and down": lambda t: 272 + 387 * t / 33 + 200 * (t % 3) / 3,
}


@pytest.mark.parametrize("name", GROWN)
def test_memory_that_triples_is_said_to_grow(name: str) -> None:
    growth = recorded(GROWN[name], 33).growth
    assert growth is not None
    assert "grows" in str(growth) or "climbs by" in str(growth)
    assert "levels off" not in str(growth)


def test_memory_at_rest_and_memory_that_comes_and_goes_level_off() -> None:
    for shape in (lambda t: 500, lambda t: 300 + 400 * (t % 5) / 5):
        growth = recorded(shape, 33).growth
        assert growth is not None
        assert (growth.verdict, growth.has_grown) == ("levels off", False)


def test_epochs_that_grow_in_steps_are_said_to_grow() -> None:
    steps = Growth.of([MB * size for size in (272, 272, 400, 400, 400, 859, 859)])
    assert str(steps) == "Over 7 epochs memory grows from 272 MB to 859 MB, but not steadily."
    assert Growth.of([MB * size for size in (272, 280, 281, 280, 282)]).verdict == "levels off"
    few = Growth.of([MB * size for size in (81, 120, 141)])
    assert str(few) == (
        "Over 3 epochs memory went from 81 MB to 141 MB: too few epochs to say whether it climbs."
    )


def test_loading_is_no_growth_and_what_follows_it_is_judged_alone() -> None:
    def loads(t: float) -> float:
        return 200 + 2000 * min(t, 20) / 20

    assert recorded(loads, 20, phases={"load data": (0, 20)}).growth is None
    after = recorded(loads, 40, phases={"load data": (0, 20), "train": (20, 40)}).growth
    assert after is not None
    assert after.verdict == "levels off"
    leak = recorded(lambda t: loads(t) + 20 * max(0, t - 20), 40, phases={"Build loaders": (0, 20)})
    assert leak.growth is not None
    assert leak.growth.verdict == "climbs"
    assert 2000 <= leak.growth.first_bytes / MB <= 2400


def test_a_loader_built_in_each_epoch_hides_no_leak() -> None:
    phases = {f"build loader {i}": (4.0 * i, 4.0 * i + 1) for i in range(10)}
    record = Record()
    record.event({"event": "start", "time_s": 0.0, "command": ["python"]})
    for i in range(400):
        if i % 40 == 0:
            record.event({"event": "begin", "phase": "build loader", "time_s": i / 10})
        if i % 40 == 10:
            record.event({"event": "end", "phase": "build loader", "time_s": i / 10})
        record.sample(i / 10, Reading(1, rss_anon_bytes=(300 + 2 * i) * MB, rss_shmem_bytes=0))
    assert len(phases) == 10
    assert record.growth is not None
    assert record.growth.verdict == "climbs"


def test_processes_that_become_many_are_told_with_the_memory_of_each() -> None:
    def number(t: float) -> int:
        return min(17, 1 + int(t))

    record = recorded(lambda t: 50 * number(t), 33, processes=number)
    assert record.processes is not None
    assert (record.processes.first, record.processes.most) == (1, 17)
    assert re.match("Its processes went from 1 to 17, 5[01] MB each", str(record.processes))
    assert recorded(lambda t: 50, 5).processes is None
