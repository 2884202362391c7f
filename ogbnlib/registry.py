"""Registries of models and loading policies; classes by dotted path, so that forecasts import no
torch."""

import itertools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

Widths = list[tuple[int, int]]


@dataclass(frozen=True)
class _Entry:
    path: str  # module:Class

    def load(self) -> Any:
        """Import the class."""
        return pkgutil.resolve_name(self.path)


# Rows of a GraphSAGE layer that a thread takes at a time: their product takes 8 ms, and stays in
# the cache.
PART_ROWS = 4096


class Layer(NamedTuple):
    """One layer of a training step."""

    sources: int  # nodes that it reads
    targets: int  # nodes that it writes
    edges: int
    inputs: int
    outputs: int  # of all heads together but for the last layer's
    first: bool
    last: bool
    heads: int
    hops: int  # of propagated features
    half: bool  # 16-bit precision
    dropout: bool
    fused: bool  # by `propagation.sage`: on the CPU
    edge_list: bool  # in place of a sparse matrix, as `forward(x, edge_index)` gets it


class LayerMemory(NamedTuple):
    """Bytes of one layer in a training step."""

    # for the backward pass, the output included; the first layer's x belongs to the batch
    saved: int
    # the part of `saved` that activation checkpointing keeps: the output and the sparse matrix
    checkpointed: int
    peak: int  # the most that the forward or the backward pass has alive


@dataclass(frozen=True)
class Model(_Entry):
    """One model; `load` imports torch."""

    weights: Callable[[Layer], int]  # of one layer
    memory: Callable[[Layer], LayerMemory]
    # whether it learns from propagated features instead of sampled neighbors
    propagated: bool = False
    # whether inference can count all neighbors, layer by layer over the whole graph
    exact: bool = False
    has_heads: bool = False  # whether `heads` must divide `hidden_channels`
    # Inputs and outputs of each layer, from depth (fan-outs or hops), features, hidden channels,
    # classes.
    widths: Callable[[int, int, int, int], Widths] = lambda depth, features, hidden, classes: list(
        itertools.pairwise([features, *[hidden] * (depth - 1), classes])
    )


# With sampled neighbors, [rows, channels] is float32 where nothing else is stated. Autocast halves
# products, adds half-width copies of inputs, and leaves sums in float32. The last layer's output is
# there twice more for the loss.


def _sum(
    layer: Layer, products: int, scratch: int, matrix: int = 0, *, item: int = 4, masks: int = 3
) -> LayerMemory:
    """Bytes of a layer from its products, its scratch space and its sparse matrix."""
    out = (4 if layer.last else item) * layer.targets * layer.outputs
    # Dropout keeps its mask and its result in addition to the output.
    saved = products + out * (masks if layer.dropout and not layer.last else 1) + 8 * layer.targets
    peak = products + out * (3 if layer.last else 1) + scratch
    return LayerMemory(saved, out + matrix, max(saved, peak))


def _sage(layer: Layer) -> LayerMemory:
    """Keeps the mean of the neighbors [T, in], the sparse matrix and the output."""
    item, copy = (2, 2) if layer.half else (4, 0)
    if layer.fused:
        # Keeps the mean and the targets' own features, [T, 2 in], whose memory their gradients
        # take, and the output. The two matrices are copied side by side, and each part has their
        # gradient. The first layer's input has none; for the others' the edges are sorted by
        # source.
        scratch = 8 * layer.inputs * layer.outputs * (1 + -(-layer.targets // PART_ROWS))
        if layer.first:
            scratch += item * layer.targets * layer.outputs * (layer.dropout and not layer.last)
        else:
            scratch += item * layer.inputs * layer.sources + 8 * (layer.edges + layer.sources)
        return _sum(
            layer, 2 * layer.targets * (item * layer.inputs + 4), scratch, item=item, masks=1
        )
    matrix = 4 * layer.edges + 8 * layer.targets
    products = (4 if layer.first else item) * layer.targets * layer.inputs + matrix
    if layer.first:  # two more outputs
        scratch = layer.targets * (2 * item * layer.outputs + copy * layer.inputs)
    else:  # twice the gradient of the input [S, in]; dropout's result makes room for one
        scratch = (8 + copy - (item if layer.dropout else 0)) * layer.sources * layer.inputs
    scratch += 8 * layer.edges * layer.inputs if layer.edge_list else 0  # [E, in] and its gradient
    return _sum(layer, products, scratch, matrix, item=item)


def _gcn(layer: Layer) -> LayerMemory:
    """Keeps the sparse matrix, its self-loops and the output."""
    copy = 2 if layer.half else 0
    matrix = 4 * layer.edges + 12 * layer.targets
    # Products of the sources, twice their gradient, and the matrix transposed: 3 [S, out] and 16
    # bytes an edge.
    scratch = (12 + copy) * layer.sources * layer.outputs + 16 * layer.edges
    # Under autocast dropout's result is the next layer's copy.
    return _sum(
        layer,
        matrix + copy * layer.sources * layer.inputs,
        scratch,
        matrix,
        masks=2 if layer.half else 3,
    )


def _gat(layer: Layer) -> LayerMemory:
    """Keeps [S + 2 T + E, H], 16 bytes an edge for each head and once more, and the output; takes 3
    [E, H]."""
    item, copy = (2, 2) if layer.half else (4, 0)
    wide = layer.outputs * layer.heads if layer.last else layer.outputs
    edges = layer.edges + layer.targets  # self-loops
    products = item * (layer.sources + layer.targets + edges) * wide + 16 * edges * (
        1 + layer.heads
    )
    products += 2 * copy * layer.sources * layer.inputs
    return _sum(layer, products, (12 + 2 * copy) * edges * wide)


def _gat_weights(layer: Layer) -> int:
    """A matrix, two vectors of attention and the bias."""
    wide = layer.outputs * layer.heads if layer.last else layer.outputs
    return layer.inputs * wide + 2 * wide + layer.outputs


def _linear_weights(layer: Layer) -> int:
    return layer.inputs * layer.outputs + layer.outputs


def _linear(layer: Layer, saved: int = 0) -> LayerMemory:
    """A last layer keeps its output and takes it twice more; the first one keeps `saved` and takes
    twice its rows."""
    rows = 4 * layer.targets * layer.outputs
    if layer.last:
        return LayerMemory(rows, rows, 3 * rows)
    saved += 2 * layer.targets * layer.inputs * (layer.hops + 1) if layer.half else 0
    return LayerMemory(saved, rows, saved + 2 * rows)


def _sign(layer: Layer) -> LayerMemory:
    """Keeps the ReLU's results of all hops, the dropout's with their mask, and all of them side by
    side."""
    return _linear(layer, (4 if layer.dropout else 3) * 4 * layer.targets * layer.outputs)


def _sagn(layer: Layer) -> LayerMemory:
    """Keeps all hops side by side, their attention, and the ReLU's and the dropout's results of
    their sum."""
    hidden = layer.outputs // (layer.hops + 2)
    return _linear(
        layer, 4 * layer.targets * (layer.outputs + 3 * (layer.hops + 1) * layer.heads + 2 * hidden)
    )


def _sagn_weights(layer: Layer) -> int:
    """The first layer's hops have no bias; its own features have one, and attention is two
    vectors."""
    hidden = layer.outputs // (layer.hops + 2)
    return layer.inputs * layer.outputs + (layer.outputs if layer.last else 3 * hidden)


def _sign_widths(hops: int, features: int, hidden: int, classes: int) -> Widths:
    return [(features // (hops + 1), (hops + 1) * hidden), ((hops + 1) * hidden, classes)]


def _sagn_widths(hops: int, features: int, hidden: int, classes: int) -> Widths:
    return [(features // (hops + 1), (hops + 2) * hidden), (hidden, classes)]


_GNN, _HOPS = "ogbnlib.training.models:GNN", "ogbnlib.training.models:HopModel"
MODELS = {
    "sage": Model(
        _GNN, lambda layer: 2 * layer.inputs * layer.outputs + layer.outputs, _sage, exact=True
    ),
    "gcn": Model(_GNN, _linear_weights, _gcn, exact=True),
    "gat": Model(_GNN, _gat_weights, _gat, has_heads=True),
    "sgc": Model(
        _HOPS,
        _linear_weights,
        _linear,
        True,
        widths=lambda hops, x, _, last: [(x // (hops + 1), last)],
    ),
    "sign": Model(_HOPS, _linear_weights, _sign, True, widths=_sign_widths),
    "sagn": Model(_HOPS, _sagn_weights, _sagn, True, has_heads=True, widths=_sagn_widths),
}


@dataclass(frozen=True)
class Policy(_Entry):
    """One loading policy: its class loads, builds loaders, and forecasts its phases; see
    `sampling.policies`."""

    # whether features stay in a store, in its own dtype, and are read batch by batch
    on_disk: bool = False
    # whether batches are rows of propagated features instead of sampled subgraphs
    propagated: bool = False
    # policies that take less memory for the same batches, the fastest first
    smaller: tuple[str, ...] = ()


_SAMPLED = "ogbnlib.sampling.policies"
POLICIES = {
    "eager": Policy(f"{_SAMPLED}:EagerLoaders", smaller=("shared", "store")),
    "lazy": Policy(f"{_SAMPLED}:LazyLoaders", smaller=("shared", "store")),
    "shared": Policy(f"{_SAMPLED}:SharedLoaders", smaller=("store",)),
    "store": Policy("ogbnlib.sampling.store_policy:StoreLoaders", on_disk=True),
    "propagated": Policy(
        "ogbnlib.propagation.policy:PropagatedLoaders", on_disk=True, propagated=True
    ),
}
