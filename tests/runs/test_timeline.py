"""Promises of `timeline`: what a kill tears is one line at most, and the rest is read with its
phase."""

import contextlib
import itertools
import os
from pathlib import Path

import pytest
from conftest import MB

from ogbnlib.memory.reading import read_memory
from ogbnlib.memory.recorder import EventLog, Recorder
from ogbnlib.memory.tree import Tree
from ogbnlib.runs.folder import Run

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
