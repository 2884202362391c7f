"""The recipes of the guide's page on data run as they stand."""

import re
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from conftest import random_arrays

from ogbnlib import Store, open_store
from ogbnlib.graph.writer import verify_store

PAGE = Path(__file__).parents[2] / "notebooks" / "guide" / "data.md"
RECIPES = {
    re.search(r'"data/(\w+)"', code)[1]: code  # type: ignore[index]
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    if 'Store.from_arrays("data/' in code and not code.startswith("splits")
}
N, E = 60, 300


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The files of each recipe, in the working folder."""
    monkeypatch.chdir(tmp_path)
    graph = random_arrays(N, E, 5, 4)
    labels = np.where(graph["y"] < 0, np.nan, graph["y"]).astype(np.float32)
    ends = graph["edge_index"]
    scipy.sparse.save_npz("adjacency.npz", scipy.sparse.coo_matrix((np.ones(E), ends), (N, N)))
    for root, name in (("igb/tiny", "cites"), ("mag240m_kddcup2021", "_cites_")):
        paper = Path(root, "processed", "paper")
        edges = paper.with_name(f"paper__{name}__paper")
        paper.mkdir(parents=True)
        edges.mkdir()
        np.save(edges / "edge_index.npy", ends.T if name == "cites" else ends)
        np.save(paper / "node_feat.npy", graph["x"].astype(np.float16))
        np.save(paper / "node_label.npy", labels)
        np.save(paper / "node_label_19.npy", np.arange(N) % 4)
    ids = graph["splits"]
    torch.save({"train": ids["train"], "valid": ids["valid"]}, "mag240m_kddcup2021/split_dict.pt")
    raw = Path("dataset/ogbn_proteins/raw")
    (raw.parent / "split" / "species").mkdir(parents=True)
    raw.mkdir()
    values = np.random.default_rng(0).integers(0, 2, (N, 112))
    for file, table in (("edge", ends.T), ("node-label", values)):
        pd.DataFrame(table).to_csv(raw / f"{file}.csv.gz", header=False, index=False)
    for split, nodes in ids.items():
        np.savetxt(raw.parent / "split" / "species" / f"{split}.csv.gz", nodes, "%d")
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_a_sound_store(name: str, graph: dict[str, Any]) -> None:
    code = RECIPES[name]
    assert code.count("\n") <= 6
    modules = {"np": np, "pd": pd, "torch": torch, "scipy": scipy, "networkx": networkx}
    splits = graph["splits"] if name == "scipy" else {"train": range(20), "valid": [21], "test": []}
    if name == "karate":
        splits = {split: np.array([*ids], int) for split, ids in splits.items()}
    exec(code, {**modules, "Path": Path, "Store": Store, **graph, "splits": splits})
    assert verify_store(Path("data") / name) == []
    store = open_store(Path("data") / name)
    if name != "karate":
        assert (store.num_nodes, store.summary["edges_read"]) == (N, E)
    if name == "mag240m":
        assert store.feature_dtype == np.float16
        np.testing.assert_array_equal(store.y, graph["y"])
