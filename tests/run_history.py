"""A run with a long past: what weeks of earlier attempts leave in its folder, written in seconds."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

from ogbnlib.memory.record import SAMPLE_COLUMNS


def write_history(folder: Path, *, hours: float, phases: int, samples: int) -> None:
    """Put one earlier attempt of `hours` before all that `folder` holds: epochs of five phases, and a timeline of every
    sample, as runs had before their timelines were thinned; at 20 Hz a week has 12,096,000.
    """
    length_s = hours * 3600.0
    began_s = time.time() - length_s - 60
    with open(folder / "events.jsonl", "w") as file:
        file.write(json.dumps({"time_s": began_s, "event": "start", "previous": None}) + "\n")
        names = itertools.cycle(["train epoch", "eval valid", "eval test", "release", "checkpoint"])
        for i, name in zip(range(phases), names, strict=False):
            at = began_s + length_s * i / phases
            sizes = {"held_bytes": 10**9 + i, "rss_bytes": 2 * 10**9}
            info = {"epoch": 1 + i // 5} if name == "train epoch" else {}
            file.write(json.dumps({"time_s": round(at, 4), "event": "begin", "phase": name, **sizes, **info}) + "\n")
            file.write(json.dumps({"time_s": round(at, 4), "event": "part", "name": "features", "bytes": i}) + "\n")
            end_s = round(at + 0.9 * length_s / phases, 4)
            file.write(json.dumps({"time_s": end_s, "event": "end", "phase": name, "held_bytes": 10**9}) + "\n")
    sizes = {"num_processes": "1", "rss_anon_bytes": "40000000000", "rss_file_bytes": "1234567890"}
    sizes |= {"rss_shmem_bytes": "0", "cgroup_usage_bytes": "60000000000", "cgroup_anon_bytes": "40000000000"}
    sizes |= {"cgroup_file_bytes": "20000000000", "cgroup_shmem_bytes": "0", "cgroup_limit_bytes": "137438953472"}
    rest = ",".join(sizes.get(name, "") for name in SAMPLE_COLUMNS[1:])
    with open(folder / "timeline.csv", "w") as file:
        file.write(",".join(SAMPLE_COLUMNS) + "\n")
        for first in range(0, samples, 10_000):
            chunk = range(first, min(first + 10_000, samples))
            file.write("".join(f"{began_s + length_s * i / samples:.4f},{rest}\n" for i in chunk))


# Resumes the run in a folder and says what its parent did after the child had ended: seconds, and its peak in MB.
RESUME = """
import json, sys, time
from ogbnlib.config import TrainConfig
from ogbnlib.memory.reading import own_memory
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run
from ogbnlib.runs import supervise
ended = []
relay = supervise._relay
def timed(*given):
    tail = relay(*given)
    ended.append(time.monotonic())
    return tail
supervise._relay = timed
config = Run(sys.argv[1]).config.replace(epochs=int(sys.argv[2]))
done = run(config, "2 GB", run_dir=sys.argv[1], resume=True, echo=False)
took_s = time.monotonic() - ended[0]
peak = own_memory()[2] / 2**20
found = {"exit_code": done.exit_code, "forecast": "peak_bytes" in done.result["forecast"]}
print(json.dumps({"took_s": took_s, "peak_mb": peak, **found}))
"""
