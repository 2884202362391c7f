"""The windows (batches that are sampled together, see `plan`) of a loader in order, each prepared
while the one before it is used."""

import contextlib
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ..errors import explained
from ..forecast.pass_memory import read_bytes
from ..graph.store import Store
from ..io.disk_array import Interrupted
from ..io.spool_file import DiskFull
from ..kernels import Array
from ..sampling.order import EpochSampler
from ..sampling.sampler import CSCSampler
from .spool import Cursor, Preparation, Spool, without_frames
from .window import Seeds, Window, sample_windows

# names of a store's arrays in progress lines
_CONTENT = {"colptr": "offsets", "row": "neighbors", "x": "features"}


class WindowReader:
    """Reader of a loader's windows; a thread prepares the next while one is used.

    With `preparation.windows.spooling`, windows come from disk until the disk is full. A `Cursor`
    is the position of a window, see `spool`.
    """

    def __init__(
        self,
        store: Store,
        order: EpochSampler,  # the loader's: positions in `nodes`
        sampler: CSCSampler,  # the loader's
        nodes: Tensor,  # the loader's seeds, int64, unshuffled
        batch_size: int,
        preparation: Preparation,
    ) -> None:
        self.store = store
        self.preparation = preparation
        self.windows = preparation.windows  # replaced by windows in memory once the disk is full
        self.abandoned = threading.Event()  # once set, the running pass ends at its next read
        self._order = order
        self._sampler = sampler
        self._nodes = nodes
        self._batch_size = batch_size
        chunk_bytes = 1 << read_bytes(self.windows.available_bytes).bit_length() - 1  # power of 2
        self.arrays = {
            name: store.disk_array(name, chunk_bytes, self.abandoned) for name in _CONTENT
        }
        self.spool: Spool | None = None
        if self.windows.spooling:
            self.spool = Spool(store, self.arrays, preparation, self.seeds, self.next_cursor)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="window")
        self._ahead: tuple[Cursor, Future[Window]] | None = None  # the window being prepared

    def progress(self) -> tuple[str, int, int] | None:
        """Return (content, bytes read, bytes to read) of the running read; None if there is none."""
        for name, array in self.arrays.items():
            done, total = array.progress  # 0, 0 between reads
            if done < total:
                return _CONTENT[name], done, total
        return None

    def seeds(self, cursor: Cursor) -> Seeds:
        """Return the seeds of the window at `cursor`."""
        epoch, start, begin = cursor
        end = begin + self._batch_size * (self.windows.window_batches or 1)  # `or`: for mypy
        positions = self._order.share(epoch, start)[begin:end]  # int64, among `nodes`
        # a copy, because a view would keep the whole order in memory
        batches = torch.split(positions.clone(), self._batch_size)
        ids: list[Array] = [self._nodes[batch].numpy() for batch in batches]
        return Seeds(self._sampler, epoch, batches, ids)

    def next_cursor(self, cursor: Cursor, positions: Sequence[Tensor | Array]) -> Cursor | None:
        """Return the cursor of the window after the one at `cursor` with these positions, in this
        epoch or in the next if that is prepared ahead; None if there is no such window."""
        epoch, start, begin = cursor
        begin += sum(map(len, positions))
        if begin < self._order.count(start):
            return epoch, start, begin
        last = self.preparation.last_epoch
        return (epoch + 1, 0, 0) if last is not None and epoch < last else None

    def read(self, epoch: int, start: int) -> Iterator[Window]:
        """Yield the windows of a pass; the caller must drop each before it asks for the next."""
        cursor: Cursor | None = (epoch, start, 0) if self._order.count(start) else None
        while cursor is not None and cursor[:2] == (epoch, start):  # else: of the next epoch
            window = self._take_ahead(cursor)
            if window is None:
                window = self._thread.submit(without_frames, self._read, cursor).result()
            cursor = self.next_cursor(cursor, window.positions)
            if cursor is not None:
                self._ahead = cursor, self._thread.submit(without_frames, self._read, cursor)
            yield window
            del window

    def _take_ahead(self, cursor: Cursor) -> Window | None:
        # waits for the prepared window; None if there is none, or it is not the one at `cursor`
        if self._ahead is None:
            return None
        prepared, future = self._ahead
        self._ahead = None
        with contextlib.suppress(Interrupted):  # its pass was left early
            # wait for another window, too, so that two are never prepared at once
            window = future.result()
            return window if prepared == cursor else None
        return None

    def _read(self, cursor: Cursor) -> Window:
        window = None if self.spool is None else self._read_spool(self.spool, cursor)
        from_spool = window is not None
        if window is None:  # without a spool, or its disk is full
            # outside the handler of `DiskFull`, which would keep the spool's arrays in memory
            window = self._sample(cursor)
        facts = {"epoch": cursor[0], "batches": len(window.hops), "from_spool": from_spool}
        self.preparation.on_event("window", **facts)
        return window

    def _read_spool(self, spool: Spool, cursor: Cursor) -> Window | None:
        try:
            return spool.read(cursor)
        except DiskFull as error:
            warnings.warn(
                f"spool: {explained(error)}; the windows are kept in memory from here on",
                stacklevel=2,
            )
            spool.close()
            self.spool = None
            assert self.windows.in_memory  # planned together with every spool
            self.windows = self.windows.in_memory
            return None

    def _sample(self, cursor: Cursor) -> Window:
        """Sample a window and gather its features in memory."""
        self.store.check_maps()  # refuses files that were written to since they were mapped
        arrays = self.arrays
        seeds = self.seeds(cursor)
        # the sample is dropped before the features are read
        window = Window.pack(seeds, sample_windows([seeds], arrays["colptr"], arrays["row"])[0])
        shape = (len(window.ids), self.store.num_features)
        window.features = np.empty(shape, self.store.feature_dtype)
        arrays["x"].read(window.ids, window.features)
        return window

    def close(self) -> None:
        """End the threads, delete the spool, and close the store's files."""
        self.abandoned.set()  # ends a running read
        self._thread.shutdown(cancel_futures=True)
        self._ahead = None
        if self.spool is not None:
            self.spool.close()
        for array in self.arrays.values():
            array.close()
