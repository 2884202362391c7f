"""What the end of a long run costs: `python tests/benchmarks/bench_result.py [HOURS]`, 168 by default.

A run is trained for an epoch, given a past of so many hours at 20 Hz in the format that timelines had before they were
thinned (1.2 GB for a week) and of 50,000 phases, and resumed for another epoch. Printed are the seconds between the
child's end and the written result, forecast check included, and the parent's peak; and how large the timeline of such
a run is when it is thinned as it grows, which takes ten minutes of one core for the 12 million samples of a week.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from run_history import RESUME, write_history

from ogbnlib.config import TrainConfig
from ogbnlib.memory.reading import Reading
from ogbnlib.memory.recorder import Recorder
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run
from ogbnlib.sources.synth import synthesize


def resumed(folder: Path, hours: float) -> None:
    synthesize(folder / "data", scale=0.001, progress=False)
    config = TrainConfig.create(dataset=str(folder / "data"), epochs=1, device="cpu", progress="none")
    first = run(config, run_dir=folder / "run", echo=False)
    assert first.exit_code == 0, first.diagnosis
    write_history(folder / "run", hours=hours, phases=50_000, samples=int(hours * 3600 * 20))
    size = (folder / "run" / "timeline.csv").stat().st_size
    print(f"a past of {hours:.0f} h: {size / 2**20:,.0f} MB of samples, 50,000 phases")
    done = subprocess.run([sys.executable, "-c", RESUME, str(folder / "run"), "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    print(f"result {told['took_s']:.2f} s after the child's end, parent's peak {told['peak_mb']:.0f} MB: {told}")


def thinned(folder: Path, hours: float) -> None:
    folder.mkdir()
    recorder, began_s = Recorder(folder), time.time()
    values = {"num_processes": 1, "rss_anon_bytes": 4 * 10**10, "rss_file_bytes": 10**9, "rss_shmem_bytes": 0}
    values |= {"cgroup_usage_bytes": 6 * 10**10, "cgroup_file_bytes": 2 * 10**10, "cgroup_shmem_bytes": 0}
    count = int(hours * 3600 * 20)
    for i in range(count):
        held = 3 * 10**10 + i * 7919 % 10**10
        recorder.add(round(began_s + i / 20, 4), Reading(cgroup_anon_bytes=held, **values))
    recorder.stop()
    size, rows = (folder / "timeline.csv").stat().st_size, len(Run(folder).samples)
    took_us = (time.time() - began_s) / count * 1e6
    print(
        f"{hours:.0f} h at 20 Hz: {rows:,} of {count:,} samples kept, {size / 2**20:.2f} MB, {took_us:.0f} us a sample"
    )


if __name__ == "__main__":
    length = float(sys.argv[1]) if len(sys.argv) > 1 else 168.0
    with tempfile.TemporaryDirectory() as scratch:
        resumed(Path(scratch), length)
        thinned(Path(scratch) / "thinned", length)
