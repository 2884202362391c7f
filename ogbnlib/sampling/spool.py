"""Windows on disk: one pass over the store serves as many of them as the disk has room for, not as memory has.

A pass over papers100M reads 43 GB for batches of two hops, whatever it picks; what an epoch of [3, 2] x 128 picks is
3.0 GB, what two evaluations pick 0.75 GB. So batches of several epochs are sampled together, more than their features
would leave room for, and one pass over the features then deals them out to files, from which window after window is
read in one piece.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, clear_errors
from ..files import Stream
from ..graph.disk import DiskArray
from ..graph.npz import Array
from .budget import Spooling
from .window import Seeds, Window, sample_windows

Jobs = Sequence[tuple[Hashable, Seeds]]  # windows to be prepared, by what they are asked for later
_Job = tuple["Reel", Hashable, Seeds]
_ALIGNED = 4096
_DIRTY_BYTES = 128 * 2**20  # of features at most that wait for the disk: they count against a memory cgroup


@dataclass(frozen=True)
class _Kept:
    """Where a window lies in the file, and what of it is small enough to stay in RAM."""

    window: Window  # without its arrays
    offset: int
    num_slots: int
    num_edges: int
    num_ids: int
    first: int  # of the rows of all windows of the file


class DiskFull(InputError):
    """A spool can't be written."""


@contextlib.contextmanager
def _written(name: str) -> Iterator[None]:
    try:
        with clear_errors(name):
            yield
    except InputError as error:
        raise DiskFull(str(error)) from None


class Reel:
    """Windows in a file without a name, which the kernel deletes when this process ends, however it does.

    Args:
        folder: Where the file is.
        num_features, dtype: Of a row of features.
        num_nodes: Of the graph.
    """

    def __init__(self, folder: Path, num_features: int, dtype: np.dtype[Any], num_nodes: int):
        self.num_features, self.dtype = num_features, dtype
        self._id_dtype = np.dtype(np.int32 if num_nodes < 2**31 else np.int64)
        path = folder / f".ogbnlib-{uuid.uuid4().hex}.spool"
        with _written(str(path)):
            self._file = Stream(path)
            path.unlink()
        self._kept: dict[Hashable, _Kept] = {}
        self._rows = self._features_at = self._unwritten = 0

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self._features_at + self._rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.num_features * self.dtype.itemsize

    @property
    def last(self) -> tuple[Any, Window]:
        """The last window's key, and the window without its arrays."""
        key = next(reversed(self._kept))
        return key, self._kept[key].window

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def _append(self, key: Hashable, window: Window) -> None:
        """Write all of a window but its features."""
        bare = Window(window.positions, window.hops, *(np.empty(0, np.int32),) * 3, np.empty(0))
        sizes = len(window.slots), len(window.edges), len(window.ids)
        self._kept[key] = _Kept(bare, self._file.size, *sizes, self._rows)
        with _written(self._file.name):
            for array in (window.slots, window.edges, window.ids):
                self._file.append(array.view(np.uint8).data)
        self._rows += len(window.ids)

    def _make_room(self) -> None:
        """Set room aside for the features of all windows."""
        self._features_at = -(-self._file.size // _ALIGNED) * _ALIGNED
        with _written(self._file.name):
            self._file.drop()
            if self._rows:
                os.posix_fallocate(self._file.fileno(), self._features_at, self._rows * self._row_bytes)

    def _put(self, first: int, rows: Array) -> None:
        """Write some rows of features; the file's `first` and those behind it."""
        view, at = rows.reshape(-1).data, self._features_at + first * self._row_bytes
        self._unwritten += len(view)
        with _written(self._file.name):
            while len(view):
                written = os.pwrite(self._file.fileno(), view, at)
                view, at = view[written:], at + written
            if self._unwritten >= _DIRTY_BYTES:
                self._file.drop()
                self._unwritten = 0

    def get(self, key: Hashable) -> Window:
        """The window that was kept under `key`, read into memory."""
        kept, bare = self._kept[key], self._kept[key].window
        slots, edges = np.empty(kept.num_slots, np.int32), np.empty(kept.num_edges, np.int32)
        self._read(kept.offset, slots)
        self._read(kept.offset + slots.nbytes, edges)
        features = np.empty((kept.num_ids, self.num_features), self.dtype)
        self._read(self._features_at + kept.first * self._row_bytes, features)
        ids = np.empty(kept.num_ids, self._id_dtype)
        self._read_ids(kept, ids)
        return Window(bare.positions, bare.hops, ids, slots, edges, features)

    def _read_ids(self, kept: _Kept, out: Array) -> None:
        self._read(kept.offset + 4 * (kept.num_slots + kept.num_edges), out)

    def _read(self, offset: int, out: Array) -> None:
        view, begin = out.reshape(-1).view(np.uint8).data, offset
        while len(view):
            got = os.preadv(self._file.fileno(), [view], offset)
            if not got:
                raise InputError(f"{self._file.name}: it became shorter while it was used; set spool=off")
            view, offset = view[got:], offset + got
        os.posix_fadvise(self._file.fileno(), begin, offset - begin, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._file.close()


def record(
    groups: Sequence[Jobs],
    make: Callable[[], Reel],
    arrays: Mapping[str, DiskArray],
    spooling: Spooling,
    on_pass: Callable[..., None],
) -> list[Reel]:
    """Prepare windows, with one pass over the features for all of them; a file for each group.

    Args:
        arrays: colptr, row and x of the store.
        spooling: How many batches may be sampled in one pass over the graph, and the room for features on their way.
        on_pass: Called with what a pass took: `sample_s` or `features_s`, batches, bytes read and written.

    Raises:
        InputError: for a damaged graph.
        DiskFull: when the windows can't be written.
        Interrupted: when a `DiskArray` is no longer wanted.
    """
    reels: list[Reel] = []
    colptr, row, x = (arrays[name] for name in ("colptr", "row", "x"))
    try:
        for _ in groups:
            reels.append(make())
        jobs = [(reel, *job) for reel, group in zip(reels, groups, strict=True) for job in group]
        for part in _parts(jobs, spooling.sampled_batches):
            begun, before = time.monotonic(), colptr.bytes_read + row.bytes_read
            sampled, at = sample_windows([seeds for *_, seeds in part], colptr, row), 0
            for reel, key, seeds in part:
                reel._append(key, Window.pack(seeds, sampled, at, x.num_rows))
                at += len(seeds.ids)
            del sampled
            on_pass(
                batches=sum(len(seeds.ids) for *_, seeds in part),
                sample_s=round(time.monotonic() - begun, 3),
                bytes_read=colptr.bytes_read + row.bytes_read - before,
            )
        begun, before = time.monotonic(), x.bytes_read
        for reel in reels:
            reel._make_room()
        kept = [(reel, one) for reel in reels for one in reel._kept.values()]
        bounds = np.cumsum([0, *(one.num_ids for _, one in kept)])
        index = np.empty(bounds[-1], np.int32 if x.num_rows < 2**31 else np.int64)
        for (reel, one), (begin, end) in zip(kept, itertools.pairwise(bounds.tolist()), strict=True):
            reel._read_ids(one, index[begin:end])
        x.deal(index, bounds, spooling.buffer_bytes, lambda c, at, rows: kept[c][0]._put(kept[c][1].first + at, rows))
        on_pass(
            windows=len(kept),
            distinct_nodes=len(index),
            features_s=round(time.monotonic() - begun, 3),
            bytes_read=x.bytes_read - before,
            bytes_written=sum(reel.num_bytes for reel in reels),
        )
    except BaseException:
        for reel in reels:
            reel.close()
        raise
    return reels


def _parts(jobs: Sequence[_Job], most: int) -> Iterator[Sequence[_Job]]:
    """Consecutive windows with at most so many batches in all, one at the least."""
    begin = held = 0
    for i, (*_, seeds) in enumerate(jobs):
        if i > begin and held + len(seeds.ids) > most:
            yield jobs[begin:i]
            begin, held = i, 0
        held += len(seeds.ids)
    yield jobs[begin:]
