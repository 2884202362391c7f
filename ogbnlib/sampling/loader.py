"""A PyG `NodeLoader` over a store on disk: batches from the page cache where it holds the store, else from windows.

`StoreLoaders` decides from the memory that is left which of the two it is, and how many batches a window has;
`StoreLoader` hands the batches out in order. A thread prepares ahead while the model trains.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import psutil
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import NodeSamplerInput

from ..forecast.budget import QUEUE_BATCHES, QUEUE_BYTES, Windows, queue_depth, usable_bytes
from ..graph.disk import CHUNK_BYTES, DiskArray, Interrupted, disk_array
from ..graph.store import Store
from ..launcher import launch
from ..memory.cgroup import effective_limit
from ..memory.reading import malloc_trim, own_memory, read_rss
from .choice import EpochSampler, GivenOrder
from .sampler import CSCSampler
from .spool import DiskFull, Place, Spool
from .window import Seeds, Window, sample_windows

T = TypeVar("T")
Waiting = Callable[[tuple[str, int, int] | None], bool]
_SPOKEN = {"colptr": "offsets", "row": "neighbors", "x": "features"}
NO_EDGES = torch.empty((2, 0), dtype=torch.int64)  # makes a NodeLoader fill in each batch's own


def _tensor_bytes(item: object) -> int:
    values = item.to_dict().values() if isinstance(item, Data) else [item]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def prefetch(
    source: Iterator[T],
    depth: int = QUEUE_BATCHES,
    budget_bytes: int = QUEUE_BYTES,
    *,
    waiting: Callable[[], bool] = lambda: False,
    abandon: Callable[[], None] = lambda: None,
) -> Iterator[T]:
    """The items of `source`, produced by a thread up to `depth` ahead; its errors are raised here.

    Fewer ahead where they are tensors, or `Data` of tensors, so large that `depth` of them pass `budget_bytes`.

    Args:
        waiting: Called a few times a second while an item is waited for.
        abandon: Called before the thread is waited for, where the last item was not asked for.

    Raises:
        Interrupted: when `waiting` returns True.
    """
    end, ahead, user, ended = object(), deque[Future[Any]](), threading.get_ident(), False
    thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead.append(thread.submit(next, source, end))
        while (item := _result(ahead.popleft(), waiting)) is not end:
            wanted = queue_depth(_tensor_bytes(item), depth, budget_bytes) + 1  # and one in the thread's hand
            while len(ahead) < wanted:
                ahead.append(thread.submit(next, source, end))
            yield item
            del item
        ended = True
    finally:
        if not ended:
            abandon()
        # The garbage collector may end this in a thread that is just starting, where waiting would never end.
        thread.shutdown(wait=threading.get_ident() == user, cancel_futures=True)


def _result(future: Future[Any], waiting: Callable[[], bool]) -> Any:
    while not future.done():
        wait([future], 0.2)
        if not future.done() and waiting():
            raise Interrupted
    return future.result()


def available_bytes() -> int:
    """What this process may still take of what is usable of its limit, or of what the host has left.

    The ranks of a node share its limit with their launcher, and its memory.
    """
    ranks = local_ranks()
    launcher = (read_rss([os.getppid()])[0] or 0) if ranks > 1 else 0
    left = (usable_bytes(effective_limit()[0]) - launcher) // ranks - own_memory()[0]
    return max(0, min(left, usable_bytes(psutil.virtual_memory().available) // ranks))


def local_ranks() -> int:
    """How many processes a launcher has started on this node to train together; raises `InputError` as `launch`."""
    here = launch()
    return 1 if here is None else here.num_local_ranks


def fill_page_cache(store: Store) -> None:
    """Read graph and features once from end to end: a tenth of the time that faulting them in row by row takes.

    For a store that fits; what is cached already is read at memory speed.
    """
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for name in ("colptr", "row", "x"):
        with store.open_file(name) as file:
            while file.readinto(buffer):
                pass


def begin_pass(loader: Any, name: str, sampler: CSCSampler, epoch: int) -> None:
    """Have the iterator that a PyG loader makes next draw at `epoch`, whatever other passes over it do.

    An iterator takes the loader's `collate_fn` along, to its workers too. Here it becomes that of a copy of the loader,
    whose attribute `name` is a sampler at that epoch. Workers that persist have one already, and see its epoch change.
    """
    if loader.persistent_workers and loader._iterator is not None:
        getattr(loader.collate_fn.args[0], name).set_epoch(epoch)
        return
    one = copy.copy(loader)
    vars(one)[name] = sampler.at_epoch(epoch)
    loader.collate_fn = functools.partial(type(loader).collate_fn, one)


class StoreLoader(NodeLoader):  # type: ignore[misc]  # PyG ships no types
    """A `NodeLoader` whose features and graph stay on disk.

    Batches have what any policy's have: `x` in the store's dtype, `edge_index`, `n_id`, `num_sampled_nodes`,
    `num_sampled_edges`, `batch_size`, `input_id`; `y` holds the labels of the seeds only.

    Args:
        store: The open store.
        node_sampler: Decides the neighbors.
        input_nodes: int64 seeds, in RAM.
        labels: int16 or int64, one per seed.
        windows: From `choose_windows`.
        next_epoch: Where not None, passes count their epochs themselves from here on, and `x` is made float32.
        arguments: As for `torch.utils.data.DataLoader`; any `sampler` does, and an `EpochSampler` is one by epoch.

    Attributes:
        on_window, on_pass: Called with what each window, and each pass for those on disk, took: seconds, bytes read.
        spool_dir: Where windows are kept whose `windows` say so.
        companions: Loaders whose windows are kept for as long as they live, prepared with the first of this one's.
        last_epoch: With overlapped windows, those of the next epoch are prepared during this one, unless this is the
            last; None prepares nothing beyond the epoch.
        waiting: Called a few times a second while a batch is waited for, with what is read for it: an array's name, the
            bytes read, and those that a pass reads in all. Where it returns True, the waiting ends with `Interrupted`.
    """

    def __init__(
        self,
        store: Store,
        node_sampler: CSCSampler,
        input_nodes: Tensor,
        labels: Tensor,
        windows: Windows,
        next_epoch: int | None = None,
        **arguments: Any,
    ):
        self.store, self.windows, self.labels, self.next_epoch = store, windows, labels, next_epoch
        self.last_epoch: int | None = None
        self.spool_dir, self.companions = Path(tempfile.gettempdir()), list[StoreLoader]()
        batches = arguments.pop("batch_sampler", None)  # Lightning makes a loader anew from its attributes, to predict
        if batches is not None:
            arguments |= {"sampler": batches.sampler, "batch_size": batches.batch_size, "drop_last": batches.drop_last}
        if not isinstance(arguments["sampler"], EpochSampler):
            order = GivenOrder(arguments["sampler"], arguments["batch_size"], arguments.get("drop_last", False))
            arguments["sampler"] = order
        self.on_window: Callable[..., None] = lambda **info: None
        self.on_pass: Callable[..., None] = lambda **info: None
        data = Data(edge_index=NO_EDGES, num_nodes=store.num_nodes)
        if windows.window_batches is None:
            with warnings.catch_warnings():  # nothing here writes to the map, which is what torch warns of
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                data.x = torch.from_numpy(np.asarray(store.x))
        super().__init__(data, node_sampler, input_nodes=input_nodes, transform=self._with_labels, **arguments)
        self.waiting: Waiting = lambda reading: False
        self._abandoned = threading.Event()  # no batch is waited for any more
        self._passes = 0  # over windows, that go on
        self._ahead: tuple[Place, Future[Window]] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="window")
        self._spool: Spool | None = None
        self._arrays: dict[str, DiskArray] = {}
        if windows.window_batches is not None:
            # The three buffers of a pass may not outweigh a small window; below 256 KiB reading slows down.
            chunk = min(CHUNK_BYTES, max(2**18, windows.available_bytes // 64 // 4096 * 4096))
            for name in ("colptr", "row", "x"):
                self._arrays[name] = disk_array(store, name, chunk)
                self._arrays[name].abandoned = self._abandoned

    def _with_labels(self, batch: Data) -> Data:
        batch.y = self.labels[batch.input_id]
        if self.next_epoch is not None:
            batch.x = batch.x.float()
        return batch

    def _batch(self, positions: Tensor, features: Tensor, rows: Tensor, **others: Any) -> Data:
        """A batch as PyG's loader makes it, in two thirds of the time: 0.14 ms for [3, 2] x 128 where that takes 0.20.

        `index_select` takes 0.04 ms for 1,270 rows of 128 in float16 where `features[rows]` takes 0.3.
        """
        data = Data(x=features.index_select(0, rows), batch_size=len(positions), input_id=positions, **others)
        data = self._with_labels(data)
        return data.pin_memory() if self.pin_memory else data

    def _mapped_batches(self, epoch: int, start: int) -> Iterator[Data]:
        share, sampler = self.sampler.share(epoch, start), self.node_sampler.at_epoch(epoch)
        for positions in share.split(self.batch_size) if len(share) else ():
            seeds = NodeSamplerInput(input_id=positions, node=self.input_data.node[positions])
            drawn = sampler.sample_from_nodes(seeds)
            yield self._batch(
                positions,
                self.data.x,
                drawn.node,
                edge_index=torch.stack([drawn.row, drawn.col]),
                n_id=drawn.node,
                num_sampled_nodes=drawn.num_sampled_nodes,
                num_sampled_edges=drawn.num_sampled_edges,
            )

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Fix order and neighbors of the next pass, which begins at position `start` of the order."""
        self.sampler.set_epoch(epoch, start)
        self.node_sampler.set_epoch(epoch)
        if self.next_epoch is not None:
            self.next_epoch = epoch

    def __iter__(self) -> Iterator[Data]:
        self.store.check_maps()
        if self.next_epoch is not None:
            self.set_epoch(self.next_epoch)
            self.next_epoch += int(self.sampler.shuffle)
        now = self.sampler.epoch, self.sampler.start  # another pass may begin while this one goes on
        if self.windows.window_batches is not None:
            return self._window_pass(*now)
        if self.num_workers:
            begin_pass(self, "node_sampler", self.node_sampler, now[0])
            return cast("Iterator[Data]", super().__iter__())
        return prefetch(self._mapped_batches(*now))

    def _window_pass(self, epoch: int, start: int) -> Iterator[Data]:
        self._abandoned.clear()
        self._passes += 1

        def abandon() -> None:
            if self._passes == 1:
                self._abandoned.set()

        try:
            yield from prefetch(self._window_batches(epoch, start), waiting=self._waiting, abandon=abandon)
        finally:
            self._passes -= 1

    def _waiting(self) -> bool:
        for name, array in self._arrays.items():
            done, total = array.progress
            if done < total:
                return self.waiting((_SPOKEN[name], done, total))
        return self.waiting(None)

    # Windows --------------------------------------------------------------------------------------------------------

    def seeds(self, place: Place) -> Seeds:
        """The window that starts at `place`."""
        assert self.windows.window_batches is not None
        epoch, start, begin = place
        size = self.batch_size
        positions = self.sampler.share(epoch, start)[begin : begin + size * self.windows.window_batches]
        parts = positions.clone().split(size)  # views of a whole order would hold it
        return Seeds(self.node_sampler, epoch, parts, [self.input_data.node[part].numpy() for part in parts])

    def after(self, place: Place, seeds: Seeds | Window) -> Place | None:
        """Where the window behind this one starts, in this epoch or in one that is prepared ahead."""
        epoch, start, begin = place
        begin += sum(len(part) for part in seeds.positions)
        if begin < self.sampler.count(start):
            return epoch, start, begin
        return (epoch + 1, 0, 0) if self.last_epoch is not None and epoch < self.last_epoch else None

    def _prepare(self, place: Place) -> Window:
        """The window that starts at `place`, read from the spool, or else from the store."""
        if (window := self._spooled(place)) is not None:
            return window
        self.store.check_maps()
        begun, read_before = time.monotonic(), self._bytes_read()
        seeds, num_nodes = self.seeds(place), self.store.num_nodes
        sampled = sample_windows([seeds], self._arrays["colptr"], self._arrays["row"])
        between, window = time.monotonic(), Window.pack(seeds, sampled, 0, num_nodes)
        del sampled
        window.features = np.empty((len(window.ids), self.store.num_features), self.store.feature_dtype)
        self._arrays["x"].fetch(window.ids, window.features)
        self.on_window(
            epoch=place[0],
            batches=len(seeds.ids),
            distinct_nodes=len(window.ids),
            sample_s=round(between - begun, 3),
            features_s=round(time.monotonic() - between, 3),
            bytes_read=self._bytes_read() - read_before,
        )
        return window

    def _bytes_read(self) -> int:
        return sum(array.bytes_read for array in self._arrays.values())

    def _spooled(self, place: Place) -> Window | None:
        """The window at `place` from the disk; None where none are kept there, or once it is full."""
        if self.windows.spooling is None:
            return None
        try:
            begun = time.monotonic()
            window = self.spool().get(place)
        except DiskFull as error:
            warnings.warn(f"spool: {error}; the windows are kept in memory from here on", stacklevel=2)
            self.spool().close()
            self.windows = self.windows.in_memory or dataclasses.replace(self.windows, spooling=None)
            return None
        took_s = round(time.monotonic() - begun, 3)
        self.on_window(epoch=place[0], batches=len(window.hops), distinct_nodes=len(window.ids), spool_s=took_s)
        return window

    def spool(self) -> Spool:
        """The windows on disk, which `windows.spooling` says there are."""
        if self._spool is None:
            assert self.windows.spooling is not None
            row, companions = (self.store.num_features, self.store.feature_dtype), [c.spool() for c in self.companions]
            self._spool = Spool(
                self, self.windows.spooling, self._arrays, self.spool_dir, row, self.on_pass, companions
            )  # fmt: skip
        return self._spool

    def _prepared(self, place: Place) -> Window:
        """The window at `place`, which may have been prepared ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            with contextlib.suppress(Interrupted):
                window = ahead[1].result()  # also where another one is wanted, so that two are never prepared
                if ahead[0] == place:
                    return window
                del window
        return self._executor.submit(self._prepare, place).result()

    def _window_batches(self, epoch: int, start: int) -> Iterator[Data]:
        place: Place | None = (epoch, start, 0) if self.sampler.count(start) else None
        while place is not None and place[:2] == (epoch, start):
            window = self._prepared(place)
            place = self.after(place, window)
            if self.windows.overlapped and place is not None:
                self._ahead = place, self._executor.submit(self._prepare, place)
            yield from self._unpack(window)
            del window
            malloc_trim()  # a window is many small arrays; without this the memory held grew from window to window

    def _unpack(self, window: Window) -> Iterator[Data]:
        features = torch.from_numpy(window.features)
        for positions, slots, edges, of_nodes, of_edges in window.batches():
            yield self._batch(
                positions,
                features,
                torch.from_numpy(slots),
                edge_index=torch.from_numpy(edges.astype(np.int64)),
                n_id=torch.from_numpy(window.ids[slots].astype(np.int64)),
                num_sampled_nodes=of_nodes,
                num_sampled_edges=of_edges,
            )

    def close(self) -> None:
        """End the preparing threads, delete what is on disk, and close the files."""
        self._abandoned.set()
        self._executor.shutdown(cancel_futures=True)
        self._ahead = None
        if self._spool is not None:
            self._spool.close()
        for array in self._arrays.values():
            array.close()
