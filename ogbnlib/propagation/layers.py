"""Exact scores of a trained GraphSAGE or GCN for a whole graph, layer by layer, with every neighbor, on disk.

A layer takes the mean of neighbors and multiplies it by a matrix. These two steps commute, so the narrower side is kept
in RAM for all nodes, as many columns at a time as fit, and swept over the edges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, format_bytes
from ..files import check_space
from ..graph.bits import NodeSet
from ..graph.checks import HEADER_BYTES
from ..graph.disk import DiskArray, disk_array
from ..graph.npz import CHUNK_BYTES, Array
from ..graph.store import Store
from ..graph.writer import StoreWriter
from ..progress import counted
from ..sources.convert import Progress
from .sweep import Edges, in_order

Chunks = Generator[Array, None, None]


class Layer(NamedTuple):
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


def layer_scores(
    store: Store, layers: list[Layer], nodes: NodeSet | None, room: int, folder: Path, progress: Progress
) -> Chunks:
    """Yield scores, float32 [n, classes], of some or all nodes in ascending order.

    Args:
        room: bytes for columns of all nodes.
        folder: where layers' results lie, in float32, until the next layer has used them.
    """
    num_nodes, column = store.num_nodes, 4 * store.num_nodes
    if (most := room // column) < 1:
        raise InputError(
            f"memory_limit: expected room for {format_bytes(column)}, one column of all nodes, beside the memory "
            f"in use, found {format_bytes(max(0, room))}; raise it by the difference"
        )
    # Whether a layer sweeps its input, and the columns of its result to compute at a time.
    first_swept, blocks = [layer.neighbors.shape[0] < min(layer.neighbors.shape[1], most + 1) for layer in layers], []
    for layer, swept in zip(layers, first_swept, strict=True):
        out = len(layer.bias)
        size = out if swept else -(-out // -(-out // most))
        blocks.append([slice(begin, min(begin + size, out)) for begin in range(0, out, size)])
    sizes = [column * len(layer.bias) for layer in layers[:-1]]
    if len(blocks[-1]) > 1:
        sizes.append(4 * (num_nodes if nodes is None else nodes.count()) * len(layers[-1].bias))
    # A layer's input and its result are on disk at the same time.
    needed_bytes = max(map(sum, zip([0, *sizes], [*sizes, 0], strict=True)))
    check_space(folder, needed_bytes, f"{format_bytes(needed_bytes)} of free disk space until it is done")

    def compute(number: int, source: _Matrix, columns: slice) -> Chunks:
        """Yield columns of a layer's result for all nodes, 0 for unwanted ones; of the last layer only wanted rows."""
        layer, targets, swept, last = layers[number], needed[number], first_swept[number], number == len(layers) - 1
        matrix, loops = layer.neighbors[:, columns], layer.own is None
        values = np.empty((num_nodes, matrix.shape[0 if swept else 1]), np.float32)

        def fill(first: int) -> None:
            end = min(first + source.step, num_nodes)
            part = source.rows(first, end)
            part = part if swept else part @ matrix
            if loops:
                part /= np.sqrt(edges.degrees(first, end, loops), dtype=np.float32)[:, None]
            values[first:end] = part

        with contextlib.closing(in_order(range(0, num_nodes, source.step), fill)) as filled:
            for _ in filled:
                done(source.parts[0][1].itemsize * source.width * source.step)
        with contextlib.closing(edges.sweep(values, None, targets, loops=loops, mean=True, done=done)) as slices:
            for first, out, degrees in slices:
                for begin in range(0, len(out), source.step):
                    part, at = out[begin : begin + source.step], first + begin
                    inside: Any = slice(None) if targets is None else targets.contains(np.arange(at, at + len(part)))
                    if targets is not None:
                        part[~inside] = 0  # the sweep left these rows uninitialised
                    if loops:
                        part *= np.sqrt(degrees[begin : begin + len(part)], dtype=np.float32)[:, None]
                    part = part @ matrix if swept else part
                    if layer.own is not None:
                        part += source.rows(at, at + len(part)) @ layer.own[:, columns]
                    part += layer.bias[columns]
                    if not last:
                        np.maximum(part, 0, out=part)
                        if targets is not None:
                            part[~inside] = 0
                    yield part[inside] if last else part

    edges = Edges(store)
    total = max(1, len(layers) - 1) * edges.nbytes  # bytes to read, approximately
    for number, layer in enumerate(layers):
        item = 4 if number else store.feature_itemsize
        total += len(blocks[number]) * (num_nodes * layer.neighbors.shape[0] * item + edges.nbytes)
    source = _Matrix([(disk_array(store, "x"), store.feature_dtype)])
    with contextlib.closing(edges), counted("predicting", total, progress) as done:
        needed = edges.needed(nodes, len(layers), done)
        for number in range(len(layers)):
            if number == len(layers) - 1 and len(blocks[number]) == 1:
                with contextlib.closing(compute(number, source, blocks[number][0])) as scores:
                    yield from scores
                source.close()
                return
            parts: list[tuple[DiskArray, np.dtype[Any]]] = []
            for columns in blocks[number]:
                name, width = f"{number}-{columns.start}", columns.stop - columns.start
                with (
                    StoreWriter(folder).create(name, np.float32, (width,)) as writer,
                    contextlib.closing(compute(number, source, columns)) as chunks,
                ):
                    for values in chunks:
                        writer.write(values)
                parts.append((DiskArray(folder / f"{name}.npy", HEADER_BYTES, 4 * width, writer.length), writer.dtype))
            source.close()
            for file in folder.glob(f"{number - 1}-*.npy"):
                file.unlink()
            source = _Matrix(parts)
        for first in range(0, source.num_rows, source.step):
            yield source.rows(first, min(first + source.step, source.num_rows))
        source.close()
