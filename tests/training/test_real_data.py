"""Real graphs through the raw writer and a conversion, trained as a user would train them."""

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


@pytest.mark.slow
def test_gcn_reaches_the_accuracy_of_pygs_own_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_graph("amazon_photo", tmp_path / "graph")
    large = {"batch_size": 1024, "num_neighbors": [-1, -1]}  # nearly the whole graph: few batches of it
    config = real_config(tmp_path / "graph", 15, model="gcn", dropout=0.0, **large)
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
