"""What `CSCSampler` and `EpochSampler` promise, against brute force on small random multigraphs."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import csc_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch_geometric.sampler import NodeSamplerInput, SamplerOutput

from ogbnlib.errors import InputError
from ogbnlib.graph.neighbors import batch_key, choose, node_state
from ogbnlib.sampling.order import EpochSampler
from ogbnlib.sampling.sampler import CSCSampler

# A statistical test here fails by chance once in a million runs; its seeds are fixed, so it passes
# always or never.
P_VALUE = 1e-6


def random_graph(dtype: Any = np.int64) -> tuple[np.ndarray, np.ndarray]:
    return csc_of(np.random.default_rng(0).integers(0, 300, (4000, 2)).astype(dtype).T, 300)


def seeds_of(*nodes: int, position: int | None = 0) -> NodeSamplerInput:
    ids = None if position is None else torch.arange(position, position + len(nodes))
    return NodeSamplerInput(input_id=ids, node=torch.tensor(nodes, dtype=torch.long))


def flat(out: SamplerOutput) -> tuple[list[int], ...]:
    tensors = (tensor.tolist() for tensor in (out.node, out.row, out.col))
    return (*tensors, list(out.num_sampled_nodes), list(out.num_sampled_edges))


def chosen(degree: int, k: int, key: int, hop: int = 0, node: int = 0) -> list[int]:
    out = np.full(max(degree, 1), -7, np.int64)
    count = choose(np.uint64(node_state(np.uint64(key), hop, node)), degree, k, out)
    assert (out[count:] == -7).all()
    return out[:count].tolist()


@st.composite
def problems(draw: Any) -> tuple[int, list[tuple[int, int]], list[int], list[int], int]:
    num_nodes = draw(st.integers(1, 12))
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=60))
    seeds = draw(st.lists(node, min_size=1, max_size=num_nodes, unique=True))
    fanouts = draw(st.lists(st.sampled_from([-1, 1, 2, 3, 5, 40]), min_size=1, max_size=4))
    return num_nodes, edges, seeds, fanouts, draw(st.integers(0, 2**63 - 1))


@settings(max_examples=100, deadline=None)
@given(problems())
def test_a_batch_has_the_structure_that_pyg_defines(problem: Any) -> None:
    num_nodes, edges, seeds, fanouts, seed = problem
    colptr, row = csc_of(np.array(edges, np.int64).reshape(-1, 2).T, num_nodes)
    out = CSCSampler(colptr, row, fanouts, seed=seed).sample_from_nodes(seeds_of(*seeds))
    node, source, target, hop_nodes, hop_edges = flat(out)

    assert all(t.dtype == torch.int64 and t.is_contiguous() for t in (out.node, out.row, out.col))
    assert node[: len(seeds)] == seeds
    assert len(set(node)) == len(node)
    assert len(hop_nodes) == len(fanouts) + 1
    assert len(hop_edges) == len(fanouts)
    assert hop_nodes[0] == len(seeds)
    assert sum(hop_nodes) == len(node)
    assert sum(hop_edges) == len(source) == len(target)
    assert out.edge is None
    assert out.batch is None

    # Walk the edges in order: who is expanded when, and in which order nodes are discovered.
    known, edge, expanded = len(seeds), 0, 0
    for hop, k in enumerate(fanouts):
        frontier = range(expanded, known)
        for col in frontier:
            stored = [int(s) for s in row[colptr[node[col]] : colptr[node[col] + 1]]]
            count = len(stored) if k < 0 else min(k, len(stored))
            mine = slice(edge, edge + count)
            assert target[mine] == [col] * count
            taken = [node[s] for s in source[mine]]
            # every edge exists, none more often than it is stored
            assert Counter(taken) <= Counter(stored)
            if count == len(stored):
                assert taken == stored
            for s in source[mine]:
                assert s <= known
                known += s == known
            edge += count
        assert hop_edges[hop] == edge - sum(hop_edges[:hop])
        expanded = frontier.stop
        assert hop_nodes[hop + 1] == known - expanded
    assert edge == len(source)
    assert known == len(node)


@pytest.mark.parametrize(("degree", "k"), [(5, 2), (60, 33), (500, 40)])
def test_every_position_is_equally_likely(degree: int, k: int) -> None:
    draws = 4000
    counts = np.zeros(degree)
    for first in range(draws):
        counts[chosen(degree, k, batch_key(0, 0, first))] += 1
    # The counts' covariance is draws * p * (1 - p) * d / (d - 1) * (I - 1/d), because each draw's
    # counts sum to k; so this is chi-square with d - 1 degrees of freedom. Too small a statistic is
    # as suspect as too large a one.
    p = k / degree
    statistic = ((counts - draws * p) ** 2).sum() / (draws * p * (1 - p)) * (degree - 1) / degree
    assert P_VALUE < chi2.sf(statistic, degree - 1) < 1 - P_VALUE


def test_a_fixed_sampler_gives_a_node_the_same_neighbors() -> None:
    graph = random_graph()
    sampler, found = CSCSampler(*graph, [3, 3, 3], fixed=True), dict[int, list[int]]()
    for position, seeds in enumerate(([1, 2], [2, 3, 4], [9, 1, 5, 250])):
        out = sampler.sample_from_nodes(seeds_of(*seeds, position=position))
        for i, node in enumerate(out.node[: sum(out.num_sampled_nodes[:-1])].tolist()):
            mine = out.node[out.row[out.col == i]].tolist()
            assert found.setdefault(node, mine) == mine
    assert len(found) > 20
    other = CSCSampler(*graph, [3, 3, 3], seed=1, fixed=True).sample_from_nodes(seeds_of(1, 2))
    assert flat(other) != flat(sampler.sample_from_nodes(seeds_of(1, 2)))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("place", ["read_only", "shared", "memmap"])
def test_batches_depend_on_neither_memory_nor_dtype(place: str, dtype: Any, tmp_path: Path) -> None:
    arrays: list[Any] = list(random_graph(dtype=dtype))
    if place == "read_only":
        for array in arrays:
            array.flags.writeable = False
    elif place == "shared":
        arrays = [torch.from_numpy(array).share_memory_() for array in arrays]
    else:
        for i, array in enumerate(arrays):
            np.save(tmp_path / f"{i}.npy", array)
        arrays = [np.load(tmp_path / f"{i}.npy", mmap_mode="r") for i in range(2)]
    out = CSCSampler(*arrays, [3, -1, 2]).sample_from_nodes(seeds_of(5, 1, 9))
    plain = CSCSampler(*random_graph(), [3, -1, 2]).sample_from_nodes(seeds_of(5, 1, 9))
    assert flat(out) == flat(plain)


def test_wrong_seeds_and_offsets_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"from 0 to 299, found -1$"):
        CSCSampler(*random_graph(), [2]).sample_from_nodes(seeds_of(3, -1, position=None))
    with pytest.raises(InputError, match=r"colptr: .*1 entries"):
        CSCSampler(np.array([0, 2]), np.zeros(1, np.int64), [1])


@pytest.mark.parametrize("num_nodes", [2, 300])
def test_a_repeated_seed_is_a_node_with_the_same_neighbors(num_nodes: int) -> None:
    """As in PyG: model(...)[:batch_size] has a row for each seed."""
    colptr, row = random_graph()
    if num_nodes == 2:
        colptr, row = np.array([0, 1, 2]), np.array([1, 0])
    ids = [1, 0, 1, 1, 0]
    sampler = CSCSampler(colptr, row, [3, 2])
    again = sampler.sample_from_nodes(NodeSamplerInput(torch.arange(5), torch.tensor(ids)))
    once = sampler.sample_from_nodes(NodeSamplerInput(torch.arange(2), torch.tensor([1, 0])))
    assert again.node[:5].tolist() == ids
    assert again.num_sampled_nodes[0] == 5
    assert {*again.node.tolist()} == {*once.node.tolist()}
    assert len(again.node) == len(once.node) + 3

    def sources(out: SamplerOutput, target: int) -> list[int]:
        return out.node[out.row[out.col == target]].tolist()

    for place, node in enumerate(ids):
        assert sources(again, place) == sources(once, [1, 0].index(node))
    assert not {*again.row.tolist()} & {2, 3, 4}  # each node is the source of its edges once


@pytest.mark.parametrize(
    ("colptr", "row"), [([0, 2, 1, 2], [1, 1]), ([0, 9, 9, 2], [1, 1]), ([0, 1, 2, 2], [-1, 1])]
)
def test_a_damaged_column_is_refused_when_it_is_met(colptr: list[int], row: list[int]) -> None:
    sampler = CSCSampler(np.array(colptr), np.array(row), [-1, -1])
    with pytest.raises(InputError, match=r"colptr, row: .*node [01];"):
        sampler.sample_from_nodes(seeds_of(0, 1))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 200),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 1000),
    st.booleans(),
    st.data(),
)
def test_epochs_permute_and_resume(n: int, seed: int, epoch: int, shuffle: bool, data: Any) -> None:
    start = data.draw(st.integers(0, n))
    whole, rest = (EpochSampler(n, seed=seed, shuffle=shuffle) for _ in range(2))
    whole.set_epoch(epoch)
    rest.set_epoch(epoch, start)
    order = list(whole)
    assert sorted(order) == list(range(n))
    assert shuffle or order == list(range(n))
    assert list(rest) == order[start:] == list(rest)
    assert len(rest) == n - start
    rest.set_epoch(epoch)
    assert list(rest) == order
