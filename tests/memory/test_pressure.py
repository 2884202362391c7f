"""Promises about time lost for memory (the kernel's PSI): read, recorded, and named where a run thrashes."""

from pathlib import Path

import pytest
from conftest import MB, uncached_file, write_run

from ogbnlib.memory.cgroup import Cgroup
from ogbnlib.memory.reading import Reading
from ogbnlib.memory.record import SAMPLE_COLUMNS
from ogbnlib.memory.recorder import Recorder
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import watch

PRESSURE = """\
some avg10=12.00 avg60=3.10 avg300=0.70 total=106245066
full avg10=0.00 avg60=0.00 avg300=0.00 total=64468641
"""


def test_seconds_of_waiting_are_those_of_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "memory.pressure").write_text(PRESSURE)
    assert Cgroup(tmp_path, 2, tmp_path).stalled_s() == 106.245066
    (tmp_path / "memory.pressure").write_text("")  # as with the kernel's option psi=0
    assert Cgroup(tmp_path, 2, tmp_path).stalled_s() is None


@pytest.mark.parametrize(
    ("step_s", "is_named"), [(0.6, True), (0.1, False)], ids=["thrashing", "harmless"]
)
def test_a_run_that_thrashed_is_told_the_share_of_its_time(
    tmp_path: Path, step_s: float, is_named: bool
) -> None:
    samples = [{"time_s": 100 + i, "stalled_s": 7 + step_s * i} for i in range(50)]
    events = [{"time_s": 100.0, "event": "start", "command": ["my_train"]}]
    run = Run.open(write_run(tmp_path, exit_code=137, samples=samples, events=events))
    assert run.diagnosis.facts.stalled_s == pytest.approx(49 * step_s)
    assert ("waited for memory" in run.diagnosis.text) == is_named
    assert run.timeline["stalled_s"].iloc[-1] == pytest.approx(7 + 49 * step_s)


def test_a_run_of_0_2_0_without_the_column_goes_on_in_its_file(tmp_path: Path) -> None:
    write_run(tmp_path)
    timeline = tmp_path / "timeline.csv"
    lines = timeline.read_text().splitlines()
    assert lines[0].endswith(",stalled_s")
    timeline.write_text("".join(f"{line.rpartition(',')[0]}\n" for line in lines))
    assert Run.open(tmp_path).record.stalled_s is None
    recorder = Recorder(tmp_path)
    recorder.add(200.0, Reading(rss_anon_bytes=5 * MB, stalled_s=3.0))
    recorder.stop()
    table = Run.open(tmp_path).samples
    assert [*table] == [*SAMPLE_COLUMNS]
    assert table["rss_anon_bytes"].iloc[-1] == 5 * MB
    assert table["stalled_s"].isna().all()


# Random pages of a file that is larger than the limit.
THRASH = """
import mmap, random, sys, time
with open(sys.argv[1], "rb") as file:
    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
end_s = time.monotonic() + 12
while time.monotonic() < end_s:
    content[random.randrange(len(content))]
"""


@pytest.mark.slow
def test_a_run_that_thrashes_records_the_time_it_lost(tmp_path: Path) -> None:
    path = uncached_file(tmp_path / "large", 120 * MB)
    run = watch(["-c", THRASH, str(path)], "60 MB", run_dir=tmp_path / "run", echo=False)
    if "stalled_s" not in run.result:
        pytest.skip("no cgroup v2 that counts pressure (PSI) can be made here")
    assert run.result["stalled_s"] > 0.02 * run.result["duration_s"]
    assert run.timeline["stalled_s"].is_monotonic_increasing
