"""A store made into another one: the same graph, with other features or with reverse edges."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import random_arrays, tree

from ogbnlib import convert, propagate
from ogbnlib.errors import InputError
from ogbnlib.graph.store import Store
from ogbnlib.graph.writer import verify_store
from ogbnlib.sources.arrays import from_arrays

many_chunks = pytest.mark.parametrize("file_chunks", [256], indirect=True)
pytestmark = [pytest.mark.usefixtures("file_chunks"), many_chunks]
ARRAYS = ("colptr", "row", "y", "train", "valid", "test")


@pytest.fixture(scope="module")
def graph() -> dict[str, Any]:
    return random_arrays(200, 1500, 5, 4)


@pytest.fixture
def store(tmp_path: Path, graph: dict[str, Any]) -> Store:
    return convert(from_arrays("any", **graph), tmp_path / "store", progress=False)


@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("feature_dtype", ["float16", "int8", None])
def test_it_equals_the_store_of_the_original(
    tmp_path: Path, graph: dict[str, Any], store: Store, undirected: bool, feature_dtype: Any
) -> None:
    options = {"undirected": undirected, "feature_dtype": feature_dtype, "progress": False}
    expected = convert(from_arrays("any", **graph), tmp_path / "expected", **options)
    other = convert(store.path, tmp_path / "other", **options)
    for name in (*ARRAYS, "x"):
        assert tree(other.path)[f"{name}.npy"] == tree(expected.path)[f"{name}.npy"]
    assert (other.size, other.origin["num_nodes"]) == (expected.size, 200)
    assert verify_store(other.path) == []


def test_reverse_edges_are_added_once(tmp_path: Path, store: Store) -> None:
    both = convert(store, tmp_path / "both", undirected=True, progress=False)
    again = convert(both, tmp_path / "again", undirected=True, progress=False)
    half = convert(both, tmp_path / "half", feature_dtype="float16", progress=False)
    for other in (again, half):
        assert other.undirected
        assert tree(other.path)["row.npy"] == tree(both.path)["row.npy"]


def test_int8_becomes_floats_and_the_same_int8_again(tmp_path: Path, store: Store) -> None:
    small = convert(store, tmp_path / "int8", feature_dtype="int8", progress=False)
    floats = convert(small, tmp_path / "float32", feature_dtype="float32", progress=False)
    np.testing.assert_array_equal(floats.read("x"), small.read("x"))
    again = convert(small, tmp_path / "again", progress=False)
    np.testing.assert_allclose(again.read("x"), small.read("x"), atol=1e-6)


def test_names_stay(tmp_path: Path, graph: dict[str, Any]) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    names = np.array([f"n{i}" for i in range(200)])
    src, dst = names[graph["edge_index"]]
    pd.DataFrame({"source": src, "target": dst}).to_csv(folder / "edges.csv", index=False)
    x = pd.DataFrame(graph["x"]).add_prefix("x")
    split = np.repeat(["train", "valid", "test", ""], 50)
    nodes = x.assign(node_id=names, label=np.array(["red", "green"])[graph["y"] % 2], split=split)
    nodes.to_csv(folder / "nodes.csv", index=False)
    first = convert(folder, tmp_path / "store", progress=False)
    second = convert(first, tmp_path / "float16", feature_dtype="float16", progress=False)
    np.testing.assert_array_equal(second.node_name, names)
    assert list(second.label_name) == list(first.label_name) == ["green", "red"]
    assert second.origin == first.origin


def test_what_is_refused_leaves_nothing(tmp_path: Path, store: Store) -> None:
    hops = propagate(store.path, tmp_path / "hops", hops=1, progress=False)
    with pytest.raises(InputError, match="hops: expected a graph"):
        convert(hops, tmp_path / "new", progress=False)
    damaged = shutil.copytree(store.path, tmp_path / "damaged")
    with open(damaged / "colptr.npy", "r+b") as file:
        file.seek(-8, 2)
        file.write(bytes(8))  # the last offset
    with pytest.raises(InputError, match=r"colptr\.npy"):
        convert(damaged, tmp_path / "new", progress=False)
    with open(store.file_path("row"), "r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\0\0\0")
    with pytest.raises(InputError, match=r"row\.npy"):
        convert(store.path, tmp_path / "new", progress=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("none", ["num_nodes", "num_features"])
def test_an_empty_source_is_refused(tmp_path: Path, graph: dict[str, Any], none: str) -> None:
    source = replace(from_arrays("any", **graph), **{none: 0})
    with pytest.raises(InputError, match="expected nodes with features"):
        convert(source, tmp_path / "new", progress=False)
