"""Predictions of a run: layer by layer they are those of a forward pass over the whole graph in
RAM."""

import json
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

from ogbnlib import InputError, Store, TrainConfig, open_store, predict
from ogbnlib.__main__ import main
from ogbnlib.inference import exact
from ogbnlib.propagation import columns as columns_of
from ogbnlib.propagation import sweep
from ogbnlib.training.checkpoint import SavedModel
from ogbnlib.training.network import registered_model
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]
QUIET: dict[str, Any] = {"progress": False, "say": lambda text: None}


def in_ram(run_dir: Path, dataset: Path) -> np.ndarray:
    """Scores of all nodes by the layers on the whole graph."""
    config, weights, *_ = SavedModel.open(run_dir)
    store = open_store(dataset)
    x, edges = (
        torch.from_numpy(store.read("x", "float32")),
        torch.from_numpy(store.read_edge_index()),
    )
    net = registered_model(config, store.num_features, store.num_classes).eval()
    net.load_state_dict(weights)
    with torch.no_grad():
        x = untrimmed(config.model, net.convs, x, edges)  # type: ignore[arg-type]
    return x.numpy()


@pytest.fixture(scope="module", params=EXACT)
def trained(
    request: pytest.FixtureRequest, tiny_config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run_dir: Path = tmp_path_factory.mktemp(request.param) / "run"
    train(
        tiny_config(
            model=request.param, num_neighbors=[3, 3, 2], hidden_channels=6, keep="best", lr=0.05
        ),
        run_dir,
    )
    return run_dir


@pytest.mark.parametrize("columns", [1, 5, 100])
def test_exact_scores_are_those_of_a_forward_pass_in_ram(
    trained: Path, tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(sweep, "SLICE_NODES", 37)
    monkeypatch.setattr(sweep, "PIECE_EDGES", 50)
    monkeypatch.setattr(columns_of, "CHUNK_BYTES", 2 * 4 * 8 * 20)
    monkeypatch.setattr(exact, "left_bytes", lambda limit: 2**30)
    monkeypatch.setattr(
        exact, "fixed_bytes", lambda *_: 2**30 - exact._STEP_BYTES - columns * 4 * 300
    )
    expected = in_ram(trained, tiny_store)
    predict(trained, tmp_path / "scores.npy", nodes="all", scores=True, **QUIET)
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), expected, rtol=1e-4, atol=1e-5)
    some = np.random.default_rng(0).permutation(300)[:40]
    np.save(tmp_path / "some.npy", some)
    for nodes, ids in (
        ("all", np.arange(300)),
        (str(tmp_path / "some.npy"), some),
        ("labelled", None),
    ):
        path = predict(trained, tmp_path / f"{Path(nodes).stem}-out.npy", nodes=nodes, **QUIET)
        if ids is None:
            ids = np.load(tmp_path / "labelled-out-nodes.npy")
            assert np.array_equal(
                ids, np.unique(np.concatenate([*open_store(tiny_store).splits.values()]))
            )
        found = np.load(path)
        assert found.dtype == np.int16
        assert np.array_equal(found, expected[ids].argmax(1))
    assert left_in(tmp_path) == [
        *("all-out.npy", "labelled-out-nodes.npy", "labelled-out.npy"), "scores.npy", "some-out.npy", "some.npy"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "gcn", "eval_batch_size": 7},
        {"feature_dtype": "float16", "loading": "eager"},
        {"keep": "best"},
    ],
    ids=str,
)
def test_sampled_predictions_have_the_accuracies_of_the_evaluations(
    tiny_config: Config, tiny_store: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = tiny_config(
        **{"num_neighbors": [3, 1], "seed": 5, "train_eval": "every_epoch", "epochs": 3, **changes}
    )
    history = train(config, tmp_path / "run").history
    kept = (
        max(history, key=lambda row: row["valid"] or 0.0) if config.keep == "best" else history[-1]
    )
    labelled = predict(tmp_path / "run", tmp_path / "some.npy", sampled=True, **QUIET)
    everything = predict(tmp_path / "run", tmp_path / "all.npy", nodes="all", sampled=True, **QUIET)
    ids, store = np.load(tmp_path / "some-nodes.npy"), open_store(tiny_store)
    assert np.array_equal(np.load(labelled), np.load(everything)[ids])
    for split, nodes in store.splits.items():
        some = np.random.default_rng(0).permutation(nodes)[:30]
        few = predict(
            tmp_path / "run", tmp_path / f"{split}.npy", nodes=some, sampled=True, **QUIET
        )
        assert np.array_equal(np.load(few), np.load(everything)[some])
        assert float((np.load(everything)[nodes] == store.y[nodes]).mean()) == kept[split]


def test_a_model_of_propagated_features_can_predict(
    tiny_config: Config, tiny_store: Path, tmp_path: Path
) -> None:
    config = tiny_config(
        loading="propagated", model="sign", data_dir=str(tmp_path), dataset=str(tiny_store)
    )
    result = train(config, tmp_path / "run")
    found = np.load(predict(tmp_path / "run", tmp_path / "out.npy", **QUIET))
    ids, store = np.load(tmp_path / "out-nodes.npy"), open_store(tiny_store)
    test = np.searchsorted(ids, store.splits["test"])
    assert (
        float((found[test] == store.y[store.splits["test"]]).mean()) == result.history[-1]["test"]
    )
    with pytest.raises(
        InputError, match="has no features of 90 of these nodes; propagate for all nodes"
    ):
        predict(tmp_path / "run", tmp_path / "all.npy", nodes="all", **QUIET)
    assert not (tmp_path / "all.npy").exists()


def test_what_cannot_be_predicted_is_refused_and_nothing_is_left(
    trained: Path, tiny_config: Config, tiny_dir: Path, tmp_path: Path
) -> None:
    def refused(said: str, run_dir: Path = trained, out: str = "out.npy", **how: Any) -> None:
        before = left_in(tmp_path)
        with pytest.raises(InputError, match=said):
            predict(run_dir, tmp_path / out, **how, **QUIET)
        assert left_in(tmp_path) == before

    refused("out: expected the name of a .npy, .csv or .parquet", out="out.xls")
    refused("nodes: expected labelled, all, or a file of nodes, got 'test'", nodes="test")
    refused(r"none\.npy", nodes=str(tmp_path / "none.npy"))
    refused("nodes: expected ids from 0 to 299, got 5 to 300", nodes=np.array([5, 300]))
    refused(
        r"memory_limit: expected room for .* raise it by at least [\d.]+ [MG]B",
        memory_limit="10 MB",
    )
    train(tiny_config(model="gat", hidden_channels=8), tmp_path / "gat")
    refused(
        "model: every neighbor can be counted for gcn and sage, got gat; add --sampled",
        run_dir=tmp_path / "gat",
    )


def test_another_data_set_at_the_path_is_refused(
    tiny_config: Config, tiny_store: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_store, tmp_path / "s")
    train(tiny_config(dataset=str(tmp_path / "s"), epochs=1), tmp_path / "run")
    data, splits = open_store(tiny_store).to_data(), open_store(tiny_store).splits
    data.x = data.x.flip(0)
    shutil.rmtree(tmp_path / "s")
    Store.from_data(data, tmp_path / "s", splits=splits, num_classes=4, progress=False)
    for sampled in (False, True):
        with pytest.raises(
            InputError, match=r"expected the data set that .*\.pt was trained on .* other features"
        ):
            predict(tmp_path / "run", tmp_path / "out.npy", sampled=sampled, **QUIET)
    assert not (tmp_path / "out.npy").exists()


def test_the_command_writes_the_file(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["ogbnlib", "predict", str(trained), "--out", str(tmp_path / "out.npy"), "--json"]
    monkeypatch.setattr("sys.argv", argv)
    assert main() == 0
    done = capsys.readouterr()
    assert json.loads(done.out) == {"path": str(tmp_path / "out.npy")}
    assert "best.pt: predicting with its weights" in done.err
    assert main() == 2  # the file exists


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_table_has_the_names_of_nodes_in_their_order(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr("ogbnlib.inference.tables._PIECE_BYTES", 100)
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
