"""Promises of `catalog`: one place says what a name means; what is no store becomes one once, and
is found again."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import csc_of, left_in, official_csv, raw_arrays, tree
from torch_geometric.data import Data

from ogbnlib import open_tables, propagate
from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.forecast.planner import ladder, plan
from ogbnlib.forecast.run_forecast import predict
from ogbnlib.graph.store import GraphSize, Store, open_store
from ogbnlib.graph.summary import summarized
from ogbnlib.graph.writer import verify_store
from ogbnlib.runs.sandbox import check_inputs
from ogbnlib.sources.arrays import write_raw
from ogbnlib.sources.catalog import open_dataset, prepare_dataset
from ogbnlib.sources.convert import convert as make_store
from ogbnlib.sources.convert import open_source
from ogbnlib.sources.official import KNOWN, fetch
from ogbnlib.sources.resolve import DataRequest, resolve, size_of

SEEDS = {"train": 20, "valid": 10, "test": 5}


@pytest.fixture
def arrays() -> dict[str, Any]:
    random = np.random.default_rng(0)
    ids = random.permutation(60)
    return {
        "edge_index": random.integers(60, size=(2, 400)),
        "x": random.standard_normal((60, 5)).astype(np.float32),
        "y": random.integers(4, size=60),
        "splits": {"train": ids[:20], "valid": ids[20:30], "test": ids[30:35]},
    }


@pytest.fixture
def raw(tmp_path: Path, arrays: dict[str, Any]) -> Path:
    return write_raw(tmp_path / "mine", num_classes=4, **arrays).path


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def opened(said: list[str]) -> Callable[..., Any]:
    """`open_dataset` that notes what it says."""
    return lambda dataset, **how: open_dataset(str(dataset), say=said.append, progress=False, **how)


def test_a_raw_folder_is_converted_once_and_found_again(
    raw: Path, opened: Any, said: list[str]
) -> None:
    store = opened(raw)
    assert store.path == raw.with_name("mine.store")
    assert said == [
        f"{raw}: converting it, once, to {store.path}, about 1 MB",
        summarized(store),
    ]
    assert verify_store(store.path) == []
    np.testing.assert_array_equal(store.x, raw_arrays(raw)["x"])
    colptr, row = csc_of(raw_arrays(raw)["edge_index"], 60)
    np.testing.assert_array_equal(store.colptr, colptr)
    np.testing.assert_array_equal(store.row, row)
    before = tree(raw.parent)
    assert opened(raw) == opened(f"{raw}/") == opened(store.path) == store
    assert len(said) == 2
    assert tree(raw.parent) == before


def test_what_is_asked_for_is_in_the_stores_name(raw: Path, opened: Any, tmp_path: Path) -> None:
    assert not opened(raw, undirected=False).undirected
    both = opened(raw, undirected=True)
    small = opened(raw, feature_dtype="float16", data_dir=tmp_path / "stores")
    assert (both.path.name, both.undirected, both.feature_dtype) == (
        "mine-undirected.store",
        True,
        "float32",
    )
    assert (small.path, small.feature_dtype) == (
        tmp_path / "stores" / "mine-float16.store",
        "float16",
    )
    opened(raw, undirected=True, feature_dtype="float16")
    names = [
        "mine",
        "mine-undirected-float16.store",
        "mine-undirected.store",
        "mine.store",
        "stores",
    ]
    assert left_in(tmp_path) == names


def test_an_official_csv_data_set_is_converted_beside_its_folder(
    tmp_path: Path, arrays: dict[str, Any], opened: Any, said: list[str]
) -> None:
    official_csv(tmp_path, **arrays)
    store = opened("ogbn-arxiv", data_dir=tmp_path)
    assert store.path == tmp_path / "ogbn_arxiv.store"
    assert (store.name, store.num_classes, store.num_edges) == ("ogbn-arxiv", 40, 400)
    np.testing.assert_array_equal(
        store.x, arrays["x"].astype(np.float64).round(3).astype(np.float32)
    )
    np.testing.assert_array_equal(store.splits["valid"], arrays["splits"]["valid"])
    assert opened("ogbn-arxiv", data_dir=tmp_path) == store
    shutil.rmtree(tmp_path / "ogbn_arxiv")
    assert opened("ogbn-arxiv", data_dir=tmp_path) == store
    assert resolve(DataRequest("ogbn-arxiv", data_dir=tmp_path)).size == store.size
    assert len(said) == 2


def test_sizes_come_from_headers_before_and_after(raw: Path, opened: Any) -> None:
    expected = GraphSize("mine", 60, 400, 5, 4, SEEDS)
    before = tree(raw.parent)
    assert resolve(DataRequest(str(raw))).size == size_of(str(raw)) == expected
    assert (
        resolve(
            DataRequest(str(raw), undirected=True, feature_dtype="float16")
        ).size.feature_itemsize
        == 2
    )
    assert tree(raw.parent) == before
    store = opened(raw, undirected=True)
    found = resolve(DataRequest(str(raw), undirected=True))
    assert found.size == size_of(str(store.path)) == store.size


def test_a_known_data_set_has_its_size_wherever_it_is(
    tmp_path: Path, arrays: dict[str, Any], opened: Any
) -> None:
    assert size_of("ogbn-arxiv", data_dir=tmp_path) is KNOWN["ogbn-arxiv"]
    with pytest.raises(
        InputError, match="ogbn-arxiv is not there; pass download=True, or data_dir"
    ):
        resolve(DataRequest("ogbn-arxiv", data_dir=tmp_path))
    assert resolve(DataRequest("ogbn-arxiv", data_dir=tmp_path, download=True)).size.stored == "csv"
    official_csv(tmp_path, **arrays)
    assert size_of("ogbn-arxiv", data_dir=tmp_path) is KNOWN["ogbn-arxiv"]
    store = opened("ogbn-arxiv", data_dir=tmp_path)
    assert size_of("ogbn-arxiv", data_dir=tmp_path) == store.size
    with pytest.raises(InputError, match="did you mean 'ogbn-arxiv'"):
        size_of("ogbn-arxive")


@pytest.mark.parametrize(("name", "reason"), [("ogbn-proteins", "112 labels a node .*watch")])
def test_every_door_refuses_an_official_data_set_that_can_not_be_a_store(
    name: str, reason: str, tmp_path: Path
) -> None:
    doors: list[Callable[[], Any]] = [
        lambda: size_of(name, data_dir=tmp_path),
        lambda: resolve(DataRequest(name, data_dir=tmp_path, download=True)).size,
        lambda: fetch(name, tmp_path),
        lambda: make_store(name, tmp_path / "store"),
        lambda: open_dataset(name, data_dir=tmp_path, download=True),
        lambda: predict(TrainConfig.create(dataset=name)),
    ]
    for door in doors:
        with pytest.raises(InputError, match=f"{name} can't be converted: .*{reason}"):
            door()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("ogbn_arxiv", "did you mean 'ogbn-arxiv'"),
        ("ogbl-collab", "is for predicting links, and models here classify nodes: ogbn-arxiv, "),
        ("ogbg-molhiv", "is for classifying graphs, and"),
    ],
)
def test_a_name_like_an_official_one_leads_to_those(name: str, sentence: str) -> None:
    for door in (size_of, open_dataset, lambda name: make_store(name, "new")):
        with pytest.raises(InputError, match=f"{name}.*{sentence}"):
            door(name)


DOORS: dict[str, Callable[[Any], Any]] = {
    "open_store": open_store,
    "open_dataset": open_dataset,
    "open_tables": open_tables,
    "prepare_dataset": lambda path: prepare_dataset(path, "out", 0.001),
    "convert": lambda path: make_store(path, "out/new", progress=False),
}


@pytest.mark.parametrize("door", sorted({*DOORS} - {"open_tables"}))
def test_a_path_beside_a_store_leads_to_it(
    door: str, tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_store, tmp_path / "graphs" / "papers.store")
    monkeypatch.chdir(tmp_path)
    beside = [
        "graphs/papers.store/store.json",
        "graphs/papers.store/x.npy",
        "graphs/papers.store/runs",
        "graphs",
        "graphs/papers",
        "graphs/paper.store",
    ]
    for path in beside:
        with pytest.raises(
            InputError, match=f"{path}: .*; did you mean the store .*graphs/papers.store\\?$"
        ):
            DOORS[door](path)
    with pytest.raises(InputError, match=f"the working folder is {tmp_path}$"):
        DOORS[door]("elsewhere")
    assert left_in(tmp_path) == ["graphs"]


@pytest.mark.parametrize("door", DOORS)
def test_what_is_no_path_is_named(door: str, tmp_path: Path) -> None:
    data = Data(x=torch.ones(3, 1))
    with pytest.raises(InputError, match=r"expected a path, got Data; ogbnlib.Store.from_data\("):
        DOORS[door](data)
    for wrong in (3, [str(tmp_path)], b"data"):
        with pytest.raises(InputError, match=f"expected a path, got {type(wrong).__name__}$"):
            DOORS[door](wrong)


def test_a_store_stands_for_its_path(tiny_store: Path, tmp_path: Path) -> None:
    store = open_store(tiny_store)
    assert open_store(store) == open_dataset(store) == store
    assert prepare_dataset(store, tmp_path, 0.001) == str(tiny_store)
    assert TrainConfig.create(dataset=store).dataset == str(tiny_store)
    assert propagate(tiny_store, tmp_path / "hops", hops=1, progress=False).hops == 1


@pytest.mark.parametrize("name", ["ogbn-arxiv.store", "ogbn-arxiv"])
def test_a_folder_that_is_called_like_an_official_data_set_is_itself(
    name: str, tiny_dir: Path, tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_store if name.endswith(".store") else tiny_dir, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert size_of(name).num_nodes == 300
    if not name.endswith(".store"):
        assert make_store(name, "converted", progress=False).num_nodes == 300


def test_planning_imports_no_kernels() -> None:
    code = "import sys, ogbnlib.forecast.planner, ogbnlib.sources.resolve; "
    code += "assert not {'numba', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_another_direction_names_the_data_or_the_way_to_it(
    raw: Path, tmp_path: Path, opened: Any
) -> None:
    store = opened(raw)
    with pytest.raises(
        InputError, match=f"asked for was True; name the data it was made of, {raw}"
    ):
        opened(store.path, undirected=True)
    assert opened(store.origin["raw"], undirected=True).undirected
    copy = Store.from_data(store.to_data(), tmp_path / "copy", progress=False)
    with pytest.raises(InputError, match="make the store again with undirected=True"):
        opened(copy.path, undirected=True)


def test_a_source_that_changed_since_is_refused(raw: Path, opened: Any) -> None:
    store = opened(raw)
    os.utime(raw / "raw" / "data.npz")
    match = f"{raw}: it changed since {store.path} was made of it; delete the store .* or name the store"
    with pytest.raises(InputError, match=match):
        resolve(DataRequest(str(raw)))
    assert opened(store.path) == store
    shutil.rmtree(store.path)
    assert opened(raw) == store


def test_a_store_of_other_data_or_other_content_in_its_place_is_refused(
    raw: Path, tmp_path: Path, opened: Any
) -> None:
    other = shutil.copytree(raw, tmp_path / "elsewhere" / "mine", copy_function=shutil.copy)
    store = opened(other, data_dir=tmp_path)
    with pytest.raises(
        InputError, match=f"{store.path}: expected the store of {raw}, found one of {other}"
    ):
        resolve(DataRequest(str(raw)))
    shutil.rmtree(store.path)
    store.path.write_text("mine")
    with pytest.raises(
        InputError, match=r"mine\.store: expected a new or empty folder, found a file"
    ):
        resolve(DataRequest(str(raw)))


def test_a_folder_that_was_moved_or_mounted_elsewhere_keeps_its_store(
    raw: Path, tmp_path: Path, opened: Any, said: list[str]
) -> None:
    store = opened(raw)
    (tmp_path / "there").mkdir()
    for folder in (raw, store.path):
        folder.rename(tmp_path / "there" / folder.name)
    assert opened(tmp_path / "there" / "mine").files == store.files
    assert len(said) == 2


OPEN = """
import sys
from ogbnlib.sources.catalog import open_dataset
print("ready", flush=True)
sys.stdin.readline()
print("STORE", open_dataset(sys.argv[1], progress=False).path)
"""


def test_two_processes_at_once_convert_once(raw: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPEN, str(raw)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        outputs.append(process.communicate(timeout=120)[0])
        assert process.returncode == 0
    assert sum("converting it, once" in output for output in outputs) == 1
    assert all(f"STORE {tmp_path / 'mine.store'}" in output for output in outputs)
    assert verify_store(tmp_path / "mine.store") == []


def test_a_generated_data_set_is_made_once_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = prepare_dataset("", "data", 1e-4, 3)
    assert path == str(tmp_path / "data" / "synthetic-0.0001-seed3.store")
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "data/synthetic-0.0001-seed3.store: generating it, once"
    assert last.startswith("data/synthetic-0.0001-seed3.store: 11,106 nodes, ")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    assert (
        prepare_dataset("", tmp_path / "data", 1e-4, 3)
        == prepare_dataset(path, tmp_path, 0.5)
        == path
    )
    assert "generating" not in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before
    kept = prepare_dataset(path, tmp_path / "elsewhere", 0.01)
    assert kept == path
    both = open_store(prepare_dataset("", tmp_path / "data", 1e-4, 3, undirected=True))
    assert (both.path.name, both.undirected) == ("synthetic-0.0001-seed3-undirected.store", True)


@pytest.mark.parametrize("name", ["ogbn-proteins"])
def test_a_data_set_that_can_not_be_trained_is_refused_by_each_command_in_one_sentence(
    name: str, tmp_path: Path
) -> None:
    config = TrainConfig.create(dataset=name, data_dir=tmp_path)
    attempts: dict[str, Any] = {
        "plan": lambda: plan(config, "100 GB"),
        "ladder": lambda: ladder(name, data_dir=tmp_path),
        "download": lambda: fetch(name, tmp_path, progress=False),
        "convert": lambda: open_source(name, tmp_path),
        "train": lambda: check_inputs(config),
    }
    sentences = set()
    for attempt in attempts.values():
        with pytest.raises(InputError) as refused:
            attempt()
        sentences.add(str(refused.value))
    assert len(sentences) == 1
    assert name in sentences.pop()
