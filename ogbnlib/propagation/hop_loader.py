"""Batches of propagated features: rows of a mapped store, without a graph."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from ..graph.store import Store
from ..sampling.sampler import NO_EDGES


class HopLoader(DataLoader[int]):
    """Loader of a split's batches: `x` [B, (hops + 1) * F], hop after hop, in the store's dtype, and
    `y` [B]. `ids` are the split's nodes, int64 [n], and `labels` theirs."""

    node_sampler = None  # other loaders have one

    def __init__(self, store: Store, ids: Tensor, labels: Tensor, **arguments: Any) -> None:
        self._store = store
        self._ids = ids
        self._labels = labels
        super().__init__(range(len(ids)), collate_fn=self._batch, **arguments)  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        self._store.check_maps()  # refuses files that were written to since they were mapped
        return super().__iter__()

    def _batch(self, positions: list[int]) -> Data:
        input_id = torch.tensor(positions)  # in `ids`; the data set is their range
        ids = self._ids[input_id]
        return Data(  # with the attributes that batches have under any policy
            x=torch.from_numpy(self._store.x[ids.numpy()]),
            edge_index=NO_EDGES,
            y=self._labels[input_id],
            n_id=ids,
            input_id=input_id,
            batch_size=len(ids),
            num_sampled_nodes=[len(ids)],
            num_sampled_edges=[],
        )
