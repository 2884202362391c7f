"""One place says what the name of a data set means, and how its store is made."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import left_in, official_csv, python_child, random_arrays
from ogb_layout import write_raw
from torch_geometric.data import Data

from ogbnlib import propagate
from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.forecast.planner import ladder, plan
from ogbnlib.forecast.run_forecast import predict
from ogbnlib.graph.store import open_store
from ogbnlib.graph.writer import verify_store
from ogbnlib.runs.sandbox import check_inputs
from ogbnlib.sources.convert import convert as make_store
from ogbnlib.sources.official import KNOWN, fetch
from ogbnlib.sources.resolve import find_store, size_of
from ogbnlib.sources.synth import prepare_dataset
from ogbnlib.training.train import train


@pytest.fixture
def arrays() -> dict[str, Any]:
    return random_arrays(60, 400, 5, 4)


@pytest.mark.parametrize("kind", ["csv", "raw", "empty"])
def test_any_other_folder_is_one_sentence_with_the_command(
    kind: str, arrays: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my graph"
    if kind == "raw":
        write_raw(folder, num_classes=4, **arrays)
    folder.mkdir(exist_ok=True)
    if kind == "csv":
        (folder / "edges.csv").write_text("source,target\n1,2\n")
    config = TrainConfig.create(dataset=folder)
    doors = (size_of, find_store, lambda _: plan(config), lambda _: check_inputs(config), train)
    command = f"python -m ogbnlib convert '?{folder}'? '?{folder}.store'?$"
    for door in doors:
        with pytest.raises(InputError, match=command) as error:
            door(config if door is train else folder)
        assert "\n" not in str(error.value)


def test_an_official_name_is_its_store_once_that_is_made(
    tmp_path: Path, arrays: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert size_of("ogbn-arxiv") is KNOWN["ogbn-arxiv"]
    command = "download ogbn-arxiv; .* convert ogbn-arxiv dataset/ogbn_arxiv.store$"
    with pytest.raises(InputError, match=command):
        find_store("ogbn-arxiv")
    official_csv(tmp_path / "dataset", **arrays)
    store = make_store("ogbn-arxiv", "dataset/ogbn_arxiv.store", progress=False)
    assert (store.name, store.num_classes, store.num_edges) == ("ogbn-arxiv", 40, 400)
    x = arrays["x"].astype(np.float64).round(3).astype(np.float32)
    np.testing.assert_array_equal(store.x, x)
    np.testing.assert_array_equal(store.splits["valid"], arrays["splits"]["valid"])
    assert find_store("ogbn-arxiv") == store
    assert size_of("ogbn-arxiv") == store
    config = TrainConfig.create(dataset="ogbn-arxiv", undirected=True)
    for door in (check_inputs, plan, train):
        with pytest.raises(InputError, match=r"undirected: .*convert .*--undirected"):
            door(config)
    with pytest.raises(InputError, match="did you mean 'ogbn-arxiv'"):
        size_of("ogbn-arxive")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ogbn-proteins", "112 labels a node .*watch"),
        ("ogbn-mag", "several kinds"),
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
        lambda: size_of(name),
        lambda: find_store(name),
        lambda: fetch(name, tmp_path),
        lambda: make_store(name, tmp_path / "store"),
        lambda: predict(config),
        lambda: plan(config, "100 GB"),
        lambda: ladder(name),
        lambda: check_inputs(config),
    ]
    for door in doors:
        with pytest.raises(InputError, match=f"{name}.*{reason}"):
            door()
    assert left_in(tmp_path) == []


DOORS: dict[str, Callable[[Any], Any]] = {
    "open_store": open_store,
    "find_store": find_store,
    "prepare_dataset": lambda path: prepare_dataset(path, "out", 0.001),
    "convert": lambda path: make_store(path, "out/new", progress=False),
}


@pytest.mark.parametrize("door", DOORS)
def test_what_is_no_path_or_not_there_is_named(door: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"elsewhere: .*the working folder is {Path.cwd()}$"):
        DOORS[door]("elsewhere")
    for wrong in (3, [str(tmp_path)], b"data", Data(x=torch.ones(3, 1))):
        with pytest.raises(InputError, match=f"expected a path, got {type(wrong).__name__}$"):
            DOORS[door](wrong)


def test_a_store_stands_for_its_path(tiny_store: Path, tmp_path: Path) -> None:
    store = open_store(tiny_store)
    assert open_store(store) == find_store(store) == store
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


MAKE = """
import sys
from ogbnlib.sources.synth import prepare_dataset
print("ready", flush=True)
sys.stdin.readline()
prepare_dataset("", sys.argv[1], 1e-4)
"""


def test_two_processes_at_once_generate_once(tmp_path: Path) -> None:
    make = (MAKE, str(tmp_path))
    with python_child(*make) as first, python_child(*make) as second:
        for process in (first, second):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert first.returncode == second.returncode == 0
    assert sum("generating it, once" in output for output in outputs) == 1
    assert verify_store(tmp_path / "synthetic-0.0001-seed0.store") == []


def test_a_generated_data_set_is_made_once_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = prepare_dataset("", "data", 1e-4, 3)
    assert path == str(tmp_path / "data" / "synthetic-0.0001-seed3.store")
    assert "synthetic-0.0001-seed3.store: generating it, once" in capsys.readouterr().out
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    assert prepare_dataset("", tmp_path / "data", 1e-4, 3) == path
    assert prepare_dataset(path, tmp_path / "elsewhere", 0.5) == path
    assert "generating" not in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before
    both = open_store(prepare_dataset("", tmp_path / "data", 1e-4, 3, undirected=True))
    assert (both.path.name, both.undirected) == ("synthetic-0.0001-seed3-undirected.store", True)
