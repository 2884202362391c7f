"""Exact scores of a trained GraphSAGE or GCN for a whole graph, layer by layer, with every
neighbor.

The layers' results are on disk. A layer takes the mean of a node's neighbors and multiplies it by a
matrix. These two steps commute, so the mean is taken on the narrower side, input or product. As
many of its columns as fit are in RAM for all nodes during one pass over the edges.
"""

import contextlib
import itertools
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import InputError, format_bytes
from ..files import check_own, check_space
from ..graph.node_set import NodeSet
from ..graph.npz import Array
from ..graph.store import Store
from ..graph.writer import StoreWriter, check_for_training
from ..progress import Progress, counted
from ..propagation.columns import Columns, Done, pick
from ..propagation.hops import left_bytes
from ..propagation.plan import fixed_bytes
from ..propagation.sweep import Edges
from ..registry import MODELS
from ..training.checkpoint import SavedModel
from .batches import Rows, loaded_model

Chunks = Generator[Array, None, None]  # float32 rows of the next nodes
_STEP_BYTES = 256 * 2**20  # buffers between the layers, and memory of the matrix products


@dataclass(frozen=True)
class _Layer:
    """Weights of a layer, which computes mean(h) @ neighbors + h @ root + bias.

    Without `root` it is a layer of GCN, with self-loops and scaled by the degrees of both ends.
    """

    max_columns: int  # number of columns of all nodes, float32, that fit in RAM
    relu: bool  # whether a ReLU follows; not after the model's last layer
    neighbors: Array  # float32 [inputs, outputs], like `root`
    bias: Array  # float32 [outputs]
    root: Array | None = None

    @property
    def averages_input(self) -> bool:
        """Whether to take the mean of the input, which is narrower and fits, not of the product."""
        inputs, outputs = self.neighbors.shape
        return inputs < outputs and inputs <= self.max_columns

    def blocks(self) -> list[slice]:
        """Return the columns of the result, in slices that are computed one at a time."""
        outputs = len(self.bias)
        width = outputs  # all at once, from one pass that averages the input
        if not self.averages_input:
            num_blocks = -(-outputs // self.max_columns)
            width = -(-outputs // num_blocks)  # blocks of about equal width
        return [slice(begin, min(begin + width, outputs)) for begin in range(0, outputs, width)]


def exact_scores(
    saved: SavedModel,
    store: Store,
    ids: Array | range,
    work: Path,
    memory_limit: str | int | None,
    progress: Progress,
) -> Generator[Rows, None, None]:
    """Yield scores of the nodes `ids` (a range: all), float32 [n, classes], ascending by node.

    `work` is a folder for the layers' results; it is deleted at the end.
    """
    check_for_training(store)
    weights = loaded_model(saved, store).state_dict()
    num_layers = len(saved.config.num_neighbors)
    room = left_bytes(memory_limit) - fixed_bytes(store.size, num_layers) - _STEP_BYTES
    column = 4 * store.num_nodes  # bytes of a float32 for each node
    if room < column:
        raise InputError(
            f"memory_limit: expected room for {format_bytes(column)}, one column of all nodes, beside the memory "
            f"in use, found {format_bytes(max(0, room))}; raise it by at least {format_bytes(column - room)}"
        )
    layers = []
    # of the neighbors' weights, the bias and, except for GCN, the weights of the node itself
    names = MODELS[saved.config.model].load().exact_weights
    for number in range(num_layers):
        tensors = [weights[f"convs.{number}.{name}"] for name in names]
        arrays = [tensor.float().cpu().numpy().T for tensor in tensors]  # torch has [out, in]
        # the columns that fit, and whether a ReLU follows: not after the last layer
        layers.append(_Layer(room // column, number < num_layers - 1, *arrays))
    if check_own(work):  # left by a killed process
        shutil.rmtree(work)
    work.mkdir()
    targets = None if isinstance(ids, range) else NodeSet(store.num_nodes, ids)
    # int64 [n] or a range: the result's row of each target, targets in ascending order
    order = ids if isinstance(ids, range) else np.argsort(ids)
    begin = 0
    try:
        _check_disk(store, layers, targets, work)
        with contextlib.closing(_layer_by_layer(store, layers, targets, work, progress)) as chunks:
            for values in chunks:  # float32 [m, classes] of the next m targets
                yield np.asarray(order[begin : begin + len(values)]), values
                begin += len(values)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_disk(store: Store, layers: list[_Layer], targets: NodeSet | None, folder: Path) -> None:
    # A layer's input and its result are on disk at the same time. The first layer's input, the
    # features, is in the store already: 0 bytes, like a result that is yielded without a file.
    sizes = [0, *(4 * store.num_nodes * len(layer.bias) for layer in layers[:-1])]
    if len(layers[-1].blocks()) > 1:  # a single block is yielded without a file
        rows = store.num_nodes if targets is None else targets.count()
        sizes.append(4 * len(layers[-1].bias) * rows)
    needed = max(source + result for source, result in itertools.pairwise([*sizes, 0]))
    check_space(folder, needed, f"{format_bytes(needed)} of free disk space until it is done")


@dataclass(frozen=True)
class _Sweep:
    """One layer's computation for the nodes `targets` (None: all), from the rows in `source`: those
    of the targets and of all nodes with an edge to a target."""

    layer: _Layer
    source: Columns  # the layer's input, float32 once read, on disk
    edges: Edges
    targets: NodeSet | None
    done: Done  # called with numbers of bytes, for the progress line

    def columns(self, columns: slice) -> Chunks:
        """Yield some columns of the layer's result, with rows of `targets` in ascending order."""
        source = self.source
        loops = self.layer.root is None  # self-loops, only in GCN
        matrix = self.layer.neighbors[:, columns]

        def prepare(first: int, end: int) -> Array:
            # the rows whose mean is taken, of the nodes from `first` to `end` that `source` has
            rows = source.rows(first, end)  # float32 [n, inputs]
            if not self.layer.averages_input:
                rows = rows @ matrix
            if loops:
                degrees = self.edges.degrees(first, end, loops)  # of all these nodes
                rows /= np.sqrt(pick(source.members, first, degrees), dtype=np.float32)[:, None]
            return rows

        width = matrix.shape[0 if self.layer.averages_input else 1]  # of the averaged rows
        hop = source.hop(
            self.edges, self.targets, width, np.float32, prepare, loops=loops, done=self.done
        )
        with contextlib.closing(hop) as slices:
            for first, means, degrees in slices:  # of consecutive nodes, from `first` on
                for begin in range(0, len(means), source.step):  # bounds the memory of products
                    end = begin + source.step
                    target_means = pick(self.targets, first + begin, means[begin:end])
                    target_degrees = pick(self.targets, first + begin, degrees[begin:end])
                    nodes = range(first + begin, first + min(end, len(means)))
                    yield self._result(target_means, target_degrees, nodes, columns)

    def _result(self, rows: Array, degrees: Array, nodes: range, columns: slice) -> Array:
        # The result for the targets among `nodes`, from their means `rows` and their degrees.
        layer = self.layer
        if layer.root is None:
            # GCN divides by sqrt(d_i d_j). `prepare` has divided by sqrt(d_j), and the mean by d_i.
            rows = rows * np.sqrt(degrees, dtype=np.float32)[:, None]
        if layer.averages_input:  # else `prepare` has multiplied by this matrix
            rows = rows @ layer.neighbors[:, columns]
        if layer.root is not None:
            root_rows = self.source.rows(nodes.start, nodes.stop, targets=self.targets)
            rows = rows + root_rows @ layer.root[:, columns]
        rows = rows + layer.bias[columns]
        return np.maximum(rows, 0, out=rows) if layer.relu else rows


def _layer_by_layer(
    store: Store, layers: list[_Layer], targets: NodeSet | None, folder: Path, progress: Progress
) -> Chunks:
    # Yields the last layer's rows of `targets` in ascending order.
    edges = Edges(store)
    # Bytes to read, approximately: the graph, to verify it and find each layer's nodes, then for each
    # block of columns the layer's input and the graph.
    total = len(layers) * edges.nbytes
    itemsize = store.feature_itemsize
    for layer in layers:
        rows_bytes = store.num_nodes * layer.neighbors.shape[0] * itemsize
        total += len(layer.blocks()) * (rows_bytes + edges.nbytes)
        itemsize = 4  # results of layers are float32
    with contextlib.closing(edges), counted("predicting", total, progress) as done:
        source = Columns.features(store)
        needed = edges.needed(targets, len(layers), done)  # the nodes of each layer's result
        for members in filter(None, needed):  # None stands for all nodes
            members.count()  # computes the ranks before the threads of a sweep read them
        for number, layer in enumerate(layers):
            sweep = _Sweep(layer, source, edges, needed[number], done)
            blocks = layer.blocks()
            with contextlib.closing(source):
                if layer is layers[-1] and len(blocks) == 1:
                    yield from sweep.columns(blocks[0])
                    return
                for columns in blocks:
                    _write(folder, number, columns, sweep.columns(columns))
            for file in folder.glob(f"{number - 1}-*.npy"):  # the layer's input; not the features
                file.unlink()
            source = Columns.open(folder, str(number), store.num_nodes, needed[number])
        with contextlib.closing(source):  # the last layer's blocks, side by side
            for first in range(0, store.num_nodes, source.step):
                yield source.rows(first, min(first + source.step, store.num_nodes))


def _write(folder: Path, number: int, columns: slice, chunks: Chunks) -> None:
    # writes columns of layer `number`'s result, float32 [rows, width]
    name = f"{number}-{columns.start}"  # `Columns.open` finds the file by its name
    with (
        StoreWriter(folder).create(name, np.float32, (columns.stop - columns.start,)) as writer,
        contextlib.closing(chunks),
    ):
        for values in chunks:
            writer.write(values)
