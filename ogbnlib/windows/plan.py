"""The plan of a loader's windows, from sizes alone. No torch, no numba.

A *window* is a group of consecutive batches that are sampled together, in one pass over the store.
*Packing* a window stores each of its nodes once. A *spool* keeps windows on disk: ids and edges in
*structure files*, features in *feature shards*, each filled by one pass over the features. *Hot
rows*, the features of the nodes in most windows, stay in memory and are left out of the shards.
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
ID_BYTES = 12  # for each hot row: its id, here and in the list of rows to read
MOST_VISITS = 255  # windows that visit a node are counted up to this number, the largest uint8
_HOT_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # tried, of the working memory


def _packed_batch_bytes(batch: BatchShape, row_bytes: int) -> int:
    # int32: an id and a slot for each node, two ends for each edge; 2 kB of Python objects
    return batch.num_nodes * (row_bytes + 8) + batch.num_edges * 8 + 2000


def node_set_bytes(num_nodes: int) -> int:
    """Bytes of a `NodeSet`: a bit for each node of the graph, and half as much for the ranks."""
    return num_nodes // 8 + num_nodes // 16


def sampled_bytes(loader_pass: Pass, batch: BatchShape) -> tuple[int, int]:
    """Bytes of a batch in `window.sample_windows`, seeds included: at its peak, and in its result."""
    peak = nodes = edges = 0  # nodes and edges so far
    num_edges = sizes.trained_edges(loader_pass.size, loader_pass.config.undirected)
    place_bytes = 4 if num_edges < 2**32 else 8  # position of an edge in `row`: uint32 or int64
    appended = [*batch.hop_nodes[1:-1], 0]  # 0: packing a window appends those of the last hop
    # a hop expands the frontier, the nodes that the hop before reached
    for frontier, reached, new in zip(batch.hop_nodes, appended, batch.hop_edges, strict=False):
        nodes += frontier
        step = max(
            36 * frontier,  # read offsets: ids 8, two offsets 16, order 4, and 8 to spare
            24 * frontier + (place_bytes + 4) * new,  # choose edges: places, targets
            (2 * place_bytes + 4) * new,  # read the edges at these places
            8 * (nodes + reached) + (place_bytes + 4) * new,  # copy all nodes, append new ones
        )
        peak = max(peak, 8 * (nodes + edges) + step)  # int64 ids; int32 sources and targets
        edges += new
    # Measured at papers100M's size: 22 and 12 kB for [3, 2] x 128, 3.3 and 2.3 MB for [15, 10, 5]
    # x 1024. These lines give 27 and 16 kB, 3.6 and 2.4 MB.
    return int(1.1 * peak) + 4000, int(1.05 * 8 * (nodes + edges)) + 4000


def window_bytes(loader_pass: Pass, windows: Windows) -> int:
    """Expected bytes of a window: features of each distinct node, ids and edges of each batch."""
    assert windows.window_batches is not None  # not for batches from the page cache
    batch = loader_pass.batch
    size = loader_pass.size
    visits = windows.window_batches * batch.num_nodes
    distinct = sizes.distinct_nodes(size, loader_pass.config.undirected, visits)
    distinct = min(visits, max(batch.num_nodes, distinct))  # a batch has no node twice
    structure_bytes = windows.window_batches * _packed_batch_bytes(batch, 0)
    rows_bytes = int(distinct * size.num_features * loader_pass.itemsize)
    return rows_bytes + structure_bytes + node_set_bytes(size.num_nodes)


def asked_bytes() -> str:
    """Memory for windows, "auto" or bytes, as `WINDOWS_VARIABLE` sets it."""
    return os.environ.get(WINDOWS_VARIABLE, "auto")


def spool_dir() -> Path:
    """The folder for a spool: SLURM_TMPDIR, the local disk of a Slurm job, else TMPDIR."""
    return Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()).absolute()


def spool_bytes(spool: str | int, folder: Path, sharers: int = 1) -> int:
    """Bytes in `folder` for each of `sharers` processes; "auto": a quarter of the free disk space."""
    if spool == "off":
        return 0
    if spool != "auto":
        return int(spool) // sharers
    if file_system(folder) in ("tmpfs", "ramfs"):  # files there would take memory
        return 0
    free = shutil.disk_usage(folder).free
    # the last 5 GB of the disk are for other users
    return max(0, min(free // 4, free - 5 * 2**30)) // sharers


def choose_windows(
    loader_pass: Pass, available: int | None, room_bytes: int = 0, *, always: bool = False
) -> Windows:
    """Choose between the page cache, windows in memory and windows on disk, and their size.

    `available`, from `Budget.bytes_beside`, is memory in bytes, page cache included; `room_bytes`
    is disk space for a spool. With `always`, windows are on disk wherever possible: those of an
    evaluation are filled by the training loader's first passes, and cost none of their own.
    """
    files = sizes.store_bytes(loader_pass.config, loader_pass.size)  # of colptr, row and x
    # bytes to keep free with windows, and with a store in the page cache
    beside_windows, beside_cache = loader_pass.reserve or _step_reserve(loader_pass)
    if (
        available is None  # without a limit
        or not loader_pass.num_batches
        # the store fits into the page cache, which the ranks of a node share
        or sum(files.values()) <= (available - beside_cache) * loader_pass.sharers
    ):
        return Windows(window_batches=None, window_bytes=0, available_bytes=available or 0)
    memory = max(0, available - beside_windows)
    in_memory = _in_memory(loader_pass, files, memory, available)
    spooled = _Spool(loader_pass, files, memory, room_bytes).best()
    # Windows on disk are small. They win if they move fewer bytes, writing and reading them again
    # included, than one pass for each window in memory.
    if spooled is None or not (always or spooled.moved_bytes < in_memory.moved_bytes):
        return in_memory
    # `in_memory` serves once the disk is full; `_Spool` left the reserve out of `available_bytes`
    return replace(spooled, in_memory=in_memory, available_bytes=available)


def _step_reserve(loader_pass: Pass) -> tuple[int, int]:
    """Bytes of training steps with windows, and with the page cache, where workers sample."""
    if asked_bytes() != "auto":  # a fixed size is for windows alone
        return 0, 0
    size = loader_pass.size
    step_pass = Pass(loader_pass.config, size, "train", Batches.of(loader_pass.batch))
    model_bytes = model_state_bytes(loader_pass.config, size.num_features, size.num_classes)
    step = sum(step_pass.prefetched().values()) + model_bytes
    return step, step + sum(step_pass.workers(idle_loaders=1).values())  # 1: an evaluation's


def _in_memory(loader_pass: Pass, files: Mapping[str, int], memory: int, available: int) -> Windows:
    """Plan windows in memory, as few as possible: a pass costs the same for a small window."""
    batch = loader_pass.batch
    size = loader_pass.size
    num_batches = loader_pass.num_batches
    fixed = node_set_bytes(size.num_nodes)
    # at most: as if the batches of a window had no nodes in common
    packed_bytes = _packed_batch_bytes(batch, size.num_features * loader_pass.itemsize)
    # Two windows in training leave a tenth to evaluations, whose `memory` excludes these windows.
    half = (0.45 if loader_pass.training else 0.5) * memory
    # Besides the two windows, memory holds samples of the one being prepared, whose nodes are
    # copied (int64) when it is packed, and three buffers of a pass. Each window bears half of that.
    sampling, result = sampled_bytes(loader_pass, batch)
    samples = max(sampling, result + 8 * batch.num_nodes)  # bytes per batch
    buffers = 3 * read_bytes(available)
    most = int((half - fixed - buffers / 2) / (packed_bytes + samples / 2))  # batches of a window
    num_windows = -(-num_batches // max(1, most))
    count = -(-num_batches // num_windows)  # batches of a window, about equal in all
    num_windows = -(-num_batches // count)  # rounding up may have made some unnecessary
    # each window reads the features once, and the graph once per hop
    pass_bytes = files["x"] + len(batch.hop_edges) * (files["colptr"] + files["row"])
    return Windows(
        window_batches=count,
        window_bytes=count * packed_bytes + fixed,
        available_bytes=available,
        num_windows=num_windows,
        moved_bytes=num_windows * pass_bytes,
        first_bytes=pass_bytes,  # the first window takes one pass
    )


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
        config = loader_pass.config
        row_bytes = graph.num_features * loader_pass.itemsize  # of one node's features
        self.training = loader_pass.training
        self.memory_bytes = memory  # bytes for windows and their preparation
        self.room_bytes = room_bytes  # of disk space for the spool
        self.num_batches = loader_pass.num_batches
        rounds = config.epochs if self.training else config.num_evaluations(loader_pass.split)
        self.rounds = max(1, rounds)  # passes over the loader in the run
        # each epoch of training has batches of its own, all evaluations have the same
        self.run_batches = self.num_batches * (self.rounds if self.training else 1)
        self.x_bytes = files["x"]  # read by a pass over the features
        self.graph_bytes = len(batch.hop_edges) * (files["colptr"] + files["row"])  # over the graph
        # Bytes of one batch: in a shard and in a structure file (an id and a slot for each node,
        # two ends for each edge, all int32), in a window in memory, and while it is sampled.
        self.rows_bytes = batch.num_nodes * row_bytes
        self.structure_bytes = 8 * (batch.num_nodes + batch.num_edges)
        self.packed_bytes = _packed_batch_bytes(batch, row_bytes)
        self.sampled_bytes, self.result_bytes = sampled_bytes(loader_pass, batch)
        # Up to 8 large batches, because they have nodes in common: at papers100M's size, 8 batches
        # of [15, 10, 5] x 1024 had 1.12 M distinct nodes, two windows of 4 batches had 1.36 M.
        small = min(memory // 24, WINDOW_BYTES) // self.packed_bytes  # four windows: a sixth
        large = min(8, memory // 12 // self.packed_bytes)  # four windows: a third of memory
        self.window_batches = min(self.num_batches, max(1, small, large))
        # the share of a window's rows that is left when each node is counted once
        shared = graph, config.undirected, batch, self.window_batches
        visits = self.window_batches * max(1, batch.num_nodes)
        distinct_share = min(1.0, sizes.shared_nodes(*shared) / visits)
        self.distinct_share = max(1 / self.window_batches, distinct_share)  # at least one batch
        self.num_nodes = graph.num_nodes
        self.hot_row_bytes = row_bytes + ID_BYTES
        # by number of windows: numbers of hot nodes, and the share of rows that each leaves
        self._rows_left = functools.cache(functools.partial(sizes.rows_left, *shared))
        # Two windows are in use, two more in an evaluation between epochs; an eighth is a reserve.
        window_bytes = self.window_batches * self.packed_bytes
        self.working_bytes = memory - memory // 8 - 4 * window_bytes  # for the passes
        # Each thread samples a batch. Four threads are counted at least, so that machines of few
        # cores plan alike.
        threads_bytes = max(4, sampling_threads()) * self.sampled_bytes
        # batches in one pass over the graph
        self.most_sampled = max(0, self.working_bytes - threads_bytes) // self.sampled_bytes
        # two threads pack a window each; 8: a copy of the nodes, int64
        packed_bytes = self.window_batches * _packed_batch_bytes(batch, 8)
        self.packing_bytes = 2 * (node_set_bytes(graph.num_nodes) + packed_bytes)
        # of a batch in the list of rows to read, in a pass over the features
        self.ids_bytes = batch.num_nodes * np.dtype(index_dtype(graph.num_nodes)).itemsize

    def best(self) -> Windows | None:
        """The windows of the best division; None if memory or disk are too small for any."""
        shares = _HOT_SHARES if self.training else _HOT_SHARES[:1]  # evaluations: no hot rows
        # Of equal divisions the first is taken: the one with most files, as training begins sooner.
        tried = itertools.product(
            self._file_counts(), [int(share * self.working_bytes) for share in shares]
        )
        divisions = filter(None, itertools.starmap(self._divide, tried))
        best = min(divisions, key=lambda division: division[0], default=None)
        return None if best is None else best[1]

    def _file_counts(self) -> list[int]:
        """Numbers of structure files to try, descending; the largest leave each file one shard."""
        in_memory = self.working_bytes // 4 // (self.ids_bytes + _SEEDS_BYTES)  # batches of a file
        on_disk = self.room_bytes // 2 // (self.structure_bytes + self.rows_bytes)
        most = 1 + 2 * (self.run_batches // max(1, min(in_memory, on_disk)))  # twice the need
        # all small numbers, then steps of about 1 %
        return np.unique(np.geomspace(1, most, 1000).astype(np.int64))[::-1].tolist()

    def _cold_share(self, hot_bytes: int, num_batches: int) -> float:
        # share of the rows of `num_batches` batches that go to shards: once per window, unless hot
        spare = max(0, hot_bytes - node_set_bytes(self.num_nodes))  # without the set of hot nodes
        num_windows = min(MOST_VISITS, -(-num_batches // self.window_batches))
        num_hot, share_left = self._rows_left(num_windows)
        left = np.interp(spare / self.hot_row_bytes, num_hot, share_left)
        return self.distinct_share * float(left)

    def _divide(self, num_files: int, hot_bytes: int) -> tuple[int, Windows] | None:
        """Divide the batches into `num_files` structure files, and these into shards, with
        `hot_bytes` of memory for hot rows. Return the bytes moved in the whole run, and the
        windows; None if there is no room."""
        # Batches of a file, in whole windows, and bytes of its seeds, which stay in memory.
        windows_per_file = -(-self.run_batches // num_files // self.window_batches)
        file_batches = min(self.run_batches, windows_per_file * self.window_batches)
        seeds_bytes = file_batches * _SEEDS_BYTES
        # Batches of a shard, as many as have room for their ids in memory and their rows on disk.
        most_by_ids = (self.working_bytes // 4 - seeds_bytes) // max(1, self.ids_bytes)
        files_bytes = min(2, num_files) * file_batches * self.structure_bytes  # two files on disk
        most_by_rows = (self.room_bytes - files_bytes) // max(1, self.rows_bytes)
        if num_files > 1 or min(most_by_ids, most_by_rows) < self.run_batches:
            most_by_rows //= 2  # more than one shard: one is used while the next is filled
        shard_batches = min(file_batches, most_by_ids, most_by_rows)
        sampled, peak = self._passes(num_files, file_batches, shard_batches, hot_bytes)
        if min(sampled, shard_batches) < self.window_batches:  # no room for one window
            return None
        shards_per_file = -(-file_batches // shard_batches)
        even_windows = -(-file_batches // shards_per_file // self.window_batches)  # in each shard
        windows_per_shard = min(shard_batches // self.window_batches, even_windows)  # that fit
        shard_batches = windows_per_shard * self.window_batches
        buffers = 4 * min(CHUNK_BYTES, self.memory_bytes // 64)  # read buffers of a pass's threads
        shards_on_disk = min(2, num_files * shards_per_file)
        spooling = Spooling(
            sampled_batches=sampled,
            structure_batches=file_batches,
            picked_batches=shard_batches,
            working_bytes=min(self.working_bytes, peak + seeds_bytes + buffers),
            disk_bytes=files_bytes + shards_on_disk * shard_batches * self.rows_bytes,
            hot_bytes=hot_bytes,
        )
        return self._with_cost(num_files, shards_per_file, spooling)

    def _passes(
        self, num_files: int, file_batches: int, shard_batches: int, hot_bytes: int
    ) -> tuple[int, int]:
        """Return the batches of one pass over the graph (0 or less: no room), and the memory of both
        passes at its peak."""
        # The pass over the features: the list of rows, and rows on their way to the shard. The
        # memory of packing may not be free yet. Choosing hot rows before takes a byte per node.
        rows_bytes = min(self.working_bytes // 4, 2 * WINDOW_BYTES, shard_batches * self.rows_bytes)
        lists_bytes = shard_batches * self.ids_bytes + rows_bytes
        filling = self.packing_bytes + max(lists_bytes, self.num_nodes if hot_bytes else 0)
        if hot_bytes + filling > self.working_bytes:
            return 0, 0
        # Hot rows are chosen once the first file is sampled. If there is only one file, the memory of
        # its samples is free by then; otherwise hot rows are in memory while later ones are sampled.
        resident = 0 if num_files == 1 else hot_bytes
        sampled = min(
            self.most_sampled - -(-resident // self.sampled_bytes),  # while the batches are drawn
            (self.working_bytes - resident - filling) // self.result_bytes,  # while they are packed
        )
        per_pass = min(file_batches, sampled)  # batches; each of 4 threads samples one more
        sampling = max((per_pass + 4) * self.sampled_bytes, per_pass * self.result_bytes + filling)
        return sampled, max(resident + sampling, hot_bytes + filling)

    def _with_cost(
        self, num_files: int, shards_per_file: int, spooling: Spooling
    ) -> tuple[int, Windows]:
        """Add up the bytes that a division moves between memory and disk: passes over graph and
        features, and each batch written once and read once. Returns the same as `_divide`."""
        passes_per_file = -(-spooling.structure_batches // spooling.sampled_batches)
        # Room was planned for batches without common nodes, so fewer shards are filled. At least
        # one is filled, because its pass also reads the hot rows.
        cold = self._cold_share(spooling.hot_bytes, spooling.structure_batches)
        num_shards = num_files * max(1, math.ceil(shards_per_file * cold))
        pass_bytes = num_shards * self.x_bytes + num_files * passes_per_file * self.graph_bytes
        batch_bytes = self.structure_bytes + int(cold * self.rows_bytes)
        # An evaluation prepares its windows once if they all stay on disk, else each time.
        stays = self.training or num_files * shards_per_file == 1
        prepared = (1 if stays else self.rounds) * (pass_bytes + self.run_batches * batch_bytes)
        windows = Windows(
            window_batches=self.window_batches,
            window_bytes=self.window_batches * self.packed_bytes,
            available_bytes=self.memory_bytes,
            num_windows=-(-self.num_batches // self.window_batches),
            moved_bytes=prepared // self.rounds + self.num_batches * batch_bytes,  # of one round
            first_bytes=passes_per_file * self.graph_bytes + self.x_bytes,  # the first shard's
            spooling=spooling,
        )
        return pass_bytes + 2 * self.run_batches * batch_bytes, windows


@dataclass(frozen=True)
class Budget:
    """Memory and disk space for the windows of a run's loaders, and the choice of these windows."""

    available_bytes: int | None  # memory that may still be used; None without a limit
    disk_bytes: int  # for a spool
    sharers: int = 1  # ranks of this node, which share a fixed size

    def bytes_beside(self, training: Windows | None = None) -> int | None:
        """Bytes for a loader's windows, next to the training loader's if it has some; None: no limit."""
        asked = asked_bytes()
        budget = self.available_bytes if asked == "auto" else int(asked) // self.sharers
        if budget is None or training is None or training.window_batches is None:
            return budget
        # During an evaluation the next window to train on is being prepared, and the evaluation gets
        # the rest, about a tenth.
        return budget - training.peak_bytes

    def loader(self, loader_pass: Pass, training: Windows | None = None) -> Windows:
        """Return the windows of a loader that leave the training loader its own."""
        return choose_windows(loader_pass, self.bytes_beside(training), self.disk_bytes)

    def loaders(
        self, train: Pass, evaluations: Mapping[str, Pass]
    ) -> tuple[Windows, dict[str, Windows]]:
        """Return the windows of the training loader, and by split those of evaluations that stay
        on disk from one evaluation to the next: of all evaluations if these windows take at most a
        third of the disk space and training has windows on disk too, else of none."""
        memory = self.bytes_beside()
        third = self.disk_bytes // 3
        chosen = {
            split: choose_windows(loader_pass, memory, third, always=True)
            for split, loader_pass in evaluations.items()
        }
        on_disk = [windows.spooling.disk_bytes for windows in chosen.values() if windows.spooling]
        if len(on_disk) < len(chosen) or sum(on_disk) > third:  # some are in memory, or too large
            return self.loader(train), {}
        windows = choose_windows(train, memory, self.disk_bytes - sum(on_disk))
        return windows, chosen if windows.spooling else {}
