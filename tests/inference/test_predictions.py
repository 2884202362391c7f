"""Layer by layer, predictions are those of a forward pass over the whole graph in RAM."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from all_models import EXACT, untrimmed
from conftest import left_in
from torch_geometric.data import Data

from ogbnlib import InputError, Store, TrainConfig, convert, open_store, predict
from ogbnlib.errors import format_bytes
from ogbnlib.propagation import columns as columns_of
from ogbnlib.training.checkpoint import SavedModel
from ogbnlib.training.custom_model import make_model
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]
QUIET: dict[str, Any] = {"progress": False, "say": lambda text: None}


def in_ram(run_dir: Path, dataset: Path) -> np.ndarray:
    """Scores of all nodes by the layers on the whole graph."""
    config, weights, *_ = SavedModel.open(run_dir)
    store = open_store(dataset)
    x = torch.from_numpy(store.read("x", "float32"))
    edges = torch.from_numpy(store.read_edge_index())
    net = make_model(config, store.num_features, store.num_classes).eval()
    net.load_state_dict(weights)
    with torch.no_grad():
        x = untrimmed(config.model, net.convs, x, edges)  # type: ignore[arg-type]
    return x.numpy()


@pytest.fixture(scope="module", params=EXACT)
def trained(
    request: pytest.FixtureRequest, tiny_config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run_dir: Path = tmp_path_factory.mktemp(request.param) / "run"
    values = {"num_neighbors": [3, 3, 2], "hidden_channels": 6, "keep": "best", "lr": 0.05}
    train(tiny_config(model=request.param, **values), run_dir)
    return run_dir


@pytest.mark.parametrize("columns", [1, 5, 100])
def test_exact_scores_are_those_of_a_forward_pass_in_ram(
    trained: Path, tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    columns_in_memory: Callable[[int], None], columns: int,
) -> None:  # fmt: skip
    columns_in_memory(columns)
    monkeypatch.setattr(columns_of, "CHUNK_BYTES", 2 * 4 * 8 * 20)  # a few rows at a time
    expected = in_ram(trained, tiny_store)
    predict(trained, tmp_path / "scores.npy", nodes="all", scores=True, **QUIET)
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), expected, rtol=1e-4, atol=1e-5)
    some = np.random.default_rng(0).permutation(300)[:40]
    np.save(tmp_path / "some.npy", some)
    labelled = np.unique(np.concatenate([*open_store(tiny_store).splits.values()]))
    asked = {"all": np.arange(300), str(tmp_path / "some.npy"): some, "labelled": labelled}
    for nodes, ids in asked.items():
        path = predict(trained, tmp_path / f"{Path(nodes).stem}-out.npy", nodes=nodes, **QUIET)
        found = np.load(path)
        assert found.dtype == np.int16
        assert np.array_equal(found, expected[ids].argmax(1))
    assert np.array_equal(np.load(tmp_path / "labelled-out-nodes.npy"), labelled)
    others = {"labelled-out-nodes.npy", "scores.npy", "some.npy"}
    assert {*left_in(tmp_path)} == {"all-out.npy", "labelled-out.npy", "some-out.npy"} | others


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "gcn", "eval_batch_size": 7},
        {"feature_dtype": "float16", "loading": "eager"},
        {"keep": "best"},
    ],
    ids=str,
)
def test_sampled_predictions_have_the_runs_accuracies(
    tiny_config: Config, tiny_store: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    values = {"num_neighbors": [3, 1], "seed": 5, "train_eval": "every_epoch", "epochs": 3}
    config = tiny_config(**{**values, **changes})
    history = train(config, tmp_path / "run").history
    kept = history[-1]
    if config.keep == "best":
        kept = max(history, key=lambda row: row["valid"] or 0.0)
    labelled = predict(tmp_path / "run", tmp_path / "some.npy", sampled=True, **QUIET)
    everything = predict(tmp_path / "run", tmp_path / "all.npy", nodes="all", sampled=True, **QUIET)
    ids, store = np.load(tmp_path / "some-nodes.npy"), open_store(tiny_store)
    assert np.array_equal(np.load(labelled), np.load(everything)[ids])
    for split, nodes in store.splits.items():
        some = np.random.default_rng(0).permutation(nodes)[:30]
        out = tmp_path / f"{split}.npy"
        few = predict(tmp_path / "run", out, nodes=some, sampled=True, **QUIET)
        assert np.array_equal(np.load(few), np.load(everything)[some])
        assert float((np.load(everything)[nodes] == store.y[nodes]).mean()) == kept[split]


def test_propagated_models_predict(tiny_config: Config, tiny_store: Path, tmp_path: Path) -> None:
    config = tiny_config(loading="propagated", model="sign", dataset=str(tiny_store))
    result = train(config, tmp_path / "run")
    found = np.load(predict(tmp_path / "run", tmp_path / "out.npy", **QUIET))
    ids, store = np.load(tmp_path / "out-nodes.npy"), open_store(tiny_store)
    test = np.searchsorted(ids, store.splits["test"])
    labels = store.y[store.splits["test"]]
    assert float((found[test] == labels).mean()) == result.history[-1]["test"]
    with pytest.raises(InputError, match=r"nodes: .* 90 .*nodes=.all"):
        predict(tmp_path / "run", tmp_path / "all.npy", nodes="all", **QUIET)
    assert not (tmp_path / "all.npy").exists()


def test_what_cannot_be_predicted_is_refused_and_nothing_is_left(
    trained: Path, tiny_config: Config, tiny_dir: Path, tmp_path: Path
) -> None:
    def refused(facts: str, run_dir: Path = trained, out: str = "out.npy", **how: Any) -> None:
        before = left_in(tmp_path)
        with pytest.raises(InputError, match=facts):
            predict(run_dir, tmp_path / out, **how, **QUIET)
        assert left_in(tmp_path) == before

    refused(r"out: .*\.npy, \.csv or \.parquet", out="out.xls")
    refused("nodes: .*got 'test'", nodes="test")
    refused(r"none\.npy", nodes=str(tmp_path / "none.npy"))
    refused("nodes: .*0 to 299, got 5 to 300", nodes=np.array([5, 300]))
    refused(r"memory_limit: .* raise .* [\d.]+ [MG]B", memory_limit="10 MB")
    train(tiny_config(model="gat", hidden_channels=8), tmp_path / "gat")
    refused("model: .*gcn and sage, got gat; .*--sampled", run_dir=tmp_path / "gat")


def flipped(data: Data) -> dict[str, Any]:
    data.x = data.x.flip(0)
    return {"num_classes": 4}


def with_targets(data: Data) -> dict[str, Any]:
    data.y = data.y.float()
    return {"targets": True}


@pytest.mark.parametrize(
    ("change", "fact"), [(flipped, "features"), (with_targets, "sizes, labels")]
)
@pytest.mark.parametrize("sampled", [False, True])
def test_another_data_set_at_the_path_is_refused(
    tiny_config: Config, tiny_store: Path, tmp_path: Path,
    change: Callable[[Data], dict[str, Any]], fact: str, sampled: bool,
) -> None:  # fmt: skip
    shutil.copytree(tiny_store, tmp_path / "s")
    train(tiny_config(dataset=str(tmp_path / "s"), epochs=1), tmp_path / "run")
    data, splits = open_store(tiny_store).to_data(), open_store(tiny_store).splits
    options = change(data)
    shutil.rmtree(tmp_path / "s")
    Store.from_data(data, tmp_path / "s", splits=splits, progress=False, **options)
    with pytest.raises(InputError, match=rf"\.pt .* other {fact}"):
        predict(tmp_path / "run", tmp_path / "out.npy", sampled=sampled, **QUIET)
    assert not (tmp_path / "out.npy").exists()


def test_a_copied_run_predicts_on_its_data(trained: Path, tiny_store: Path, tmp_path: Path) -> None:
    expected = predict(trained, tmp_path / "expected.npy", **QUIET)
    run_dir = shutil.copytree(trained, tmp_path / "run")
    moved = shutil.copytree(tiny_store, tmp_path / "moved")
    config = TrainConfig.load(run_dir / "config.json").replace(dataset=str(tmp_path / "gone"))
    config.save(run_dir / "config.json")
    with pytest.raises(InputError, match=rf"{tmp_path}/gone"):
        predict(run_dir, tmp_path / "out.npy", **QUIET)
    config.replace(dataset=str(moved)).save(run_dir / "config.json")
    found = predict(run_dir, tmp_path / "out.npy", **QUIET)
    assert np.array_equal(np.load(found), np.load(expected))


def test_the_command_writes_the_file(
    trained: Path, tmp_path: Path, command_line: Callable[..., int], capsys: Any
) -> None:
    arguments = ["predict", str(trained), "--out", str(tmp_path / "out.npy"), "--json"]
    assert command_line(*arguments) == 0
    done = capsys.readouterr()
    assert json.loads(done.out) == {"path": str(tmp_path / "out.npy")}
    assert "best.pt" in done.err
    assert command_line(*arguments) == 2  # the file exists


@pytest.mark.usefixtures("table_pieces")
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_table_names_nodes_in_their_order(trained: Path, tmp_path: Path, ending: str) -> None:
    (tmp_path / "nodes.csv").write_text("node_id\n7\n290\n3\n")
    read = pd.read_csv if ending == "csv" else pd.read_parquet
    raw = np.load(predict(trained, tmp_path / "raw.npy", nodes="all", scores=True, **QUIET))
    shares = torch.from_numpy(raw).softmax(1).numpy()
    for nodes, ids in ((str(tmp_path / "nodes.csv"), [7, 290, 3]), ("all", [*range(300)])):
        out = tmp_path / f"{len(ids)}.{ending}"
        table = read(predict(trained, out, nodes=nodes, scores=True, **QUIET))
        assert [*table] == ["node_id", "class", "probability", "0", "1", "2", "3"]
        assert table.node_id.tolist() == ids
        assert table["class"].tolist() == raw[ids].argmax(1).tolist()
        np.testing.assert_allclose(table.probability, shares[ids].max(1), rtol=1e-4)
        np.testing.assert_allclose(table.iloc[:, 3:], shares[ids], atol=1e-5)
        out = tmp_path / f"{len(ids)}-best.{ending}"
        best = read(predict(trained, out, nodes=nodes, **QUIET))
        assert best.equals(table[["node_id", "class", "probability"]])


NAMES = [f"näme, {i:03d}" for i in range(60)]


@pytest.fixture(scope="module")
def named_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over a graph whose nodes have text names, with commas in them."""
    folder = tmp_path_factory.mktemp("named")
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"node_id": NAMES, "a": rng.normal(size=60).round(3)})
    table["label"] = rng.integers(0, 3, 60)
    table["split"] = rng.choice(["train", "valid", "test"], 60)
    table.to_csv(folder / "nodes.csv", index=False)
    ends = {"source": rng.choice(NAMES, 300), "target": rng.choice(NAMES, 300)}
    pd.DataFrame(ends).to_csv(folder / "edges.csv", index=False)
    convert(folder, folder / "store", progress=False)
    store = str(folder / "store")
    config = {"dataset": store, "num_neighbors": [2], "epochs": 1, "loading": "shared"}
    train(TrainConfig.create(**config), folder / "run")
    return folder / "run"


WANTED = [NAMES[7], NAMES[59], NAMES[0]]


@pytest.mark.parametrize("name", ["n.csv", "n.csv.gz", "n.TXT", "n.tsv", "n.parquet", "n.npy"])
@pytest.mark.parametrize("column", ["node_id", "paper", None])
def test_a_file_of_names_gives_predictions_in_its_order(
    named_run: Path, tmp_path: Path, name: str, column: str | None
) -> None:
    file = tmp_path / name
    table = pd.DataFrame({column or WANTED[0]: WANTED if column else WANTED[1:]})
    if name.endswith(".npy"):
        np.save(file, np.array(WANTED))
    elif name.endswith(".parquet"):
        pd.DataFrame({column or "x": WANTED}).to_parquet(file)
    elif ".csv" in name:
        table.to_csv(file, index=False)
    else:
        # a comma belongs to the name where a tab separates; in a file of one column quotes tell
        table.to_csv(file, index=False, sep="\t", quoting=1)
    found = pd.read_csv(predict(named_run, tmp_path / "out.csv", nodes=file, sampled=True, **QUIET))
    assert found["node_id"].tolist() == WANTED


@pytest.mark.parametrize("name", ["n.csv", "n.tsv", "n.parquet"])
def test_columns_without_node_id_are_refused(named_run: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    table = pd.DataFrame({"paper": WANTED, "year": [1, 2, 3]})
    if name.endswith(".parquet"):
        table.to_parquet(file)
    else:
        table.to_csv(file, index=False, sep="\t" if name == "n.tsv" else ",")
    with pytest.raises(InputError, match=rf"{name}: .*node_id.*'paper', 'year'"):
        predict(named_run, tmp_path / "out.csv", nodes=file, **QUIET)
    assert left_in(tmp_path) == [name]


@pytest.mark.parametrize(
    ("name", "how", "needed"),
    [
        ("out.csv", {}, 300 * 4 * 2 * 4),
        ("out.parquet", {"scores": True}, 300 * 4 * 4 * 2),
        ("out.npy", {"scores": True}, 300 * 4 * 4),
    ],
)
def test_a_disk_without_room_is_refused_and_nothing_is_written(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, how: dict[str, Any], needed: int
) -> None:  # fmt: skip
    usage = shutil.disk_usage(tmp_path)._replace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    expected = re.escape(f"{tmp_path / name}: expected {format_bytes(needed)}")
    with pytest.raises(InputError, match=f"{expected} .*300 rows"):
        predict(trained, tmp_path / name, nodes="all", **{"sampled": True, **how}, **QUIET)
    assert left_in(tmp_path) == []
