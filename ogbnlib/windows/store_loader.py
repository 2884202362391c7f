"""PyG `NeighborLoader` over a store on disk: batches come from the mapped files or from windows
(batches sampled together)."""

import copy
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.sampler import SamplerOutput

from ..errors import InputError
from ..forecast.batches import queue
from ..forecast.pass_memory import Windows
from ..graph.store import Store
from ..io.disk_array import Interrupted
from ..kernels import Array
from ..memory.reading import malloc_trim
from ..sampling.order import BorrowedOrder, EpochSampler
from ..sampling.pyg_stores import StoreData, mapped_features
from ..sampling.sampler import NO_EDGES, CSCSampler, Hops
from .reader import WindowReader
from .spool import Preparation
from .window import Window, decode_rows


class StoreLoader(NeighborLoader):  # type: ignore[misc]  # PyG ships no types
    """A `NeighborLoader` whose features and graph stay on disk.

    Batches have the same attributes as under any policy. `x` has the store's dtype, int8 decoded
    to float32; `y` has the labels of the seeds only.

    Args:
        input_nodes: Seeds, int64, in RAM.
        labels: One label for each seed, int16 or int64 [n], or targets, float32 [n] or [n, T].
        first_epoch: In the user's own loop, the epoch of the first pass. Each shuffled pass raises
            it by 1, and `x` is float32. None in a trainer, which sets the epochs itself.
        transform: Called with each batch in the user's own loop; can be set later as well.
        arguments: As for `torch.utils.data.DataLoader`; an `EpochSampler` gives each epoch its own
            order.
    """

    def __init__(
        self,
        store: Store,
        node_sampler: CSCSampler,
        input_nodes: Tensor,
        labels: Tensor,
        preparation: Preparation,
        first_epoch: int | None = None,
        transform: Callable[[Data], Data] | None = None,
        **arguments: Any,
    ):
        self.store = store
        self.labels = labels
        self.preparation = preparation
        self.next_epoch = first_epoch  # None in a trainer, see `first_epoch`
        self._next_start = 0  # place in the order where the next pass begins
        self._running_passes = 0  # over windows
        # For prediction, Lightning copies a loader by its attributes, with its own batch sampler.
        batches = arguments.pop("batch_sampler", None)
        if batches is not None:
            for name in ("sampler", "batch_size", "drop_last"):
                arguments[name] = getattr(batches, name)
        if not isinstance(arguments["sampler"], EpochSampler):  # such as Lightning's own
            drop_last = arguments.get("drop_last", False)
            arguments["sampler"] = BorrowedOrder(
                arguments["sampler"], arguments["batch_size"], drop_last, node_sampler.seed
            )
        super().__init__(
            StoreData(store),
            node_sampler.num_neighbors,
            input_nodes,
            neighbor_sampler=node_sampler,
            transform=transform,
            **arguments,
        )
        self.reader = None  # where batches come from the mapped files, through the page cache
        if preparation.windows.window_batches is not None:
            seeds = self.input_data.node  # int64, as PyG has them
            self.reader = WindowReader(
                store, self.sampler, node_sampler, seeds, self.batch_size, preparation
            )

    @property
    def windows(self) -> Windows:
        """The way in which the store is read now; in memory once the disk is full."""
        return self.preparation.windows if self.reader is None else self.reader.windows

    def __len__(self) -> int:
        if self.next_epoch is None:
            return int(super().__len__())  # of the pass that `set_epoch` chose
        return -(-self.sampler.count(0) // self.batch_size)  # of a whole epoch

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Fix order and neighbors of the next pass, which begins at `start` of the order."""
        for number in (epoch, start):
            if not isinstance(number, Integral) or number < 0:
                raise InputError(f"set_epoch: expected a whole number from 0 on, got {number!r}")
        start = min(start, self.sampler.n)  # the last batch may be smaller than the others
        self.sampler.set_epoch(epoch, start)
        self.node_sampler.set_epoch(epoch)
        self.sampler.is_chosen = False  # not by Lightning, see `_counted_pass`
        if self.next_epoch is not None:
            self.next_epoch = epoch
            self._next_start = start

    def __iter__(self) -> Iterator[Data]:
        self.store.check_maps()  # refuses files that were written to since they were mapped
        if self.next_epoch is not None:
            return self._counted_pass()
        return self._pass(self.sampler.epoch, self.sampler.start)

    def _counted_pass(self) -> Iterator[Data]:
        # The epoch is decided with its first batch, because Lightning creates the iterator before
        # it calls the sampler's `set_epoch`.
        assert self.next_epoch is not None
        shuffle = self.sampler.shuffle
        chosen = self.sampler.epoch + 1  # Lightning counts from 0, this loader from 1
        # `is_chosen`: it has called the sampler's `set_epoch` since this loader last did. Another
        # epoch begins at 0; the expected one keeps the start that this loader's `set_epoch` got.
        if shuffle and self.sampler.is_chosen and chosen != self.next_epoch:
            self.set_epoch(chosen)
        epoch = self.next_epoch
        start = self._next_start
        self.set_epoch(epoch, start)  # fixes the order, and resets `is_chosen`
        self.next_epoch = epoch + shuffle  # without shuffling all epochs are the same
        self._next_start = 0
        is_transformed = self.reader is None and self.num_workers > 0  # by workers, in `filter_fn`
        for batch in self._pass(epoch, start):
            if self.transform is not None and not is_transformed:
                batch = self.transform(batch)
            last = [batch]
            del batch  # keep no reference to a batch that is handed out
            yield last.pop()

    def _pass(self, epoch: int, start: int) -> Iterator[Data]:
        """Return an iterator over the batches of an epoch, from position `start` of its order on:
        from windows, from a thread, or from DataLoader workers. A second pass, over another epoch,
        may begin while this one runs."""
        if self.reader is not None:
            return self._window_pass(self.reader, epoch, start)
        if not self.num_workers:  # one batch takes little time, so a stop may wait for it
            return _prefetch(self._mapped_groups(epoch, start), lambda: False, lambda: None)
        self.node_sampler.set_epoch(epoch)
        # Persistent workers were started once and see `set_epoch` through shared memory. Workers
        # of a single pass get a sampler with an epoch of its own, which a second pass can't change.
        if not self.persistent_workers:
            loader = copy.copy(self)
            loader.node_sampler = self.node_sampler.at_epoch(epoch)
            self.collate_fn = functools.partial(NeighborLoader.collate_fn, loader)
        return cast("Iterator[Data]", super().__iter__())

    def close(self) -> None:
        """End the preparing threads, delete the spool, and close the files."""
        if self.reader is not None:
            self.reader.close()

    def filter_fn(self, out: SamplerOutput) -> Data:
        """Build a batch as PyG does; add labels and decoded features before `transform`."""
        plain = copy.copy(self)  # without features, from which PyG would take rows undecoded
        plain.transform = None
        plain.data = Data(edge_index=NO_EDGES, num_nodes=self.store.num_nodes)
        batch = NeighborLoader.filter_fn(plain, out)
        batch.x = torch.from_numpy(self.store.decode(self.store.x[batch.n_id.numpy()]))
        self._add_labels(batch)
        return batch if self.transform is None else self.transform(batch)

    def _add_labels(self, batch: Data) -> None:
        batch.y = self.labels[batch.input_id]
        if self.next_epoch is not None:  # in the user's own loop
            batch.x = batch.x.float()

    def _take(self, features: Array, rows: Array) -> Tensor:  # [len(rows), F]; int8 decoded
        int8 = self.store.int8
        if int8 is None:
            # in one thread: torch's `index_select` would start its own
            return torch.from_numpy(features.take(rows, axis=0))
        x = torch.empty(len(rows), features.shape[1])
        decode_rows(features, rows, *int8, x.numpy())  # int8: scale and offset, [F] each
        return x

    def _groups(
        self,
        features: Array,  # [n, F], in the store's dtype
        count: int,
        draw: Callable[[int, int], tuple[Tensor, Array, Array, Array, Hops]],
    ) -> Iterator[Data]:
        """Yield `count` batches in groups, one after the other in each tensor. Small batches share
        a group, so that the thread needs the interpreter's lock once per group.

        `draw(begin, end)` returns positions, rows of `features`, ids int64, edges int64 (for each
        batch all sources, then all targets) and hops of the batches from `begin` to `end`.
        """
        begin = 0
        size = 1  # batches; doubled up to what `queue` allows, so that the first one comes soon
        while begin < count:
            end = min(begin + size, count)
            positions, rows, n_id, edges, hops = draw(begin, end)
            group = Data(
                self._take(features, rows),
                edge_index=torch.from_numpy(edges),
                n_id=torch.from_numpy(n_id),
                input_id=positions,
                hops=hops,
            )
            self._add_labels(group)
            if self.pin_memory:
                group = group.pin_memory()
            all_bytes = group.x.nbytes + group.n_id.nbytes + group.edge_index.nbytes
            batch_bytes = all_bytes // len(group.hops)  # the mean
            together, group.ahead = queue(batch_bytes)  # batches of a group, groups ahead
            begin = end
            size = min(2 * size, together)
            yield group
            del group, positions, rows, n_id, edges, hops  # before the next ones are drawn

    def _mapped_groups(self, epoch: int, start: int) -> Iterator[Data]:
        share = self.sampler.share(epoch, start)  # int64 positions of this rank's seeds, in order
        size = self.batch_size

        def draw(begin: int, end: int) -> tuple[Tensor, Array, Array, Array, Hops]:
            positions = share[begin * size : end * size]
            firsts = positions[::size].tolist()  # the first seed identifies a batch
            keys = [self.node_sampler.batch_key(first, epoch) for first in firsts]
            seeds = self.input_data.node[positions].numpy()
            nodes, edges, hops = self.node_sampler.sample_batches(seeds, size, keys)
            n_id = nodes.numpy()
            return positions, n_id, n_id, edges.numpy(), hops  # an id is its row in mapped features

        return self._groups(mapped_features(self.store).numpy(), -(-len(share) // size), draw)

    def _window_pass(self, reader: WindowReader, epoch: int, start: int) -> Iterator[Data]:
        reader.abandoned.clear()  # set by an earlier pass that was left early
        self._running_passes += 1

        def stop_reading() -> None:
            # The event ends the reads of all passes, so it is not set while a second pass runs.
            if self._running_passes == 1:
                reader.abandoned.set()

        try:
            groups = self._window_groups(reader.read(epoch, start))
            yield from _prefetch(
                groups, lambda: self.preparation.waiting(reader.progress()), stop_reading
            )
        finally:
            self._running_passes -= 1

    def _window_groups(self, windows: Iterator[Window]) -> Iterator[Data]:
        for window in windows:
            yield from self._groups(window.features, len(window.hops), window.batches)
            del window  # before the reader takes the next one into memory
            # a window is many small arrays; without this, memory grew from window to window
            malloc_trim()


def _prefetch(
    groups: Iterator[Data], waiting: Callable[[], bool], abandon: Callable[[], object]
) -> Iterator[Data]:
    """Yield the batches of `groups`. A thread draws some of them ahead, see
    `forecast.batches.queue`; the thread's errors are raised here.

    `waiting` is called a few times a second; if it returns True, `Interrupted` ends the waiting.
    `abandon` is called if the caller leaves early, before the thread is joined.
    """
    end = object()  # in place of a group: there are no more
    futures = deque[Future[Data]]()  # groups that are drawn or being drawn
    user = threading.get_ident()
    thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        futures.append(thread.submit(next, groups, end))
        while True:
            future = futures.popleft()
            while not wait([future], 0.2).done:  # seconds
                if waiting():
                    raise Interrupted
            group = future.result()
            del future  # it refers to the group
            if group is end:
                break
            while len(futures) < group.ahead + 1:  # one more is being drawn by the thread
                futures.append(thread.submit(next, groups, end))
            batches = _batches_of(group)[::-1]
            del group  # a batch that is handed out may go to a GPU: keep no reference to it
            while batches:
                yield batches.pop()
    except BaseException:  # `GeneratorExit` if the caller left early
        abandon()
        raise
    finally:
        # The garbage collector may end this generator in a thread that is starting; a join there
        # would hang.
        thread.shutdown(wait=threading.get_ident() == user, cancel_futures=True)


def _batches_of(group: Data) -> list[Data]:
    """Split a group, whose tensors have its batches one after the other."""
    hop_nodes, hop_edges = zip(*group.hops, strict=True)
    nodes = [sum(counts) for counts in hop_nodes]
    seeds = [counts[0] for counts in hop_nodes]
    sizes = {  # length of each batch's part
        "x": nodes,
        "n_id": nodes,
        "edge_index": [2 * sum(counts) for counts in hop_edges],  # flat: sources, then targets
        "y": seeds,
        "input_id": seeds,
    }
    # `data` has a version counter of its own, so that changing one batch in place does not prevent
    # gradients of the others.
    parts: dict[str, Any] = {
        name: [part.data for part in group[name].split(lengths)] for name, lengths in sizes.items()
    }
    parts["edge_index"] = [part.view(2, -1) for part in parts["edge_index"]]
    parts |= {"batch_size": seeds, "num_sampled_nodes": hop_nodes, "num_sampled_edges": hop_edges}
    return [
        Data().update(dict(zip(parts, values, strict=True)))
        for values in zip(*parts.values(), strict=True)
    ]
