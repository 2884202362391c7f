"""Folders in OGB's own layouts are data sets."""

import gzip
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import official_csv, random_arrays
from ogb_layout import write_raw

from ogbnlib import InputError, convert
from ogbnlib.sources.convert import open_source
from ogbnlib.sources.ogb import read_split_dict

N, E, F, C = 40, 300, 5, 4


@pytest.fixture
def graph() -> dict[str, Any]:
    return random_arrays(N, E, F, C)


@pytest.mark.parametrize("given", [".", "raw"])
def test_a_graph_in_ogbs_csv_layout_is_a_data_set(
    tmp_path: Path, graph: dict[str, Any], given: str
) -> None:
    folder = official_csv(tmp_path, **graph).rename(tmp_path / "ogbn_mine")
    (folder / "RELEASE_v1.txt").unlink()
    (folder / "raw" / "node_year.csv.gz").write_bytes(gzip.compress(b"2015\n" * N))
    shutil.move(folder / "split" / "time", folder / "split" / "mine")
    store = convert(folder / given, tmp_path / "store", progress=False)
    assert (store.name, store.num_edges, store.num_classes) == ("ogbn_mine", E, C)
    x = graph["x"].astype(np.float64).round(3).astype(np.float32)
    np.testing.assert_array_equal(store.x, x)
    np.testing.assert_array_equal(store.splits["valid"], graph["splits"]["valid"])
    (folder / "raw" / "node-feat.csv.gz").unlink()
    with pytest.raises(InputError, match=r"node-feat.csv.gz: "):
        open_source(folder)


def test_what_ogbs_dataset_saver_writes_is_a_data_set(
    tmp_path: Path, graph: dict[str, Any]
) -> None:
    folder = write_raw(tmp_path / "toy", **graph).path
    shutil.rmtree(folder / "split")
    (folder / "split" / "random").mkdir(parents=True)
    torch.save(graph["splits"], folder / "split" / "random" / "split_dict.pt")
    for given in (folder, folder / "raw"):
        store = convert(given, tmp_path / f"store-{given.name}", progress=False)
        assert store.num_seeds == {"train": 20, "valid": 2, "test": 4}


def test_code_in_a_file_of_splits_is_never_run(tmp_path: Path) -> None:
    torch.save({"train": Path("x"), "valid": np.arange(3)}, tmp_path / "split_dict.pt")
    with pytest.raises(InputError, match=r"split_dict.pt: "):
        read_split_dict(tmp_path / "split_dict.pt")


def test_options_of_ogbs_binary_layout(tmp_path: Path, graph: dict[str, Any]) -> None:
    folder = write_raw(tmp_path / "raw", **graph).path
    (folder / "dataset.yaml").write_text("undirected: true\n")
    assert convert(folder, tmp_path / "a", progress=False).undirected
    assert not convert(folder, tmp_path / "b", undirected=False, progress=False).undirected
    with pytest.raises(InputError, match="undirected: "):
        convert(tmp_path / "a", tmp_path / "c", undirected=False, progress=False)
