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

Chunks = Generator[Array, None, None]
_STEP_BYTES = 256 * 2**20  # buffers between the layers, and memory of the matrix products


@dataclass(frozen=True)
class _Layer:
    """Weights of a layer, which computes mean(h) @ neighbors + h @ root + bias.

    Without `root` it is a layer of GCN, with self-loops and scaled by the degrees of both ends.
    """

    relu: bool  # whether a ReLU follows; not after the model's last layer
    neighbors: Array  # float32 [inputs, outputs], like `root`
    bias: Array
    root: Array | None = None

    def sweeps_input(self, most: int) -> bool:
        """Whether to take the mean of the layer's input rather than of the product.

        True if the input has fewer columns than the product, and at most `most`, which fit in
        memory.
        """
        inputs, outputs = self.neighbors.shape
        return inputs < min(outputs, most + 1)

    def blocks(self, most: int) -> list[slice]:
        """Return the columns of the result, in slices that are computed one at a time."""
        outputs = len(self.bias)
        width = outputs if self.sweeps_input(most) else -(-outputs // -(-outputs // most))
        return [slice(begin, min(begin + width, outputs)) for begin in range(0, outputs, width)]


def exact_scores(
    saved: SavedModel,
    store: Store,
    ids: Array | range,
    work: Path,
    memory_limit: str | int | None,
    progress: Progress,
) -> Generator[Rows, None, None]:
    """Yield scores of the nodes `ids`, a range for all, float32 [n, classes], in ascending order of
    the nodes.

    `work` is a folder for the layers' results; it is deleted at the end.
    """
    check_for_training(store)
    weights = loaded_model(saved, store).state_dict()
    layers = []
    last = len(saved.config.num_neighbors) - 1
    names = MODELS[saved.config.model].load().exact_weights
    for number in range(last + 1):
        tensors = [weights[f"convs.{number}.{name}"] for name in names]
        layers.append(
            _Layer(number < last, *(tensor.float().cpu().numpy().T for tensor in tensors))
        )
    room = left_bytes(memory_limit) - fixed_bytes(store.size, len(layers)) - _STEP_BYTES
    column = 4 * store.num_nodes
    if room < column:
        raise InputError(
            f"memory_limit: expected room for {format_bytes(column)}, one column of all nodes, beside the memory "
            f"in use, found {format_bytes(max(0, room))}; raise it by at least {format_bytes(column - room)}"
        )
    if check_own(work):  # left by a killed process
        shutil.rmtree(work)
    work.mkdir()
    targets = order = None
    if not isinstance(ids, range):
        targets = NodeSet(store.num_nodes, ids)
        order = np.argsort(ids)
    begin = 0
    try:
        _check_disk(store, layers, targets, room // column, work)
        scores = _layer_by_layer(store, layers, targets, room // column, work, progress)
        with contextlib.closing(scores) as chunks:
            for values in chunks:
                places = np.arange(begin, begin + len(values))
                yield places if order is None else order[places], values
                begin += len(values)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_disk(
    store: Store, layers: list[_Layer], targets: NodeSet | None, most: int, folder: Path
) -> None:
    # A layer's input and its result are on disk at the same time. The first layer's input, the
    # features, is in the store already: 0 bytes more.
    sizes = [0, *(4 * store.num_nodes * len(layer.bias) for layer in layers[:-1])]
    if len(layers[-1].blocks(most)) > 1:  # a single block is yielded without a file
        rows = store.num_nodes if targets is None else targets.count()
        sizes.append(4 * len(layers[-1].bias) * rows)
    needed = max(
        source_bytes + result_bytes
        for source_bytes, result_bytes in itertools.pairwise([*sizes, 0])
    )
    check_space(folder, needed, f"{format_bytes(needed)} of free disk space until it is done")


@dataclass(frozen=True)
class _Sweep:
    """One layer's computation for the nodes `targets`, from the rows in `source`: those of the
    targets and of all nodes with an edge to a target."""

    layer: _Layer
    source: Columns
    edges: Edges
    targets: NodeSet | None
    sweeps_input: bool
    done: Done

    def columns(self, columns: slice) -> Chunks:
        """Yield some columns of the layer's result, with rows of `targets` in ascending order."""
        source = self.source
        loops = self.layer.root is None
        matrix = self.layer.neighbors[:, columns]

        def prepare(first: int, end: int) -> Array:
            part = source.rows(first, end)
            if not self.sweeps_input:
                part = part @ matrix
            if loops:
                degrees = self.edges.degrees(first, end, loops)
                part /= np.sqrt(pick(source.members, first, degrees), dtype=np.float32)[:, None]
            return part

        width = matrix.shape[0 if self.sweeps_input else 1]
        hop = source.hop(
            self.edges, self.targets, width, np.float32, prepare, loops=loops, done=self.done
        )
        with contextlib.closing(hop) as slices:
            for first, means, degrees in slices:
                for begin in range(0, len(means), source.step):
                    end = begin + source.step
                    part = pick(self.targets, first + begin, means[begin:end])
                    degree = pick(self.targets, first + begin, degrees[begin:end])
                    nodes = range(first + begin, first + min(end, len(means)))
                    yield self._result(part, degree, nodes, columns)

    def _result(self, part: Array, degrees: Array, nodes: range, columns: slice) -> Array:
        layer = self.layer
        if layer.root is None:
            # GCN divides by sqrt(d_i d_j). `prepare` has divided by sqrt(d_j), and the mean by d_i.
            part = part * np.sqrt(degrees, dtype=np.float32)[:, None]
        if self.sweeps_input:  # else `prepare` has multiplied by this matrix
            part = part @ layer.neighbors[:, columns]
        if layer.root is not None:
            root_rows = self.source.rows(nodes.start, nodes.stop, targets=self.targets)
            part = part + root_rows @ layer.root[:, columns]
        part = part + layer.bias[columns]
        if not layer.relu:
            return part
        return np.maximum(part, 0, out=part)


def _layer_by_layer(
    store: Store,
    layers: list[_Layer],
    targets: NodeSet | None,
    most: int,
    folder: Path,
    progress: Progress,
) -> Chunks:
    # At most `most` columns of all nodes are in memory at a time.
    edges = Edges(store)
    total = len(layers) * edges.nbytes  # bytes to read, approximately
    itemsize = store.feature_itemsize
    for layer in layers:
        rows_bytes = store.num_nodes * layer.neighbors.shape[0] * itemsize
        total += len(layer.blocks(most)) * (rows_bytes + edges.nbytes)
        itemsize = 4
    with contextlib.closing(edges), counted("predicting", total, progress) as done:
        source = Columns.features(store)
        needed = edges.needed(targets, len(layers), done)
        for members in filter(None, needed):
            members.count()  # computes the ranks before the threads of a sweep read them
        for number, layer in enumerate(layers):
            sweep = _Sweep(layer, source, edges, needed[number], layer.sweeps_input(most), done)
            blocks = layer.blocks(most)
            with contextlib.closing(source):
                if layer is layers[-1] and len(blocks) == 1:
                    yield from sweep.columns(blocks[0])
                    return
                for columns in blocks:
                    _write(folder, number, columns, sweep.columns(columns))
            for file in folder.glob(f"{number - 1}-*.npy"):
                file.unlink()
            source = Columns.open(folder, str(number), store.num_nodes, needed[number])
        with contextlib.closing(source):
            for first in range(0, store.num_nodes, source.step):
                yield source.rows(first, min(first + source.step, store.num_nodes))


def _write(folder: Path, number: int, columns: slice, chunks: Chunks) -> None:
    create = StoreWriter(folder).create  # `Columns.open` finds the file by its name
    width = columns.stop - columns.start
    with (
        create(f"{number}-{columns.start}", np.float32, (width,)) as writer,
        contextlib.closing(chunks),
    ):
        for values in chunks:
            writer.write(values)
