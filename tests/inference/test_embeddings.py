"""Embeddings of a run's model: the last layer makes the scores of `predict(scores=True)` of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from all_models import EXACT, KINDS
from conftest import left_in

from ogbnlib import InputError, TrainConfig, open_store, predict
from ogbnlib.training.checkpoint import SavedModel
from ogbnlib.training.network import registered_model
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]
QUIET: dict[str, Any] = {"progress": False, "say": lambda text: None}
CUSTOM = """
import torch
from torch_geometric.nn import SAGEConv

class Net(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.conv = SAGEConv(in_channels, hidden_channels)
        self.out = torch.nn.Linear(hidden_channels, out_channels)

    def forward(self, x, edge_index):
        return self.out(self.conv(x, edge_index).relu())
"""
DROPS = """
    def drop_last_layer(self):
        self.out = torch.nn.Identity()
"""


def embeddings_and_scores(
    run_dir: Path, folder: Path, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of all nodes, or of the nodes that `how` names."""
    how = {"nodes": "all", **how, **QUIET}
    hidden = np.load(predict(run_dir, folder / "hidden.npy", embeddings=True, **how))
    assert hidden.dtype == np.float32
    scores = np.load(predict(run_dir, folder / "scores.npy", scores=True, **how))
    return torch.from_numpy(hidden), torch.from_numpy(scores)


def last_layer(run_dir: Path, dataset: Path, hidden: torch.Tensor) -> torch.Tensor:
    """The last layer of a sampled model, of every node and edge."""
    config, weights, *_ = SavedModel.open(run_dir)
    store = open_store(dataset)
    net: Any = registered_model(config, store.num_features, store.num_classes).eval()
    net.load_state_dict(weights)
    edges = torch.from_numpy(store.read_edge_index())
    edges = edges[:, edges[1].argsort(stable=True)]
    kind = KINDS[config.model]
    adjacency = kind.adjacency(edges, len(hidden), len(hidden), kind.prepare(edges, len(hidden)))
    with torch.no_grad():
        scores: torch.Tensor = net.convs[-1]((hidden, hidden), *adjacency)
    return scores


@pytest.mark.parametrize("columns", [2, 100])
@pytest.mark.parametrize("model", EXACT)
def test_exact_embeddings_give_the_exact_scores(
    tiny_config: Config,
    tiny_store: Path,
    tmp_path: Path,
    columns_in_memory: Callable[[int], None],
    model: str,
    columns: int,
) -> None:
    columns_in_memory(columns)
    train(
        tiny_config(model=model, num_neighbors=[3, 3, 2], hidden_channels=6, lr=0.05),
        tmp_path / "run",
    )
    hidden, scores = embeddings_and_scores(tmp_path / "run", tmp_path)
    assert hidden.shape == (300, 6)
    found = last_layer(tmp_path / "run", tiny_store, hidden)
    torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-5)
    some = np.random.default_rng(0).permutation(300)[:40]
    few = predict(tmp_path / "run", tmp_path / "few.npy", nodes=some, embeddings=True, **QUIET)
    np.testing.assert_allclose(np.load(few), hidden[some], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", EXACT)
def test_sampled_embeddings_of_all_neighbors_are_exact(
    tiny_config: Config, tiny_store: Path, tmp_path: Path, model: str, precision: str
) -> None:
    config = tiny_config(
        model=model, num_neighbors=[-1, -1], hidden_channels=6, lr=0.05, precision=precision
    )
    train(config, tmp_path / "run")
    hidden, scores = embeddings_and_scores(tmp_path / "run", tmp_path, sampled=True)
    expected = np.load(
        predict(tmp_path / "run", tmp_path / "e.npy", nodes="all", embeddings=True, **QUIET)
    )
    near = 1e-4 if precision == "fp32" else 0.05
    np.testing.assert_allclose(hidden, expected, rtol=near, atol=near)
    if model == "sage":  # a batch's outermost nodes have fewer edges, which gcn counts
        found = last_layer(tmp_path / "run", tiny_store, hidden)
        torch.testing.assert_close(found, scores, rtol=near, atol=near)


@pytest.mark.parametrize(("model", "width"), [("sign", 24), ("sagn", 8)])
def test_propagated_embeddings_give_the_scores(
    tiny_config: Config, tiny_store: Path, tmp_path: Path, model: str, width: int
) -> None:
    config = tiny_config(
        loading="propagated", model=model, hops=2, hidden_channels=8,
        dataset=str(tiny_store),
    )  # fmt: skip
    train(config, tmp_path / "run")
    hidden, scores = embeddings_and_scores(tmp_path / "run", tmp_path, nodes="labelled")
    assert hidden.shape[1] == width
    weights = SavedModel.open(tmp_path / "run").weights
    found = hidden @ weights["out.weight"].T + weights["out.bias"]
    torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-5)


def test_gat_and_a_custom_model_have_embeddings(tiny_config: Config, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(CUSTOM + DROPS)
    train(tiny_config(model=f"{tmp_path}/net.py:Net", hidden_channels=6), tmp_path / "run")
    hidden, scores = embeddings_and_scores(tmp_path / "run", tmp_path, sampled=True)
    weights = SavedModel.open(tmp_path / "run").weights
    found = hidden @ weights["out.weight"].T + weights["out.bias"]
    torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-5)
    train(tiny_config(model="gat", hidden_channels=8), tmp_path / "gat")
    out = predict(tmp_path / "gat", tmp_path / "gat.npy", sampled=True, embeddings=True, **QUIET)
    ids = np.load(tmp_path / "gat-nodes.npy")
    assert np.load(out).shape == (len(ids), 8)


@pytest.mark.usefixtures("table_pieces")
def test_parquet_has_the_names_of_nodes_and_one_list_each(
    tiny_config: Config, tmp_path: Path, command_line: Callable[..., int]
) -> None:
    train(tiny_config(hidden_channels=6, epochs=1), tmp_path / "run")
    expected, _ = embeddings_and_scores(tmp_path / "run", tmp_path)
    (tmp_path / "nodes.csv").write_text("node_id\n7\n290\n3\n")
    for nodes, ids in ((str(tmp_path / "nodes.csv"), [7, 290, 3]), ("all", [*range(300)])):
        out = tmp_path / f"{len(ids)}.parquet"
        arguments = ["predict", str(tmp_path / "run"), "--out", str(out), "--nodes", nodes]
        assert command_line(*arguments, "--embeddings", "--json") == 0
        table = pa.parquet.read_table(out)
        assert table.schema.field("embedding").type == pa.list_(pa.float32(), 6)
        assert table["node_id"].to_pylist() == ids
        found = np.array(table["embedding"].to_pylist())
        np.testing.assert_allclose(found, expected[ids], rtol=1e-4, atol=1e-5)


def test_embeddings_that_cannot_be_written_are_refused(
    tiny_config: Config, tiny_store: Path, tmp_path: Path
) -> None:
    def refused(error: str, run_dir: str, out: str = "out.npy", **how: Any) -> None:
        before = left_in(tmp_path)
        with pytest.raises(InputError, match=error):
            predict(tmp_path / run_dir, tmp_path / out, embeddings=True, **how, **QUIET)
        assert left_in(tmp_path) == before

    train(tiny_config(epochs=1), tmp_path / "run")
    refused("embeddings: .*scores", "run", scores=True)
    refused(r"out: .*\.npy or \.parquet.*, got o\.csv", "run", "o.csv")
    train(tiny_config(epochs=1, num_neighbors=[3]), tmp_path / "one")
    refused("embeddings: .*got sage", "one")
    config = tiny_config(loading="propagated", model="sgc", dataset=str(tiny_store))
    train(config, tmp_path / "sgc")
    refused("embeddings: .*got sgc", "sgc")
    (tmp_path / "net.py").write_text(CUSTOM)
    train(tiny_config(epochs=1, model=f"{tmp_path}/net.py:Net"), tmp_path / "own")
    refused(r"net.py:Net .*drop_last_layer\(\)", "own", sampled=True)
