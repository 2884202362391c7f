"""Promises of `memory_parts`, `step_memory` and `batches`: each part has the size of the tensors that it names."""

import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.bench_planner import write_graph
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.sampler import NodeSamplerInput

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.forecast import batches
from ogbnlib.forecast.batches import BatchShape, Draw, draw_batches
from ogbnlib.forecast.memory_parts import (
    expected_batch,
    rows_left,
    shared_nodes,
    stock_csc_bytes,
    store_bytes,
)
from ogbnlib.forecast.pass_memory import Pass
from ogbnlib.graph.store import Store, open_store
from ogbnlib.sampling.sampler import CSCSampler
from ogbnlib.sources.convert import convert
from ogbnlib.sources.official import KNOWN
from ogbnlib.sources.resolve import size_of
from ogbnlib.sources.synth import synthesize_store

PAPERS = KNOWN["ogbn-papers100M"]


@pytest.mark.parametrize("undirected", [False, True])
def test_a_store_has_the_size_of_its_files(
    tiny_dir: Path, tmp_path: Path, undirected: bool
) -> None:
    how: dict[str, Any] = {"undirected": undirected, "feature_dtype": "float16"}
    store = convert(tiny_dir, tmp_path / "store", progress=False, **how)
    size = size_of(str(tmp_path / "store"))
    assert (size.num_nodes, size.num_edges) == (300, len(store.row))
    assert (size.num_features, size.num_classes) == (8, 4)
    assert (size.stored, size.feature_itemsize, size.undirected) == ("store", 2, undirected)
    assert dict(size.num_seeds) == {name: len(ids) for name, ids in store.splits.items()}
    files = {name: getattr(store, name).nbytes for name in ("colptr", "row", "x")}
    assert store_bytes(TrainConfig.create(dataset="x", loading="store"), size) == files


def test_a_stock_loader_keeps_what_stock_csc_bytes_says(tiny_store: Path) -> None:
    edge_index = torch.from_numpy(open_store(tiny_store).read_edge_index())
    data = Data(edge_index=edge_index, num_nodes=300)
    stock = NeighborLoader(data, [3], input_nodes=torch.arange(9)).node_sampler
    kept = sum(tensor.nbytes for tensor in (stock.colptr, stock.row, stock.perm))
    assert kept == stock_csc_bytes(size_of(str(tiny_store)), 3000)


@pytest.fixture(scope="module", params=[False, True], ids=["directed", "undirected"])
def drawn_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("data") / "drawn"
    return synthesize_store(path, scale=0.001, undirected=request.param, progress=False)


def sampled(
    store: Store, split: str, batch_size: int, fan_out: Sequence[int]
) -> tuple[float, float]:
    """Mean nodes and edges of sampled batches: of any seeds in training, else of the first ones."""
    sampler, ids = CSCSampler(store.colptr, store.row, fan_out), store.splits[split]
    random, sizes = np.random.default_rng(1), []
    for number in range(6):
        begin = number % max(1, len(ids) // batch_size) * batch_size
        seeds = ids[begin : begin + batch_size]
        if split == "train":
            seeds = random.permutation(ids)[:batch_size]
        one = sampler.sample_from_nodes(NodeSamplerInput(None, torch.from_numpy(seeds)))
        sizes.append((len(one.node), len(one.row)))
    nodes, edges = np.mean(sizes, axis=0)
    return float(nodes), float(edges)


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("fan_out", [[15, 10, 5], [25, -1]], ids=str)
def test_draws_are_as_large_as_samples(drawn_store: Store, fan_out: list[int], split: str) -> None:
    nodes, edges = sampled(drawn_store, split, 64, fan_out)
    drawn = draw_batches(drawn_store, split, Draw(64, tuple(fan_out), split == "train", 0), 100)
    assert drawn is not None
    assert drawn.source == "drawn"
    assert drawn.mean.num_nodes == pytest.approx(nodes, rel=0.15)
    assert drawn.mean.num_edges == pytest.approx(edges, rel=0.15)
    assert drawn.mean.num_nodes <= drawn.largest.num_nodes <= 2.5 * nodes


@pytest.fixture(scope="module")
def hub_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A node has 100,000 in-neighbors, and is itself a neighbor of two nodes in each split."""
    path = tmp_path_factory.mktemp("data") / "hubs.store"
    write_graph("hubs-1-100000-8", path)
    return open_store(path)


@pytest.mark.parametrize("fan_out", [(-1, -1), (-1, 5), (-1,)], ids=str)
def test_the_largest_evaluated_batch_is_counted(hub_store: Store, fan_out: tuple[int, ...]) -> None:
    sampler = CSCSampler(hub_store.colptr, hub_store.row, fan_out)
    edges = []
    for seeds in torch.from_numpy(hub_store.splits["test"]).split(128):
        edges.append(len(sampler.sample_from_nodes(NodeSamplerInput(None, seeds)).row))
    found = draw_batches(hub_store, "test", Draw(128, fan_out, False, 0), len(edges))
    assert found is not None
    assert found.largest.num_edges == pytest.approx(max(edges), rel=0.01)
    if fan_out == (-1, -1):
        assert max(edges) > 100_000
        assert found.mean.num_edges < 30_000
        assert found.bound == found.largest  # all were counted


def test_the_highest_degree_bounds_random_or_uncounted_batches(hub_store: Store) -> None:
    finite = draw_batches(hub_store, "test", Draw(64, (5, 5), False, 0), 10)
    assert finite is not None
    assert finite.bound == finite.largest
    some = draw_batches(hub_store, "train", Draw(64, (2, -1), True, 0), 10)
    assert some is not None
    assert some.bound.num_edges > 100_000
    config = TrainConfig.create(dataset="x", eval_num_neighbors=-1)
    unseen = Pass.over(config, hub_store.size, "test", training=False).batches
    assert unseen.bound.num_edges == pytest.approx(hub_store.num_edges, rel=0.01)
    assert unseen.bound.num_nodes == hub_store.num_nodes


def test_a_batch_too_large_to_draw_is_extrapolated_upwards(
    drawn_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, edges = sampled(drawn_store, "train", 64, [15, 10, 5])
    monkeypatch.setattr(batches, "_EDGES", 6000)
    draw = Draw(64, (15, 10, 5), True, 0)
    drawn = draw_batches(drawn_store, drawn_store.splits["train"], draw, 100)  # ids: no cache
    assert drawn is not None
    assert drawn.source == "extrapolated"
    assert 0.95 * nodes < drawn.mean.num_nodes < 2 * nodes
    assert 0.85 * edges < drawn.mean.num_edges < 1.3 * edges


def test_a_neighbor_is_found_in_proportion_to_its_degree() -> None:
    # Sampled at 1 % of papers100M with reverse edges, 1,110,600 nodes and 31.8 M edges.
    size = replace(PAPERS, name="x", num_nodes=1_110_600, num_edges=31_795_614, undirected=True)
    for fan_out, seeds, nodes, edges in (
        ([25, -1], 256, 227_000, 296_000),
        ([-1, -1], 256, 284_000, 396_000),
        ([-1, -1, -1], 16, 610_000, 1_417_000),
        ([-1, -1, -1], 128, 1_051_000, 7_651_000),
    ):
        expected = expected_batch(size, None, seeds, fan_out)
        assert expected.num_nodes == pytest.approx(nodes, rel=0.2)
        assert expected.num_edges == pytest.approx(edges, rel=0.2)


def test_a_damaged_graph_is_no_traceback(tiny_store: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_store, tmp_path / "store")
    row = np.load(tmp_path / "store" / "row.npy", mmap_mode="r+")
    row[:] = 10**6
    row.flush()
    with pytest.raises(InputError, match="expected ascending offsets and ids"):
        draw_batches(open_store(tmp_path / "store"), "train", Draw(16, (3,), True, 0), 1)


@pytest.mark.parametrize(
    ("num_batches", "measured"), [(15, 758_000), (28, 1_193_000), (2358, 12_954_969)]
)
def test_full_size_batches_have_the_distinct_nodes_counted(num_batches: int, measured: int) -> None:
    """In windows and in the epoch of [15, 10] x 512 with reverse edges on the generated graph."""
    batch = BatchShape((512, 6663, 60_036), (6736, 65_993))
    expected = shared_nodes(PAPERS, True, batch, num_batches)
    assert expected == pytest.approx(measured, rel=0.2)


def test_a_batch_of_the_real_graph_has_the_nodes_that_others_report() -> None:
    # dgl's examples/graphbolt/disk_based_feature
    batch = expected_batch(PAPERS, True, 1024, [10, 10, 10])
    assert batch.num_nodes == pytest.approx(669_000, rel=0.1)


def test_seeds_without_neighbors_leave_every_row_in_its_window() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers, left = rows_left(PAPERS, False, BatchShape((128, 0), (0,)), 8, 255)
    assert left[0] == 1
    assert np.all(np.diff(numbers) >= 0)
