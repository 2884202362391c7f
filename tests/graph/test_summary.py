"""A conversion ends with counts that an independent count confirms, at every door."""

import json
from pathlib import Path

import numpy as np
import pytest
from ogb_layout import write_raw
from typer.testing import CliRunner

from ogbnlib import convert
from ogbnlib.data_commands import app
from ogbnlib.graph.store import Store
from ogbnlib.graph.summary import summarized

# 0 -> 1 comes twice and its reverse once, 2 has a self-loop; 3 -> 4; 5 to 8 have no edge.
EDGES = np.array([[0, 0, 1, 2, 3], [1, 1, 0, 2, 4]])
LABELS = np.array([0, 0, 0, 2, 2, -1, 0, -1, -1])
SPLITS = {"train": [0, 1, 2], "valid": [3, 4], "test": []}


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    x = np.ones((9, 2), np.float32)
    path = tmp_path / "raw"
    write_raw(path, edge_index=EDGES, x=x, y=LABELS, splits=SPLITS, num_classes=4)
    return path


COUNTS = {"edges_read": 5, "merged_edges": 0, "empty_classes": 2, "unlabelled_nodes": 3}
COUNTS |= {"largest_class": [0, 4], "smallest_class": [2, 2]}


def test_the_command_prints_the_counts(raw: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", str(raw), str(tmp_path / "text"), "--undirected"])
    words = " ".join(done.output.split())
    for fact in ("9 nodes, 5 edges", "read: 5;", "merged edges: 5;", "largest class: '0' with 4;"):
        assert fact in words
    done = CliRunner().invoke(app, ["convert", str(raw), str(tmp_path / "json"), "--json"])
    facts = json.loads(done.stdout)
    assert facts["splits"] == {"train": 3, "valid": 2, "test": 0}
    assert {name: facts[name] for name in COUNTS} == COUNTS


def test_a_store_keeps_its_counts_and_each_door_says_them(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = convert(raw, tmp_path / "both", undirected=True, progress=False)
    copy = Store.from_data(store.to_data(), tmp_path / "copy", progress=False)
    assert capsys.readouterr().out == f"{summarized(copy)}\n"
    assert copy.summary["edges_read"] == 5


def test_classes_have_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "labels.csv").write_text("label\ncs\ncs\ncs\nmath\n")
    (folder / "edges.csv").write_text("source,target\n0,1\n")
    np.save(folder / "features.npy", np.ones((4, 2)))
    (folder / "splits.csv").write_text("node_id,split\n0,train\n1,valid\n3,test\n")
    text = summarized(convert(folder, tmp_path / "named", progress=False))
    assert "largest class: 'cs' with 3; smallest class: 'math' with 1;" in " ".join(text.split())


def test_columns_on_a_larger_scale_are_named(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(9, 5))
    graph = {"edge_index": EDGES, "y": LABELS, "splits": SPLITS, "progress": False}
    names = []
    for scale, standardize in ((50, False), (500, True), (500, False)):
        graph |= {"x": x * [1, 1, 1, scale, 1], "standardize": standardize}
        store = Store.from_arrays(tmp_path / f"{scale}{standardize}", **graph)
        names.append(store.summary.get("spread_over_100_times_the_median"))
    assert names == [None, None, "3"]
    assert "the median: 3 (in dataset.yaml: standardize: true)" in " ".join(
        summarized(store).split()
    )
