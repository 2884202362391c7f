"""Promises of PyG's own loaders over data of a store, where pyg-lib and torch-sparse are missing."""

import pytest
from torch_geometric.loader import NeighborLoader
from torch_geometric.sampler import NeighborSampler
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from ogbnlib.graph.store import Store
from ogbnlib.sampling.pyg_stores import sample_without_pyg_lib


def test_stock_loaders_run_without_pyg_lib(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = NeighborSampler.sample_from_nodes
    monkeypatch.setattr(NeighborSampler, "sample_from_nodes", stock)
    sample_without_pyg_lib()
    data = store.to_data()
    train = NeighborLoader(data, [3, 2], data.train_mask, batch_size=16)
    how = {"batch_size": 16, "neighbor_sampler": train.node_sampler}
    valid = NeighborLoader(data, [3, 2], data.val_mask, **how)
    assert valid.node_sampler is train.node_sampler
    presorted = NeighborLoader(data, [3, 2], data.val_mask, batch_size=16, is_sorted=True)
    assert (
        presorted.node_sampler.row.data_ptr() == data.edge_index.data_ptr()
    )  # the data's edges, no copy
    assert presorted.node_sampler.colptr.equal(train.node_sampler.colptr)
    for batch in (*train, *valid, *presorted):
        edges = set(zip(*store.read_edge_index().tolist(), strict=True))
        assert set(zip(*batch.n_id[batch.edge_index].tolist(), strict=True)) <= edges
        assert batch.x.equal(data.x[batch.n_id])
    replacing = NeighborLoader(data, [3, 2], data.train_mask, batch_size=16, replace=True)
    if not WITH_PYG_LIB and not WITH_TORCH_SPARSE:
        with pytest.raises(ImportError, match="pyg-lib"):
            next(iter(replacing))


def test_half_width_features_are_those_of_half(store: Store) -> None:
    data, half = store.to_data(), store.to_data(half=True)
    assert half.x.equal(data.x.half())
    assert half.edge_index.equal(data.edge_index)
