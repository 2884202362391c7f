"""Promises of `recorder`: a week is as small as a minute, and no peak or sample is lost; what a kill
tears is one line at most; the phase at the end is open, and growth is that of the epochs."""

import contextlib
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import MB

from ogbnlib.memory.growth import Growth
from ogbnlib.memory.reading import Reading, _gives_pss, read_memory
from ogbnlib.memory.record import SAMPLE_COLUMNS, Record
from ogbnlib.memory.recorder import NUM_BINS, EventLog, Recorder
from ogbnlib.memory.tree import Tree
from ogbnlib.runs.folder import Run

WEEK_S = 7 * 24 * 3600.0


def sample(held_bytes: int) -> Reading:
    """A reading of a process that is alone in a cgroup, with as many digits as a large run's."""
    own = {"rss_anon_bytes": held_bytes, "rss_file_bytes": 10**9, "rss_shmem_bytes": 0}
    group = {"anon": held_bytes, "file": 10**10, "shmem": 0}
    group = {f"cgroup_{name}_bytes": size for name, size in group.items()}
    return Reading(num_processes=1, **own, **group)


class Simulated:
    """A run on its own clock, sampled at 20 Hz and later 3 times for each sample that stays."""

    def __init__(self, folder: Path):
        self.began_s = self.now_s = 1.7e9
        self.recorder, self.trainer = Recorder(folder), EventLog(folder)
        self.peaks: list[int] = []  # of each phase, in order
        self.random = random.Random(0)

    def phase(self, name: str, duration_s: float, peak_bytes: int, **info: Any) -> None:
        """A phase with one sample of `peak_bytes` somewhere in it, all others below."""
        self.trainer.mark("begin", phase=name, time_s=self.now_s, **info)
        end_s = self.now_s + duration_s
        step_s = max(0.05, (self.now_s - self.began_s) / NUM_BINS / 3)
        samples = max(3, int(duration_s / step_s))
        at = self.random.randrange(samples)
        for i in range(samples):
            self.now_s += duration_s / (samples + 1)
            held = peak_bytes if i == at else self.random.randrange(peak_bytes // 2, peak_bytes)
            self.recorder.add(round(self.now_s, 4), sample(held))
        self.peaks.append(peak_bytes)
        self.now_s = end_s
        self.trainer.mark("end", phase=name, time_s=self.now_s)


def test_a_weeks_samples_stay_small_and_keep_every_peak(tmp_path: Path) -> None:
    run = Simulated(tmp_path)
    run.trainer.mark("start", time_s=run.began_s)
    for epoch in range(1, 170):
        run.phase("train epoch", 3360, 40 * 10**9 + epoch * MB, epoch=epoch)
        run.phase("eval valid", 210, 30 * 10**9 + epoch * MB)
        run.phase("checkpoint", 10, 20 * 10**9 + epoch * MB)
    run.recorder.stop()
    assert run.now_s - run.began_s > WEEK_S
    assert (tmp_path / "timeline.csv").stat().st_size < 5 * MB
    done = Run.open(tmp_path)
    phase = done.timeline["phase"]
    peaks = done.timeline.groupby((phase != phase.shift()).cumsum())
    assert peaks["cgroup_anon_bytes"].max().tolist() == run.peaks
    assert peaks["phase"].first().tolist() == [phase.label for phase in done.phases]
    record = run.recorder.record
    last = {"eval valid": run.peaks[-2], "checkpoint": run.peaks[-1]}
    assert record.phases == {"train epoch": max(run.peaks), **last}
    assert record.held_peak_bytes == record.peaks["cgroup_anon_bytes"] == max(run.peaks)
    assert record.duration_s == pytest.approx(run.now_s - run.began_s, abs=5)
    assert vars(done.record)["phases"] == record.phases  # and so a reader of the files finds them


MANY = {"num_processes": 3, "rss_anon_bytes": 7}


@pytest.mark.skipif(not _gives_pss(), reason="this kernel's /proc/PID/smaps_rollup gives no PSS")
@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"num_processes": 1, "rss_anon_bytes": 7, "pss_anon_bytes": 5}, 7),
        (MANY, None),
        ({**MANY, "pss_anon_bytes": 5, "pss_shmem_bytes": 1}, 6),
        ({**MANY, "cgroup_anon_bytes": 4, "cgroup_file_bytes": 9}, 4),
        ({"num_processes": 0}, None),
    ],
)
def test_held_memory_counts_each_page_once(given: dict[str, int], held: int | None) -> None:
    assert Reading(**given).held_bytes == held


def test_a_timeline_of_its_header_alone_has_no_samples(tmp_path: Path) -> None:
    (tmp_path / "timeline.csv").write_text(",".join(SAMPLE_COLUMNS) + "\n")
    assert len(Run(tmp_path).timeline) == 0


def test_what_another_process_marks_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"time_s": 1, "event": "of an earlier attempt"}\n')
    log, other = EventLog(tmp_path), EventLog(tmp_path)
    other.mark("part", name="features", bytes=1)
    assert [event["event"] for event in log.follow()] == ["part"]
    path = tmp_path / "events.jsonl"
    line = json.dumps({"time_s": 2.0, "event": "note"}) + "\n"
    with open(path, "a") as file:
        file.write(line[:10])
    assert not list(log.follow())
    with open(path, "a") as file:
        file.write(line[10:] + "torn" + "x" * 3 * MB + "\n" + line)
    assert [event["event"] for event in log.follow()] == ["note", "note"]


_seconds = itertools.count(1_700_000_000.0)


def record(folder: Path, samples: int) -> None:
    """Samples a second apart, so that none is thinned out however fast they are taken."""
    recorder = Recorder(folder)
    for _ in range(samples):
        recorder.add(next(_seconds), read_memory(Tree(os.getpid())))
    recorder.stop()


def test_appending_after_a_torn_line_damages_nothing(tmp_path: Path) -> None:
    record(tmp_path, 3)
    path = tmp_path / "timeline.csv"
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    wrong = []
    # 1: only the newline is missing, and closing the line makes it whole
    for cut in range(2, last):
        path.write_bytes(whole[:-cut])
        record(tmp_path, 2)
        table = Run(tmp_path).timeline
        if len(table) != 4:
            wrong.append((cut, len(table)))
    assert not wrong, f"(bytes cut, rows), expected 4 rows: {wrong}"


def test_torn_events_are_left_out_and_later_ones_stand(tmp_path: Path) -> None:
    def told() -> list[str]:
        return [event["event"] for event in Run(tmp_path).events]

    with contextlib.closing(EventLog(tmp_path)) as log:
        log.mark("start")
        log.mark("part", name="features", bytes=5)
    path = tmp_path / "events.jsonl"
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in range(2, last):
        path.write_bytes(whole[:-cut])
        assert told() == ["start"], f"{cut} bytes cut"
        with contextlib.closing(EventLog(tmp_path)) as log:
            log.mark("note", text="again")
        assert told() == ["start", "note"], f"{cut} bytes cut"


def test_the_end_of_a_phase_carries_its_exact_peak(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    with log.phase("outer"):
        with log.phase("inner"):
            _ = len(b"x" * (100 * MB))
        with log.phase("quiet"):
            pass
    begins = {e["phase"]: e for e in Run(tmp_path).events if e["event"] == "begin"}
    ends = {e["phase"]: e for e in Run(tmp_path).events if e["event"] == "end"}
    if ends["inner"]["peak_rss_bytes"] == 0:
        pytest.skip("this kernel gives no high-water mark of resident memory")
    grown = {name: ends[name]["peak_rss_bytes"] - begins[name]["rss_bytes"] for name in ends}
    assert 95 * MB <= grown["inner"] < 150 * MB
    assert 95 * MB <= grown["outer"] < 150 * MB
    assert grown["quiet"] < 50 * MB


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
