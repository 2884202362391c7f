"""Windows on disk: one pass over the store serves as many of them as the disk has room for, not as memory has.

A pass over papers100M reads 43 GB for batches of two hops, whatever it picks; what an epoch of [3, 2] x 128 picks is
3.0 GB, what two evaluations pick 0.75 GB. So batches of several epochs are sampled together, more than their features
would leave room for, and kept in a file, a `Reel`. One pass over the features then deals out those of many windows to
another file, a `Part`, from which window after window is read in one piece. Of [15, 10, 5] x 1024 a batch takes 6 MB in
a reel and 100 in a part, so a reel has windows for several parts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import InputError, clear_errors
from ..files import Stream
from ..forecast.budget import Spooling
from ..graph.disk import DiskArray, Interrupted
from ..graph.npz import Array
from .window import Seeds, Window, sample_windows

Place = tuple[int, int, int]  # of a window: its epoch, the position the epoch goes on from, its first among those left
Jobs = Sequence[tuple[Hashable, Seeds]]  # windows to be prepared, by what they are asked for later
_DIRTY_BYTES = 128 * 2**20  # of features at most that wait for the disk: they count against a memory cgroup


class DiskFull(InputError):
    """A spool can't be written."""


@contextlib.contextmanager
def _written(name: str) -> Iterator[None]:
    try:
        with clear_errors(name):
            yield
    except InputError as error:
        raise DiskFull(str(error)) from None


class _Nameless:
    """A file without a name, which the kernel deletes when the last of it goes, at the latest with this process."""

    def __init__(self, folder: Path):
        path = folder / f".ogbnlib-{uuid.uuid4().hex}.spool"
        with _written(str(path)):
            self._file = Stream(path)
            path.unlink()

    def _read(self, offset: int, out: Array) -> None:
        view, begin = out.reshape(-1).view(np.uint8).data, offset
        while len(view):
            got = os.preadv(self._file.fileno(), [view], offset)
            if not got:
                raise InputError(f"{self._file.name}: it became shorter while it was used; set spool=off")
            view, offset = view[got:], offset + got
        os.posix_fadvise(self._file.fileno(), begin, offset - begin, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    __del__ = close


@dataclass(frozen=True)
class _Kept:
    """Where a window lies in the file, and what of it is small enough to stay in RAM."""

    window: Window  # without its arrays
    offset: int
    num_slots: int
    num_edges: int
    num_ids: int


class Reel(_Nameless):
    """Windows on disk, all of them but their features.

    Args:
        folder: Where the file is.
        num_nodes: Of the graph.
    """

    def __init__(self, folder: Path, num_nodes: int):
        super().__init__(folder)
        self._id_dtype = np.dtype(np.int32 if num_nodes < 2**31 else np.int64)
        self.kept: dict[Hashable, _Kept] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self._file.size

    def append(self, key: Hashable, window: Window) -> None:
        bare = Window(window.positions, window.hops, *(np.empty(0, np.int32),) * 3, np.empty(0))
        sizes = len(window.slots), len(window.edges), len(window.ids)
        self.kept[key] = _Kept(bare, self._file.size, *sizes)
        with _written(self._file.name):
            for array in (window.slots, window.edges, window.ids):
                self._file.append(array.view(np.uint8).data)

    def flush(self) -> None:
        """Have all that was appended leave the page cache."""
        with _written(self._file.name):
            self._file.drop()

    def stretch(self, key: Hashable, most: int) -> list[Hashable]:
        """The windows from `key` on, of at most `most` batches, one at the least."""
        keys = list(itertools.dropwhile(lambda other: other != key, self.kept))
        held = itertools.accumulate(len(self.kept[each].window.hops) for each in keys)
        return [each for each, batches in zip(keys, held, strict=True) if each == key or batches <= most]

    def get(self, key: Hashable) -> Window:
        """A window, read into memory, without its features."""
        kept, bare = self.kept[key], self.kept[key].window
        slots, edges = np.empty(kept.num_slots, np.int32), np.empty(kept.num_edges, np.int32)
        self._read(kept.offset, slots)
        self._read(kept.offset + slots.nbytes, edges)
        ids = np.empty(kept.num_ids, self._id_dtype)
        self.read_ids(key, ids)
        return Window(bare.positions, bare.hops, ids, slots, edges, np.empty(0))

    def read_ids(self, key: Hashable, out: Array) -> None:
        kept = self.kept[key]
        self._read(kept.offset + 4 * (kept.num_slots + kept.num_edges), out)


class Part(_Nameless):
    """The features of some windows of a reel, set room aside for on disk.

    Args:
        keys: The windows.
        num_features, dtype: Of a row of features.
    """

    def __init__(self, folder: Path, reel: Reel, keys: Sequence[Hashable], num_features: int, dtype: np.dtype[Any]):
        super().__init__(folder)
        self.reel, self.num_features, self.dtype = reel, num_features, dtype
        first = np.cumsum([0, *(reel.kept[key].num_ids for key in keys)]).tolist()
        self.first, self._unwritten = dict(zip(keys, first, strict=False)), 0
        self.num_bytes = first[-1] * self._row_bytes
        if self.num_bytes:
            with _written(self._file.name):
                os.posix_fallocate(self._file.fileno(), 0, self.num_bytes)

    @property
    def _row_bytes(self) -> int:
        return self.num_features * self.dtype.itemsize

    @property
    def last(self) -> tuple[Any, Window]:
        """The last window's key, and the window without its arrays."""
        key = next(reversed(self.first))
        return key, self.reel.kept[key].window

    def put(self, key: Hashable, at: int, rows: Array) -> None:
        """Write some rows of a window; its row `at` and those behind it."""
        view, at = rows.reshape(-1).data, (self.first[key] + at) * self._row_bytes
        self._unwritten += len(view)
        with _written(self._file.name):
            while len(view):
                written = os.pwrite(self._file.fileno(), view, at)
                view, at = view[written:], at + written
            if self._unwritten >= _DIRTY_BYTES:
                self._file.drop()
                self._unwritten = 0

    def get(self, key: Hashable) -> Window:
        """The window, read into memory."""
        window = self.reel.get(key)
        window.features = np.empty((len(window.ids), self.num_features), self.dtype)
        self._read(self.first[key] * self._row_bytes, window.features)
        return window


def sample(
    groups: Sequence[tuple[Reel, Jobs]], arrays: Mapping[str, DiskArray], most: int, on_pass: Callable[..., None]
) -> None:
    """Put sampled windows on reels; at most `most` batches are sampled in one pass over the graph.

    Raises:
        InputError: for a damaged graph.
        DiskFull: when the windows can't be written.
        Interrupted: when a `DiskArray` is no longer wanted.
    """
    colptr, row = arrays["colptr"], arrays["row"]
    for part in _parts([(reel, *job) for reel, jobs in groups for job in jobs], most):
        begun, before, at = time.monotonic(), colptr.bytes_read + row.bytes_read, 0
        sampled = sample_windows([seeds for *_, seeds in part], colptr, row)
        for reel, key, seeds in part:
            reel.append(key, Window.pack(seeds, sampled, at, colptr.num_rows - 1))
            at += len(seeds.ids)
        del sampled
        on_pass(
            batches=at,
            sample_s=round(time.monotonic() - begun, 3),
            bytes_read=colptr.bytes_read + row.bytes_read - before,
        )
    for reel, _ in groups:
        reel.flush()


def pick(parts: Sequence[Part], x: DiskArray, buffer_bytes: int, on_pass: Callable[..., None]) -> None:
    """Fill parts with features in one pass over them, `buffer_bytes` of which are on their way; raises as `sample`."""
    begun, before = time.monotonic(), x.bytes_read
    wanted = [(part, key) for part in parts for key in part.first]
    bounds = np.cumsum([0, *(part.reel.kept[key].num_ids for part, key in wanted)])
    index = np.empty(bounds[-1], np.int32 if x.num_rows < 2**31 else np.int64)
    for (part, key), (begin, end) in zip(wanted, itertools.pairwise(bounds.tolist()), strict=True):
        part.reel.read_ids(key, index[begin:end])
    x.deal(index, bounds, buffer_bytes, lambda c, at, rows: wanted[c][0].put(wanted[c][1], at, rows))
    on_pass(
        windows=len(wanted),
        distinct_nodes=len(index),
        features_s=round(time.monotonic() - begun, 3),
        bytes_read=x.bytes_read - before,
        bytes_written=sum(part.num_bytes for part in parts),
    )


def _parts(jobs: Sequence[tuple[Reel, Hashable, Seeds]], most: int) -> Iterator[Sequence[tuple[Reel, Hashable, Seeds]]]:
    """Consecutive windows with at most so many batches in all, one at the least."""
    begin = held = 0
    for i, (*_, seeds) in enumerate(jobs):
        if i > begin and held + len(seeds.ids) > most:
            yield jobs[begin:i]
            begin, held = i, 0
        held += len(seeds.ids)
    yield jobs[begin:]


class Source(Protocol):
    """A loader, for its spool."""

    def seeds(self, place: Place) -> Seeds:
        """The window that starts at `place`."""

    def after(self, place: Place, window: Seeds | Window) -> Place | None:
        """Where the window behind this one starts, in this epoch or in one that is prepared ahead."""


class Spool:
    """A loader's windows on disk: one part of them is used while the next is recorded, in a thread of its own.

    Args:
        source: Says which windows there are.
        spooling: How many batches at a time, and the room for features on their way.
        arrays: colptr, row and x of the store.
        folder: Where the files are.
        row: Numbers in a row of features, and their dtype.
        on_pass: Called with what a pass took: `sample_s` or `features_s`, batches, bytes read and written.
        companions: Spools all of whose windows are recorded with the first of this one's, to stay.
    """

    def __init__(
        self,
        source: Source,
        spooling: Spooling,
        arrays: Mapping[str, DiskArray],
        folder: Path,
        row: tuple[int, np.dtype[Any]],
        on_pass: Callable[..., None],
        companions: Sequence[Spool] = (),
    ):
        self._source, self._spooling, self._arrays, self._folder = source, spooling, arrays, folder
        self._row, self._on_pass, self._companions = row, on_pass, companions
        self._recorder = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._reel: Reel | None = None  # of the part that was recorded last
        self.part: Part | None = None
        self._next: Future[Part] | None = None

    def get(self, place: Place) -> Window:
        """The window at `place`, recorded now if need be; while its part is used the next is recorded."""
        if self.part is None or place not in self.part.first:
            self._change_part(place)
        assert self.part is not None
        if self._next is None and (following := self._source.after(*self.part.last)) is not None:
            self._next = self._recorder.submit(self._record, following)
        return self.part.get(place)

    def _change_part(self, place: Place) -> None:
        coming, self._next, self.part = self._next, None, None
        if coming is not None:
            with contextlib.suppress(Interrupted):  # it was prepared for a pass that was not gone to its end
                self.part = coming.result()
        if self.part is None or place not in self.part.first:
            self.part = None
            self.part = self._recorder.submit(self._record, place).result()

    def _record(self, place: Place) -> Part:
        companions, self._companions = self._companions, ()
        others: list[Reel] = []
        if self._reel is None or place not in self._reel.kept:
            self._reel = None
            fresh = [spool._new_reel() for spool in (self, *companions)]
            jobs = [self._jobs(place, self._spooling.reel_batches)]
            jobs += [spool._jobs((0, 0, 0), 2**62) for spool in companions]
            sample(list(zip(fresh, jobs, strict=True)), self._arrays, self._spooling.sampled_batches, self._on_pass)
            self._reel, *others = fresh
        parts = [self._new_part(self._reel, self._reel.stretch(place, self._spooling.picked_batches))]
        parts += [spool._new_part(reel, [*reel.kept]) for spool, reel in zip(companions, others, strict=True)]
        pick(parts, self._arrays["x"], self._spooling.buffer_bytes, self._on_pass)
        for spool, part in zip(companions, parts[1:], strict=True):
            spool.part = part
        return parts[0]

    def _new_reel(self) -> Reel:
        return Reel(self._folder, self._arrays["x"].num_rows)

    def _new_part(self, reel: Reel, keys: Sequence[Hashable]) -> Part:
        return Part(self._folder, reel, keys, *self._row)

    def _jobs(self, place: Place | None, most: int) -> Jobs:
        """The windows from `place` on, of at most `most` batches, one window at the least."""
        jobs: list[tuple[Place, Seeds]] = []
        while place is not None:
            seeds = self._source.seeds(place)
            most -= len(seeds.ids)
            if jobs and most < 0:
                break
            jobs.append((place, seeds))
            place = self._source.after(place, seeds)
        return jobs

    def close(self) -> None:
        """End the recording, whose arrays are abandoned, and delete what is on disk."""
        self._recorder.shutdown(cancel_futures=True)
        self._reel = self.part = self._next = None
