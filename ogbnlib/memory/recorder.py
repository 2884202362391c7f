"""What a run writes of its memory while it goes on: samples by the watching process, events by the trainer.

`timeline.csv` has one line per sample, `events.jsonl` one JSON object per line. Both are appended line by line with no
buffering in this process, so whatever kills the run, all lines but perhaps the last are whole. Times are `time.time()`
seconds, so that an interrupted run's later attempts append to the same files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .cgroup import Cgroup
from .cuda import cuda_reading
from .reading import Reading, own_memory, read_memory, reset_peak

TIMELINE, EVENTS = "timeline.csv", "events.jsonl"
RUNS_VARIABLE = "OGBNLIB_RUNS_LOG"  # a file to which each attempt of a run adds its folder; for a watcher outside
COLUMNS = ("time_s", *(field.name for field in fields(Reading)))
_TORN = " torn\n"  # closes a line that a kill cut off: without it half a number in the last column would pass for one


def _open_for_append(path: Path) -> io.TextIOWrapper:
    """Open for appending whole lines; a torn last line left by a kill is marked as such, not deleted."""
    file = open(path, "a+b", buffering=0)  # noqa: SIM115 (the caller keeps it)
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.write(_TORN.encode())
    return io.TextIOWrapper(file, write_through=True)


class EventLog:
    """Appends to `events.jsonl`; one `write` call per line. With `run_dir=None` it marks nothing.

    Events: `start` of an attempt, `begin` and `end` of a phase, `part` (a named piece of memory the run now holds),
    `cuda` (see `cuda.cuda_reading`), `cuda_oom` (an allocation on the GPU that failed), `empty_cache`, `note` (a choice
    that was taken).

    Both ends of a phase carry this process's own `held_bytes` (RssAnon + RssShmem) at that moment, and its end the
    exact `peak_rss_bytes` reached inside it: the kernel's high-water mark, reset at the beginning through
    /proc/self/clear_refs (proc(5), "5"), so no spike is too short for it. Workers are not in these two.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None):
        self._file = _open_for_append(Path(run_dir) / EVENTS) if run_dir is not None else None
        self._lock = threading.Lock()
        self._last_cuda_s = self._last_largest_s = 0.0
        self._peaks: list[int] = []  # of the open phases: resetting the mark for an inner one must not lose the outer's

    def mark(self, event: str, **info: Any) -> None:
        if self._file is None:
            return
        line = json.dumps({"time_s": round(time.time(), 4), "event": event, **info}) + "\n"
        with self._lock:
            self._file.write(line)

    @contextlib.contextmanager
    def phase(self, name: str, **info: Any) -> Iterator[None]:
        """Everything inside belongs to phase `name`; phases nest, and the innermost open one is where a kill fell."""
        if self._file is None:
            yield
            return
        held, rss, peak = own_memory()
        self._peaks = [max(outer, peak) for outer in self._peaks]
        reset_peak()
        self._peaks.append(0)
        self.mark("begin", phase=name, held_bytes=held, rss_bytes=rss, **info)
        self.cuda(force=True)
        failed = {}
        try:
            yield
        except BaseException as error:
            failed = {"failed": type(error).__name__}
            raise
        finally:
            self.cuda(force=True, largest=True)
            held, _, peak = own_memory()
            self._peaks = [max(outer, peak) for outer in self._peaks]
            self.mark("end", phase=name, held_bytes=held, peak_rss_bytes=self._peaks.pop(), **failed)
            reset_peak()

    def part(self, name: str, size_bytes: int) -> None:
        """The run now holds `size_bytes` under this name; 0 says that it was given back."""
        self.mark("part", name=name, bytes=int(size_bytes))

    def cuda(self, force: bool = False, largest: bool = False) -> None:
        """Record this process's GPU memory, at most ten times a second unless `force`; free without CUDA.

        The largest free block is looked for once a second, and whenever `largest` is asked for.
        """
        now = time.monotonic()
        if self._file is None or not (force or now - self._last_cuda_s >= 0.1):
            return
        largest = largest or now - self._last_largest_s >= 1.0
        if (reading := cuda_reading(largest)) is not None:
            self._last_cuda_s = now
            self._last_largest_s = now if largest else self._last_largest_s
            self.mark("cuda", **reading)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Recorder:
    """A thread that appends a reading of `pid`'s process tree to `timeline.csv` every `interval_s`.

    `cgroup` is asked anew for each sample, as systemd makes a scope only after the child has begun.

    PSS makes the kernel walk page tables, so it is read once a second at most, and never for more than about 5 % of
    the time. `on_sample`, when given, sees each reading as it is taken (the watchdog limit hangs on it). An error in
    the thread, a full disk say, calls `on_error` and is raised by `stop`.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        pid: int,
        *,
        cgroup: Callable[[], Cgroup | None] = lambda: None,
        interval_s: float = 0.05,
        on_sample: Callable[[Reading], None] | None = None,
        on_error: Callable[[], None] | None = None,
    ):
        self._on_error = on_error
        self._pid, self._cgroup, self._interval_s, self._on_sample = pid, cgroup, interval_s, on_sample
        path = Path(run_dir) / TIMELINE
        self._file = _open_for_append(path)
        if path.stat().st_size == 0:
            self._file.write(",".join(COLUMNS) + "\n")
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._next_pss_s = 0.0
        self._thread = threading.Thread(target=self._loop, name="memory-recorder", daemon=True)

    def start(self) -> Recorder:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Take one last sample, end the thread, close the file."""
        self._stop.set()
        self._thread.join()
        self._file.close()
        if self._error is not None:
            raise self._error

    def sample(self) -> Reading:
        begin = time.monotonic()
        pss = begin >= self._next_pss_s
        reading = read_memory(self._pid, cgroup=self._cgroup(), pss=pss)
        if pss:
            self._next_pss_s = begin + max(1.0, 20 * (time.monotonic() - begin))
        values = ["" if value is None else str(value) for value in asdict(reading).values()]
        self._file.write(f"{time.time():.4f},{','.join(values)}\n")
        if self._on_sample is not None:
            self._on_sample(reading)
        return reading

    def _loop(self) -> None:
        try:
            while True:
                begin = time.monotonic()
                self.sample()
                if self._stop.wait(max(0.0, self._interval_s - (time.monotonic() - begin))):
                    if Path(f"/proc/{self._pid}").exists():
                        self.sample()
                    return
        except BaseException as error:
            self._error = error
            if self._on_error is not None:
                self._on_error()
