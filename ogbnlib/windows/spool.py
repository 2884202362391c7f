"""Windows of a loader that are prepared on disk.

A pass over papers100M reads 43 GB for batches of two hops, however few rows it picks. An epoch of
[3, 2] x 128 picks 3.0 GB, two evaluations pick 0.75 GB. If the disk has room, batches of several
epochs are therefore sampled together and written to a *structure file*: all of a window but its
features. One pass over the features then fills a *feature shard* for many windows, and each window
is read back in one piece. A batch of [15, 10, 5] x 1024 takes 6 MB in the structure file and 100 MB
in a shard, so one structure file serves several shards.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from ..files import whole_blocks
from ..graph.checks import index_dtype
from ..graph.store import Store
from ..io.disk_array import DiskArray, Interrupted
from ..io.spool_file import SpoolFile
from ..kernels import Array
from ..sampling.sampler import Hops
from .plan import WINDOW_BYTES, Spooling
from .window import Sampled, Seeds, Window, sample_windows

Result = TypeVar("Result")
# of a window: epoch, where the pass begins in it, first seed counted from there
Place = tuple[int, int, int]
_FIRST: Place = (0, 0, 0)  # of an evaluation


class StoredWindow(NamedTuple):
    """A window in spool files; in memory are only the positions of its seeds and the sizes of its
    hops."""

    positions: Sequence[Tensor | Array]
    hops: Hops
    num_ids: int
    arrays: tuple[Callable[[], Array], ...]  # they read ids, slots, edges and, in a shard, features


Shard = dict[Place, StoredWindow]
# of each window the number of batches, and the window
Structure = dict[Place, tuple[int, "Future[StoredWindow]"]]


class _Job(NamedTuple):
    """A window to be sampled for a spool's structure file."""

    spool: Spool
    file: SpoolFile
    place: Place
    seeds: Seeds


def submit(
    threads: ThreadPoolExecutor, work: Callable[..., Result], *arguments: Any
) -> Future[Result]:
    """Have a thread call `work`; an expected error comes without its frames, whose variables would
    keep files open and arrays in memory."""
    return threads.submit(_without_frames, work, *arguments)


def _without_frames(work: Callable[..., Result], *arguments: Any) -> Result:
    try:
        return work(*arguments)
    except (Interrupted, OSError, MemoryError) as error:
        del work, arguments
        error.__context__ = None
        raise error.with_traceback(None) from None


class Spool:
    """Windows on disk: while one shard is used, a thread records the next.

    Args:
        arrays: colptr, row and x of the store.
        folder: for the files, which have no names.
        seeds: The seeds of the window at a place.
        after: The place of the window behind one with these positions, None behind the last.
        evaluations: All their windows are recorded together with the first shard, and stay on disk.
        on_pass: Called with seconds and bytes of each pass over the store.
    """

    def __init__(
        self,
        store: Store,
        arrays: Mapping[str, DiskArray],
        spooling: Spooling,
        folder: Path,
        seeds: Callable[[Place], Seeds],
        after: Callable[[Place, Sequence[Tensor | Array]], Place | None],
        evaluations: Sequence[Spool],
        on_pass: Callable[..., None],
    ) -> None:
        self._store = store
        self._arrays = arrays
        self._spooling = spooling
        self._folder = folder
        self._seeds = seeds
        self._after = after
        self._evaluations = evaluations
        self._on_pass = on_pass
        self._structure: Structure = {}
        self._shard: Shard = {}
        self._next: Future[Shard] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        # Two threads, as packing takes a set of all nodes, 21 MB for papers100M; the one with the
        # lock may write.
        self._packers = ThreadPoolExecutor(2, thread_name_prefix="pack")
        self._writing = threading.Lock()
        self._packing: list[Future[StoredWindow]] = []  # of the last call of `_sample`

    def read(self, place: Place) -> Window:
        """Read the window at `place`, which is recorded first if necessary."""
        if place not in self._shard and self._next is not None:
            coming = self._next
            used = self._shard
            self._next = None
            self._shard = {}
            with contextlib.suppress(Interrupted):  # it was recorded for a pass that was left early
                self._shard = coming.result()
            self._thread.submit(used.clear)  # to free a file of 10 GB takes Linux two seconds
            del coming, used
        if place not in self._shard:
            self._shard = {}  # frees its file
            self._shard = submit(self._thread, self._record, place).result()
        following = self._following(self._shard)
        if self._next is None and following is not None:
            self._next = submit(self._thread, self._record, following)
            submit(self._thread, self._sample_ahead, self._next, next(iter(self._shard)))
        stored = self._shard[place]
        return Window(stored.positions, stored.hops, *(read() for read in stored.arrays))

    def close(self) -> None:
        """End the threads and delete the files."""
        for threads in (self._thread, self._packers):
            threads.shutdown(cancel_futures=True)
        self._structure = {}
        self._packing = []
        self._shard = {}
        self._next = None

    def _following(self, shard: Shard) -> Place | None:
        last = next(reversed(shard))
        return self._after(last, shard[last].positions)

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
        evaluations: Sequence[Spool] = ()
        packings = [packing for _, packing in self._structure.values()]
        failed = any(packing.done() and packing.exception() for packing in packings)
        if failed or place not in self._structure:
            evaluations = self._evaluations
            self._evaluations = ()
            self._sample([self, *evaluations], place)
        shards = [self._picked(place), *(spool._complete() for spool in evaluations)]
        # for features between the two files
        buffer_bytes = min(self._spooling.working_bytes // 4, 2 * WINDOW_BYTES)
        mine, *others = self._add_features(shards, buffer_bytes)
        for spool, shard in zip(evaluations, others, strict=True):
            spool.keep(shard)
        return mine

    def keep(self, shard: Shard) -> None:
        """Read windows from here on from a shard that another spool has recorded."""
        self._shard = shard

    def _complete(self) -> Shard:
        """All windows of the structure file."""
        return {place: packing.result() for place, (_, packing) in self._structure.items()}

    def _picked(self, place: Place) -> Shard:
        """The windows of the shard from `place` on.

        Room was planned for batches without a node in common; a window has each of its nodes once,
        so more may fit. The mean window so far stands for those that are not packed yet.
        """
        following = itertools.dropwhile(lambda item: item[0] != place, self._structure.items())
        windows = list(following)
        total = sum(number for _, (number, _) in windows)
        room = self._spooling.picked_batches
        shard = Shard()
        batches = 0
        ids = 0
        nodes = 0
        for each, (number, packing) in windows:
            stored = packing.result()
            before = ids
            batches += number
            ids += stored.num_ids
            nodes += sum(sum(hop_nodes) for hop_nodes, _ in stored.hops)
            parts = -(-ids * total // (room * nodes))  # rounded up, in whole numbers
            full = batches > room and ids * batches > room * nodes
            if shard and (full or before * batches * parts >= ids * total):
                break
            shard[each] = stored
        return shard

    def _sample(self, spools: Sequence[Spool], place: Place) -> None:
        """Sample this spool's windows from `place` on, and all windows of the others, for their
        structure files.

        Other threads pack and write them, the last ones while the features of the first shard are
        read.
        """
        # those of a pass left early still run
        wait([packing for packing in self._packing if not packing.cancel()])
        self._structure = {}
        self._packing = []
        structures: list[Structure] = [{} for _ in spools]
        jobs = list(self._jobs(spools, place))
        while jobs:
            batches = list(itertools.accumulate(len(job.seeds.ids) for job in jobs))
            count = sum(total <= self._spooling.sampled_batches for total in batches)
            count = max(1, count)
            for packing in self._packing:
                # raises its error; memory has room for the samples of one pass only
                packing.result()
            sampled = self._sample_jobs(jobs[:count])
            for job in jobs[:count]:
                packing = submit(self._packers, self._pack, job.file, job.seeds, sampled.pop(0))
                self._packing.append(packing)
                structures[spools.index(job.spool)][job.place] = len(job.seeds.ids), packing
            jobs = jobs[count:]
        for spool, structure in zip(spools, structures, strict=True):
            spool.begin(structure)

    def begin(self, structure: Structure) -> None:
        """Take windows from here on from another structure file."""
        self._structure = structure

    def _jobs(self, spools: Sequence[Spool], place: Place) -> Iterator[_Job]:
        """Yield the windows of a structure file for each spool: evaluations first, as the first
        shard has all of their windows."""
        for spool in reversed(spools):
            file = SpoolFile(self._folder)
            first = place if spool is self else _FIRST
            room = self._spooling.structure_batches
            following: Place | None = first
            while following is not None:
                seeds = spool._seeds(following)
                room -= len(seeds.ids)
                if spool is self and room < 0 and following != first:
                    break
                yield _Job(spool, file, following, seeds)
                following = spool._after(following, seeds.positions)

    def _sample_jobs(self, jobs: Sequence[_Job]) -> list[Sampled]:
        """Sample some windows in one pass over the graph."""
        colptr = self._arrays["colptr"]
        row = self._arrays["row"]
        begun = time.monotonic()
        before = colptr.bytes_read + row.bytes_read
        sampled = sample_windows([job.seeds for job in jobs], colptr, row)
        self._on_pass(
            batches=sum(len(job.seeds.ids) for job in jobs),
            sample_s=round(time.monotonic() - begun, 3),
            bytes_read=colptr.bytes_read + row.bytes_read - before,
        )
        return sampled

    def _pack(self, file: SpoolFile, seeds: Seeds, sampled: Sampled) -> StoredWindow:
        window = Window.pack(seeds, sampled)
        with self._writing:
            arrays = [file.store(array) for array in (window.ids, window.slots, window.edges)]
        return StoredWindow(window.positions, window.hops, len(window.ids), tuple(arrays))

    def _add_features(self, shards: Sequence[Shard], buffer_bytes: int) -> list[Shard]:
        """Write the features of some windows to a file for each shard, in one pass over the store's
        features."""
        x = self._arrays["x"]
        begun = time.monotonic()
        before = x.bytes_read
        filled = list[Shard]()
        targets = list[tuple[SpoolFile, int]]()
        for shard in shards:
            sizes = [stored.num_ids * x.row_bytes for stored in shard.values()]
            offsets = np.cumsum([0, *map(whole_blocks, sizes)]).tolist()
            file = SpoolFile(self._folder, offsets[-1])
            filled.append({})
            for (place, stored), offset in zip(shard.items(), offsets, strict=False):
                shape = (stored.num_ids, self._store.num_features)
                read = functools.partial(file.load, offset, shape, self._store.feature_dtype)
                filled[-1][place] = stored._replace(arrays=(*stored.arrays, read))
                targets.append((file, offset))
        windows = [stored for shard in shards for stored in shard.values()]
        bounds = np.cumsum([0, *(stored.num_ids for stored in windows)])
        index = np.empty(bounds[-1], index_dtype(x.num_rows))
        for stored, (begin, end) in zip(windows, itertools.pairwise(bounds.tolist()), strict=True):
            index[begin:end] = stored.arrays[0]()

        def put(number: int, done: int, rows: Array) -> None:
            target, offset = targets[number]
            target.put(rows.reshape(-1).data, offset + done * x.row_bytes)

        x.sweep(index, bounds, buffer_bytes, put)
        for file in {file for file, _ in targets}:
            file.finish()
        self._on_pass(
            windows=len(windows),
            distinct_nodes=len(index),
            features_s=round(time.monotonic() - begun, 3),
            bytes_read=x.bytes_read - before,
            bytes_written=len(index) * x.row_bytes,
        )
        return filled
