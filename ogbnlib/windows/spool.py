"""Windows (batches that are sampled together, see `plan`) of a loader that are prepared on disk.

A pass over papers100M reads 43 GB for batches of two hops, however few rows it picks: 3.0 GB for an
epoch of [3, 2] x 128, 0.75 GB for two evaluations. If the disk has room, batches of several epochs
are therefore sampled together and written to a *structure file*: everything in a window except its
features. One pass over the features then fills a *feature shard* for many windows, and each window
is read back in one piece. A batch of [15, 10, 5] x 1024 takes 6 MB in the structure file and 100 MB
in a shard, so one structure file serves several shards.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from ..forecast.pass_memory import Windows
from ..graph.store import Store
from ..graph.store_format import index_dtype
from ..io.blocks import whole_blocks
from ..io.disk_array import DiskArray, Interrupted
from ..io.spool_file import SpoolFile
from ..kernels import Array
from ..memory.reading import malloc_trim
from ..sampling.policies import Waiting
from ..sampling.sampler import Hops
from .hot_rows import HotRows
from .plan import WINDOW_BYTES
from .window import Sampled, Seeds, Window, sample_windows

Result = TypeVar("Result")
# position of a window: its epoch, the place in the epoch's order where the pass begins, and the
# window's first seed counted from there
Cursor = tuple[int, int, int]


class _StoredWindow(NamedTuple):
    """A window in spool files, of which memory has positions of seeds and sizes of hops."""

    positions: Sequence[Tensor | Array]
    hops: Hops
    num_ids: int
    num_rows: int  # in a shard: ids whose rows are not in memory; else all ids
    # functions that read ids, slots, edges and, in a shard, features
    arrays: tuple[Callable[[], Array], ...]
    hot: HotRows | None = None  # in a shard: the rows in memory


# the windows of a structure file, or of a shard
Shard = dict[Cursor, _StoredWindow]


def without_frames(work: Callable[..., Result], *arguments: object) -> Result:
    """Call `work`, from a thread of a pool. Expected errors are raised without their frames, whose
    variables would keep files open and arrays in memory."""
    try:
        return work(*arguments)
    except (Interrupted, OSError, MemoryError) as error:
        del work, arguments  # this frame is added to the error again
        error.__context__ = None  # `from None` only hides it
        raise error.with_traceback(None) from None


@dataclass(frozen=True)
class Preparation:
    """Settings for the preparation of a loader's windows."""

    windows: Windows
    # in each epoch before this one, the first window of the next epoch is prepared too; None for
    # never
    last_epoch: int | None = None
    spool_dir: Path = Path(tempfile.gettempdir())
    # spools of evaluations, all of whose windows are prepared together with this loader's first
    # ones
    evaluations: Sequence[Spool] = ()
    # called with "window" and facts of each window, and with "pass" and facts of each pass over the
    # features for windows on disk
    on_event: Callable[..., None] = lambda kind, **facts: None
    waiting: Waiting = lambda reading: False


class Spool:
    """Windows on disk: while one shard is used, a thread records the next.

    Args:
        arrays: colptr, row and x of the store.
        seeds: Returns the seeds of the window at a cursor.
        next_cursor: Returns the cursor of the window after the one with these positions; None
            after the last.
    """

    def __init__(
        self,
        store: Store,
        arrays: Mapping[str, DiskArray],
        preparation: Preparation,
        seeds: Callable[[Cursor], Seeds],
        next_cursor: Callable[[Cursor, Sequence[Tensor | Array]], Cursor | None],
    ) -> None:
        assert preparation.windows.spooling
        self._store = store
        self._arrays = arrays
        self._preparation = preparation
        self._spooling = preparation.windows.spooling
        self._seeds = seeds
        self._next_cursor = next_cursor
        self._evaluations = preparation.evaluations
        self._structure: Shard = {}
        self._shard: Shard = {}
        self._hot: HotRows | None = None
        self._next: Future[Shard] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._writing = threading.Lock()  # held by the packing thread that may write

    def read(self, cursor: Cursor) -> Window:
        """Read the window at `cursor`; record it first if necessary."""
        if cursor not in self._shard and self._next is not None:
            coming, self._next = self._next, None
            self._shard = {}  # frees its file
            with contextlib.suppress(Interrupted):  # recorded for a pass that was left early
                self._shard = coming.result()
            del coming  # its error refers to this frame
        if cursor not in self._shard:
            self._shard = {}  # frees its file
            self._shard = self._thread.submit(without_frames, self._record, cursor).result()
        following = self._following(self._shard)
        if self._next is None and following is not None:
            self._next = self._thread.submit(without_frames, self._record, following)
        stored = self._shard[cursor]
        window = Window(stored.positions, stored.hops, *(read() for read in stored.arrays))
        if stored.hot is not None:
            stored.hot.insert(window.ids, window.features, stored.num_ids - stored.num_rows)
        return window

    def close(self) -> None:
        """End the thread and delete the files."""
        self._thread.shutdown(cancel_futures=True)
        self._structure = {}
        self._shard = {}
        self._next = None
        self._hot = None

    def _following(self, shard: Shard) -> Cursor | None:
        last = next(reversed(shard))
        return self._next_cursor(last, shard[last].positions)

    def _record(self, cursor: Cursor) -> Shard:
        evaluations: Sequence[Spool] = ()
        if cursor not in self._structure:
            evaluations = self._evaluations
            self._evaluations = ()
            if not self._shard:  # memory may lack room for these rows and the samples of one file
                self._hot = None
            self._sample([self, *evaluations], cursor)
        fresh = self._choose_hot() if (self._hot is None and self._spooling.hot_bytes) else None
        # with all windows of the evaluations' structure files
        shards = [
            self._picked(cursor, fresh or self._hot),
            *(spool._structure for spool in evaluations),
        ]
        # for features on their way from the store's file to the shard's
        buffer_bytes = min(self._spooling.working_bytes // 4, 2 * WINDOW_BYTES)
        recorded, *eval_shards = self._add_features(shards, buffer_bytes, fresh)
        # set only now, because an abandoned pass leaves rows out
        self._hot = fresh or self._hot
        for spool, shard in zip(evaluations, eval_shards, strict=True):
            spool._shard = shard
        return recorded

    def _choose_hot(self) -> HotRows:
        store = self._store
        chosen = HotRows.chosen(
            (stored.arrays[0]() for stored in self._structure.values()),
            store.num_nodes,
            store.num_features,
            store.feature_dtype,
            self._spooling.hot_bytes,
        )
        malloc_trim()  # the rows go into the memory that the samples had
        return chosen

    def _picked(self, cursor: Cursor, hot: HotRows | None) -> Shard:
        """Return the windows of the shard from `cursor` on; `cursor` is in the structure file.

        Room was planned for batches without common nodes. A window has each of its nodes once, so
        more windows may fit. The windows behind are estimated by the mean of the windows so far.
        """
        windows = list(itertools.dropwhile(lambda item: item[0] != cursor, self._structure.items()))
        total = sum(len(stored.hops) for _, stored in windows)
        room = self._spooling.picked_batches
        shard = Shard()
        batches = rows = nodes = 0
        for window_cursor, stored in windows:
            if hot is not None:
                stored = stored._replace(num_rows=len(hot.missing(stored.arrays[0]())), hot=hot)
            rows_before = rows
            batches += len(stored.hops)
            rows += stored.num_rows
            nodes += sum(sum(hop_nodes) for hop_nodes, _ in stored.hops)
            parts = -(-rows * total // (room * nodes))  # shards needed, rounded up in integers
            full = batches > room and rows * batches > room * nodes
            if shard and parts and (full or rows_before * batches * parts >= rows * total):
                break
            shard[window_cursor] = stored
        return shard

    def _sample(self, spools: Sequence[Spool], cursor: Cursor) -> None:
        """Sample structure files: windows from `cursor` on, and all windows of other spools."""
        self._structure = {}  # frees its file
        structures = {spool: Shard() for spool in spools}
        jobs = list(self._jobs(spools, cursor))
        while jobs:
            batches = itertools.accumulate(len(seeds.ids) for *_, seeds in jobs)
            # memory has room for the samples of one pass
            count = max(1, sum(total <= self._spooling.sampled_batches for total in batches))
            sampled = sample_windows(
                [seeds for *_, seeds in jobs[:count]], self._arrays["colptr"], self._arrays["row"]
            )
            # two threads only, because packing takes a set of all nodes, 21 MB for papers100M
            with ThreadPoolExecutor(2, thread_name_prefix="pack") as packers:
                packings = [
                    packers.submit(without_frames, self._pack, file, seeds, sampled.pop(0))
                    for _, file, _, seeds in jobs[:count]
                ]
            for (spool, _, key, _), packing in zip(jobs, packings, strict=False):
                structures[spool][key] = packing.result()
            jobs = jobs[count:]
        for spool, structure in structures.items():
            spool._structure = structure

    def _jobs(
        self, spools: Sequence[Spool], cursor: Cursor
    ) -> Iterator[tuple[Spool, SpoolFile, Cursor, Seeds]]:
        """Yield (spool, file, cursor, seeds) of the windows of each spool's structure file."""
        for spool in spools:
            file = SpoolFile(self._preparation.spool_dir)
            following: Cursor | None = cursor if spool is self else (0, 0, 0)
            room = self._spooling.structure_batches
            while following is not None:
                seeds = spool._seeds(following)
                room -= len(seeds.ids)
                if spool is self and room < 0 and following != cursor:
                    break
                yield spool, file, following, seeds
                following = spool._next_cursor(following, seeds.positions)

    def _pack(self, file: SpoolFile, seeds: Seeds, sampled: Sampled) -> _StoredWindow:
        window = Window.pack(seeds, sampled)
        with self._writing:
            arrays = [file.store(array) for array in (window.ids, window.slots, window.edges)]
        num_ids = len(window.ids)
        return _StoredWindow(window.positions, window.hops, num_ids, num_ids, tuple(arrays))

    def _add_features(
        self, shards: Sequence[Shard], buffer_bytes: int, fresh: HotRows | None
    ) -> list[Shard]:
        store = self._store
        x = self._arrays["x"]
        filled = list[Shard]()
        targets = list[tuple[SpoolFile, int]]()
        for shard in shards:
            sizes = [stored.num_rows * x.row_bytes for stored in shard.values()]
            offsets = np.cumsum([0, *map(whole_blocks, sizes)]).tolist()
            file = SpoolFile(self._preparation.spool_dir, offsets[-1])
            filled.append({})
            for (cursor, stored), offset in zip(shard.items(), offsets, strict=False):
                shape = (stored.num_rows, store.num_features)
                num_hot = stored.num_ids - stored.num_rows
                read = functools.partial(file.load, offset, shape, store.feature_dtype, num_hot)
                filled[-1][cursor] = stored._replace(arrays=(*stored.arrays, read))
                targets.append((file, offset))
        windows = [stored for shard in shards for stored in shard.values()]
        num_fresh = 0 if fresh is None else len(fresh.ids)
        bounds = np.cumsum([0, *(stored.num_rows for stored in windows), num_fresh])
        index = np.empty(bounds[-1], index_dtype(x.num_rows))
        for stored, (begin, end) in zip(windows, itertools.pairwise(bounds.tolist()), strict=False):
            ids = stored.arrays[0]()
            if stored.hot is not None:
                ids = stored.hot.missing(ids)
            index[begin:end] = ids
        if fresh is not None:
            index[bounds[-2] :] = fresh.ids

        def put(number: int, done: int, rows: Array) -> None:
            if fresh is not None and number == len(windows):
                fresh.put(done, rows)
                return
            target, offset = targets[number]
            target.put(rows.reshape(-1).data, offset + done * x.row_bytes)

        x.sweep(index, bounds, buffer_bytes, put)
        for file in {file for file, _ in targets}:
            file.finish()
        hot = fresh or self._hot
        self._preparation.on_event(
            "pass",
            windows=len(windows),
            bytes_written=int(bounds[-2]) * x.row_bytes,
            kept_rows=0 if hot is None else len(hot.rows),
        )
        return filled
