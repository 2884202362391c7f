"""The promises of synth: a small papers100M, deterministic, bounded and worth learning on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from conftest import csc_of, raw_arrays, tree

from ogbnlib.graph.writer import verify_store
from ogbnlib.sources import synth as citations
from ogbnlib.sources.convert import convert
from ogbnlib.sources.source import Source
from ogbnlib.sources.synth import synthesize, synthesize_store

TINY = 1e-4  # 11,106 nodes


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return synthesize(tmp_path_factory.mktemp("synth") / "tiny", TINY)


def test_counts_and_labels_are_those_of_papers100m_to_scale(dataset: Source) -> None:
    assert dataset.num_nodes == round(111_059_956 * TINY)
    assert dataset.num_edges / dataset.num_nodes == pytest.approx(14.548, rel=0.03)
    assert (dataset.num_features, dataset.num_classes) == (128, 172)
    splits = dataset.read_splits()
    sizes = {name: len(ids) for name, ids in splits.items()}
    assert sizes == {"train": 121, "valid": 13, "test": 21}
    labelled = np.sort(np.concatenate(list(splits.values())))
    np.testing.assert_array_equal(labelled, np.unique(labelled))
    np.testing.assert_array_equal(np.flatnonzero(raw_arrays(dataset.path)["y"] >= 0), labelled)


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE")
def test_ogbs_unchanged_programs_open_it_by_its_official_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ogb.nodeproppred import NodePropPredDataset, PygNodePropPredDataset

    # ogb 1.3.6 loads its own file without weights_only (snap-stanford/ogb#497)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    source = synthesize(tmp_path / "ogbn_papers100M", TINY)
    dataset = NodePropPredDataset("ogbn-papers100M", root=str(tmp_path))
    graph, labels = dataset[0]
    years, splits = graph["node_year"], dataset.get_idx_split()
    assert years.shape == labels.shape == (source.num_nodes, 1)
    assert {*years[splits["train"]].ravel()} == {2017}
    assert {*years[splits["valid"]].ravel()} == {2018}
    assert {*years[splits["test"]].ravel()} == {2019}
    data = PygNodePropPredDataset("ogbn-papers100M", root=str(tmp_path))[0]
    np.testing.assert_array_equal(data.node_year, years)
    np.testing.assert_array_equal(data.edge_index, raw_arrays(source.path)["edge_index"])


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(
    dataset: Source, tmp_path: Path
) -> None:
    again = synthesize(tmp_path / "again", TINY)
    other = synthesize(tmp_path / "other", TINY, seed=1)
    assert tree(again.path) == tree(dataset.path)
    for name, values in raw_arrays(dataset.path).items():
        assert not np.array_equal(raw_arrays(other.path)[name], values)


def ridge_accuracy(dataset: Source, hops: int, undirected: bool) -> float:
    """Test accuracy of ridge regression on the features and the mean features of 1 .. `hops`
    hops."""
    arrays, splits = raw_arrays(dataset.path), dataset.read_splits()
    x, y = arrays["x"], arrays["y"]
    colptr, row = csc_of(arrays["edge_index"], dataset.num_nodes, undirected)
    adjacency = sp.csr_matrix((np.ones(len(row), np.float32), row, colptr), 2 * [len(x)])
    degree = np.maximum(np.diff(colptr), 1)[:, None]
    parts = [x]
    for _ in range(hops):
        parts.append(adjacency @ parts[-1] / degree)
    train, test = ([part[splits[name]] for part in parts] for name in ("train", "test"))
    a, b = np.hstack(train), np.hstack(test)
    target = np.eye(dataset.num_classes)[y[splits["train"]]]
    mean = target.mean(axis=0)
    weights = np.linalg.solve(a.T @ a + 30.0 * np.eye(a.shape[1]), a.T @ (target - mean))
    return float(((b @ weights + mean).argmax(axis=1) == y[splits["test"]]).mean())


@pytest.mark.slow
def test_hops_and_reverse_edges_each_help(tmp_path: Path) -> None:
    dataset = synthesize(tmp_path / "learn", 0.002, num_features=32, num_classes=20)
    features = ridge_accuracy(dataset, 0, False)
    one, two = ridge_accuracy(dataset, 1, False), ridge_accuracy(dataset, 2, False)
    one_both, two_both = ridge_accuracy(dataset, 1, True), ridge_accuracy(dataset, 2, True)
    test = dataset.read_splits()["test"]
    share = np.bincount(raw_arrays(dataset.path)["y"][test]).max() / len(test)
    assert share < features < one < two
    assert one < one_both < two_both < 0.9
    assert two < two_both


@pytest.mark.parametrize(("undirected", "feature_dtype"), [(False, "float32"), (True, "float16")])
def test_a_store_is_the_one_that_converting_the_raw_files_gives(
    dataset: Source, tmp_path: Path, undirected: bool, feature_dtype: Any
) -> None:
    options: Any = {"undirected": undirected, "feature_dtype": feature_dtype, "progress": False}
    straight = synthesize_store(tmp_path / "straight", TINY, **options)
    converted = convert(dataset.path, tmp_path / "converted", **options)
    assert straight.files == converted.files
    assert (straight.num_classes, straight.undirected) == (converted.num_classes, undirected)
    assert straight.origin["synthetic"] == {"scale": TINY, "seed": 0}
    assert verify_store(straight.path) == []


def test_a_store_does_not_depend_on_the_size_of_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"num_features": 3, "num_classes": 5, "progress": False}
    large = synthesize_store(tmp_path / "large", TINY, **options)
    monkeypatch.setattr(citations, "_NODES", 997)
    assert synthesize_store(tmp_path / "small", TINY, **options).files == large.files


def test_labelled_papers_are_a_field_that_cites_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def distinct_share() -> float:
        dataset = synthesize(tmp_path / str(citations._FIELD), 1e-3, num_features=1)
        labelled = np.concatenate(list(dataset.read_splits().values()))
        assert len(np.unique(labelled)) == 1546  # one field has as many labels as the whole
        source, cited = raw_arrays(dataset.path)["edge_index"]
        return len(np.unique(cited[np.isin(source, labelled)])) / np.isin(source, labelled).sum()

    whole = distinct_share()
    monkeypatch.setattr(citations, "_FIELD", 11_000)  # of 111,060 papers
    assert distinct_share() < 0.5 * whole
