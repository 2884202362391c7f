"""Windows of an evaluation on disk: every evaluation of a split has the same batches, so it reads the store once.

A pass over papers100M for one window reads 36 GB, whatever it picks; what two evaluations of valid pick is 0.3 GB.
"""

from __future__ import annotations

import itertools
import os
import shutil
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, format_bytes
from ..files import Stream, file_system
from ..graph.npz import Array
from .budget import Windows
from .window import SampledBatch, Window

_SPARED_BYTES = 5 * 2**30  # of a disk, for its other users
_IN_MEMORY = ("tmpfs", "ramfs")  # what lies there is memory that can't be taken back


def spool_bytes(spool: str | int, folder: Path, sharers: int = 1) -> int:
    """Bytes that each of `sharers` processes may keep in `folder`: a given size, or a quarter of what the disk has free
    and never its last 5 GB; 0 where "auto" finds a folder that lies in memory.
    """
    if spool == "off":
        return 0
    if spool != "auto":
        return int(spool) // sharers
    free = shutil.disk_usage(folder).free
    return 0 if file_system(folder) in _IN_MEMORY else max(0, min(free // 4, free - _SPARED_BYTES)) // sharers


@dataclass(frozen=True)
class _Kept:
    """Where a window lies in the file, and what of it is small enough to stay in RAM."""

    offset: int
    num_ids: int
    hops: list[tuple[list[int], list[int]]]  # of each batch: nodes and edges of each hop
    positions: Sequence[Any]


class _Features:
    """The features of a window that was kept, in the place of the store's `DiskArray`."""

    def __init__(self, spool: Spool, offset: int):
        self.num_rows, self._spool, self._offset = spool.num_nodes, spool, offset

    def fetch(self, index: Array, out: Array) -> None:
        self._spool._read(self._offset, out)


class Spool:
    """Windows in a file without a name, which the kernel deletes when this process ends, however it does.

    Args:
        folder: where the file is.
        room_bytes: what may be written to it; windows beyond are prepared anew each time.
        windows: how the loader that fills it reads the store; those that use it must read alike.
        num_nodes: of the graph.
    """

    def __init__(self, folder: Path, room_bytes: int, windows: Windows, num_nodes: int):
        self.windows, self.num_nodes, self._room = windows, num_nodes, room_bytes
        path = folder / f".ogbnlib-{uuid.uuid4().hex}.spool"
        self._file = Stream(path)
        path.unlink()
        self._kept: dict[tuple[int, int, int], _Kept] = {}

    def add(self, place: tuple[int, int, int], window: Window) -> None:
        """Keep the window at `place`, where there is room; a disk that is full is said, and then no more is kept."""
        batches, features = window.batches, np.ascontiguousarray(window.features)
        nodes = np.concatenate([batch.node for batch in batches])
        edges = np.concatenate([part for batch in batches for pair in (batch.rows, batch.cols) for part in pair])
        offset = self._file.size
        if offset + features.nbytes + nodes.nbytes + edges.nbytes > self._room:
            return
        try:
            for array in (nodes, edges, features):
                self._file.append(array.reshape(-1).view(np.uint8).data)
            self._file.drop()
        except InputError as error:
            self._room = 0
            warnings.warn(f"spool: {error}; evaluations read the store again for what is not kept", stacklevel=2)
            return
        hops = [(batch.num_sampled_nodes, batch.num_sampled_edges) for batch in batches]
        self._kept[place] = _Kept(offset, len(features), hops, window.positions)

    def get(self, place: tuple[int, int, int], num_features: int, dtype: np.dtype[Any]) -> Window | None:
        """The window at `place` as it was, read from the file; None where it was not kept."""
        if (kept := self._kept.get(place)) is None:
            return None
        nodes = np.empty(sum(sum(of_nodes) for of_nodes, _ in kept.hops), np.int64)
        edges = np.empty(2 * sum(sum(of_edges) for _, of_edges in kept.hops), np.int32)
        self._read(kept.offset, nodes)
        self._read(kept.offset + nodes.nbytes, edges)
        batches, at, edge = [], 0, 0
        for of_nodes, of_edges in kept.hops:
            ends = np.cumsum([0, *of_edges, *of_edges]) + edge
            parts = [edges[begin:end] for begin, end in itertools.pairwise(ends)]
            rows, cols = parts[: len(of_edges)], parts[len(of_edges) :]
            batches.append(SampledBatch(nodes[at : at + sum(of_nodes)], of_nodes, rows, cols))
            at, edge = at + sum(of_nodes), int(ends[-1])
        features: Any = _Features(self, kept.offset + nodes.nbytes + edges.nbytes)
        return Window(batches, kept.positions, features, num_features, dtype)

    def _read(self, offset: int, out: Array) -> None:
        view = out.reshape(-1).view(np.uint8).data
        while len(view):
            got = os.preadv(self._file.fileno(), [view], offset)
            if not got:
                raise InputError(f"{self._file.name}: it became shorter while it was used; set spool=off")
            view, offset = view[got:], offset + got
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self._file.size

    def __str__(self) -> str:
        return f"{len(self._kept)} windows, {format_bytes(self.num_bytes)} on disk"

    def close(self) -> None:
        self._file.close()
