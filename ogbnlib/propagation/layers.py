"""The scores of a trained GraphSAGE or GCN for all of a graph, layer by layer, every neighbor counted, on disk.

Both take a mean of neighbors and then a matrix, which may change places: whichever side is narrower is held for all
nodes, as many columns at a time as there is room for, and swept over the edges. What a layer makes goes to disk, in
float32, until the next has used it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, format_bytes
from ..files import check_space
from ..graph.bits import NodeSet
from ..graph.checks import HEADER_BYTES
from ..graph.disk import DiskArray, disk_array
from ..graph.npz import CHUNK_BYTES, Array
from ..graph.store import Store
from ..graph.writer import StoreWriter
from .sweep import Edges, Rows, in_order

Done = Callable[[int], object]
Chunks = Generator[Array, None, None]


@dataclass(frozen=True)
class Layer:
    """mean(h) @ neighbors + h @ own + bias; without `own` gcn's, normalised by both degrees and with self-loops."""

    neighbors: Array
    bias: Array
    own: Array | None = None


class _Matrix:
    """Rows in files, each of some columns."""

    def __init__(self, parts: list[tuple[DiskArray, np.dtype[Any]]]) -> None:
        self.parts = parts
        self.num_rows, self.width = parts[0][0].num_rows, sum(file.row_bytes // dtype.itemsize for file, dtype in parts)
        self.step = max(1, CHUNK_BYTES // (4 * self.width))  # rows at a time

    def rows(self, first: int, end: int) -> Array:
        """float32 [end - first, width]."""
        parts = [file.rows(first, end, dtype).reshape(end - first, -1) for file, dtype in self.parts]
        return np.concatenate(parts, 1).astype(np.float32, copy=False)

    def close(self) -> None:
        for file, _ in self.parts:
            file.close()


class LayerWise:
    """Layers over a store.

    Args:
        nodes: those whose scores are wanted, all for None.
        room: bytes that columns of all nodes may take.
        folder: for what layers make, until the next has used it.
        done: told the bytes that were read.

    Raises:
        InputError: when not a column fits; when the disk has too little room.
    """

    def __init__(
        self, store: Store, layers: list[Layer], nodes: NodeSet | None, room: int, folder: Path, done: Done
    ) -> None:
        self.store, self.layers, self.nodes, self.folder, self.done = store, layers, nodes, folder, done
        column = 4 * store.num_nodes
        self.most = room // column
        if self.most < 1:
            raise InputError(
                f"memory_limit: expected room for {format_bytes(column)}, a column of all nodes, beside what is held "
                f"already, found {format_bytes(max(0, room))}; raise it by as much as is missing"
            )
        made = [column * len(layer.bias) for layer in layers[:-1]]
        if len(self._blocks(layers[-1])) > 1:
            count = store.num_nodes if nodes is None else nodes.count()
            made.append(4 * count * len(layers[-1].bias))
        needed = max(map(sum, zip([0, *made], [*made, 0], strict=True)))
        check_space(folder, needed, f"{format_bytes(needed)} of free disk space until it is done")
        self.edges = Edges(store)

    def _propagates_first(self, layer: Layer) -> bool:
        width, out = layer.neighbors.shape
        return width < out and width <= self.most

    def _blocks(self, layer: Layer) -> list[slice]:
        """The columns of a layer's result that are made at a time."""
        out = len(layer.bias)
        size = out if self._propagates_first(layer) else -(-out // -(-out // self.most))
        return [slice(begin, min(begin + size, out)) for begin in range(0, out, size)]

    @property
    def num_bytes(self) -> int:
        """That will be read, about."""
        total = max(1, len(self.layers) - 1) * self.edges.nbytes
        for layer in self.layers:
            item = self.store.feature_itemsize if layer is self.layers[0] else 4
            filled = self.store.num_nodes * layer.neighbors.shape[0] * item
            total += len(self._blocks(layer)) * (filled + self.edges.nbytes)
        return total

    def scores(self) -> Chunks:
        """float32 [n, classes] in pieces, in the order of the nodes.

        Raises:
            InputError: for a damaged graph.
        """
        needed = [self.nodes]
        for _ in range(max(1, len(self.layers) - 1)):
            needed.insert(0, self.edges.survey(needed[0], self.done))
        held = _Matrix([(disk_array(self.store, "x"), self.store.feature_dtype)])
        with contextlib.closing(self.edges):
            for number, layer in enumerate(self.layers):
                wanted, last = needed[number - len(self.layers)], number == len(self.layers) - 1
                blocks = self._blocks(layer)
                if last and len(blocks) == 1:
                    yield from self._columns(layer, held, wanted, blocks[0], last)
                    held.close()
                    return
                made = _Matrix(
                    [
                        self._write(f"{number}-{columns.start}", self._columns(layer, held, wanted, columns, last))
                        for columns in blocks
                    ]
                )
                held.close()
                for file in self.folder.glob(f"{number - 1}-*.npy"):
                    file.unlink()
                held = made
            for first in range(0, held.num_rows, held.step):
                yield held.rows(first, min(first + held.step, held.num_rows))
            held.close()

    def _write(self, name: str, chunks: Chunks) -> tuple[DiskArray, np.dtype[Any]]:
        with contextlib.closing(chunks):
            first = next(chunks)
            with StoreWriter(self.folder).create(name, np.float32, first.shape[1:]) as writer:
                writer.write(first)
                for values in chunks:
                    writer.write(values)
        file = self.folder / f"{name}.npy"
        return DiskArray(file, HEADER_BYTES, 4 * first.shape[1], writer.length), writer.dtype

    def _columns(self, layer: Layer, held: _Matrix, wanted: NodeSet | None, columns: slice, last: bool) -> Chunks:
        """Columns of a layer's result: those of all nodes, those not wanted 0, or `last`, of wanted ones alone."""
        store, matrix, loops = self.store, layer.neighbors[:, columns], layer.own is None
        before = self._propagates_first(layer)
        values = np.empty((store.num_nodes, matrix.shape[0 if before else 1]), np.float32)

        def fill(first: int) -> None:
            end = min(first + held.step, store.num_nodes)
            part = held.rows(first, end)
            part = part if before else part @ matrix
            if loops:
                part /= np.sqrt(self.edges.degrees(first, end, loops), dtype=np.float32)[:, None]
            values[first:end] = part

        with contextlib.closing(in_order(range(0, store.num_nodes, held.step), fill)) as filled:
            for _ in filled:
                self.done(held.parts[0][1].itemsize * held.width * held.step)
        sweep = self.edges.sweep(Rows(values), wanted, loops=loops, mean=True, done=self.done)
        with contextlib.closing(sweep) as slices:
            for first, out, degrees in slices:
                for begin in range(0, len(out), held.step):
                    part, at = out[begin : begin + held.step], first + begin
                    inside: Any = slice(None) if wanted is None else wanted.contains(np.arange(at, at + len(part)))
                    if wanted is not None:
                        part[~inside] = 0  # what is not wanted was not computed
                    if loops:
                        part *= np.sqrt(degrees[begin : begin + len(part)], dtype=np.float32)[:, None]
                    part = part @ matrix if before else part
                    if layer.own is not None:
                        part += held.rows(at, at + len(part)) @ layer.own[:, columns]
                    part += layer.bias[columns]
                    if not last:
                        np.maximum(part, 0, out=part)
                        if wanted is not None:
                            part[~inside] = 0
                    yield part[inside] if last else part
