"""Exact scores of a trained GraphSAGE or GCN for a whole graph, layer by layer, with every
neighbor, on disk.

A layer takes the mean of neighbors and multiplies it by a matrix. These two steps commute, so the
narrower side is kept in RAM for all nodes, as many columns at a time as fit, and swept over the
edges.
"""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import InputError, format_bytes
from ..files import check_space
from ..graph.bits import NodeSet
from ..graph.npz import Array
from ..graph.store import Store
from ..graph.writer import StoreWriter
from ..progress import Progress, counted
from .columns import Columns, pick
from .sweep import Edges

Chunks = Generator[Array, None, None]


class Layer(NamedTuple):
    """mean(h) @ neighbors + h @ own + bias; without `own` that of GCN, with self-loops and both
    degrees."""

    neighbors: Array
    bias: Array
    own: Array | None = None


def layer_scores(
    store: Store,
    layers: list[Layer],
    nodes: NodeSet | None,
    room: int,
    folder: Path,
    progress: Progress,
) -> Chunks:
    """Yield scores, float32 [n, classes], of some or all nodes in ascending order.

    `room` are bytes for columns of all nodes. `folder` has a layer's result, float32, until the
    next layer has used it.
    """
    num_nodes = store.num_nodes
    column = 4 * store.num_nodes
    if (most := room // column) < 1:
        raise InputError(
            f"memory_limit: expected room for {format_bytes(column)}, one column of all nodes, beside the memory "
            f"in use, found {format_bytes(max(0, room))}; raise it by the difference"
        )
    # Whether a layer sweeps its input, and the columns of its result to compute at a time.
    first_swept = [
        layer.neighbors.shape[0] < min(layer.neighbors.shape[1], most + 1) for layer in layers
    ]
    blocks = []
    for layer, swept in zip(layers, first_swept, strict=True):
        out = len(layer.bias)
        size = out if swept else -(-out // -(-out // most))
        blocks.append([slice(begin, min(begin + size, out)) for begin in range(0, out, size)])
    sizes = [column * len(layer.bias) for layer in layers[:-1]]
    if len(blocks[-1]) > 1:
        sizes.append(4 * (num_nodes if nodes is None else nodes.count()) * len(layers[-1].bias))
    # A layer's input and its result are on disk at the same time.
    needed_bytes = max(map(sum, zip([0, *sizes], [*sizes, 0], strict=True)))
    check_space(
        folder, needed_bytes, f"{format_bytes(needed_bytes)} of free disk space until it is done"
    )

    def compute(number: int, source: Columns, columns: slice) -> Chunks:
        """Yield columns of a layer's result for the nodes that the next layer reads, or of the last
        one for `nodes`."""
        layer = layers[number]
        targets = needed[number]
        swept = first_swept[number]
        matrix = layer.neighbors[:, columns]
        loops = layer.own is None

        def prepare(first: int, end: int) -> Array:
            part = source.rows(first, end)
            part = part if swept else part @ matrix
            if loops:
                degrees = pick(source.members, first, edges.degrees(first, end, loops))
                part /= np.sqrt(degrees, dtype=np.float32)[:, None]
            return part

        width = matrix.shape[0 if swept else 1]
        hop = source.hop(edges, targets, width, np.float32, prepare, loops=loops, done=done)
        with contextlib.closing(hop) as slices:
            for first, out, degrees in slices:
                for begin in range(0, len(out), source.step):
                    at = first + begin
                    end = min(begin + source.step, len(out))
                    part, degree = (
                        pick(targets, at, values[begin:end]) for values in (out, degrees)
                    )
                    if loops:
                        part = part * np.sqrt(degree, dtype=np.float32)[:, None]
                    part = part @ matrix if swept else part
                    if layer.own is not None:
                        part = (
                            part
                            + source.rows(at, first + end, targets=targets) @ layer.own[:, columns]
                        )
                    part = part + layer.bias[columns]
                    yield part if number == len(layers) - 1 else np.maximum(part, 0, out=part)

    edges = Edges(store)
    total = max(1, len(layers) - 1) * edges.nbytes  # bytes to read, approximately
    for number, layer in enumerate(layers):
        item = 4 if number else store.feature_itemsize
        total += len(blocks[number]) * (num_nodes * layer.neighbors.shape[0] * item + edges.nbytes)
    with contextlib.closing(edges), counted("predicting", total, progress) as done:
        source = Columns.features(store)
        needed = edges.needed(nodes, len(layers), done)
        for members in needed:
            if members is not None:
                members.count()
        for number, members in enumerate(needed):
            if number == len(layers) - 1 and len(blocks[number]) == 1:
                yield from compute(number, source, blocks[number][0])
                source.close()
                return
            for columns in blocks[number]:
                name = f"{number}-{columns.start}"
                width = columns.stop - columns.start
                result = StoreWriter(folder).create(name, np.float32, (width,))
                with (
                    result as writer,
                    contextlib.closing(compute(number, source, columns)) as chunks,
                ):
                    for values in chunks:
                        writer.write(values)
            source.close()
            for file in folder.glob(f"{number - 1}-*.npy"):
                file.unlink()
            source = Columns.open(folder, str(number), num_nodes, members)
        for first in range(0, num_nodes, source.step):
            yield source.rows(first, min(first + source.step, num_nodes))
        source.close()
