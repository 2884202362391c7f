"""A conversion ends with counts that an independent count confirms, at every door."""

import json
from pathlib import Path
from typing import Any

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


LABEL_COUNTS = {
    "largest_class": [0, 4],
    "smallest_class": [2, 2],
    "empty_classes": 2,
    "unlabelled_nodes": 3,
}
TEXT = """: 9 nodes, 5 edges, store of 28 kB
  edges: 5 read (10 with their reverses, 5 of them merged); self-loops: 1; isolated nodes: 4
  classes: 4; largest: 0 with 4; smallest: 2 with 2; without a node: 2
  splits: train 3, valid 2, test 0; nodes without a label: 3
"""


def test_the_command_prints_the_counts(raw: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["convert", str(raw), str(tmp_path / "text"), "--undirected"])
    assert TEXT in shown.output
    shown = CliRunner().invoke(app, ["convert", str(raw), str(tmp_path / "json"), "--json"])
    facts = json.loads(shown.stdout)
    assert facts["splits"] == {"train": 3, "valid": 2, "test": 0}
    counts = {"edges_read": 5, "merged_edges": 0, "self_loops": 1, "isolated_nodes": 4}
    assert {name: facts[name] for name in counts | LABEL_COUNTS} == counts | LABEL_COUNTS


def test_a_store_keeps_its_counts_and_each_door_says_them(raw: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    how: dict[str, Any] = {"progress": False, "say": lines.append}
    store = convert(raw, tmp_path / "both", undirected=True, progress=False)
    from_data = Store.from_data(store.to_data(), tmp_path / "copy", **how)
    assert lines[-1] == summarized(from_data)
    assert "edges: 5 read; self-loops: 1; isolated nodes: 4" in lines[-1]


def test_classes_have_their_names_and_old_stores_one_line(tmp_path: Path, raw: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    names = {"cs": 3, "math": 1}
    labels = "".join(f"{name}\n" * count for name, count in names.items())
    (folder / "labels.csv").write_text(f"label\n{labels}")
    (folder / "edges.csv").write_text("source,target\n0,1\n")
    np.save(folder / "features.npy", np.ones((4, 2)))
    (folder / "splits.csv").write_text("node_id,split\n0,train\n1,valid\n3,test\n")
    text = summarized(convert(folder, tmp_path / "named", progress=False))
    assert "classes: 2; largest: 'cs' with 3; smallest: 'math' with 1; without a node: 0\n" in text
    store = convert(raw, tmp_path / "store", progress=False)
    object.__setattr__(store, "summary", {})
    assert "\n" not in summarized(store)
