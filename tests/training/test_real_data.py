"""Real graphs through the raw writer and a conversion, trained as a user would train them."""

import itertools
import os
from pathlib import Path

import pytest
import torch.nn.functional as F
from real_graphs import real_config, write_graph
from torch import Tensor
from torch_geometric.nn import GCNConv

from ogbnlib.training.models import GNN
from ogbnlib.training.train import train


def test_graphsage_reaches_the_accuracy_of_the_literature_on_amazon_photo(tmp_path: Path) -> None:
    write_graph("amazon_photo", tmp_path / "photo")
    accuracy = train(real_config(tmp_path / "photo", 30), tmp_path / "run").history[-1]["test"]
    assert accuracy is not None
    assert accuracy >= 0.92
    print(f"amazon_photo: test accuracy {accuracy:.4f}")


@pytest.mark.slow
def test_coauthor_cs_reaches_it_too_and_bfloat16_comes_within_a_hundredth(tmp_path: Path) -> None:
    write_graph("coauthor_cs", tmp_path / "cs")
    exact, half = (
        train(real_config(tmp_path / "cs", 5, device="cpu", precision=precision)).history[-1]["test"]
        for precision in ("fp32", "bf16")
    )
    assert exact is not None
    assert half is not None
    assert exact >= 0.91
    assert abs(exact - half) <= 0.01
    print(f"coauthor_cs: test accuracy {exact:.4f} in fp32, {half:.4f} in bf16")


GRAPHS, FAN_OUTS = ("amazon_photo", "coauthor_cs"), ([-1, -1], [5, 5], [5, 5, 5])
# All six take four minutes: two in CI, the rest with OGBNLIB_LONG=1.
SHORT = [("amazon_photo", [-1, -1]), ("coauthor_cs", [5, 5])]
CASES = itertools.product(GRAPHS, FAN_OUTS) if os.environ.get("OGBNLIB_LONG") else SHORT


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_neighbors"), CASES, ids=str)
def test_gcn_reaches_the_accuracy_of_pygs_own_forward(
    tmp_path: Path, name: str, num_neighbors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_graph(name, tmp_path / "graph")
    epochs = {"amazon_photo": 15, "coauthor_cs": 4}[name]
    large = {"batch_size": 1024}  # a full neighborhood is nearly the whole graph: fewer batches of it
    config = real_config(tmp_path / "graph", epochs, model="gcn", num_neighbors=num_neighbors, dropout=0.0, **large)
    ours = train(config).history[-1]["test"]

    def stock(self: GNN, x: Tensor, edge_index: Tensor, num_sampled_nodes: list[int], *_: object) -> Tensor:
        for layer, conv in enumerate(self.convs):
            x = GCNConv.forward(conv, x, edge_index)
            x = x if layer == len(self.convs) - 1 else F.relu(x)
        return x[: num_sampled_nodes[0]]

    monkeypatch.setattr(GNN, "forward", stock)
    theirs = train(config).history[-1]["test"]
    assert ours is not None
    assert theirs is not None
    assert abs(ours - theirs) <= 0.01
    print(f"{name}, gcn {num_neighbors}: {ours:.4f}, with PyG's own forward {theirs:.4f}")
