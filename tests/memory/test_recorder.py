"""Promises of `recorder`: a week is as small as a minute, and no peak or sample is lost."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import MB

from ogbnlib.memory.reading import Reading, _gives_pss
from ogbnlib.memory.record import SAMPLE_COLUMNS
from ogbnlib.memory.recorder import NUM_BINS, EventLog, Recorder
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

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.began_s = self.now_s = 1.7e9
        monkeypatch.setattr("time.time", lambda: self.now_s)
        self.recorder, self.trainer = Recorder(folder), EventLog(folder)
        self.peaks: list[int] = []  # of each phase, in order
        self.random = random.Random(0)

    def phase(self, name: str, duration_s: float, peak_bytes: int, **info: Any) -> None:
        """A phase with one sample of `peak_bytes` somewhere in it, all others below."""
        self.trainer.mark("begin", phase=name, **info)
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
        self.trainer.mark("end", phase=name)


def test_a_weeks_samples_stay_small_and_keep_every_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Simulated(tmp_path, monkeypatch)
    run.trainer.mark("start")
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
