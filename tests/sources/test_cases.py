"""Files that people of this trade bring: each is converted right, left to a draft, or refused."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import random_arrays

from ogbnlib import InputError, convert
from ogbnlib.sources.convert import open_source

N, E = 200, 900


@pytest.fixture
def graph() -> dict[str, Any]:
    graph = random_arrays(N, E, 3, 4)
    graph["y"] = np.random.default_rng(1).integers(0, 4, N)
    return graph


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


def save(folder: Path, graph: dict[str, Any], *names: str) -> None:
    arrays = {"edges": graph["edge_index"], "features": graph["x"], "labels": graph["y"]}
    for name, values in {**arrays, **graph["splits"]}.items():
        if not names or name in names:
            np.save(folder / f"{name}.npy", values)


def edited(folder: Path, roles: dict[str, str], more: str = "") -> None:
    """Replace the draft's TODOs, by the text before them."""
    with pytest.raises(InputError, match="draft"):
        open_source(folder)
    text = (folder / "dataset.yaml").read_text()
    for name, role in roles.items():
        assert f"{name}: TODO" in text
        text = text.replace(f"{name}: TODO", f"{name}: {role}")
    (folder / "dataset.yaml").write_text(text + more)


def test_snaps_edge_list_under_its_own_name(folder: Path, graph: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    names = np.sort(rng.choice(10**6, N, replace=False))
    ends = "".join(f"{names[a]}\t{names[b]}\n" for a, b in graph["edge_index"].T)
    file = folder / "com-mine.ungraph.txt.gz"
    file.write_bytes(gzip.compress(f"# Directed graph\n# FromNodeId\tToNodeId\n{ends}".encode()))
    save(folder, graph, "features", "labels", *graph["splits"])
    np.save(folder / "nodes.npy", names)
    edited(folder, {"    1": "source", "    2": "target"})
    store = convert(folder, folder.parent / "store", progress=False)
    (folder / "dataset.yaml").unlink()
    file.rename(folder / "edges.txt.gz")
    named = convert(folder, folder.parent / "named", progress=False)
    assert (named.files, named.num_edges) == (store.files, E)


def test_two_kinds_of_nodes_are_left_to_the_user(folder: Path, graph: dict[str, Any]) -> None:
    save(folder, graph, "features", "labels", *graph["splits"])
    ends = pd.DataFrame(graph["edge_index"].T, columns=["user_id", "item_id"])
    ends.to_csv(folder / "edges.csv", index=False)
    edited(folder, {"user_id": "source", "item_id": "target"})
    draft = (folder / "dataset.yaml").read_text()
    assert draft.count("  # numbers: ") == 2
    assert open_source(folder).num_edges == E
