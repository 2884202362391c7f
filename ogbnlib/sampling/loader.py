"""A PyG `NodeLoader` over a store on disk: batches from its maps, or from windows; see `window` and
`spool`."""

import copy
import functools
import os
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

from ..errors import InputError
from ..forecast.budget import Windows, queue, usable_bytes
from ..graph.disk import CHUNK_BYTES, Interrupted
from ..graph.store import Store
from ..launcher import local_ranks
from ..memory.cgroup import effective_limit
from ..memory.reading import malloc_trim, own_memory, read_rss
from .choice import EpochSampler, GivenOrder
from .sampler import CSCSampler, Hops
from .spool import WindowReader
from .window import Window, take_rows

# Attributes of PyG's loaders that decide how one batch is drawn.
_FIXED = {"transform_sampler_output", "custom_cls", "collate_fn", "node_sampler", "data"}
_FIXED |= {"input_nodes", "input_id", "input_time", "input_data"}
NO_EDGES = torch.empty((2, 0), dtype=torch.int64)  # makes a NodeLoader fill in each batch's own


def prefetch(
    groups: Iterator[Data], waiting: Callable[[], bool], abandon: Callable[[], object]
) -> Iterator[Data]:
    """Yield the batches of `groups`, which a thread draws some ahead, see `queue`; its errors are
    raised here.

    `waiting` is called a few times a second while the caller waits, and ends that with
    `Interrupted` by returning True. `abandon` is called if the caller leaves early, before the
    thread is joined.
    """
    end, ahead, user, ended = object(), deque[Future[Any]](), threading.get_ident(), False
    thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead.append(thread.submit(next, groups, end))
        while True:
            future = ahead.popleft()
            while not wait([future], 0.2).done:
                if waiting():
                    raise Interrupted
            group = future.result()
            del future
            if group is end:
                break
            while len(ahead) < group.ahead + 1:  # one more in the thread's hand
                ahead.append(thread.submit(next, groups, end))
            batches = _batches_of(group)[::-1]
            # of a batch that is handed out nothing may stay here: the user may move it to a GPU
            del group
            while batches:
                yield batches.pop()
        ended = True
    finally:
        if not ended:
            abandon()
        # The garbage collector may end this generator in a thread that is starting; a join there
        # would hang.
        thread.shutdown(wait=threading.get_ident() == user, cancel_futures=True)


def _batches_of(group: Data) -> list[Data]:
    """The batches of a group, which lie in its tensors; see `StoreLoader._group`."""
    hop_nodes, hop_edges = zip(*group.hops, strict=True)
    nodes, edges, seeds = (
        [sum(n) for n in hop_nodes],
        [2 * sum(n) for n in hop_edges],
        [n[0] for n in hop_nodes],
    )
    sizes = {"x": nodes, "n_id": nodes, "edge_index": edges, "y": seeds, "input_id": seeds}
    # `data` has a version of its own, so that a change in place of one batch leaves the gradients
    # of others possible.
    parts: dict[str, Any] = {
        name: [part.data for part in group[name].split(each)] for name, each in sizes.items()
    }
    parts |= {"batch_size": seeds, "num_sampled_nodes": hop_nodes, "num_sampled_edges": hop_edges}
    parts["edge_index"] = [part.view(2, -1) for part in parts["edge_index"]]
    return [
        Data().update(dict(zip(parts, values, strict=True)))
        for values in zip(*parts.values(), strict=True)
    ]


def available_bytes() -> int:
    """Return the bytes that this process may still use, of its limit and of the host's free memory.

    The ranks of a node share both, and the limit also with their launcher.
    """
    ranks = local_ranks()
    launcher = (read_rss([os.getppid()])[0] or 0) if ranks > 1 else 0
    own_share = (usable_bytes(effective_limit()[0]) - launcher) // ranks - own_memory()[0]
    return max(0, min(own_share, usable_bytes(psutil.virtual_memory().available) // ranks))


def fill_page_cache(store: Store) -> None:
    """Read graph and features once from end to end, in a tenth of the time that page faults
    take."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for name in ("colptr", "row", "x"):
        with store.open_file(name) as file:
            while file.readinto(buffer):
                pass


class StoreLoader(NodeLoader):  # type: ignore[misc]  # PyG ships no types
    """A `NodeLoader` whose features and graph stay on disk.

    Batches have what any policy's have, `x` in the store's dtype, int8 decoded to float32; `y`
    holds the labels of the seeds only.

    Args:
        input_nodes: int64 seeds, in RAM; `labels` has one for each, int16 or int64.
        next_epoch: For a loop of the user's own: each pass counts the epoch, from this one on, and
            `x` is float32. None in a trainer.
        transform: Called with each batch of such a loop; it can be set later as well.
        arguments: As for `torch.utils.data.DataLoader`; an `EpochSampler` gives each epoch its own
            order.
    """

    def __init__(
        self,
        store: Store,
        node_sampler: CSCSampler,
        input_nodes: Tensor,
        labels: Tensor,
        windows: Windows,
        next_epoch: int | None = None,
        transform: Callable[[Data], Any] | None = None,
        **arguments: Any,
    ):
        self.store, self.windows, self.labels, self.next_epoch = store, windows, labels, next_epoch
        self.next_start = 0
        self._place = next_epoch or 0, 0  # epoch and position behind the batch handed out last
        # in each epoch before it, the next one's first window is prepared
        self.last_epoch: int | None = None
        # in the very first window, to train on them during the first pass; 0 for a usual one
        self.first_batches = 0
        self.spool_dir = Path(tempfile.gettempdir())
        # their windows are prepared with the first of this one's
        self.evaluations: list[StoreLoader] = []
        # Lightning copies a loader through its attributes, to predict
        batches = arguments.pop("batch_sampler", None)
        if batches is not None:
            arguments |= {
                "sampler": batches.sampler,
                "batch_size": batches.batch_size,
                "drop_last": batches.drop_last,
            }
        if not isinstance(arguments["sampler"], EpochSampler):
            order = GivenOrder(
                arguments["sampler"], arguments["batch_size"], arguments.get("drop_last", False)
            )
            arguments["sampler"] = order
        # Called with seconds and bytes of each window, and of each pass for windows on disk.
        self.on_window: Callable[..., None] = lambda **info: None
        self.on_pass: Callable[..., None] = lambda **info: None
        # Called a few times a second while a batch is waited for, with the running read as array
        # name, bytes read and bytes to read. If it returns True, the waiting ends with
        # `Interrupted`.
        self.waiting: Callable[[tuple[str, int, int] | None], bool] = lambda reading: False
        data = Data(edge_index=NO_EDGES, num_nodes=store.num_nodes)
        if windows.window_batches is None:
            # nothing here writes to the map, which is what torch warns of
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                data.x = torch.from_numpy(np.asarray(store.x))
        super().__init__(
            data, node_sampler, input_nodes=input_nodes, transform=transform, **arguments
        )
        self._running_passes = 0  # over windows
        self.reader = None if windows.window_batches is None else WindowReader(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and value is not None and "reader" in self.__dict__:
            raise InputError(
                f"loader.{name}: expected it unchanged, since batches of a store are drawn many at "
                "a time; set loader.transform, or build another loader with store.loader(...)"
            )
        super().__setattr__(name, value)

    def __len__(self) -> int:
        if self.next_epoch is None:
            return int(super().__len__())
        return -(-self.sampler.count(0) // self.batch_size)  # of a whole epoch

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Fix order and neighbors of the next pass, which begins at position `start` of the
        order."""
        self.sampler.set_epoch(epoch, start)
        self.node_sampler.set_epoch(epoch)
        self.sampler.is_chosen = False
        if self.next_epoch is not None:
            self.next_epoch, self.next_start = epoch, start
            self._place = epoch, start

    def state_dict(self) -> dict[str, int]:
        """Return the place behind the batch handed out last: epoch, number of its seeds so far, and
        of all."""
        epoch, position = self._place
        return {"epoch": epoch, "position": position, "num_seeds": self.sampler.count(0)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Have the next pass go on from the place of `state_dict`, or begin the next epoch."""
        num_seeds = self.sampler.count(0)
        if state.get("num_seeds") != num_seeds:
            expected = f"the state of a loader over {num_seeds} nodes"
            raise InputError(f"state_dict: expected {expected}, got {state}")
        if state["position"] < num_seeds:
            self.set_epoch(state["epoch"], state["position"])
        else:
            self.set_epoch(state["epoch"] + self.sampler.shuffle)

    def __iter__(self) -> Iterator[Data]:
        self.store.check_maps()
        if self.next_epoch is not None:
            return self._counted_pass()
        return self._pass(self.sampler.epoch, self.sampler.start)

    def _counted_pass(self) -> Iterator[Data]:
        """The pass of the next epoch, decided with its first batch: Lightning creates the iterator
        before it calls `set_epoch` of the sampler, where epochs count from 0."""
        assert self.next_epoch is not None
        shuffle = self.sampler.shuffle
        chosen = self.sampler.epoch + 1
        if shuffle and self.sampler.is_chosen and chosen != self.next_epoch:
            self.set_epoch(chosen)
        epoch, position = self.next_epoch, self.next_start
        self.set_epoch(epoch, position)
        self.next_epoch, self.next_start = epoch + shuffle, 0
        drawn_by_workers = self.reader is None and self.num_workers > 0
        for batch in self._pass(epoch, position):
            position = min(position + self.batch_size, self.sampler.count(0))
            self._place = epoch, position
            if self.transform is not None and not drawn_by_workers:
                batch = self.transform(batch)
            last = [batch]
            del batch  # of a batch that is handed out nothing may stay here
            yield last.pop()

    def _pass(self, epoch: int, start: int) -> Iterator[Data]:
        # a second pass may begin while this one runs
        if self.reader is not None:
            return self._window_pass(self.reader, epoch, start)
        if not self.num_workers:
            return prefetch(self._mapped_groups(epoch, start), lambda: False, lambda: None)
        self.node_sampler.set_epoch(epoch)
        # a copy, as the workers of a second pass have another epoch
        if not self.persistent_workers:
            own = copy.copy(self)
            own.__dict__["node_sampler"] = self.node_sampler.at_epoch(epoch)
            self.__dict__["collate_fn"] = functools.partial(NodeLoader.collate_fn, own)
        return cast("Iterator[Data]", super().__iter__())

    def close(self) -> None:
        """End the preparing threads, delete the spool, and close the files."""
        if self.reader is not None:
            self.reader.close()

    def filter_fn(self, out: Any) -> Data:
        """As PyG's, with labels and decoded features before `transform`."""
        plain = copy.copy(self)
        plain.transform = None
        batch = NodeLoader.filter_fn(plain, out)
        if self.reader is not None:  # a batch of its own, not of a pass
            batch.x = torch.from_numpy(np.asarray(self.store.x[batch.n_id.numpy()]))
        batch = self._with_labels(batch)
        return batch if self.transform is None else self.transform(batch)

    def _with_labels(self, batch: Data) -> Data:
        batch.y = self.labels[batch.input_id]
        if self.store.int8 is not None:
            batch.x = torch.from_numpy(self.store.decode(batch.x.numpy()))
        elif self.next_epoch is not None:
            batch.x = batch.x.float()
        return batch

    def _groups(
        self, features: Tensor, count: int, draw: Callable[[int, int], Any]
    ) -> Iterator[Data]:
        """Yield `count` batches; small ones in groups, so that the thread needs the interpreter's
        lock once a group.

        `draw` returns for the batches from one number to another their positions, rows of
        `features`, ids, edges, hops.
        """
        begin, size = 0, 1
        while begin < count:
            end = min(begin + size, count)
            group = self._group(features, *draw(begin, end))
            all_bytes = group.x.nbytes + group.n_id.nbytes + group.edge_index.nbytes
            together, group.ahead = queue(all_bytes // len(group.hops))
            begin, size = end, min(2 * size, together)
            yield group
            del group

    def _group(
        self, features: Tensor, positions: Tensor, rows: Any, n_id: Any, edges: Any, hops: Hops
    ) -> Data:
        """Batches one after the other in each tensor, edges as one row: of each batch all sources,
        then all targets."""
        x = features.new_empty(len(rows), features.shape[1])
        take_rows(features.view(torch.uint8).numpy(), np.asarray(rows), x.view(torch.uint8).numpy())
        parts = {
            "edge_index": torch.as_tensor(edges),
            "n_id": torch.as_tensor(n_id),
            "input_id": positions,
        }
        group = self._with_labels(Data(x, **parts, hops=hops))
        return group.pin_memory() if self.pin_memory else group

    def _mapped_groups(self, epoch: int, start: int) -> Iterator[Data]:
        share, size, sampler = self.sampler.share(epoch, start), self.batch_size, self.node_sampler

        def draw(begin: int, end: int) -> tuple[Any, ...]:
            positions = share[begin * size : end * size]
            keys = [sampler.batch_key(first, epoch) for first in positions[::size].tolist()]
            node, edges, hops = sampler.sample_batches(
                self.input_data.node[positions].numpy(), size, keys
            )
            return positions, node, node, edges, hops

        return self._groups(self.data.x, -(-len(share) // size), draw)

    def _window_pass(self, reader: WindowReader, epoch: int, start: int) -> Iterator[Data]:
        abandoned: Any = reader.abandoned
        abandoned.clear()
        self._running_passes += 1
        how = (
            (lambda: self.waiting(reader.progress())),
            lambda: self._running_passes == 1 and abandoned.set(),
        )
        try:
            yield from prefetch(self._window_groups(reader.windows(epoch, start)), *how)
        finally:
            self._running_passes -= 1

    def _window_groups(self, windows: Iterator[Window]) -> Iterator[Data]:
        for window in windows:
            yield from self._groups(
                torch.from_numpy(window.features), len(window.hops), window.batches
            )
            del window
            # a window is many small arrays; without this, memory grew from window to window
            malloc_trim()
