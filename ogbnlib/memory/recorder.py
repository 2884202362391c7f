"""What a run writes of its memory while it goes on: samples by the watching process, events by the trainer.

`timeline.csv` has one line per sample that is kept, `events.jsonl` one JSON object per line. Both are written with no
buffering in this process, so whatever kills the run, all lines but perhaps the last are whole. Times are `time.time()`
seconds, so that an interrupted run's later attempts append to the same files.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..errors import MB
from .cgroup import Cgroup
from .cuda import cuda_reading
from .reading import Reading, own_memory, read_memory, reset_peak
from .tally import BOUNDARIES, Tally, phase_label, precedes

T = TypeVar("T")
TIMELINE, EVENTS = "timeline.csv", "events.jsonl"
RUNS_VARIABLE = "OGBNLIB_RUNS_LOG"  # a file to which each attempt of a run adds its folder; for a watcher outside
COLUMNS = ("time_s", *(field.name for field in fields(Reading)))
# Closes a line that a kill cut off: without it half a number in the last column would pass for one.
TORN = " torn\n"
STRETCHES = 2000  # into which the time that a run has taken is divided; a picture of it has no more columns of pixels
_CHUNK_BYTES = 2**20


class Thinning(Generic[T]):
    """Which items of an endless series stay: the largest of each stretch of a 2,000th of the time so far.

    That is every one at first, and 2,000 for each time that the run gets e times as long: of the 12 million samples
    that a week has at 20 Hz 19,000 stay. `close` ends a stretch early, where a phase does, so that each phase keeps its
    largest.
    """

    def __init__(self, began_s: float | None):  # None: with the first item
        self.best: tuple[float, T] | None = None
        self._began_s, self._stretch_s = began_s, 0.0

    def add(self, time_s: float, size: float, item: T) -> T | None:
        """Take one more item; returns the one to keep of the stretch that `time_s` has ended, if it has."""
        ended, self._began_s = None, time_s if self._began_s is None else self._began_s
        if self.best is None or time_s - self._stretch_s >= (time_s - self._began_s) / STRETCHES:
            ended, self._stretch_s = self.close(), time_s
        if self.best is None or size > self.best[0]:
            self.best = size, item
        return ended

    def close(self) -> T | None:
        """End the stretch; returns what is to be kept of it."""
        best, self.best = self.best, None
        return None if best is None else best[1]


def _open_for_append(path: Path, flags: int = 0) -> tuple[int, int, float | None]:
    """A descriptor, the file's size, and the time on its first line that has one.

    A torn last line left by a kill is marked as such, not deleted.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        size += os.pwrite(file, TORN.encode(), size)
    first = re.search(rb'(?:^{"time_s": |\n)(\d+(?:\.\d+)?),', os.pread(file, 1000, 0))
    return file, size, float(first[1]) if first else None


class EventLog:
    """Appends to `events.jsonl`; one `write` call per line. With `run_dir=None` it marks nothing.

    Events: `start` of an attempt, `begin` and `end` of a phase, `part` (a named piece of memory the run now holds),
    `dataset` (its size), `metrics` (of an epoch), `cuda` (see `cuda.cuda_reading`), `cuda_oom` (an allocation on the
    GPU that failed), `empty_cache`, `note` (a choice that was taken), `window` and `pass` (see `sampling.loader`),
    `disk` (bytes moved until the end of an epoch), `mark` (by `ogbnlib.mark`), `resumed` (data
    set and checkpoint were accepted), `finished` (all epochs are done).

    Both ends of a phase carry this process's own `held_bytes` (RssAnon + RssShmem) at that moment, and its end the
    exact `peak_rss_bytes` reached inside it: the kernel's high-water mark, reset at the beginning through
    /proc/self/clear_refs (proc(5), "5"), so no spike is too short for it. Workers are not in these two.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None):
        self._file, self._read_from, began_s = -1, 0, None
        if run_dir is not None:
            self._file, self._read_from, began_s = _open_for_append(Path(run_dir) / EVENTS, os.O_APPEND)
        self._lock = threading.Lock()
        self._last_cuda_s = self._last_largest_s = 0.0
        self._cuda = Thinning[dict[str, Any]](began_s)
        self.open: list[str] = []  # the phases that go on, marked or not, by their labels
        self._peaks: list[int] = []  # of the open phases: resetting the mark for an inner one must not lose the outer's

    def mark(self, event: str, **info: Any) -> None:
        if self._file < 0:
            return
        line = json.dumps({"time_s": round(time.time(), 4), "event": event, **info}) + "\n"
        with self._lock:
            os.write(self._file, line.encode())

    @contextlib.contextmanager
    def phase(self, name: str, **info: Any) -> Iterator[None]:
        """Everything inside belongs to phase `name`; phases nest, and the innermost open one is where a kill fell."""
        self.open.append(phase_label(name, info))
        try:
            with self._marked(name, info) if self._file >= 0 else contextlib.nullcontext():
                yield
        finally:
            self.open.pop()

    @contextlib.contextmanager
    def _marked(self, name: str, info: dict[str, Any]) -> Iterator[None]:
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
        """Read this process's GPU memory, at most ten times a second unless `force`; free without CUDA.

        Readings are thinned as samples are; `force` marks this one. The largest free block is looked for once a
        second, and whenever `largest` is asked for.
        """
        now = time.time()
        if self._file < 0 or not (force or now - self._last_cuda_s >= 0.1):
            return
        largest = largest or now - self._last_largest_s >= 1.0
        if (reading := cuda_reading(largest)) is None:
            return
        self._last_cuda_s, self._last_largest_s = now, now if largest else self._last_largest_s
        reading["time_s"] = round(now, 4)
        kept = [self._cuda.add(now, reading["allocated_bytes"], reading)]
        if force:
            kept += [best, reading] if (best := self._cuda.close()) is not reading else [reading]
        for one in kept:
            if one is not None:
                self.mark("cuda", **one)

    def follow(self) -> Iterator[dict[str, Any]]:
        """The events that were added since this log was opened or followed, by whichever process."""
        while data := os.pread(self._file, _CHUNK_BYTES, self._read_from):
            whole = data.rfind(b"\n") + 1
            if not whole and len(data) < _CHUNK_BYTES:
                return
            self._read_from += whole or len(data)  # a line of more than 1 MB is none of ours
            yield from parse_events(data[:whole])

    def close(self) -> None:
        if self._file >= 0:
            if best := self._cuda.close():
                self.mark("cuda", **best)
            self.forget()

    def forget(self) -> None:
        """Close the file and mark nothing more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


_NEEDED: dict[str, dict[str, Any]] = {
    "begin": {"phase": str},
    "end": {"phase": str},
    "part": {"name": str, "bytes": (int, float)},
    "cuda": {"allocated_bytes": (int, float)},
    "mark": {"name": str},
    "cuda_oom": {"message": str},
    "rank ended": {"rank": int, "exit_code": int},
}


_NUMBERS = ("bytes", "_s", "_retries", "ooms")  # the ends of names whose values are numbers


def parse_events(data: bytes) -> Iterator[dict[str, Any]]:
    """The events in these lines; one that was torn by a kill, or damaged, is left out. Unknown kinds and names stay."""
    for line in data.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            needed = {"time_s": (int, float)} | _NEEDED.get(event["event"], {})
            numbers = (value for name, value in event.items() if name.endswith(_NUMBERS) and value is not None)
            words = event.get("command") or []
            if (
                all(isinstance(event.get(name), kind) for name, kind in needed.items())
                and all(type(value) in (int, float) and math.isfinite(value) for value in numbers)
                and isinstance(words, list)
                and all(isinstance(word, str) for word in words)
            ):
                yield event


class _Rows:
    """Writes timeline.csv, thinned: what is kept of the stretches that have ended, then the running one's largest
    sample and its last, which are written over each time, so that a kill loses none of them.
    """

    def __init__(self, path: Path):
        self.path, (self._file, self._end, began_s) = path, _open_for_append(path)
        if not self._end:
            self._end = os.pwrite(self._file, (",".join(COLUMNS) + "\n").encode(), 0)
        self._size, self._thinning = self._end, Thinning[bytes](began_s)

    def add(self, time_s: float, reading: Reading) -> None:
        values = ["" if value is None else str(value) for value in vars(reading).values()]  # in their order
        line = f"{time_s:.4f},{','.join(values)}\n".encode()
        self._end += len(self._thinning.add(time_s, reading.held_bytes or 0, line) or b"")
        assert self._thinning.best is not None
        best = self._thinning.best[1]
        block = best if line is best else best + line
        if self._end + len(block) < self._size:  # before writing: what a longer line leaves might pass for one
            os.ftruncate(self._file, self._end)
        if os.pwrite(self._file, block, self._end) < len(block):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), TIMELINE)
        self._size = self._end + len(block)

    def boundary(self) -> None:
        """End the stretch: no sample of another phase may stand for this one's."""
        self._end += len(self._thinning.close() or b"")

    def close(self) -> None:
        os.close(self._file)


class _Pace:
    """How long from one sample to the next: `interval_s`, or as long as keeps the sampling at 1 % of a core while
    memory moves, 0.25 % once ten samples have seen it rest.

    On a quiet machine a sample takes 0.12 ms of CPU time, 0.24 % at 20 a second. Beside a script that keeps the memory
    busy it takes five times that, as what it needs is in no cache.
    """

    def __init__(self, interval_s: float):
        self._interval_s = interval_s
        self._cost_s = 0.0  # of a sample, smoothed
        self._held_bytes, self._at_rest = 0, 0

    def next_s(self, cost_s: float, held_bytes: int) -> float:
        """Seconds until the next sample, after one that took `cost_s` and found the tree to hold `held_bytes`."""
        # The first sample, and those with a PSS, are no measure.
        self._cost_s += 0.1 * (min(cost_s, 0.001) - self._cost_s)
        moves = abs(held_bytes - self._held_bytes) > self._held_bytes / 200
        self._held_bytes, self._at_rest = held_bytes, 0 if moves else self._at_rest + 1
        return max(self._interval_s, (100 if self._at_rest < 10 else 400) * self._cost_s)


class Recorder:
    """Records a run in its folder: marks its `log`, and once started takes a reading of a process tree again and again.

    Each reading goes to `timeline.csv`, thinned, and to the `tally`, as do the events that the run marks meanwhile.
    Both files are opened once, and what they hold of earlier attempts is not read.

    PSS makes the kernel walk page tables, so it is read once a second at most, and never for more than about 0.5 % of
    the time. Where nothing else tells what several processes hold together it is read for 5 % of the time, and whenever
    their sum of RSS has grown: a peak must not fall between two seconds.
    """

    def __init__(self, run_dir: str | os.PathLike[str]):
        self.log = EventLog(run_dir)
        self.tally = Tally()
        self._rows = _Rows(Path(run_dir) / TIMELINE)
        self._pss_allowed_s, self._pss_due_s, self._pss_sum = 0.0, 0.0, 0  # when, and the sum of RSS at the last one
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._on_unwritable: Callable[[OSError], None] = lambda error: None

    def start(
        self,
        pid: int,
        *,
        cgroup: Callable[[], Cgroup | None] = lambda: None,
        interval_s: float = 0.05,
        longest_pause_s: Callable[[], float] = lambda: 0.25,
        on_sample: Callable[[Reading], None] = lambda reading: None,
        check: Callable[[Reading], Reading | None] = lambda reading: reading,
        on_error: Callable[[], None] = lambda: None,
        on_unwritable: Callable[[OSError], None] = lambda error: None,
    ) -> Recorder:
        """Sample `pid`'s process tree again and again from now on, in a thread.

        Args:
            interval_s: From one sample to the next, where neither `longest_pause_s` asks for less nor what a sample
                costs for more.
            longest_pause_s: Asked after each sample how many seconds may pass until the next.
            cgroup: Asked anew for each sample, as systemd makes a scope only after the child has begun.
            on_sample: Sees each reading as it is recorded.
            check: Sees each reading before that and gives the one to record (`Limit.check`); None ends the recording.
            on_error: Called on an error in the thread, which ends it and is raised by `stop`.
            on_unwritable: Called once, where a sample can't be written, on a full disk say. Later ones are taken and
                seen by `check` as before.
        """
        self._on_unwritable = on_unwritable
        pace = _Pace(interval_s)

        def loop() -> None:
            ended = False
            try:
                while True:
                    begin, begin_cpu = time.monotonic(), time.thread_time()
                    if (reading := self.sample(pid, cgroup(), check)) is None:
                        return
                    on_sample(reading)
                    if ended:
                        return
                    pause_s = pace.next_s(time.thread_time() - begin_cpu, reading.held_bytes or 0)
                    pause_s = min(pause_s, longest_pause_s())
                    ended = self._stop.wait(max(0.0, pause_s - (time.monotonic() - begin)))
                    if ended and not Path(f"/proc/{pid}").exists():
                        return
            except BaseException as error:
                self._error = error
                on_error()

        self._thread = threading.Thread(target=loop, name="memory-recorder", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Take one last sample, end the thread, close the files."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._follow(float("inf"))
        self._rows.close()
        self.log.close()
        if self._error is not None:
            raise self._error

    def sample(
        self,
        pid: int,
        cgroup: Cgroup | None = None,
        check: Callable[[Reading], Reading | None] = lambda reading: reading,
    ) -> Reading | None:
        """Take one reading and record what `check`, see `start`, makes of it."""
        begin = time.monotonic()
        reading = read_memory(pid, cgroup=cgroup, pss=begin >= self._pss_due_s)
        summed = (reading.rss_anon_bytes or 0) + (reading.rss_shmem_bytes or 0)
        grown = summed > 1.02 * self._pss_sum + MB
        if reading.held_bytes is None and grown and begin >= self._pss_allowed_s:
            reading = read_memory(pid, cgroup=cgroup, pss=True)
        if reading.pss_bytes is not None:
            cost_s, several = time.monotonic() - begin, cgroup is None and (reading.num_processes or 1) > 1
            self._pss_allowed_s, self._pss_sum = begin + (20 if several else 200) * cost_s, summed
            self._pss_due_s = max(begin + 1.0, self._pss_allowed_s)
        if (checked := check(reading)) is None:
            return None
        try:
            self.add(round(time.time(), 4), checked)  # as both files have it
        except OSError as error:
            told, self._on_unwritable = self._on_unwritable, lambda error: None
            told(OSError(error.errno, error.strerror, str(self._rows.path)))
        return checked

    def add(self, time_s: float, reading: Reading) -> None:
        """Take a reading, after the events that were marked before it."""
        later = self._follow(time_s)
        self.tally.sample(time_s, reading)
        self._rows.add(time_s, reading)
        for event in later:
            self._event(event)

    def _follow(self, until_s: float) -> Iterator[dict[str, Any]]:
        """Take the events up to `until_s`; returns the others."""
        events = self.log.follow()
        for event in events:
            if not precedes(event, until_s):
                return itertools.chain([event], events)
            self._event(event)
        return iter(())

    def _event(self, event: dict[str, Any]) -> None:
        if event["event"] in BOUNDARIES:
            self._rows.boundary()
        self.tally.event(event)
