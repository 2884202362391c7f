"""Recording of a run's memory: samples by the watching process, events by the trainer or the
watched script.

timeline.csv and events.jsonl are written without buffering, so after a kill every line except
perhaps the last is whole. Times are `time.time()` seconds: a resumed run appends to both.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..files import open_to_write, write_all
from .cuda import cuda_reading
from .limits import Limit
from .reading import Reading, list_processes, own_memory, read_memory
from .record import BOUNDARIES, SAMPLE_COLUMNS, Event, Record, RunPaths, parse_events, phase_label
from .tree import Tree

# Closes a line that a kill cut off. Without it, half a number in the last column would pass for a
# whole one.
TORN = " torn\n"
NUM_BINS = 2000  # time bins of a run so far; a plot has no more columns of pixels
_CHUNK_BYTES = 2**20


def _open_for_append(path: Path, flags: int = 0) -> tuple[int, int]:
    """Open a file to append to it, with `TORN` after a line that a kill cut off; return its
    descriptor and its size in bytes."""
    file = open_to_write(path, os.O_RDWR | flags)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        size += os.pwrite(file, TORN.encode(), size)
    return file, size


class EventLog:
    """Writer of events.jsonl, one `write` call per line. `run_dir=None` writes nothing.

    The events "begin" and "end" of a phase have this process's own `held_bytes` (RssAnon +
    RssShmem). "end" also has the exact `peak_rss_bytes` of the phase: the kernel's high-water mark,
    which misses no spike, however short. Both values leave out DataLoader workers.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None):
        self._file = -1  # a file descriptor; -1 writes nothing
        self._read_from = 0  # position in the file, in bytes, of the next line to `follow`
        if run_dir is not None:
            self._file, self._read_from = _open_for_append(RunPaths(run_dir).events, os.O_APPEND)
        self._lock = threading.RLock()  # collected garbage may make a mark in the middle of another
        self._began_s = time.time()
        self._last_cuda_s = 0.0
        self.open: list[str] = []  # labels of the open phases; kept without a file, too
        # RSS peaks in bytes of the open phases, the outermost first: the reset for an inner phase
        # must not lose the outer peak
        self._peaks: list[int] = []

    def mark(self, event: str, **info: object) -> None:
        if self._file < 0:  # without a folder, or closed
            return
        line = json.dumps({"time_s": round(time.time(), 4), "event": event, **info}) + "\n"
        with self._lock:  # a line must not be torn by another thread's
            write_all(self._file, line.encode())

    @contextlib.contextmanager
    def phase(self, name: str, **info: object) -> Iterator[None]:
        """Record the block as phase `name`. Phases nest."""
        self.open.append(phase_label(name, info))
        try:
            with self._marked(name, info) if self._file >= 0 else contextlib.nullcontext():
                yield
        finally:
            self.open.pop()

    @contextlib.contextmanager
    def _marked(self, name: str, info: dict[str, object]) -> Iterator[None]:
        # Write the events "begin" and "end" of a phase around the block.
        held_bytes, rss = self._own_memory()
        self._peaks.append(0)
        self.mark("begin", phase=name, held_bytes=held_bytes, rss_bytes=rss, **info)
        self.cuda(force=True)
        failed = {}  # the name of the exception that ends the block
        try:
            yield
        except BaseException as error:
            failed = {"failed": type(error).__name__}
            raise
        finally:
            self.cuda(force=True)
            held_bytes, _ = self._own_memory()
            peak = self._peaks.pop()
            self.mark("end", phase=name, held_bytes=held_bytes, peak_rss_bytes=peak, **failed)

    def _own_memory(self) -> tuple[int, int]:
        """Return this process's RssAnon + RssShmem and its RSS, in bytes; store the RSS peak since
        the last call in the open phases."""
        held_bytes, rss, peak = own_memory()
        self._peaks = [max(earlier, peak) for earlier in self._peaks]
        # "5" sets the kernel's peak to the present RSS (proc(5), clear_refs). Kernels without
        # CONFIG_PROC_PAGE_MONITOR refuse it. Then a phase's peak is the peak so far.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        return held_bytes, rss

    def part(self, name: str, size_bytes: int) -> None:
        """Record that the run now uses `size_bytes` under this name; 0 means freed."""
        self.mark("part", name=name, bytes=int(size_bytes))

    def cuda(self, force: bool = False) -> None:
        """Record this process's GPU memory, unless the last reading is recent.

        `force` reads at any time. Torch's own peaks, in each reading, miss nothing in between.
        """
        now_s = time.time()
        # ten readings a second at first, later 2,000 each time the run gets e times as long
        pause_s = max(0.1, (now_s - self._began_s) / NUM_BINS)
        if self._file < 0 or not (force or now_s - self._last_cuda_s >= pause_s):
            return
        reading = cuda_reading()
        if reading is not None:  # else this process has not used CUDA
            self._last_cuda_s = now_s
            self.mark("cuda", **reading)

    def follow(self) -> Iterator[Event]:
        """Yield the events that any process added since this log was opened or last followed."""
        while data := os.pread(self._file, _CHUNK_BYTES, self._read_from):
            whole = data.rfind(b"\n") + 1  # bytes up to the end of the last whole line
            if not whole and len(data) < _CHUNK_BYTES:
                return  # another process is writing the line
            # a line longer than a chunk is damage, because no event is that long: skip it
            self._read_from += whole or len(data)
            yield from parse_events(data[:whole])

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _TimelineWriter:
    """Writer of timeline.csv, thinned to the largest sample of each time bin.

    The file ends with the largest sample of the current time bin and with the last sample.
    """

    # A bin is as long as a 2,000th of the time so far. At first every sample is kept, later 2,000
    # each time the run gets e times as long: 19,000 of a week's 12 million.

    def __init__(self, path: Path):
        self.path = path
        self._file, self._end = _open_for_append(path)  # `_end`: of the closed bins, in bytes
        if not self._end:
            self._end = os.pwrite(self._file, (",".join(SAMPLE_COLUMNS) + "\n").encode(), 0)
        begin = os.pread(self._file, 1000, 0).decode(errors="replace")  # header and first sample
        # A run that another version began keeps the columns of its file.
        self._columns = begin.partition("\n")[0].split(",")[1:]  # without `time_s`
        first = re.search(r"\n(\d+(?:\.\d+)?),", begin)
        self._began_s = float(first[1]) if first else None  # an earlier attempt's first sample
        self._size = self._end  # of the file, with the lines of the current bin
        self._bin_s = 0.0  # when the current time bin began
        # the line of the current time bin's largest sample, and that sample's memory in use
        self._best = b""  # empty before the bin's first sample
        self._best_bytes = 0

    def add(self, time_s: float, reading: Reading) -> None:
        texts = {name: str(value) for name, value in vars(reading).items() if value is not None}
        values = [texts.get(name, "") for name in self._columns]
        line = f"{time_s:.4f},{','.join(values)}\n".encode()
        if self._began_s is None:
            self._began_s = time_s
        if not self._best or time_s - self._bin_s >= (time_s - self._began_s) / NUM_BINS:
            self.boundary()
            self._bin_s = time_s
        size = reading.held_bytes or 0
        if not self._best or size > self._best_bytes:
            self._best = line
            self._best_bytes = size
        # replaces the lines of the current bin: its largest sample, and the last one
        block = line if line is self._best else self._best + line
        # Truncate before writing: the rest of a longer line could pass for a sample.
        if self._end + len(block) < self._size:
            os.ftruncate(self._file, self._end)
        write_all(self._file, block, self._end)
        self._size = self._end + len(block)

    def boundary(self) -> None:
        """Close the time bin where a phase begins or ends, so that no bin spans two phases."""
        self._end += len(self._best)  # the next bin overwrites all after its largest sample
        self._best = b""

    def close(self) -> None:
        os.close(self._file)


class Recorder:
    """Recorder of a run: its event `log`, a thread that samples processes, a `record` of both."""

    def __init__(self, run_dir: str | os.PathLike[str]):
        self.log = EventLog(run_dir)
        self.record = Record()
        self._rows = _TimelineWriter(RunPaths(run_dir).timeline)
        # when PSS was read last (`time.monotonic()`), and the CPU seconds that this took
        self._pss_read_s = 0.0
        self._pss_cost_s = 0.0
        self._listed_bytes = 0  # memory of the processes when they were last listed
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(
        self,
        tree: Tree,
        limit: Limit | None = None,
        *,
        interval_s: float = 0.05,
        on_sample: Callable[[Reading], None] = lambda reading: None,
        on_unwritable: Callable[[OSError], None] = lambda error: None,
    ) -> None:
        """Start a thread that samples a process tree until `stop`, or until the limit has killed
        the tree.

        An error in the thread kills a tree with a limit, and `stop` raises it.

        Args:
            limit: Gets each reading.
            interval_s: Time from one sample to the next.
            on_sample: Called with each reading, also one that could not be written.
            on_unwritable: Called at each failure to write; sampling goes on because the limit
                needs it.
        """
        watched = limit or Limit(None)

        def write(reading: Reading) -> None:
            try:
                self.add(round(time.time(), 4), reading)  # rounded as in both files
                has_grown = reading.rss_sum_bytes > 1.25 * self._listed_bytes  # by a quarter
                # after a kill the processes of this reading have ended
                if self.record.is_command and has_grown and not watched.killed_by:
                    self._listed_bytes = reading.rss_sum_bytes
                    self.log.mark("processes", text=list_processes(tree.pids()))
            except OSError as error:  # such as a full disk
                on_unwritable(OSError(error.errno, error.strerror, str(self._rows.path)))
            on_sample(reading)

        def work() -> None:
            try:
                self._sample_until_stop(tree, watched, interval_s, write)
            except BaseException as error:
                self._error = error  # a thread's own errors would only be printed
                if limit is not None:  # a run must not go on without its watchdog
                    tree.kill()

        self._thread = threading.Thread(target=work, name="memory-recorder", daemon=True)
        self._thread.start()

    def _sample_until_stop(
        self, tree: Tree, limit: Limit, interval_s: float, write: Callable[[Reading], None]
    ) -> None:
        """Write a sample each interval, and one after `stop` unless the first process is gone."""
        is_last = False
        while True:
            begin_s = time.monotonic()
            reading = self._sample(tree, limit)
            if reading is None:  # the limit has killed the tree
                return
            write(reading)
            if is_last:
                return
            pause_s = min(interval_s, limit.longest_pause_s)
            is_last = self._stop.wait(max(0.0, pause_s - (time.monotonic() - begin_s)))
            if is_last and not Path(f"/proc/{tree.pid}").exists():  # `stop` was called too late
                return

    def stop(self) -> None:
        """Take one last sample, end the thread and close the files; raise the thread's error."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._take(self.log.follow())  # events after the last sample
        self._rows.close()
        self.log.close()
        if self._error is not None:
            raise self._error

    def _sample(self, tree: Tree, limit: Limit) -> Reading | None:
        # PSS makes the kernel walk page tables, so it is read at most once a second and for about
        # 0.5 % of the time. Without a cgroup, only PSS gives the memory of several processes. Then
        # it is read for up to 5 % of the time, so that few peaks fall between two readings.
        begin_s = time.monotonic()
        begin_cpu_s = time.thread_time()  # elapsed time is not the cost on a busy machine
        since_s = begin_s - self._pss_read_s
        has_pss = since_s >= max(1.0, 200 * self._pss_cost_s)
        # the cgroup is None until systemd has made its scope
        reading = read_memory(tree, cgroup=limit.cgroup, pss=has_pss)
        if reading.held_bytes is None and since_s >= 20 * self._pss_cost_s:
            has_pss = True
            reading = read_memory(tree, cgroup=limit.cgroup, pss=True)
        if has_pss:
            self._pss_read_s = begin_s
            self._pss_cost_s = time.thread_time() - begin_cpu_s
        tree.reap()
        checked = limit.check(reading)  # None if the limit has killed the tree
        return checked and dataclasses.replace(checked, stalled_s=limit.stalled_s())

    def add(self, time_s: float, reading: Reading) -> None:
        """Record a reading, after the events that precede it.

        A reading at the very time of a phase's end still belongs to that phase.
        """

        def is_earlier(event: Event) -> bool:
            return (event["time_s"], event["event"] == "end") < (time_s, True)  # False < True

        events = [*self.log.follow()]  # written by any process since the last reading
        earlier = [*itertools.takewhile(is_earlier, events)]
        self._take(earlier)
        self.record.sample(time_s, reading)
        self._rows.add(time_s, reading)
        self._take(events[len(earlier) :])

    def _take(self, events: Iterable[Event]) -> None:
        # Add events to the record. A phase's begin or end also closes the timeline's bin.
        for event in events:
            if event["event"] in BOUNDARIES:
                self._rows.boundary()
            self.record.event(event)
