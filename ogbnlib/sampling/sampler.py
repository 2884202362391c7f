"""Neighbor sampling on a graph in CSC form, behind PyG's `BaseSampler`."""

import copy
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.neighbor_sampler import edge_sample

from ..errors import InputError
from ..graph.neighbors import (
    ANY_NUMBER,
    BAD_COLUMN,
    BAD_ID,
    bad_column,
    batch_key,
    damaged,
    sample_all,
)
from ..kernels import Array

NO_EDGES = torch.empty((2, 0), dtype=torch.int64)  # a NodeLoader fills in each batch's edges

# for each batch, the number of new nodes at each hop, seeds first, and of edges at each hop
Hops = list[tuple[list[int], list[int]]]


def _read_only(part: Array | Tensor) -> Array:
    # one kind of view, so that numba compiles one variant per dtype of `row`
    view = np.asarray(part).view(np.ndarray)
    view.flags.writeable = False
    return view


class CSCSampler(BaseSampler):  # type: ignore[misc]  # PyG ships no types
    """Uniform neighbor sampling without replacement from one homogeneous graph, for PyG's
    `NodeLoader`; a pure function of (seed, epoch, batch, hop, node), see `graph.neighbors`.

    The output is like that of PyG's own `NeighborSampler` with `replace=False, disjoint=False,
    subgraph_type="directional"`. Seeds come first. Each node is expanded once, at the hop after its
    discovery, with min(k, degree) distinct in-edges (a duplicated edge counts as two edges). `edge`
    is None: the sampler is for graphs without edge attributes.

    Safe to call from several threads at once, and to fork.

    Args:
        colptr: int64 [num_nodes + 1], ascending from 0 to num_edges: the in-edges of `v` lie at
            `row[colptr[v]:colptr[v + 1]]`. A C-contiguous numpy array (`np.memmap` included) or CPU
            tensor; not copied.
        row: int32 or int64 [num_edges], global ids of the edges' sources. An array or tensor as for
            `colptr`; not copied.
        num_neighbors: one fan-out per hop, the seeds' first; at least 1, or -1 for all neighbors.
        seed: any integer of 64 bits; together with the epoch and the batch's first seed it decides
            every choice.
        fixed: whether each node has the same neighbors in all batches and at all hops, for
            evaluations.
        where: path of the graph's store, for messages.
    """

    def __init__(
        self,
        colptr: Array | Tensor,
        row: Array | Tensor,
        num_neighbors: Sequence[int],
        *,
        seed: int = 0,
        fixed: bool = False,
        where: str = "",
    ) -> None:
        fanouts = list(num_neighbors)
        are_counts = (isinstance(k, int | np.integer) and (k >= 1 or k == -1) for k in fanouts)
        if not fanouts or not all(are_counts):
            raise InputError(
                f"num_neighbors: expected fan-outs of at least 1, or -1 for all, got {fanouts}"
            )
        self.num_neighbors = [int(k) for k in fanouts]
        self.seed = int(seed)
        self.fixed = fixed
        self._where = where
        # nodes of the last batch, to size the next one's table: 20 in place of 23 ms for a batch of
        # [15, 10, 5] x 1024
        self._expected = 0
        self.colptr = _read_only(colptr)
        self.row = _read_only(row)
        edges = len(self.row)
        if not len(self.colptr) or self.colptr[0] != 0 or self.colptr[-1] != edges:
            problem = f"colptr: expected offsets from 0 to the {edges} entries of row, found others"
            raise damaged(self._where, problem)
        if len(self.colptr) > 2**32:  # 32 bits of a table entry are for a local id + 1
            raise InputError(f"colptr: expected under 2**32 nodes, found {len(self.colptr) - 1}")
        # in shared memory, so that workers that are already running see `set_epoch`
        self._epoch = torch.tensor([0]).share_memory_()  # type: ignore[no-untyped-call]
        # compiles the kernels here, once, and not in each forked worker
        self.sample_batches(np.empty(0, np.int64), 0, [np.uint64(0)])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and so draw other neighbors from now on, also in DataLoader workers that
        are already running."""
        self._epoch[0] = epoch

    def at_epoch(self, epoch: int) -> Self:
        """Return a sampler over the same arrays with an epoch of its own."""
        sampler = copy.copy(self)
        sampler._epoch = torch.tensor([epoch]).share_memory_()  # type: ignore[no-untyped-call]
        return sampler

    def sample_from_nodes(self, inputs: NodeSamplerInput, **kwargs: object) -> SamplerOutput:
        """Sample the neighborhood of `inputs.node` (integers [batch_size], global ids).

        `inputs.input_id[0]` identifies the batch within its epoch, or `inputs.node[0]` if there is
        no `input_id`. Local ids are in order of discovery. Edges come hop by hop, ascending by
        target; the edges of one target are in stored order. A repeated seed has a local id and
        edges of its own, as in PyG.
        """
        seeds = np.ascontiguousarray(inputs.node.numpy(), np.int64)
        ids = inputs.input_id
        positions = seeds if ids is None else ids.numpy()
        key = self.batch_key(int(positions[0]) if len(seeds) else 0)
        node, edges, hops = self.sample_batches(seeds, len(seeds), [key])
        row, col = edges.view(2, -1)  # local ids of sources and targets
        # None: no edge ids (`edge`), and seeds share their subgraph (`batch`)
        return SamplerOutput(node, row, col, None, None, *hops[0], metadata=(ids, inputs.time))

    def sample_from_edges(
        self, inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput:
        """Sample the neighborhood of both ends of edges, and of PyG's negative edges, for
        `LinkLoader`."""
        if inputs.time is not None:
            raise InputError(
                "edge_label_time: expected none, as this sampler does not look at times"
            )
        positions = inputs.row if inputs.input_id is None else inputs.input_id
        first = int(positions[0]) if len(inputs.row) else 0  # identifies the batch

        def sample(seed: Tensor, _: object) -> SamplerOutput:  # the ends of all edges
            ids = torch.tensor([first]) if len(seed) else None
            return self.sample_from_nodes(NodeSamplerInput(input_id=ids, node=seed))

        # before `fork_rng`, because a subclass may draw the key from torch's global generator
        key = int(self.batch_key(first))
        with torch.random.fork_rng(devices=[]):  # PyG draws negative edges from that generator
            torch.manual_seed(key & (2**63 - 1))
            # not disjoint, no times
            return edge_sample(inputs, sample, len(self.colptr) - 1, False, None, neg_sampling)

    def batch_key(self, first: int, epoch: int | None = None) -> np.uint64:
        """Return the key, uint64, that decides all choices of a batch in `epoch` (default: the
        current one); `first` is the position of its first seed among the loader's nodes."""
        epoch = int(self._epoch[0]) if epoch is None else epoch
        seed = np.uint64(self.seed & (2**64 - 1))  # the mask: it may be negative
        return np.uint64(batch_key(seed, epoch, 0 if self.fixed else first))

    def sample_batches(
        self, seeds: Array, size: int, keys: list[np.uint64]
    ) -> tuple[Tensor, Tensor, Hops]:
        """Sample batches of `size` seeds (int64), one for each key, in one call that releases the
        interpreter's lock.

        Returns the nodes' global ids, batch after batch; the edges' local ids, for each batch all
        sources, then all targets; and each batch's hops, see `Hops`. Ids are int64 in RAM.
        """
        num_nodes = len(self.colptr) - 1
        status, culprit, nodes, edges, hop_nodes, hop_edges = sample_all(
            self.colptr,
            self.row,
            seeds,
            size,
            np.array(self.num_neighbors, np.int64),
            np.array(keys, np.uint64),
            self.fixed,
            self._expected,
            ANY_NUMBER,
        )
        if status == BAD_ID:
            raise InputError(
                f"inputs.node: expected seeds from 0 to {num_nodes - 1}, found {culprit}"
            )
        if status == BAD_COLUMN:
            raise bad_column(self._where, num_nodes, culprit)
        self._expected = len(nodes) // len(keys)
        hops = list(zip(hop_nodes.tolist(), hop_edges.tolist(), strict=True))
        return torch.from_numpy(nodes), torch.from_numpy(edges), hops
