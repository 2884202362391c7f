"""The windows of a loader, prepared ahead in memory or on disk.

A pass over papers100M reads 43 GB for batches of two hops, however few rows it picks. An epoch of
[3, 2] x 128 picks 3.0 GB, two evaluations pick 0.75 GB. If the disk has room, batches of several
epochs are therefore sampled together and written to a *structure file*: all of a window but its
features. One pass over the features then fills a *feature shard* for many windows, and each window
is read back in one piece. A batch of [15, 10, 5] x 1024 takes 6 MB in the structure file and 100 MB
in a shard, so one structure file serves several shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from ..errors import explained
from ..files import whole_blocks
from ..forecast.budget import WINDOW_BYTES
from ..graph.disk import CHUNK_BYTES, DiskArray, DiskFull, Interrupted, SpoolFile, disk_array
from ..graph.npz import Array
from .window import Sampled, Seeds, Window, sample_windows

# of a window: epoch, where the pass begins in it, first seed counted from there
Place = tuple[int, int, int]
# of a store's arrays, for progress lines
_CONTENT = {"colptr": "offsets", "row": "neighbors", "x": "features"}
_ROW_CHUNK_BYTES = 2**14  # smaller ones read less and make their table of 24 bytes a chunk larger


class StoredWindow(NamedTuple):
    """A window in spool files; in memory are only the positions of its seeds and the sizes of its
    hops."""

    positions: Sequence[Any]
    hops: list[tuple[list[int], list[int]]]
    num_ids: int
    arrays: tuple[Callable[[], Array], ...]  # they read ids, slots, edges and, in a shard, features


Shard = dict[Place, StoredWindow]


def _submit(threads: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Have a thread call `work`; an expected error comes without its frames, whose variables would
    keep files open and arrays in memory."""
    return threads.submit(_without_frames, work, *arguments)


def _without_frames(work: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return work(*arguments)
    except (Interrupted, OSError, MemoryError) as error:
        del work, arguments
        error.__context__ = None
        raise error.with_traceback(None) from None


class Spool:
    """Windows on disk: while one shard is used, a thread records the next.

    All windows of the loader's `evaluations` are recorded together with its first shard, and stay
    on disk.
    """

    def __init__(self, reader: WindowReader):
        self._reader, self._loader, self._arrays = reader, reader.loader, reader.arrays
        self._is_first = True
        # number of batches, and the window
        self._structure: dict[Place, tuple[int, Future[StoredWindow]]] = {}
        self.shard: Shard = {}
        self._next: Future[Shard] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        # Two threads, as packing takes a set of all nodes, 21 MB for papers100M; the one with the
        # lock may write.
        self._packers, self._writing = (
            ThreadPoolExecutor(2, thread_name_prefix="pack"),
            threading.Lock(),
        )
        self._packing: list[Future[StoredWindow]] = []  # of the last call of `_sample`

    def read(self, place: Place) -> Window:
        """Read the window at `place`, which is recorded first if necessary."""
        if place not in self.shard and self._next is not None:
            coming, used, self._next, self.shard = self._next, self.shard, None, {}
            with contextlib.suppress(Interrupted):  # it was recorded for a pass that was left early
                self.shard = coming.result()
            self._thread.submit(used.clear)  # to free a file of 10 GB takes Linux two seconds
            del coming, used
        if place not in self.shard:
            self.shard = {}  # frees its file
            self.shard = _submit(self._thread, self._record, place).result()
        if self._next is None and (following := self._following(self.shard)) is not None:
            self._next = _submit(self._thread, self._record, following)
            _submit(self._thread, self._sample_ahead, self._next, next(iter(self.shard)))
        stored = self.shard[place]
        return Window(stored.positions, stored.hops, *(read() for read in stored.arrays))

    def close(self) -> None:
        for threads in (self._thread, self._packers):
            threads.shutdown(cancel_futures=True)
        self._structure, self._packing, self.shard, self._next = {}, [], {}, None

    def _following(self, shard: Shard) -> Place | None:
        last = next(reversed(shard))
        return self._reader.after(last, shard[last].positions)

    def _sample_ahead(self, recorded: Future[Shard], used: Place) -> None:
        """Sample the next structure file while two shards of this one are on disk; with another
        one, room may lack.

        An error ends this alone: the shard that needs the file samples it again, and raises it.
        """
        following = self._following(recorded.result())
        if used in self._structure and following is not None and following not in self._structure:
            self._sample([self], following)

    def _record(self, place: Place) -> Shard:
        """Record a shard from `place` on; windows that are not in the structure file are sampled
        first."""
        spooling, evaluations = self._loader.windows.spooling, list[Spool]()
        failed = any(
            packing.done() and packing.exception() for _, packing in self._structure.values()
        )
        if failed or place not in self._structure:
            if self._is_first:
                evaluations = [
                    loader.reader.spool for loader in self._loader.evaluations if loader.reader
                ]
            self._is_first = False
            self._sample([self, *evaluations], place)
        # Room was planned for batches without a node in common; a window has each of its nodes
        # once, so more may fit. The mean window so far stands for those that are not packed yet.
        windows = list(itertools.dropwhile(lambda item: item[0] != place, self._structure.items()))
        total, picked = sum(number for _, (number, _) in windows), spooling.picked_batches
        mine, batches, ids, nodes = Shard(), 0, 0, 0
        for each, (number, packing) in windows:
            stored = packing.result()
            batches, ids, before = batches + number, ids + stored.num_ids, ids
            nodes += sum(sum(hop_nodes) for hop_nodes, _ in stored.hops)
            parts = -(-ids * total // (picked * nodes))  # rounded up, in whole numbers
            full = batches > picked and ids * batches > picked * nodes
            if mine and (full or before * batches * parts >= ids * total):
                break
            mine[each] = stored
        complete = [
            {key: packing.result() for key, (_, packing) in one._structure.items()}
            for one in evaluations
        ]
        # for features between the two files
        buffer_bytes = min(spooling.working_bytes // 4, 2 * WINDOW_BYTES)
        mine, *others = self._add_features([mine, *complete], buffer_bytes)
        for spool, shard in zip(evaluations, others, strict=True):
            spool.shard = shard
        return mine

    def _sample(self, spools: Sequence[Spool], place: Place) -> None:
        """Sample this spool's windows from `place` on, and all windows of the others, for their
        structure files.

        Other threads pack and write them, the last ones while the features of the first shard are
        read.
        """
        colptr, row, spooling = (
            self._arrays["colptr"],
            self._arrays["row"],
            self._loader.windows.spooling,
        )
        # those of a pass left early still run
        wait([packing for packing in self._packing if not packing.cancel()])
        self._structure, self._packing, jobs, structures = (
            {},
            [],
            list[Any](),
            [dict[Place, Any]() for _ in spools],
        )
        # Evaluations come first, as the first shard has all of their windows.
        for spool, structure in reversed(list(zip(spools, structures, strict=True))):
            file, own = SpoolFile(self._loader.spool_dir), spool is self
            following: Place | None = place if own else (0, 0, 0)
            first, room = following, spooling.structure_batches if own else 2**62
            while following is not None:
                seeds = spool._reader.seeds(following)
                room -= len(seeds.ids)
                if room < 0 and following != first:
                    break
                jobs.append((structure, file, following, seeds))
                following = spool._reader.after(following, seeds.positions)

        while jobs:
            batches = list(itertools.accumulate(len(seeds.ids) for *_, seeds in jobs))
            count = max(1, sum(total <= spooling.sampled_batches for total in batches))
            group, jobs = jobs[:count], jobs[count:]
            for packing in self._packing:
                # raises its error; memory has room for the samples of one pass only
                packing.result()
            begun, before = time.monotonic(), colptr.bytes_read + row.bytes_read
            sampled = sample_windows([seeds for *_, seeds in group], colptr, row)
            for structure, file, key, seeds in group:
                packed = _submit(self._packers, self._pack, file, seeds, sampled.pop(0))
                self._packing.append(packed)
                structure[key] = len(seeds.ids), self._packing[-1]
            read, took = (
                colptr.bytes_read + row.bytes_read - before,
                round(time.monotonic() - begun, 3),
            )
            self._loader.on_pass(batches=batches[count - 1], sample_s=took, bytes_read=read)
        for spool, structure in zip(spools, structures, strict=True):
            spool._structure = structure

    def _pack(self, file: SpoolFile, seeds: Seeds, sampled: Sampled) -> StoredWindow:
        window = Window.pack(seeds, sampled)
        with self._writing:
            arrays = [file.store(array) for array in (window.ids, window.slots, window.edges)]
        return StoredWindow(window.positions, window.hops, len(window.ids), tuple(arrays))

    def _add_features(self, shards: Sequence[Shard], buffer_bytes: int) -> list[Shard]:
        """Write the features of some windows to a file for each shard, in one pass over the store's
        features."""
        x, store, filled = self._arrays["x"], self._loader.store, list[Shard]()
        begun, before, targets = time.monotonic(), x.bytes_read, list[tuple[SpoolFile, int]]()
        for shard in shards:
            sizes = [stored.num_ids * x.row_bytes for stored in shard.values()]
            offsets = np.cumsum([0, *map(whole_blocks, sizes)]).tolist()
            file = SpoolFile(self._loader.spool_dir, offsets[-1])
            filled.append({})
            for (key, stored), offset in zip(shard.items(), offsets, strict=False):
                shape = stored.num_ids, store.num_features
                read = functools.partial(file.load, offset, shape, store.feature_dtype)
                filled[-1][key] = stored._replace(arrays=(*stored.arrays, read))
                targets.append((file, offset))
        windows = [stored for shard in shards for stored in shard.values()]
        bounds = np.cumsum([0, *(stored.num_ids for stored in windows)])
        index = np.empty(bounds[-1], np.int32 if x.num_rows < 2**31 else np.int64)
        for stored, (begin, end) in zip(windows, itertools.pairwise(bounds.tolist()), strict=True):
            index[begin:end] = stored.arrays[0]()

        def put(number: int, done: int, rows: Array) -> None:
            file, offset = targets[number]
            file.put(rows.reshape(-1).data, offset + done * x.row_bytes)

        x.deal(index, bounds, buffer_bytes, put)
        for file in {file for file, _ in targets}:
            file.finish()
        took = {
            "features_s": round(time.monotonic() - begun, 3),
            "bytes_read": x.bytes_read - before,
        }
        written = len(index) * x.row_bytes
        self._loader.on_pass(
            windows=len(windows), distinct_nodes=len(index), **took, bytes_written=written
        )
        return filled


class WindowReader:
    """The windows of `loader`, a `StoreLoader`, in order; a thread prepares the next while one is
    used."""

    def __init__(self, loader: Any):
        # which ends the running pass at its next read
        self.loader, self.abandoned = loader, threading.Event()
        # The three buffers of a pass may not outweigh a small window; reads below 256 KiB are slow.
        chunk = min(
            CHUNK_BYTES, 1 << max(2**18, loader.windows.available_bytes // 64).bit_length() - 1
        )
        self.arrays = {name: disk_array(loader.store, name, chunk) for name in _CONTENT}
        self._row_arrays: dict[str, DiskArray] = {}  # of the first window
        for array in self.arrays.values():
            array.abandoned = self.abandoned
        self.spool = Spool(self)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="window")
        self._ahead: tuple[Place, Future[Window]] | None = None

    def progress(self) -> tuple[str, int, int] | None:
        """The running read of the store: content, bytes read, bytes to read."""
        for name, array in [*self.arrays.items(), *self._row_arrays.items()]:
            done, total = array.progress
            if done < total:
                return _CONTENT[name], done, total
        return None

    @property
    def bytes_read(self) -> int:
        return sum(array.bytes_read for array in self.arrays.values())

    def seeds(self, place: Place, num_batches: int = 0) -> Seeds:
        """The seeds of the window at `place`, of as many batches as usual if `num_batches` is 0."""
        (epoch, start, begin), loader = place, self.loader
        end = begin + loader.batch_size * (num_batches or loader.windows.window_batches or 1)
        # a view would keep the whole order
        positions = loader.sampler.share(epoch, start)[begin:end].clone()
        batches = positions.split(loader.batch_size)
        return Seeds(
            loader.node_sampler,
            epoch,
            batches,
            [loader.input_data.node[part].numpy() for part in batches],
        )

    def after(self, place: Place, positions: Sequence[Any]) -> Place | None:
        """The place of the next window, in this epoch or in one that is prepared ahead."""
        (epoch, start, begin), last = place, self.loader.last_epoch
        begin += sum(map(len, positions))
        if begin < self.loader.sampler.count(start):
            return epoch, start, begin
        return (epoch + 1, 0, 0) if last is not None and epoch < last else None

    def windows(self, epoch: int, start: int) -> Iterator[Window]:
        """Yield the windows of a pass; the caller drops each before it asks for the next."""
        place: Place | None = (epoch, start, 0) if self.loader.sampler.count(start) else None
        while place is not None and place[:2] == (epoch, start):
            ahead, self._ahead, window = self._ahead, None, None
            if ahead is not None:
                with contextlib.suppress(Interrupted):
                    # also of another window, so that two are never prepared at once
                    window = ahead[1].result()
            if ahead is None or ahead[0] != place or window is None:
                window = None
                window = _submit(self._thread, self._read, place).result()
            del ahead
            place = self.after(place, window.positions)
            if self.loader.windows.overlapped and place is not None:
                self._ahead = place, _submit(self._thread, self._read, place)
            yield window
            del window

    def _read(self, place: Place) -> Window:
        """Read a window from the spool, or sample it and gather its features in memory."""
        loader, begun, info = self.loader, time.monotonic(), dict[str, Any]()
        first, loader.first_batches = loader.first_batches, 0
        if loader.sampler.count(place[1]) <= first * loader.batch_size:
            # the pass would end with it, and an evaluation would begin while the first shard is
            # recorded
            first = 0
        if loader.windows.spooling is not None and not first:
            try:
                window = self.spool.read(place)
            except DiskFull as error:
                warnings.warn(
                    f"spool: {explained(error)}; the windows are kept in memory from here on",
                    stacklevel=2,
                )
                self.spool.close()
                loader.windows = loader.windows.in_memory or dataclasses.replace(
                    loader.windows, spooling=None
                )
            # not in the handler, whose error would keep the spool's arrays
            if loader.windows.spooling is None:
                return self._read(place)
            info["spool_s"] = round(time.monotonic() - begun, 3)
        else:
            loader.store.check_maps()
            seeds, store, arrays = self.seeds(place, first), loader.store, self.arrays
            if first:  # single rows, each with the blocks that it lies in
                arrays = self._row_arrays = {
                    name: disk_array(store, name, _ROW_CHUNK_BYTES) for name in _CONTENT
                }
                for array in arrays.values():
                    array.abandoned = self.abandoned
            before = sum(array.bytes_read for array in arrays.values())
            sampled = sample_windows([seeds], arrays["colptr"], arrays["row"])
            window = Window.pack(seeds, sampled[0])
            del sampled
            info["sample_s"], begun = round(time.monotonic() - begun, 3), time.monotonic()
            window.features = np.empty((len(window.ids), store.num_features), store.feature_dtype)
            arrays["x"].fetch(window.ids, window.features)
            read = sum(array.bytes_read for array in arrays.values()) - before
            info |= {"features_s": round(time.monotonic() - begun, 3), "bytes_read": read}
            self._row_arrays = {}
        loader.on_window(
            epoch=place[0], batches=len(window.hops), distinct_nodes=len(window.ids), **info
        )
        return window

    def close(self) -> None:
        """End the threads, delete the spool, and close the store's files."""
        self.abandoned.set()
        self._thread.shutdown(cancel_futures=True)
        self._ahead = None
        self.spool.close()
        for array in self.arrays.values():
            array.close()
