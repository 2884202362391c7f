"""The plan of a loader's windows, from sizes alone. No torch, no numba.

A window is a group of consecutive batches that are sampled ahead, in one pass over the store. A
spool keeps windows on disk.
"""

import functools
import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..environment import WINDOWS_VARIABLE
from ..files import file_system
from ..forecast import memory_parts as sizes
from ..forecast.batches import Batches, BatchShape
from ..forecast.pass_memory import Pass, Spooling, Windows, read_bytes
from ..forecast.step_memory import model_state_bytes
from ..graph.npz import CHUNK_BYTES
from ..graph.store_format import index_dtype
from ..launcher import sampling_threads

# largest window in a spool, read in one piece; only large batches gain from a larger one
WINDOW_BYTES = 2**28
_SEEDS_BYTES = 2500  # in memory: seeds and sizes of a batch in a spool
ID_BYTES = 12  # for each row in memory: its id, here and in the list of rows to read
_MOST_COUNTED = 255  # windows that visit a node are counted up to this number
# Shares of a pass's memory to try for hot rows, the rows that stay in memory.
_HOT_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)


def _compact_batch_bytes(batch: BatchShape, row_bytes: int) -> int:
    return batch.num_nodes * (row_bytes + 8) + batch.num_edges * 8 + 2000


def _window_fixed_bytes(num_nodes: int) -> int:
    return num_nodes // 8 + num_nodes // 16  # the bitmap of its ids, and the ranks


def sampled_bytes(loader_pass: Pass, batch: BatchShape) -> tuple[int, int]:
    """Bytes that `window.sample_windows` takes per batch, seeds included: at its peak, and in its
    result."""
    highest = nodes = edges = 0
    # bytes of an edge's place in the store
    num_edges = sizes.trained_edges(loader_pass.size, loader_pass.config.undirected)
    place_bytes = 4 if num_edges < 2**32 else 8
    for frontier, reached, new in zip(
        batch.hop_nodes, [*batch.hop_nodes[1:-1], 0], batch.hop_edges, strict=False
    ):
        nodes += frontier
        # The four steps of a hop: read the offsets, choose edges, read the edges, append the new
        # nodes. The nodes of the last hop are appended when a window is packed.
        step = max(
            36 * frontier,
            24 * frontier + (place_bytes + 4) * new,
            (2 * place_bytes + 4) * new,
            8 * (nodes + reached) + (place_bytes + 4) * new,
        )
        highest = max(highest, 8 * (nodes + edges) + step)
        edges += new
    # Measured at papers100M's size: 22 and 12 kB for [3, 2] x 128, 3.3 and 2.3 MB for [15, 10, 5]
    # x 1024. These lines give 27 and 16 kB, 3.6 and 2.4 MB.
    return int(1.1 * highest) + 4000, int(1.05 * 8 * (nodes + edges)) + 4000


def window_bytes(loader_pass: Pass, windows: Windows) -> int:
    """Expected bytes of a window: each distinct node's features once, and every batch's own ids
    and edges."""
    assert windows.window_batches is not None
    batch = loader_pass.batch
    size = loader_pass.size
    total = windows.window_batches * batch.num_nodes
    distinct = sizes.distinct_nodes(size, loader_pass.config.undirected, total)
    distinct = min(total, max(batch.num_nodes, distinct))
    packed_bytes = _compact_batch_bytes(batch, 0)
    unshared_bytes = windows.window_batches * packed_bytes + _window_fixed_bytes(size.num_nodes)
    return int(distinct * size.num_features * loader_pass.itemsize) + unshared_bytes


def lookahead() -> str:
    """Memory for windows, "auto" or bytes, as `WINDOWS_VARIABLE` sets it."""
    return os.environ.get(WINDOWS_VARIABLE, "auto")


def spool_dir() -> Path:
    """The folder for a spool: SLURM_TMPDIR, the local disk of a Slurm job, else TMPDIR."""
    return Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()).absolute()


def spool_bytes(spool: str | int, folder: Path, sharers: int = 1) -> int:
    """Bytes that each of `sharers` processes may keep in `folder`; "auto" is a quarter of the free
    disk space."""
    if spool == "off":
        return 0
    if spool != "auto":
        return int(spool) // sharers
    if file_system(folder) in ("tmpfs", "ramfs"):
        return 0
    free = shutil.disk_usage(folder).free
    # the last 5 GB of the disk are for other users
    return max(0, min(free // 4, free - 5 * 2**30)) // sharers


def choose_windows(
    loader_pass: Pass, available: int | None, room_bytes: int = 0, *, always: bool = False
) -> Windows:
    """Choose between the page cache, windows in memory and windows on disk, and their size.

    `available`, from `Budget.bytes_beside`, includes the page cache; `room_bytes` is for a spool.
    With `always`, windows are on disk wherever possible: a pass over the store is made anyway.
    """
    files = sizes.store_bytes(loader_pass.config, loader_pass.size)
    beside_windows, beside_cache = loader_pass.reserve or _step_reserve(loader_pass)
    if (
        available is None
        or not loader_pass.num_batches
        or sum(files.values()) <= (available - beside_cache) * loader_pass.sharers
    ):
        return Windows(None, 0, available or 0)
    memory = max(0, available - beside_windows)
    in_memory = _in_memory(loader_pass, files, memory, available)
    spooled = _Spool(loader_pass, files, memory, room_bytes).best()
    # Windows on disk are small. They win if they move fewer bytes, writing and reading them again
    # included, than one pass for each window in memory.
    if spooled is None or not (always or spooled.moved_bytes < in_memory.moved_bytes):
        return in_memory
    return replace(spooled, in_memory=in_memory, available_bytes=available)


def _step_reserve(loader_pass: Pass) -> tuple[int, int]:
    if lookahead() != "auto":  # a fixed size is for windows alone
        return 0, 0
    size = loader_pass.size
    step_pass = Pass(loader_pass.config, size, "train", Batches.of(loader_pass.batch))
    model_bytes = model_state_bytes(loader_pass.config, size.num_features, size.num_classes)
    step = sum(step_pass.prefetched().values()) + model_bytes
    return step, step + sum(step_pass.workers(idle_loaders=1).values())


def _in_memory(loader_pass: Pass, files: Mapping[str, int], memory: int, available: int) -> Windows:
    """Plan windows in memory, as few as possible: a pass costs the same for a small window."""
    batch = loader_pass.batch
    size = loader_pass.size
    num_batches = loader_pass.num_batches
    fixed = _window_fixed_bytes(size.num_nodes)
    packed_bytes = _compact_batch_bytes(batch, size.num_features * loader_pass.itemsize)
    # Two windows in training leave a tenth to evaluations.
    half = (0.45 if loader_pass.training else 0.5) * memory
    # Besides the windows in use, memory holds the one being prepared: its sampled batches, and
    # three buffers of a pass.
    sampling, result = sampled_bytes(loader_pass, batch)
    samples = max(sampling, result + 8 * batch.num_nodes)
    buffers = 3 * read_bytes(available)
    room = int((half - fixed - buffers / 2) / (packed_bytes + samples / 2))
    number = -(-num_batches // max(1, room))
    count = -(-num_batches // number)
    number = -(-num_batches // count)
    moved = number * (files["x"] + len(batch.hop_edges) * (files["colptr"] + files["row"]))
    return Windows(count, count * packed_bytes + fixed, available, number, moved, moved // number)


class _Division(NamedTuple):
    """A division of batches on disk into structure files, with its cost."""

    moved_bytes: int  # of the whole run, between memory and disk
    num_files: int
    windows: Windows


class _Spool:
    """Plan of windows on disk for one pass.

    Batches are divided into structure files, and these into feature shards, so that the fewest
    bytes are moved. A structure file (ids and edges) takes one pass over the graph if memory has
    room to sample it at once. A feature shard takes one pass over the features. Two files and two
    shards are on disk at a time. An evaluation's windows stay if the disk has room.
    """

    def __init__(
        self, loader_pass: Pass, files: Mapping[str, int], memory: int, room_bytes: int
    ) -> None:
        batch = loader_pass.batch
        graph = loader_pass.size
        row_bytes = graph.num_features * loader_pass.itemsize
        self.training = loader_pass.training
        self.memory = memory
        self.room_bytes = room_bytes
        self.num_batches = loader_pass.num_batches
        config = loader_pass.config
        rounds = config.epochs if self.training else config.num_evaluations(loader_pass.split)
        self.passes = max(1, rounds)
        self.total = self.num_batches * (self.passes if self.training else 1)
        # all ids are int32
        self.rows_bytes = batch.num_nodes * row_bytes
        self.structure_bytes = 8 * (batch.num_nodes + batch.num_edges)
        self.x_bytes = files["x"]
        self.graph_bytes = len(batch.hop_edges) * (files["colptr"] + files["row"])
        self.packed_bytes = _compact_batch_bytes(batch, row_bytes)
        self.sampled_bytes, self.result_bytes = sampled_bytes(loader_pass, batch)
        # Up to 8 large batches, because they have nodes in common: at papers100M's size, 8 batches
        # of [15, 10, 5] x 1024 had 1.12 M distinct nodes, two windows of 4 batches had 1.36 M.
        small = min(memory // 24, WINDOW_BYTES) // self.packed_bytes
        large = min(8, memory // 12 // self.packed_bytes)
        self.size = min(self.num_batches, max(1, small, large))
        # the share of a window's rows that is left when each node is counted once
        shared = graph, config.undirected, batch, self.size
        visits = max(1, self.size * batch.num_nodes)
        distinct = sizes.shared_nodes(*shared)
        self.left = max(1 / max(1, self.size), min(1.0, distinct / visits))
        self.num_nodes = graph.num_nodes
        self.hot_row_bytes = row_bytes + ID_BYTES
        self._rows_left = functools.cache(functools.partial(sizes.rows_left, *shared))
        # Two windows are in use, two more in an evaluation between epochs; an eighth is a reserve.
        self.working = memory - memory // 8 - 4 * self.size * self.packed_bytes
        # Each thread samples a batch. Four threads are counted at least, so that machines of few
        # cores plan alike.
        threads_bytes = max(4, sampling_threads()) * self.sampled_bytes
        self.most_sampled = max(0, self.working - threads_bytes) // self.sampled_bytes
        self.packing = 2 * (
            _window_fixed_bytes(graph.num_nodes) + self.size * _compact_batch_bytes(batch, 8)
        )
        # a pass over the features has the ids in memory
        self.ids_bytes = batch.num_nodes * np.dtype(index_dtype(graph.num_nodes)).itemsize

    def best(self) -> Windows | None:
        """The windows of the best division; None if memory or disk are too small for any."""
        shares = _HOT_SHARES if self.training else _HOT_SHARES[:1]
        tried = itertools.product(self._file_counts(), [int(s * self.working) for s in shares])
        divisions = filter(None, itertools.starmap(self._divide, tried))
        # of two equal divisions, the one with more files wins, because training begins sooner
        best = min(divisions, key=lambda it: (it.moved_bytes, -it.num_files), default=None)
        return None if best is None else best.windows

    def _file_counts(self) -> list[int]:
        in_memory = self.working // 4 // (self.ids_bytes + _SEEDS_BYTES)
        on_disk = self.room_bytes // 2 // (self.structure_bytes + self.rows_bytes)
        most = 1 + 2 * (self.total // max(1, min(in_memory, on_disk)))  # with one shard each
        # each number up to about 50, then 2 % more each
        return np.unique(np.geomspace(1, most, 1000).astype(np.int64)).tolist()

    def _cold(self, hot_bytes: int, num_batches: int) -> float:
        spare = max(0, hot_bytes - self.num_nodes * 3 // 16)
        num_windows = min(_MOST_COUNTED, -(-num_batches // self.size))
        nodes, share_left = self._rows_left(num_windows)
        return self.left * float(np.interp(spare / self.hot_row_bytes, nodes, share_left))

    def _divide(self, num_files: int, hot_bytes: int) -> _Division | None:
        """Divide the batches into `num_files` structure files, with `hot_bytes` for rows in
        memory; None if there is no room for it.

        These rows are chosen once the first file is sampled. If there is only one file, the memory
        of its samples is free by then; otherwise the rows are in memory while later files are sampled.
        """
        size = self.size
        total = self.total
        batch_bytes = self.structure_bytes + self.rows_bytes
        file_batches = min(total, -(-total // num_files // size) * size)
        seeds_bytes = file_batches * _SEEDS_BYTES
        # batches of a shard for whose ids memory has room
        most = (self.working // 4 - seeds_bytes) // max(1, self.ids_bytes)
        structures = min(2, num_files) * file_batches * self.structure_bytes
        if num_files == 1 and total <= most and total * batch_bytes <= self.room_bytes:
            picked = total
        else:
            room = (self.room_bytes - structures) // 2 // max(1, self.rows_bytes)
            picked = min(file_batches, most, room)
        # The memory of packing may not be free yet when the pass over the features begins.
        features = min(self.working // 4, 2 * WINDOW_BYTES, picked * self.rows_bytes)
        # before that pass, the rows for memory are chosen with one byte per node
        visits = self.num_nodes if hot_bytes else 0
        picking = self.packing + max(picked * self.ids_bytes + features, visits)
        resident_bytes = 0 if num_files == 1 else hot_bytes
        room = self.working - resident_bytes
        sampled = min(
            self.most_sampled - -(-resident_bytes // self.sampled_bytes),
            (room - picking) // self.result_bytes,
        )
        if min(sampled, picked) < size or hot_bytes + picking > self.working:
            return None
        shards_per_file = -(-file_batches // picked)
        picked = min(picked // size, -(-file_batches // shards_per_file // size)) * size
        once = min(file_batches, sampled)
        sampling = max((once + 4) * self.sampled_bytes, once * self.result_bytes + picking)
        sampling = max(sampling + resident_bytes, picking + hot_bytes)
        buffers = 4 * min(CHUNK_BYTES, self.memory // 64)  # read buffers of a pass's threads
        shards_on_disk = min(2, num_files * shards_per_file)
        spooling = Spooling(
            sampled_batches=sampled,
            structure_batches=file_batches,
            picked_batches=picked,
            working_bytes=min(self.working, sampling + seeds_bytes + buffers),
            disk_bytes=structures + shards_on_disk * picked * self.rows_bytes,
            hot_bytes=hot_bytes,
        )
        return self._with_cost(num_files, shards_per_file, spooling)

    def _with_cost(self, num_files: int, shards_per_file: int, spooling: Spooling) -> _Division:
        """Add up the bytes that a division moves between memory and disk: passes over graph and
        features, and each batch written once and read once."""
        passes_per_file = -(-spooling.structure_batches // spooling.sampled_batches)
        # Room was planned for batches without common nodes, so fewer shards are filled. At least
        # one is filled, because its pass also reads the rows for memory.
        cold = self._cold(spooling.hot_bytes, spooling.structure_batches)
        num_shards = num_files * max(1, math.ceil(shards_per_file * cold))
        batch_bytes = self.structure_bytes + int(cold * self.rows_bytes)
        pass_bytes = num_shards * self.x_bytes + num_files * passes_per_file * self.graph_bytes
        # An evaluation prepares its windows once if they all stay on disk, else each time.
        stays = self.training or num_files * shards_per_file == 1
        prepared = (1 if stays else self.passes) * (pass_bytes + self.total * batch_bytes)
        windows = Windows(
            window_batches=self.size,
            window_bytes=self.size * self.packed_bytes,
            available_bytes=self.memory,
            num_windows=-(-self.num_batches // self.size),
            moved_bytes=prepared // self.passes + self.num_batches * batch_bytes,
            first_bytes=passes_per_file * self.graph_bytes + self.x_bytes,
            spooling=spooling,
        )
        return _Division(pass_bytes + 2 * self.total * batch_bytes, num_files, windows)


@dataclass(frozen=True)
class Budget:
    """Memory and disk space for the windows of a run's loaders, and the choice of these windows."""

    available_bytes: int | None  # memory that may still be used; None without a limit
    disk_bytes: int  # for a spool
    sharers: int = 1  # ranks of this node, which share a fixed size

    def bytes_beside(self, training: Windows | None = None) -> int | None:
        """Bytes for the windows of one loader, beside those of the training loader if it has some;
        None without a limit."""
        asked = lookahead()
        budget = self.available_bytes if asked == "auto" else int(asked) // self.sharers
        if budget is None or training is None or training.window_batches is None:
            return budget
        # During an evaluation the next window to train on is being prepared, and the evaluation gets
        # the rest, about a tenth.
        return budget - training.peak_bytes

    def loader(self, loader_pass: Pass, training: Windows | None = None) -> Windows:
        """Return the windows of a loader beside those of the training loader."""
        return choose_windows(loader_pass, self.bytes_beside(training), self.disk_bytes)

    def loaders(
        self, train: Pass, evaluations: Mapping[str, Pass]
    ) -> tuple[Windows, dict[str, Windows]]:
        """Return the windows of the training loader, and of the evaluations whose windows stay on
        disk between them: all of these if they take at most a third of the space and training has
        its windows there too, else none."""
        memory = self.bytes_beside()
        third = self.disk_bytes // 3
        chosen = {
            split: choose_windows(loader_pass, memory, third, always=True)
            for split, loader_pass in evaluations.items()
        }
        on_disk = [windows.spooling.disk_bytes for windows in chosen.values() if windows.spooling]
        if len(on_disk) < len(chosen) or sum(on_disk) > third:
            return self.loader(train), {}
        windows = choose_windows(train, memory, self.disk_bytes - sum(on_disk))
        return windows, chosen if windows.spooling else {}
