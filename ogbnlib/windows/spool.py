"""Windows (batches that are sampled together, see `plan`) of a loader that are prepared on disk.

A pass over papers100M reads 43 GB for batches of two hops, however few rows it picks: 3.0 GB for an
epoch of [3, 2] x 128, 0.75 GB for two evaluations. If the disk has room, batches of several epochs
are therefore sampled together and written to a *structure file*: everything in a window except its
features. One pass over the features then fills a *feature shard* for many windows, and each window
is read back in one piece. A batch of [15, 10, 5] x 1024 takes 6 MB in the structure file and 100 MB
in a shard, so one structure file serves several shards. Rows of nodes that many windows have in
common, see `hot_rows`, are left out of the shards and inserted when a window is read.
"""

from __future__ import annotations

import contextlib
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

    positions: Sequence[Tensor | Array]  # as in `Seeds`
    hops: Hops
    num_ids: int  # distinct nodes
    num_rows: int  # in a shard: nodes without a hot row; else all nodes
    arrays: Sequence[Callable[[], Array]]  # functions that read ids, slots and edges, see `Window`
    hot: HotRows | None = None  # in a shard: the rows in memory
    file: SpoolFile | None = None  # in a shard: its file, with the other rows
    offset: int = 0  # the first byte of these rows in it

    def cold_ids(self) -> Array:
        """Read the ids of the nodes without a hot row, ascending."""
        ids = self.arrays[0]()
        return ids if self.hot is None else self.hot.missing(ids)

    def put(self, first: int, rows: Array) -> None:
        """Write rows, uint8 [k, bytes], of `cold_ids()[first:]` to the shard's file."""
        assert self.file is not None
        self.file.put(rows.reshape(-1).data, self.offset + first * rows.shape[1])


Shard = dict[Cursor, _StoredWindow]  # of a structure file or feature shard, in the order of use


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
    # each epoch before this one also prepares the first window of the next epoch; None: none does
    last_epoch: int | None = None
    spool_dir: Path = Path(tempfile.gettempdir())
    # spools of evaluations, whose windows are all prepared together with this loader's first ones
    evaluations: Sequence[Spool] = ()
    # called with "window" and its facts, and with "pass", a pass over the features for the spool
    on_event: Callable[..., None] = lambda kind, **facts: None
    waiting: Waiting = lambda reading: False


class Spool:
    """Windows on disk: while one shard is used, a thread records the next.

    Args:
        arrays: colptr, row and x of the store.
        seeds: Returns the seeds of the window at a cursor.
        next_cursor: Returns the cursor of the window after the one with this cursor and these
            positions; None after the last.
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
        self._evaluations = preparation.evaluations  # not yet prepared
        self._structure: Shard = {}  # the structure file
        self._shard: Shard = {}  # the feature shard in use, of windows of this or an older file
        self._hot: HotRows | None = None
        self._next: Future[Shard] | None = None  # the shard after the one in use
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._writing = threading.Lock()  # one thread at a time writes to the structure file

    def read(self, cursor: Cursor) -> Window:
        """Read the window at `cursor`; record it first if necessary."""
        if cursor not in self._shard and self._next is not None:
            coming = self._next
            self._next = None
            self._shard = {}  # frees its file
            with contextlib.suppress(Interrupted):  # recorded for a pass that was left early
                self._shard = coming.result()
            del coming  # its error refers to this frame
        if cursor not in self._shard:  # at the beginning, or after a jump in the order
            self._shard = {}  # frees its file
            self._shard = self._thread.submit(without_frames, self._record, cursor).result()
        last = next(reversed(self._shard))
        following = self._next_cursor(last, self._shard[last].positions)
        if self._next is None and following is not None:
            self._next = self._thread.submit(without_frames, self._record, following)
        stored = self._shard[cursor]
        window = Window(stored.positions, stored.hops, *(read() for read in stored.arrays))
        assert stored.file is not None
        shape = (stored.num_rows, self._store.num_features)
        num_hot = stored.num_ids - stored.num_rows  # rows of zeros before those of the file
        window.features = stored.file.load(stored.offset, shape, self._store.feature_dtype, num_hot)
        if stored.hot is not None:
            stored.hot.insert(window.ids, window.features, num_hot)
        return window

    def close(self) -> None:
        """End the thread and delete the files."""
        self._thread.shutdown(cancel_futures=True)
        self._structure = {}
        self._shard = {}
        self._next = None
        self._hot = None

    def _record(self, cursor: Cursor) -> Shard:
        """Fill the shard from `cursor` on, with the structure file and hot rows that it needs. With
        the first one, all windows of the evaluations are prepared, in the same passes."""
        evaluations: Sequence[Spool] = ()
        if cursor not in self._structure:  # the structure file is used up, or there is none yet
            evaluations = self._evaluations
            self._evaluations = ()
            if not self._shard:  # after a jump: memory may lack room for old hot rows and samples
                self._hot = None
            self._sample([self, *evaluations], cursor)
        hot = self._hot
        unread = None  # hot rows without values, which the next pass over the features reads
        if hot is None and self._spooling.hot_bytes:
            hot = unread = self._choose_hot()
        shards = [self._picked(cursor, hot), *(spool._structure for spool in evaluations)]
        recorded, *eval_shards = map(self._with_room, shards)
        self._read_features([recorded, *eval_shards], unread)
        self._hot = hot  # only now, because an abandoned pass leaves rows out
        for spool, shard in zip(evaluations, eval_shards, strict=True):
            spool._shard = shard
        return recorded

    def _choose_hot(self) -> HotRows:
        chosen = HotRows.chosen(
            (stored.cold_ids() for stored in self._structure.values()),  # all ids: none is hot
            self._store.num_nodes,
            self._store.num_features,
            self._store.feature_dtype,
            self._spooling.hot_bytes,
        )
        malloc_trim()  # frees the memory of the samples, before the rows fill theirs
        return chosen

    def _picked(self, cursor: Cursor, hot: HotRows | None) -> Shard:
        """Return the windows of the shard from `cursor` on, a window of the structure file.

        Room was planned for batches without common nodes. A window has each of its nodes once, so
        more windows may fit. The later windows are estimated by the mean of the windows so far.
        The remaining windows are spread evenly over the shards that they need.
        """
        windows = list(itertools.dropwhile(lambda item: item[0] != cursor, self._structure.items()))
        total = sum(len(stored.hops) for _, stored in windows)  # batches, of this and later shards
        room = self._spooling.picked_batches  # batches of a shard if each node takes a row
        shard = Shard()
        batches = rows = nodes = 0  # so far: batches, rows in the shard, nodes of all batches
        for window_cursor, stored in windows:
            if hot is not None:
                stored = stored._replace(num_rows=len(hot.missing(stored.cold_ids())), hot=hot)
            rows_before = rows
            batches += len(stored.hops)
            rows += stored.num_rows
            nodes += sum(sum(hop_nodes) for hop_nodes, _ in stored.hops)
            # Estimates from the means per batch so far, without the division by `batches`:
            all_rows = rows * total  # / batches: rows of these and all later windows
            shard_rows = room * nodes  # / batches: rows that fit into a shard
            num_shards = -(-all_rows // shard_rows)  # 0 if all rows are hot
            is_full = rows * batches > shard_rows  # rows > shard_rows / batches
            # the windows before have an even share: rows_before >= all_rows / batches / num_shards
            has_share = rows_before * batches * num_shards >= all_rows
            if shard and num_shards and (is_full or has_share):
                break
            shard[window_cursor] = stored
        return shard

    def _sample(self, spools: Sequence[Spool], cursor: Cursor) -> None:
        """Sample structure files: windows from `cursor` on, and all windows of other spools."""
        self._structure = {}  # frees its file
        structures = {spool: Shard() for spool in spools}
        jobs = list(self._jobs(spools, cursor))  # windows that are still to be sampled
        while jobs:
            batches = itertools.accumulate(len(seeds.ids) for *_, seeds in jobs)
            # windows of one pass over the graph: memory has room for so many batches
            count = max(1, sum(total <= self._spooling.sampled_batches for total in batches))
            sampled = sample_windows(
                [seeds for *_, seeds in jobs[:count]], self._arrays["colptr"], self._arrays["row"]
            )
            # two threads only, because packing takes a set of all nodes, 21 MB for papers100M
            with ThreadPoolExecutor(2, thread_name_prefix="pack") as packers:
                packings = [  # `pop`, so that a sample is freed once it is packed
                    packers.submit(without_frames, self._pack, file, seeds, sampled.pop(0))
                    for _, file, _, seeds in jobs[:count]
                ]
            for (spool, _, window_cursor, _), packing in zip(jobs, packings, strict=False):
                structures[spool][window_cursor] = packing.result()
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
                # full; each file has at least one window, and that of an evaluation has all
                if spool is self and room < 0 and following != cursor:
                    break
                yield spool, file, following, seeds
                following = spool._next_cursor(following, seeds.positions)

    def _pack(self, file: SpoolFile, seeds: Seeds, sampled: Sampled) -> _StoredWindow:
        window = Window.pack(seeds, sampled)
        with self._writing:  # two threads pack, one at a time writes
            arrays = [file.store(array) for array in (window.ids, window.slots, window.edges)]
        num_ids = len(window.ids)
        return _StoredWindow(window.positions, window.hops, num_ids, num_ids, arrays)

    def _with_room(self, shard: Shard) -> Shard:  # its windows with their places in a new file
        row_bytes = self._arrays["x"].row_bytes
        sizes = [stored.num_rows * row_bytes for stored in shard.values()]
        offsets = np.cumsum([0, *map(whole_blocks, sizes)]).tolist()
        file = SpoolFile(self._preparation.spool_dir, offsets[-1])
        return {
            cursor: stored._replace(file=file, offset=offset)
            for (cursor, stored), offset in zip(shard.items(), offsets, strict=False)
        }

    def _read_features(self, shards: Sequence[Shard], unread: HotRows | None) -> None:
        """Read the rows of all windows into the files of these shards, and those of `unread` into
        memory, in one pass over the store's features."""
        x = self._arrays["x"]
        windows = [stored for shard in shards for stored in shard.values()]
        targets: list[_StoredWindow | HotRows] = [*windows]
        num_rows = [stored.num_rows for stored in windows]
        if unread is not None:
            targets.append(unread)
            num_rows.append(len(unread.ids))
        # the ids for all targets, one after the other; in one array, as memory has no room for two
        bounds = np.cumsum([0, *num_rows])
        index = np.empty(bounds[-1], index_dtype(x.num_rows))
        for target, begin, end in zip(targets, bounds, bounds[1:], strict=False):
            index[begin:end] = target.ids if isinstance(target, HotRows) else target.cold_ids()
        buffer_bytes = min(self._spooling.working_bytes // 4, 2 * WINDOW_BYTES)  # as in `plan`
        x.sweep(index, bounds, buffer_bytes, lambda at, first, rows: targets[at].put(first, rows))
        for file in filter(None, {stored.file for stored in windows}):  # all have one
            file.finish()
        hot = unread or self._hot
        self._preparation.on_event(
            "pass",
            windows=len(windows),
            bytes_written=sum(stored.num_rows for stored in windows) * x.row_bytes,
            kept_rows=0 if hot is None else len(hot.rows),
        )
