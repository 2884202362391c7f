"""Exact scores of a trained GraphSAGE or GCN for a whole graph, layer by layer, with every neighbor, on disk.

A layer takes the mean of neighbors and multiplies it by a matrix. These two steps commute, so the narrower side is kept
in RAM for all nodes, as many columns at a time as fit, and swept over the edges. A layer's result lies on disk, in
float32, until the next layer has used it.
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
    """mean(h) @ neighbors + h @ own + bias; without `own` that of GCN, with self-loops and both degrees."""

    neighbors: Array
    bias: Array
    own: Array | None = None


class _Matrix:
    """A matrix on disk, in files of some columns each."""

    def __init__(self, parts: list[tuple[DiskArray, np.dtype[Any]]]) -> None:
        self.parts = parts
        self.num_rows, self.width = parts[0][0].num_rows, sum(file.row_bytes // dtype.itemsize for file, dtype in parts)
        self.step = max(1, CHUNK_BYTES // (4 * self.width))  # rows at a time

    def rows(self, first: int, end: int) -> Array:
        """Return rows, float32 [end - first, width]."""
        parts = [file.rows(first, end, dtype).reshape(end - first, -1) for file, dtype in self.parts]
        return np.concatenate(parts, 1).astype(np.float32, copy=False)

    def close(self) -> None:
        for file, _ in self.parts:
            file.close()


class LayerWise:
    """The layers of a model over a store.

    Args:
        nodes: the nodes to score; None for all.
        room: bytes for columns of all nodes.
        folder: where layers' results lie.
        done: called with the bytes of each piece that was read.

    Raises:
        InputError: if not one column fits, or if the disk has too little space.
    """

    def __init__(
        self, store: Store, layers: list[Layer], nodes: NodeSet | None, room: int, folder: Path, done: Done
    ) -> None:
        self.store, self.layers, self.nodes, self.folder, self.done = store, layers, nodes, folder, done
        column = 4 * store.num_nodes
        self.most = room // column
        if self.most < 1:
            raise InputError(
                f"memory_limit: expected room for {format_bytes(column)}, one column of all nodes, beside the memory "
                f"in use, found {format_bytes(max(0, room))}; raise it by the difference"
            )
        sizes = [column * len(layer.bias) for layer in layers[:-1]]
        if len(self._blocks(layers[-1])) > 1:
            sizes.append(4 * (store.num_nodes if nodes is None else nodes.count()) * len(layers[-1].bias))
        # A layer's input and its result are on disk at the same time.
        needed = max(map(sum, zip([0, *sizes], [*sizes, 0], strict=True)))
        check_space(folder, needed, f"{format_bytes(needed)} of free disk space until it is done")
        self.edges = Edges(store)

    def _propagates_first(self, layer: Layer) -> bool:
        width, out = layer.neighbors.shape
        return width < out and width <= self.most

    def _blocks(self, layer: Layer) -> list[slice]:
        """Return the columns of a layer's result to compute at a time."""
        out = len(layer.bias)
        size = out if self._propagates_first(layer) else -(-out // -(-out // self.most))
        return [slice(begin, min(begin + size, out)) for begin in range(0, out, size)]

    @property
    def num_bytes(self) -> int:
        """Approximate bytes to read."""
        total = max(1, len(self.layers) - 1) * self.edges.nbytes
        for layer in self.layers:
            item = self.store.feature_itemsize if layer is self.layers[0] else 4
            filled = self.store.num_nodes * layer.neighbors.shape[0] * item
            total += len(self._blocks(layer)) * (filled + self.edges.nbytes)
        return total

    def scores(self) -> Chunks:
        """Yield scores, float32 [n, classes], in the order of the nodes.

        Raises:
            InputError: for a damaged graph.
        """
        needed = self.edges.needed(self.nodes, len(self.layers), self.done)
        source = _Matrix([(disk_array(self.store, "x"), self.store.feature_dtype)])
        with contextlib.closing(self.edges):
            for number, layer in enumerate(self.layers):
                nodes, last, blocks = needed[number], layer is self.layers[-1], self._blocks(layer)
                if last and len(blocks) == 1:
                    yield from self._columns(layer, source, nodes, blocks[0], last)
                    source.close()
                    return
                parts = [
                    self._write(f"{number}-{columns.start}", self._columns(layer, source, nodes, columns, last))
                    for columns in blocks
                ]
                source.close()
                for file in self.folder.glob(f"{number - 1}-*.npy"):
                    file.unlink()
                source = _Matrix(parts)
            for first in range(0, source.num_rows, source.step):
                yield source.rows(first, min(first + source.step, source.num_rows))
            source.close()

    def _write(self, name: str, chunks: Chunks) -> tuple[DiskArray, np.dtype[Any]]:
        with contextlib.closing(chunks):
            first = next(chunks)
            with StoreWriter(self.folder).create(name, np.float32, first.shape[1:]) as writer:
                writer.write(first)
                for values in chunks:
                    writer.write(values)
        file = self.folder / f"{name}.npy"
        return DiskArray(file, HEADER_BYTES, 4 * first.shape[1], writer.length), writer.dtype

    def _columns(self, layer: Layer, source: _Matrix, wanted: NodeSet | None, columns: slice, last: bool) -> Chunks:
        """Yield columns of a layer's result for all nodes, 0 for unwanted ones; of the last layer only wanted rows."""
        num_nodes, matrix, loops = self.store.num_nodes, layer.neighbors[:, columns], layer.own is None
        before = self._propagates_first(layer)
        values = np.empty((num_nodes, matrix.shape[0 if before else 1]), np.float32)

        def fill(first: int) -> None:
            end = min(first + source.step, num_nodes)
            part = source.rows(first, end)
            part = part if before else part @ matrix
            if loops:
                part /= np.sqrt(self.edges.degrees(first, end, loops), dtype=np.float32)[:, None]
            values[first:end] = part

        with contextlib.closing(in_order(range(0, num_nodes, source.step), fill)) as filled:
            for _ in filled:
                self.done(source.parts[0][1].itemsize * source.width * source.step)
        sweep = self.edges.sweep(Rows(values), wanted, loops=loops, mean=True, done=self.done)
        with contextlib.closing(sweep) as slices:
            for first, out, degrees in slices:
                for begin in range(0, len(out), source.step):
                    part, at = out[begin : begin + source.step], first + begin
                    inside: Any = slice(None) if wanted is None else wanted.contains(np.arange(at, at + len(part)))
                    if wanted is not None:
                        part[~inside] = 0  # the sweep left these rows uninitialised
                    if loops:
                        part *= np.sqrt(degrees[begin : begin + len(part)], dtype=np.float32)[:, None]
                    part = part @ matrix if before else part
                    if layer.own is not None:
                        part += source.rows(at, at + len(part)) @ layer.own[:, columns]
                    part += layer.bias[columns]
                    if not last:
                        np.maximum(part, 0, out=part)
                        if wanted is not None:
                            part[~inside] = 0
                    yield part[inside] if last else part
