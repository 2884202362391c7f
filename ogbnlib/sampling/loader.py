"""A PyG `NodeLoader` over a store on disk: batches from the page cache where it holds the store, else from windows.

`fit_windows` decides from the memory that is left which of the two it is, and how many batches a window has;
`StoreLoader` hands the batches out in order. A thread prepares ahead while the model trains.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numpy as np
import psutil
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import NodeSamplerInput

from ..graph.store import HEADER_BYTES, Store
from ..memory.cgroup import effective_limit
from ..memory.reading import malloc_trim, own_memory, read_rss
from .budget import QUEUE_BATCHES, QUEUE_BYTES, BatchShape, Windows, choose_windows, queue_depth, usable_bytes
from .choice import EpochSampler, GivenOrder
from .disk import CHUNK_BYTES, DiskArray
from .sampler import CSCSampler
from .window import Spool, Window, sample_window

T = TypeVar("T")
Place = tuple[int, int, int]  # of a window: its epoch, the position the epoch goes on from, its first among those left
NO_EDGES = torch.empty((2, 0), dtype=torch.int64)  # makes a NodeLoader fill in each batch's own


def _tensor_bytes(item: object) -> int:
    values = item.to_dict().values() if isinstance(item, Data) else [item]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def prefetch(source: Iterator[T], depth: int = QUEUE_BATCHES, budget_bytes: int = QUEUE_BYTES) -> Iterator[T]:
    """The items of `source`, produced by a thread up to `depth` ahead; its errors are raised here.

    Fewer ahead where they are tensors, or `Data` of tensors, so large that `depth` of them pass `budget_bytes`.
    """
    end, ahead, user = object(), deque[Future[Any]](), threading.get_ident()
    thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead.append(thread.submit(next, source, end))
        while (item := ahead.popleft().result()) is not end:
            wanted = queue_depth(_tensor_bytes(item), depth, budget_bytes) + 1  # and one in the thread's hand
            while len(ahead) < wanted:
                ahead.append(thread.submit(next, source, end))
            yield item
            del item
    finally:
        # The garbage collector may end this in a thread that is just starting, where waiting would never end.
        thread.shutdown(wait=threading.get_ident() == user, cancel_futures=True)


def available_bytes() -> int:
    """What this process may still take of what is usable of its limit, or of what the host has left.

    The ranks of a node share its limit with their launcher, and its memory.
    """
    ranks = local_ranks()
    launcher = (read_rss([os.getppid()])[0] or 0) if ranks > 1 else 0
    left = (usable_bytes(effective_limit()[0]) - launcher) // ranks - own_memory()[0]
    return max(0, min(left, usable_bytes(psutil.virtual_memory().available) // ranks))


def local_ranks() -> int:
    """How many processes a launcher has started on this node to train together."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def fill_page_cache(store: Store) -> None:
    """Read graph and features once from end to end: a tenth of the time that faulting them in row by row takes.

    For a store that fits; what is cached already is read at memory speed.
    """
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for name in ("colptr", "row", "x"):
        with open(store.file_path(name), "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def fit_windows(
    store: Store,
    sampler: CSCSampler,
    seeds: Tensor,
    batch_size: int,
    available: int | None,
    *,
    training: bool,
    reserve: Callable[[BatchShape], tuple[int, int]] = lambda batch: (0, 0),
) -> Windows:
    """`choose_windows` with one real batch, drawn through the maps, for what a batch holds.

    Repeated nodes across batches only lower what the windows then take. `seeds` are as many of the ids that an epoch
    starts from as this loader gets, `available` is for each rank of this node; `reserve` tells from that batch what a
    step beside the windows takes. The other arguments are those of `choose_windows`.
    """
    files = {name: store.files[name].bytes for name in ("colptr", "row", "x")}
    batches = -(-len(seeds) // batch_size)
    if available is None or not batches:
        return Windows(None, True, 0, available or 0)
    probe = sampler.sample_from_nodes(NodeSamplerInput(input_id=None, node=seeds[:batch_size]))
    batch = BatchShape(tuple(probe.num_sampled_nodes), tuple(probe.num_sampled_edges))
    return choose_windows(
        files,
        store.num_nodes,
        store.num_features * store.x.itemsize,
        batch,
        batches,
        available,
        training=training,
        reserve=reserve(batch),
        sharers=local_ranks(),
    )


class StoreLoader(NodeLoader):  # type: ignore[misc]  # PyG ships no types
    """A `NodeLoader` whose features and graph stay on disk.

    Batches have what any policy's have: `x` in the store's dtype, `edge_index`, `n_id`, `num_sampled_nodes`,
    `num_sampled_edges`, `batch_size`, `input_id`; `y` holds the labels of the seeds only.

    Args:
        store: The open store.
        node_sampler: Decides the neighbors.
        input_nodes: int64 seeds, in RAM.
        labels: int16 or int64, one per seed.
        windows: From `fit_windows`.
        next_epoch: Where not None, passes count their epochs themselves from here on, and `x` is made float32.
        arguments: As for `torch.utils.data.DataLoader`; any `sampler` does, and an `EpochSampler` is one by epoch.

    Attributes:
        on_window: Called with what each window took: seconds of sampling and of reading features, bytes read.
        spool: Where windows are kept and found again, for a loader that is gone over more than once.
        last_epoch: With overlapped windows, the first window of the next epoch is prepared during the last of this one,
            unless this is the last; None prepares nothing beyond the epoch.
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
        self.spool: Spool | None = None
        batches = arguments.pop("batch_sampler", None)  # Lightning makes a loader anew from its attributes, to predict
        if batches is not None:
            arguments |= {"sampler": batches.sampler, "batch_size": batches.batch_size}
        if not isinstance(arguments["sampler"], EpochSampler):
            arguments["sampler"] = GivenOrder(arguments["sampler"], arguments["batch_size"])
        self.on_window: Callable[..., None] = lambda **info: None
        data = Data(edge_index=NO_EDGES, num_nodes=store.num_nodes)
        if windows.window_batches is None:
            with warnings.catch_warnings():  # nothing here writes to the map, which is what torch warns of
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                data.x = torch.from_numpy(np.asarray(store.x))
        super().__init__(data, node_sampler, input_nodes=input_nodes, transform=self._with_labels, **arguments)
        self._ahead: tuple[Place, Future[Window]] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="window")
        self._arrays: dict[str, DiskArray] = {}
        if windows.window_batches is not None:
            # The three buffers of a pass may not outweigh a small window; below 256 KiB reading slows down.
            chunk = min(CHUNK_BYTES, max(2**18, windows.available_bytes // 64 // 4096 * 4096))
            for name, array in (("colptr", store.colptr), ("row", store.row), ("x", store.x)):
                place = store.file_path(name), HEADER_BYTES, array.strides[0], len(array)
                self._arrays[name] = DiskArray(*place, chunk)

    def _with_labels(self, batch: Data) -> Data:
        batch.y = self.labels[batch.input_id]
        if self.next_epoch is not None:
            batch.x = batch.x.float()
        return batch

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Fix order and neighbors of the next pass, which begins at position `start` of the order."""
        self.sampler.set_epoch(epoch, start)
        self.node_sampler.set_epoch(epoch)
        if self.next_epoch is not None:
            self.next_epoch = epoch

    def __iter__(self) -> Iterator[Data]:
        if self.next_epoch is not None:
            self.set_epoch(self.next_epoch)
            self.next_epoch += int(self.sampler.shuffle)
        if self.windows.window_batches is not None:
            return prefetch(self._window_batches())
        if self.num_workers:
            return cast("Iterator[Data]", super().__iter__())
        return prefetch(super().__iter__())

    # Windows --------------------------------------------------------------------------------------------------------

    def _prepare(self, epoch: int, start: int, begin: int) -> Window:
        """The window that starts at place `begin` of this loader's share of `epoch` from position `start` on."""
        assert self.windows.window_batches is not None
        begun, place = time.monotonic(), (epoch, start, begin)
        kept = None if self.spool is None else self.spool.get(place, self.store.num_features, self.store.x.dtype)
        if kept is not None:
            took_s = round(time.monotonic() - begun, 3)
            self.on_window(epoch=epoch, batches=len(kept.batches), distinct_nodes=len(kept.features), spool_s=took_s)
            return kept
        size = self.batch_size
        positions = self.sampler.share(epoch, start)[begin : begin + size * self.windows.window_batches]
        parts = positions.split(size)
        seeds = self.input_data.node
        read_before = self._bytes_read()
        sampled = sample_window(
            self.node_sampler,
            [seeds[part].numpy() for part in parts],
            [int(part[0]) for part in parts],
            epoch,
            self._arrays["colptr"],
            self._arrays["row"],
            self.store.row.dtype,
        )
        between = time.monotonic()
        window = Window(sampled, parts, self._arrays["x"], self.store.num_features, self.store.x.dtype)
        self.on_window(
            epoch=epoch,
            batches=len(parts),
            distinct_nodes=len(window.features),
            sample_s=round(between - begun, 3),
            features_s=round(time.monotonic() - between, 3),
            bytes_read=self._bytes_read() - read_before,
        )
        if self.spool is not None:
            self.spool.add(place, window)
        return window

    def _bytes_read(self) -> int:
        return sum(array.bytes_read for array in self._arrays.values())

    def _prepared(self, place: Place) -> Window:
        """The window at `place`, which may have been prepared ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            window = ahead[1].result()  # also where another one is wanted, so that two are never prepared
            if ahead[0] == place:
                return window
            del window, ahead
        return self._executor.submit(self._prepare, *place).result()

    def _window_batches(self) -> Iterator[Data]:
        assert self.windows.window_batches is not None
        epoch, start = self.sampler.epoch, self.sampler.start
        begins = range(0, len(self.sampler), self.batch_size * self.windows.window_batches)
        places: list[Place | None] = [(epoch, start, begin) for begin in begins]
        beyond = (epoch + 1, 0, 0) if self.last_epoch is not None and epoch < self.last_epoch else None
        for place, following in itertools.pairwise([*places, beyond]):
            assert place is not None
            window = self._prepared(place)
            if self.windows.overlapped and following is not None:
                self._ahead = following, self._executor.submit(self._prepare, *following)
            yield from self._unpack(window)
            del window
            malloc_trim()  # a window is many small arrays; without this the memory held grew from window to window

    def _unpack(self, window: Window) -> Iterator[Data]:
        features = torch.from_numpy(window.features)
        for (batch, slots), positions in zip(window, window.positions, strict=True):
            data = Data(
                x=features[torch.from_numpy(slots)],
                edge_index=torch.from_numpy(
                    np.stack([np.concatenate(batch.rows), np.concatenate(batch.cols)]).astype(np.int64)
                ),
                n_id=torch.from_numpy(batch.node),
                num_sampled_nodes=batch.num_sampled_nodes,
                num_sampled_edges=batch.num_sampled_edges,
                batch_size=len(positions),
                input_id=positions,
            )
            yield self._with_labels(data)
            del data

    def close(self) -> None:
        """End the preparing thread and close the files."""
        self._executor.shutdown(cancel_futures=True)
        self._ahead = None
        for array in self._arrays.values():
            array.close()
