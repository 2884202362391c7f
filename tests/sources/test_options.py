"""Options of a conversion live with the data: written once, read by every door, and the command line
wins."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import random_arrays
from typer.testing import CliRunner

from ogbnlib import InputError, convert, open_dataset, open_store, write_raw
from ogbnlib.__main__ import app
from ogbnlib.config import TrainConfig
from ogbnlib.graph.writer import verify_store
from ogbnlib.sources.convert import open_source
from ogbnlib.sources.resolve import graph_for

N, E = 40, 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files and columns with names that nobody can guess."""
    graph = random_arrays(N, E, 3, 4)
    own = tmp_path / "own"
    own.mkdir()
    np.savetxt(
        own / "cites.csv", graph["edge_index"].T, "%d", ",", header="cit_from,cit_to", comments=""
    )
    table = np.column_stack([np.arange(N), graph["x"], graph["y"]])
    columns = "who,a,b,c,topic"
    formats = ["%d", "%.3f", "%.3f", "%.3f", "%d"]
    np.savetxt(own / "papers.csv", table, formats, ",", header=columns, comments="")
    for split, ids in graph["splits"].items():
        np.save(own / f"{split}.npy", ids)
    return own


OPTIONS = "--edge-columns cit_from,cit_to --label-columns topic --id-column who --leave-out b"


def run(*words: str | Path) -> str:
    """Run `convert` and return its whole output; an `InputError` is raised."""
    result = CliRunner().invoke(app, ["convert", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def save(folder: Path) -> None:
    roles = ["--edges", folder / "cites.csv", "--nodes", folder / "papers.csv"]
    run(folder, folder.parent / "first", *roles, *OPTIONS.split(), "--save-options")


def test_saved_options_are_used_by_every_door(folder: Path) -> None:
    save(folder)
    assert (folder / "dataset.yaml").read_text().splitlines() == [
        *("edge_columns:", "- cit_from", "- cit_to", "edges: cites.csv", "id_column: who"),
        *("label_columns:", "- topic", "leave_out:", "- b", "nodes: papers.csv"),
    ]
    first = open_store(folder.parent / "first")
    assert (first.num_edges, first.num_features, first.undirected) == (E, 2, False)
    # another direction needs none of them again
    run(folder, folder.parent / "both", "--undirected")
    assert open_store(folder.parent / "both").undirected
    assert convert(folder, folder.parent / "again", progress=False).files == first.files
    config = TrainConfig.create(dataset=folder, undirected=True, loading="store")
    assert (graph_for(config).num_features, graph_for(config).num_edges) == (2, E)
    store = open_dataset(folder, undirected=True, say=lambda _: None)
    assert store.path.name == "own-undirected.store"
    assert open_dataset(folder, undirected=True, say=lambda _: None) == store
    assert verify_store(store.path) == []


def test_an_option_given_now_wins_and_that_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder)
    saved = folder / "dataset.yaml"
    saved.write_text(saved.read_text() + "undirected: true\nfeature-dtype: float16\n")
    store = convert(folder, folder.parent / "a", progress=False)
    assert (store.undirected, store.feature_dtype) == (True, np.float16)
    assert open_dataset(folder, say=lambda _: None).path.name == "own-undirected.store"
    capsys.readouterr()
    source = open_source(folder, undirected=False, leave_out=["c"])
    err = capsys.readouterr().err
    assert f"{saved}: undirected is False, not True: the option given now wins\n" in err
    assert "leave_out is ['c'], not ['b']" in err
    assert source.feature_names == ["a", "b"]
    assert not convert(source, folder.parent / "b", progress=False).undirected
    assert open_dataset(folder, undirected=False, say=lambda _: None).path.name == "own.store"
    splits = "node_id,split\n" + "".join(f"{i},train\n" for i in range(20))
    (folder / "parts.csv").write_text(splits.replace("node_id", "who"))
    saved.write_text(saved.read_text() + "train: train.npy\nvalid: valid.npy\ntest: test.npy\n")
    source = open_source(folder, splits=folder / "parts.csv")
    assert len(source.read_splits()["train"]) == 20


def test_a_change_of_the_options_asks_for_a_new_store(folder: Path) -> None:
    save(folder)
    open_dataset(folder, say=lambda _: None)
    saved = folder / "dataset.yaml"
    saved.write_text(saved.read_text().replace("- b", "- c"))
    with pytest.raises(InputError, match="it changed since"):
        open_dataset(folder, say=lambda _: None)


def test_ogbs_binary_layout_has_options_too(tmp_path: Path) -> None:
    graph = random_arrays(N, E, 3, 4)
    write_raw(tmp_path / "raw", **graph)
    run(tmp_path / "raw", tmp_path / "first", "--undirected", "--save-options")
    assert (tmp_path / "raw" / "dataset.yaml").read_text() == "undirected: true\n"
    store = open_dataset(tmp_path / "raw", say=lambda _: None)
    assert (store.path.name, store.undirected) == ("raw-undirected.store", True)
    run(tmp_path / "raw", tmp_path / "second", "--directed")
    assert not open_store(tmp_path / "second").undirected


WRONG: dict[str, Any] = {
    "edge_colums: a,b": "unknown option 'edge_colums': did you mean 'edge_columns'",
    "undirected: yes": "undirected: expected true or false",
    "num_classes: many": "num_classes: expected a whole number",
    "feature_dtype: float8": "feature_dtype: expected float16, float32, int8",
    "id_column: [a, b]": "id_column: expected one text",
    "leave_out: {a: b}": "leave_out: expected one text",
    "just text": "dataset.yaml: expected lines such as",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_line_is_refused_with_the_nearest_name(folder: Path, text: str) -> None:
    (folder / "dataset.yaml").write_text(text)
    for door in (open_source, open_dataset):
        with pytest.raises(InputError, match=f"dataset.yaml: .*{WRONG[text]}|{WRONG[text]}"):
            door(folder)
    assert not folder.with_name("own.store").exists()


def test_a_store_and_an_official_name_keep_no_options(folder: Path, tmp_path: Path) -> None:
    save(folder)
    with pytest.raises(InputError, match="beside a store, got save_options"):
        run(tmp_path / "first", tmp_path / "second", "--undirected", "--save-options")
    run(tmp_path / "first", tmp_path / "second", "--undirected")
    assert open_store(tmp_path / "second").undirected


def test_options_in_the_folder_of_an_official_name_are_refused(tmp_path: Path) -> None:
    raw = tmp_path / "ogbn_papers100M"
    write_raw(raw, **random_arrays(N, E, 3, 4))
    run(raw, tmp_path / "first", "--undirected", "--save-options")
    expected = "dataset.yaml: expected no options for the official name ogbn-papers100M; name the"
    with pytest.raises(InputError, match=expected):
        run("ogbn-papers100M", tmp_path / "second", "--data-dir", tmp_path)
    with pytest.raises(InputError, match=expected):
        open_dataset("ogbn-papers100M", data_dir=tmp_path, say=lambda _: None)


@pytest.mark.parametrize(
    "options",
    [
        ["--feature-dtype", "float8"],
        ["--memory-limit", "1 MB"],
        ["--memory-limit", "much"],
        ["--num-classes", "1"],
        ["--leave-out", "nothing"],
        ["--test", "bad.npy"],
    ],
    ids=str,
)
def test_options_that_are_refused_are_not_saved(folder: Path, options: list[str]) -> None:
    np.save(folder / "bad.npy", [N + 5])
    options = [word.replace("bad.npy", str(folder / "bad.npy")) for word in options]
    roles = ["--edges", folder / "cites.csv", "--nodes", folder / "papers.csv"]
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(InputError):
        run(folder, folder.parent / "x", *roles, *OPTIONS.split(), *options, "--save-options")
    assert sorted(folder.parent.rglob("*")) == before


def test_a_store_made_with_the_saved_options_is_that_of_the_folder(folder: Path) -> None:
    roles = ["--edges", folder / "cites.csv", "--nodes", folder / "papers.csv"]
    run(folder, folder.with_name("own.store"), *roles, *OPTIONS.split(), "--save-options")
    assert open_dataset(folder, say=lambda _: None).path == folder.with_name("own.store")


def test_unlabelled_nodes_leave_the_splits_and_not_the_graph(folder: Path, tmp_path: Path) -> None:
    save(folder)
    np.save(folder / "test.npy", np.arange(26, N))  # nodes from 30 on have no label
    expected = "without a label such as 30; --drop-unlabelled leaves them out"
    with pytest.raises(InputError, match=expected):
        run(folder, tmp_path / "new")
    output = run(folder, tmp_path / "new", "--drop-unlabelled", "--save-options")
    assert "splits: train 20, valid 2, test 4, 10 left out; nodes without a label: 10" in output
    store = open_store(tmp_path / "new")
    assert (store.num_nodes, store.num_edges, store.summary["dropped_seeds"]) == (N, E, 10)
    # before there is a store of the folder's name, `plan` counts in the files
    assert graph_for(TrainConfig.create(dataset=folder)).num_seeds["test"] == 4
    assert open_dataset(folder, say=lambda _: None).num_seeds["test"] == 4
    with pytest.raises(InputError, match="without a label"):
        run(folder, tmp_path / "other", "--no-drop-unlabelled")


def test_edges_of_names_that_are_no_nodes_are_left_out_and_counted(
    folder: Path, tmp_path: Path
) -> None:
    save(folder)
    text = (folder / "cites.csv").read_text()
    (folder / "cites.csv").write_text(text + "0,99\n-5,0\n77,77\n")
    expected = r"found '-5'; --drop-unknown leaves out edges of other names"
    with pytest.raises(InputError, match=expected):
        run(folder, tmp_path / "new")
    output = run(folder, tmp_path / "new", "--drop-unknown")
    assert f"edges: {E} read, 3 left out; self-loops" in output
    first, store = open_store(tmp_path / "first"), open_store(tmp_path / "new")
    assert store.files == first.files
    assert store.summary["dropped_edges"] == 3
    output = run(folder, tmp_path / "both", "--drop-unknown", "--undirected")
    assert f"edges: {E} read, 3 left out ({2 * E} with their reverses" in output
    assert verify_store(tmp_path / "both") == []
    (folder / "cites.csv").write_text(text + ",5\n")  # a missing end is a mistake, no other name
    with pytest.raises(InputError, match="found ''"):
        run(folder, tmp_path / "empty", "--drop-unknown")


def test_row_numbers_are_no_names_to_drop(tmp_path: Path) -> None:
    graph = random_arrays(N, E, 3, 4)
    (tmp_path / "own").mkdir()
    arrays = {"edges": graph["edge_index"], "features": graph["x"], "labels": graph["y"]}
    for name, values in {**arrays, **graph["splits"]}.items():
        np.save(tmp_path / "own" / f"{name}.npy", values)
    with pytest.raises(InputError, match=r"expected a file nodes.*--drop-unknown needs it"):
        run(tmp_path / "own", tmp_path / "new", "--drop-unknown")
