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
from conftest import left_in, official_csv, random_arrays
from torch_geometric.data import Data

from ogbnlib import propagate
from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.forecast.planner import ladder, plan
from ogbnlib.forecast.run_forecast import predict
from ogbnlib.graph.store import open_store
from ogbnlib.graph.writer import verify_store
from ogbnlib.runs.sandbox import check_inputs
from ogbnlib.sources.arrays import write_raw
from ogbnlib.sources.catalog import open_dataset, prepare_dataset
from ogbnlib.sources.convert import convert as make_store
from ogbnlib.sources.official import KNOWN, fetch
from ogbnlib.sources.resolve import DataRequest, resolve, size_of
from ogbnlib.training.train import train


@pytest.fixture
def arrays() -> dict[str, Any]:
    return random_arrays(60, 400, 5, 4)


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


@pytest.mark.parametrize("kind", ["csv", "raw", "empty"])
def test_any_other_folder_is_one_sentence_with_the_command(
    kind: str, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = raw if kind == "raw" else tmp_path / "my graph"
    folder.mkdir(exist_ok=True)
    if kind == "csv":
        (folder / "edges.csv").write_text("source,target\n1,2\n")
    config = TrainConfig.create(dataset=folder)
    doors = (size_of, open_dataset, lambda _: plan(config), lambda _: check_inputs(config), train)
    command = f"python -m ogbnlib convert '?{folder}'? '?{folder}.store'?$"
    for door in doors:
        with pytest.raises(InputError, match=command) as error:
            door(config if door is train else folder)
        assert "\n" not in str(error.value)


def test_what_is_asked_for_is_in_the_name_of_the_store(
    tmp_path: Path, arrays: dict[str, Any], opened: Any
) -> None:
    official_csv(tmp_path, **arrays)
    assert not opened("ogbn-arxiv", data_dir=tmp_path, undirected=False).undirected
    both = opened("ogbn-arxiv", data_dir=tmp_path, undirected=True, feature_dtype="float16")
    assert both.path.name == "ogbn_arxiv-undirected-float16.store"
    assert (both.undirected, both.feature_dtype) == (True, "float16")
    with pytest.raises(InputError, match=r"undirected: .*ogbn_arxiv STORE --directed"):
        opened(both.path, undirected=False)


def test_an_official_csv_data_set_is_converted_once_beside_its_folder(
    tmp_path: Path, arrays: dict[str, Any], opened: Any, said: list[str]
) -> None:
    folder = official_csv(tmp_path, **arrays)
    store = opened("ogbn-arxiv", data_dir=tmp_path)
    assert store.path == tmp_path / "ogbn_arxiv.store"
    assert (store.name, store.num_classes, store.num_edges) == ("ogbn-arxiv", 40, 400)
    x = arrays["x"].astype(np.float64).round(3).astype(np.float32)
    np.testing.assert_array_equal(store.x, x)
    np.testing.assert_array_equal(store.splits["valid"], arrays["splits"]["valid"])
    assert opened("ogbn-arxiv", data_dir=tmp_path) == store
    os.utime(folder / "raw" / "edge.csv.gz")
    with pytest.raises(InputError, match=f"{store.path}: .*{folder}"):
        opened("ogbn-arxiv", data_dir=tmp_path)
    assert opened(store.path) == store
    shutil.rmtree(folder)
    assert opened("ogbn-arxiv", data_dir=tmp_path) == store
    assert resolve(DataRequest("ogbn-arxiv", data_dir=tmp_path)).size == store.size
    assert len(said) == 2


def test_a_known_data_set_has_its_size_wherever_it_is(
    tmp_path: Path, arrays: dict[str, Any], opened: Any
) -> None:
    assert size_of("ogbn-arxiv", data_dir=tmp_path) is KNOWN["ogbn-arxiv"]
    with pytest.raises(
        InputError, match=f"ogbn-arxiv.*: .* download ogbn-arxiv --data-dir {tmp_path}"
    ):
        resolve(DataRequest("ogbn-arxiv", data_dir=tmp_path))
    official_csv(tmp_path, **arrays)
    assert size_of("ogbn-arxiv", data_dir=tmp_path) is KNOWN["ogbn-arxiv"]
    store = opened("ogbn-arxiv", data_dir=tmp_path)
    assert size_of("ogbn-arxiv", data_dir=tmp_path) == store.size
    with pytest.raises(InputError, match="did you mean 'ogbn-arxiv'"):
        size_of("ogbn-arxive")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ogbn-proteins", "112 labels a node .*watch"),
        ("ogbl-collab", "predicting links"),
        ("ogbg-molhiv", "classifying graphs"),
        ("ogbn_arxiv", "did you mean 'ogbn-arxiv'"),
    ],
)
def test_every_door_refuses_a_name_that_can_not_be_a_store(
    name: str, reason: str, tmp_path: Path
) -> None:
    config = TrainConfig.create(dataset=name)
    doors: list[Callable[[], Any]] = [
        lambda: size_of(name, data_dir=tmp_path),
        lambda: resolve(DataRequest(name, data_dir=tmp_path)),
        lambda: fetch(name, tmp_path),
        lambda: make_store(name, tmp_path / "store"),
        lambda: open_dataset(name, data_dir=tmp_path),
        lambda: predict(config),
        lambda: plan(config, "100 GB"),
        lambda: ladder(name),
        lambda: check_inputs(config),
    ]
    sentences = set()
    for door in doors:
        with pytest.raises(InputError, match=f"{name}.*{reason}") as refused:
            door()
        sentences.add(str(refused.value))
    assert len(sentences) == 1
    assert left_in(tmp_path) == []


DOORS: dict[str, Callable[[Any], Any]] = {
    "open_store": open_store,
    "open_dataset": open_dataset,
    "prepare_dataset": lambda path: prepare_dataset(path, "out", 0.001),
    "convert": lambda path: make_store(path, "out/new", progress=False),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_path_that_is_not_there_is_named(door: str) -> None:
    with pytest.raises(InputError, match=f"elsewhere: .*the working folder is {Path.cwd()}$"):
        DOORS[door]("elsewhere")


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
    shutil.copytree(tiny_store, tmp_path / name)
    shutil.copytree(tiny_dir, tmp_path / "raw" / name)
    monkeypatch.chdir(tmp_path)
    assert size_of(name).num_nodes == 300
    monkeypatch.chdir(tmp_path / "raw")
    assert make_store(name, "converted", progress=False).num_nodes == 300


def test_planning_imports_no_kernels() -> None:
    code = "import sys, ogbnlib.forecast.planner, ogbnlib.sources.resolve; "
    code += "assert not {'numba', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


OPEN = """
import sys
from ogbnlib.sources.catalog import open_dataset
print("ready", flush=True)
sys.stdin.readline()
print("STORE", open_dataset("ogbn-arxiv", data_dir=sys.argv[1], progress=False).path)
"""


def test_two_processes_at_once_convert_once(tmp_path: Path, arrays: dict[str, Any]) -> None:
    official_csv(tmp_path, **arrays)
    command = [sys.executable, "-c", OPEN, str(tmp_path)]
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
    assert all(f"STORE {tmp_path / 'ogbn_arxiv.store'}" in output for output in outputs)
    assert verify_store(tmp_path / "ogbn_arxiv.store") == []


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
