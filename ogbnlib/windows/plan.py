"""The plan of a loader's windows, from sizes alone. No torch, no numba.

A window is a run of batches that are sampled ahead in one pass over the store; a spool keeps
windows on disk.
"""

import functools
import itertools
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..errors import format_bytes
from ..files import file_system
from ..forecast.batches import Batches, BatchShape
from ..forecast.memory_parts import (
    distinct_nodes,
    rows_left,
    shared_nodes,
    store_bytes,
    trained_edges,
)
from ..forecast.pass_memory import Pass, sweep_s
from ..forecast.step_memory import model_state_bytes
from ..graph.npz import CHUNK_BYTES
from ..graph.store_format import index_dtype
from ..launcher import sampling_threads

# For the choice of windows only: seconds of training per sampled node on a 2-core machine.
# A wrong value costs time alone, where reading and training overlap.
_TRAIN_S_PER_NODE = 2.5e-6
# largest window in a spool, read in one piece; a larger one gains only with large batches
WINDOW_BYTES = 2**28
_SEEDS_BYTES = 2500  # seeds and sizes of a batch in a spool
ID_BYTES = 12  # of a row that stays in memory: its id, and again where rows are read
_MOST_COUNTED = 255  # windows that have a node; more of them are counted as so many
# Shares of the memory of a pass that are tried for rows that stay in it.
_HOT_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)


@dataclass(frozen=True)
class Spooling:
    """The passes that prepare windows on disk."""

    sampled_batches: int  # of one pass over the graph
    structure_batches: int  # of one structure file: ids and edges without features
    picked_batches: int  # of one feature shard, filled by one pass over the features
    working_bytes: int  # memory of either pass
    disk_bytes: int  # the most on disk, while one shard is used and the next is prepared
    hot_bytes: int = 0  # for rows that stay in memory, among `working_bytes`


@dataclass
class Windows:
    """The way in which a loader reads its store."""

    window_batches: int | None  # None where batches are drawn through the page cache
    # whether the next window is prepared while one is used, so that two are in memory
    overlapped: bool
    window_bytes: int
    available_bytes: int
    num_windows: int = 0
    moved_bytes: int = 0  # between memory and disk, in a pass over the loader
    first_bytes: int = 0  # moved before the first window is ready
    spooling: Spooling | None = None
    in_memory: "Windows | None" = None  # the windows to use once the disk is full

    @property
    def peak_bytes(self) -> int:
        """The peak of memory, with more than one window."""
        working = self.spooling.working_bytes if self.spooling else 0
        return (2 if self.overlapped else 1) * self.window_bytes + working

    @property
    def prepared_ahead(self) -> bool:
        """Whether the next epoch's first window is prepared at the end of an epoch and stays during
        evaluations."""
        return self.window_batches is not None and self.overlapped

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one read."""
        return read_bytes(self.available_bytes)

    def __str__(self) -> str:
        free = format_bytes(self.available_bytes)
        if self.window_batches is None:
            return f"batches are drawn through the page cache ({free} available)"
        where = "two held, one being prepared" if self.overlapped else "one held"
        if self.spooling:
            where = (
                f"from a spool of {format_bytes(self.spooling.disk_bytes)} on disk at most, two "
                "held"
            )
            if self.spooling.hot_bytes:
                where += f", the rows visited most in {format_bytes(self.spooling.hot_bytes)}"
        return (
            f"windows of {self.window_batches} batches, about {format_bytes(self.window_bytes)} "
            f"each, {where} ({free} available)"
        )


def _compact_batch_bytes(batch: BatchShape, row_bytes: int) -> int:
    """A batch inside a window: its rows of x, ids int64, local row and col int32, and the objects
    around them."""
    return batch.num_nodes * (row_bytes + 8) + batch.num_edges * 8 + 2000


def _window_fixed_bytes(num_nodes: int) -> int:
    """The bitmap of the ids of a window and its ranks."""
    return num_nodes // 8 + num_nodes // 16


def read_bytes(available_bytes: int) -> int:
    """Bytes of one read; the three buffers of a pass may not outweigh a small window."""
    return min(CHUNK_BYTES, max(2**18, available_bytes // 64))  # smaller ones are slow


def sampled_bytes(one: Pass, batch: BatchShape) -> tuple[int, int]:
    """Bytes that `window.sample_windows` takes for each batch, with its seeds: at its peak, and in
    its result."""
    highest = nodes = edges = 0
    # of an edge in the store
    place = 4 if trained_edges(one.size, one.config.undirected) < 2**32 else 8
    for frontier, reached, new in zip(
        batch.hop_nodes, [*batch.hop_nodes[1:-1], 0], batch.hop_edges, strict=False
    ):
        nodes += frontier
        # Reading a hop's offsets, choosing its edges, reading them, then appending its nodes to the
        # others. Those of the last hop are appended when a window is packed.
        step = max(
            36 * frontier,
            24 * frontier + (place + 4) * new,
            (2 * place + 4) * new,
            8 * (nodes + reached) + (place + 4) * new,
        )
        highest = max(highest, 8 * (nodes + edges) + step)
        edges += new
    # At papers100M's size 22 and 12 kB are measured for [3, 2] x 128, 3.3 and 2.3 MB for [15, 10,
    # 5] x 1024. This gives 27 and 16 kB, 3.6 and 2.4 MB.
    return int(1.1 * highest) + 4000, int(1.05 * 8 * (nodes + edges)) + 4000


def window_bytes(one: Pass, windows: Windows) -> int:
    """Real bytes of a window: each distinct node's features once, and every batch's own ids and
    edges."""
    assert windows.window_batches is not None
    total = windows.window_batches * one.batch.num_nodes
    distinct = min(
        total, max(one.batch.num_nodes, distinct_nodes(one.size, one.config.undirected, total))
    )
    each = _compact_batch_bytes(one.batch, 0)
    own = windows.window_batches * each + _window_fixed_bytes(one.size.num_nodes)
    return int(distinct * one.size.num_features * one.itemsize) + own


def window_budget(
    lookahead: str | int, left_bytes: int | None, training: Windows | None = None, sharers: int = 1
) -> int | None:
    """Bytes for the windows of one loader; None to draw batches from the maps of any store.

    A size as `lookahead` is for all `sharers` of this node together. `left_bytes` may still be
    used, None stands for no limit. `training` are the windows of the training loader, for an
    evaluation during training.
    """
    if lookahead == "off":
        return None
    # An evaluation gets a tenth if training has two windows, as the next one is being prepared
    # meanwhile, and everything if it has one, which is used up by then.
    budget = left_bytes if lookahead == "auto" else int(lookahead) // sharers
    if budget is None or training is None or not training.prepared_ahead:
        return budget
    return budget - training.peak_bytes


def spool_dir() -> Path:
    """The folder for a spool: the local disk of a Slurm job, or that of temporary files
    (TMPDIR)."""
    # Those that tempfile.gettempdir() takes, which tries each by writing a file.
    places = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")] + ["/tmp", "/var/tmp"]
    usable = (place for place in places if place and os.access(place, os.W_OK))
    return Path(os.environ.get("SLURM_TMPDIR") or next(usable, os.curdir)).absolute()


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
    return max(0, min(free // 4, free - 5 * 2**30)) // sharers  # its last 5 GB are for other users


def choose_windows(
    one: Pass, available: int | None, room_bytes: int = 0, *, always: bool = False
) -> Windows:
    """Choose between the page cache, windows in memory and windows on disk, and the windows' size.

    `available`, from `window_budget`, includes the page cache; `room_bytes` of disk are for a
    spool. With `always`, windows are on disk wherever possible, as a pass is made in any case.
    """
    files = store_bytes(one.config, one.size)
    beside_windows, beside_cache = one.reserve or _step_reserve(one)
    if (
        available is None
        or not one.num_batches
        or sum(files.values()) <= (available - beside_cache) * one.sharers
    ):
        return Windows(None, True, 0, available or 0)
    memory = max(0, available - beside_windows)
    in_memory = _in_memory(one, files, memory, available)
    spooled = _Spool(one, files, memory, room_bytes).best()
    # Windows on disk are small, and win if they move fewer bytes, written and read again, than a
    # pass for each.
    if spooled is None or not (always or spooled.moved_bytes < in_memory.moved_bytes):
        return in_memory
    return replace(spooled, in_memory=in_memory, available_bytes=available)


def _step_reserve(one: Pass) -> tuple[int, int]:
    """Ready batches, a step and weights; and next to the page cache workers too."""
    if one.config.lookahead != "auto":  # a size is for windows alone
        return 0, 0
    step_pass = Pass(one.config, one.size, "train", Batches.of(one.batch))
    model_bytes = model_state_bytes(one.config, one.size.num_features, one.size.num_classes)
    step = sum(step_pass.prefetched().values()) + model_bytes
    return step, step + sum(step_pass.workers(idle_loaders=1).values())


def _in_memory(one: Pass, files: Mapping[str, int], memory: int, available: int) -> Windows:
    """Windows in memory.

    A pass over the files costs the same for a large window as for a small one, so the fewest
    windows win. The exception is a single window that can't be prepared during training: it may
    cost more than several that can.
    """
    num_batches = one.num_batches
    num_hops = len(one.batch.hop_edges)
    fixed = _window_fixed_bytes(one.size.num_nodes)
    each = _compact_batch_bytes(one.batch, one.size.num_features * one.itemsize)
    sweep = sweep_s(files, num_hops)
    train_s = num_batches * one.batch.num_nodes * _TRAIN_S_PER_NODE
    # Two windows in training leave a tenth to evaluations.
    half = (0.45 if one.training else 0.5) * memory
    # Beside the windows, one is being prepared: its sampled batches, and three buffers of a pass.
    sampling, result = sampled_bytes(one, one.batch)
    samples = max(sampling, result + 8 * one.batch.num_nodes)
    buffers = 3 * read_bytes(available)
    alone = -(-num_batches // max(1, int((memory - fixed - buffers) / (each + samples))))
    paired = -(-num_batches // max(1, int((half - fixed - buffers / 2) / (each + samples / 2))))
    fits = half >= fixed + each + (buffers + samples) / 2
    overlapped = fits and max(paired * sweep, train_s) <= alone * sweep + train_s
    count = -(-num_batches // (paired if overlapped else alone))
    number = -(-num_batches // count)
    moved = number * (files["x"] + num_hops * (files["colptr"] + files["row"]))
    return Windows(
        count, overlapped, count * each + fixed, available, number, moved, moved // number
    )


class _Spool:
    """Windows of a pass on disk.

    Batches are divided into structure files and these into feature shards so that the fewest bytes
    are moved: one pass over the graph for each file, if memory has room to sample it at once, and
    one over the features for each shard; two files and two shards are on disk at a time. An
    evaluation's windows stay, if the disk has room.
    """

    def __init__(self, one: Pass, files: Mapping[str, int], memory: int, room_bytes: int) -> None:
        batch = one.batch
        row_bytes = one.size.num_features * one.itemsize
        self.training = one.training
        self.memory = memory
        self.room_bytes = room_bytes
        self.num_batches = one.num_batches
        config = one.config
        self.passes = max(1, config.epochs if one.training else config.num_evaluations(one.split))
        self.total = self.num_batches * (self.passes if one.training else 1)
        # all ids int32
        self.rows_bytes = batch.num_nodes * row_bytes
        self.structure_bytes = 8 * (batch.num_nodes + batch.num_edges)
        self.x_bytes = files["x"]
        self.graph_bytes = len(batch.hop_edges) * (files["colptr"] + files["row"])
        self.each = _compact_batch_bytes(batch, row_bytes)
        self.sampled_bytes, self.result_bytes = sampled_bytes(one, batch)
        # Up to 8 large batches, which have nodes in common: at papers100M's size 8 of [15, 10, 5] x
        # 1024 had 1.12 M nodes, two windows of 4 had 1.36 M.
        small = min(memory // 24, WINDOW_BYTES) // self.each
        large = min(8, memory // 12 // self.each)
        self.size = min(self.num_batches, max(1, small, large))
        # the share of a window's rows that is left when each node is counted once
        shared = one.size, config.undirected, batch, self.size
        visits = max(1, self.size * batch.num_nodes)
        distinct = shared_nodes(*shared)
        self.left = max(1 / max(1, self.size), min(1.0, distinct / visits))
        self.num_nodes = one.size.num_nodes
        self.hot_row_bytes = row_bytes + ID_BYTES
        self._rows_left = functools.cache(functools.partial(rows_left, *shared))
        # Two windows are in use, two more in an evaluation between epochs; an eighth is a reserve.
        self.working = memory - memory // 8 - 4 * self.size * self.each
        # Threads have a batch each. Four at least, so that machines of few cores plan alike.
        threads_bytes = max(4, sampling_threads()) * self.sampled_bytes
        self.most_sampled = max(0, self.working - threads_bytes) // self.sampled_bytes
        self.packing = 2 * (
            _window_fixed_bytes(one.size.num_nodes) + self.size * _compact_batch_bytes(batch, 8)
        )
        # a pass over the features has the ids in memory
        self.ids_bytes = batch.num_nodes * np.dtype(index_dtype(one.size.num_nodes)).itemsize

    def best(self) -> Windows | None:
        """The windows of the best division, None where memory or disk are too small for any."""
        shares = _HOT_SHARES if self.training else _HOT_SHARES[:1]
        tried = itertools.product(self._file_counts(), [int(s * self.working) for s in shares])
        # of two equal ones the one with more files, as training begins sooner
        divisions = filter(None, itertools.starmap(self._divide, tried))
        best = min(divisions, key=lambda division: division[:2], default=None)
        return None if best is None else best[2]

    def _file_counts(self) -> Iterator[int]:
        """Numbers of structure files to try: each of the first 64, then steps of 2 %."""
        in_memory = self.working // 4 // (self.ids_bytes + _SEEDS_BYTES)
        on_disk = self.room_bytes // 2 // (self.structure_bytes + self.rows_bytes)
        most = 1 + 2 * (self.total // max(1, min(in_memory, on_disk)))  # of one shard each
        number = 1
        while number < most:
            yield number
            number += 1 + number // 64
        yield most

    def _cold(self, hot_bytes: int, num_batches: int) -> float:
        """The share of the nodes of `num_batches` batches whose rows are in a window and not in
        memory."""
        spare = max(0, hot_bytes - self.num_nodes * 3 // 16)
        num_windows = min(_MOST_COUNTED, -(-num_batches // self.size))
        nodes, share_left = self._rows_left(num_windows)
        return self.left * float(np.interp(spare / self.hot_row_bytes, nodes, share_left))

    def _divide(self, num_files: int, hot_bytes: int) -> tuple[int, int, Windows] | None:
        """The windows of a division into `num_files` structure files, with `hot_bytes` for rows in
        memory, behind the bytes that it moves and -num_files; None where there is no room for it.

        These rows are chosen when the first file is sampled; a single one gives its memory back.
        """
        size = self.size
        total = self.total
        batch_bytes = self.structure_bytes + self.rows_bytes
        file_batches = min(total, -(-total // num_files // size) * size)
        seeds_bytes = file_batches * _SEEDS_BYTES
        most = (self.working // 4 - seeds_bytes) // max(1, self.ids_bytes)  # of memory
        structures = min(2, num_files) * file_batches * self.structure_bytes
        if num_files == 1 and total <= most and total * batch_bytes <= self.room_bytes:
            picked = total
        else:
            room = (self.room_bytes - structures) // 2 // max(1, self.rows_bytes)
            picked = min(file_batches, most, room)
        # One pass over the features is made while the last windows are packed.
        features = min(self.working // 4, 2 * WINDOW_BYTES, picked * self.rows_bytes)
        # before it, rows in memory are chosen by a byte for each node
        visits = self.num_nodes if hot_bytes else 0
        picking = self.packing + max(picked * self.ids_bytes + features, visits)
        beside = 0 if num_files == 1 else hot_bytes
        room = self.working - beside
        sampled = min(
            self.most_sampled - -(-beside // self.sampled_bytes),
            (room - picking) // self.result_bytes,
        )
        if min(sampled, picked) < size or hot_bytes + picking > self.working:
            return None
        parts = -(-file_batches // picked)
        picked = min(picked // size, -(-file_batches // parts // size)) * size
        once = min(file_batches, sampled)
        sampling = max((once + 4) * self.sampled_bytes, once * self.result_bytes + picking)
        sampling = max(sampling + beside, picking + hot_bytes)
        buffers = 4 * min(CHUNK_BYTES, self.memory // 64)  # of a pass's threads
        spooling = Spooling(
            sampled,
            file_batches,
            picked,
            min(self.working, sampling + seeds_bytes + buffers),
            structures + min(2, num_files * parts) * picked * self.rows_bytes,
            hot_bytes,
        )
        return self._windows(num_files, parts, spooling)

    def _windows(self, num_files: int, parts: int, spooling: Spooling) -> tuple[int, int, Windows]:
        """The result of `_divide`, with `parts` shards planned for each structure file."""
        file_passes = -(-spooling.structure_batches // spooling.sampled_batches)
        graph = num_files * file_passes * self.graph_bytes
        # Room was planned for batches without a node in common; fewer shards are filled, one at
        # least, as the rows in memory are read by the same pass.
        cold = self._cold(spooling.hot_bytes, spooling.structure_batches)
        filled = num_files * max(1, math.ceil(parts * cold))
        batch_bytes = self.structure_bytes + int(cold * self.rows_bytes)
        moved = filled * self.x_bytes + graph
        again = 1 if self.training or num_files * parts == 1 else self.passes
        prepared = again * (moved + self.total * batch_bytes) // self.passes
        windows = Windows(
            self.size,
            True,
            self.size * self.each,
            self.memory,
            -(-self.num_batches // self.size),
            prepared + self.num_batches * batch_bytes,
            file_passes * self.graph_bytes + self.x_bytes,
            spooling,
        )
        return moved + 2 * self.total * batch_bytes, -num_files, windows


def choose_loaders(
    train: Pass, evaluations: Mapping[str, Pass], available: int | None, room_bytes: int
) -> tuple[Windows, dict[str, Windows]]:
    """Windows of the training loader, and of evaluations whose windows stay on disk between them,
    for all or for none.

    Evaluations stay on disk if they take at most a third of `room_bytes` and training has its
    windows there too.
    """
    chosen = {
        split: choose_windows(one, available, room_bytes // 3, always=True)
        for split, one in evaluations.items()
    }
    on_disk = [windows.spooling.disk_bytes for windows in chosen.values() if windows.spooling]
    if len(on_disk) < len(chosen) or sum(on_disk) > room_bytes // 3:
        return choose_windows(train, available, room_bytes), {}
    windows = choose_windows(train, available, room_bytes - sum(on_disk))
    return windows, chosen if windows.spooling else {}
