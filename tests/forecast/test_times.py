"""Times of a forecast: the work of each model, and of a model of one's own."""

from pathlib import Path

import pytest
from all_models import KINDS

from ogbnlib.config import TrainConfig
from ogbnlib.forecast.batches import BatchShape
from ogbnlib.forecast.machine import REFERENCE
from ogbnlib.forecast.planner import plan
from ogbnlib.forecast.step_memory import Step
from ogbnlib.graph.store import GraphSize

SIZE = GraphSize("mine", 20_000, 300_000, 16, 4, {"train": 5000, "valid": 0, "test": 100})
MODELS = """
from torch import nn
from torch_geometric.nn import EdgeConv


class Dense(nn.Linear):
    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)

    def forward(self, x, edge_index):
        return super().forward(x)


class EdgeWise(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = EdgeConv(nn.Sequential(nn.Linear(2 * in_channels, 128), nn.ReLU(), nn.Linear(128, out_channels)))

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)
"""


def seconds(name: str, edges: int, *, training: bool = True) -> float:
    loading = "propagated" if KINDS[name].propagated else "shared"
    config = TrainConfig.create(dataset="mine", model=name, loading=loading)
    batch = BatchShape((8, 64, 512), (64, edges))
    step = Step(config, batch, 16 * (1 + config.hops), 4, training)
    return step.seconds(REFERENCE, threads=1)


@pytest.mark.parametrize("name", KINDS)
def test_a_step_takes_longer_the_more_edges_it_has_if_it_has_any(name: str) -> None:
    few, many = seconds(name, 512), seconds(name, 1024)
    assert 0 < seconds(name, 512, training=False) < few <= many
    assert (few == many) == KINDS[name].propagated


def test_the_time_of_ones_own_model_is_that_of_its_measured_step(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODELS)
    config = TrainConfig.create(dataset="mine", num_neighbors=[15, 10])
    dense, edge_wise = (
        plan(config.replace(model=f"{tmp_path / 'mine.py'}:{name}"), size=SIZE)
        for name in ("Dense", "EdgeWise")
    )
    assert edge_wise.forecast.epoch_s > 2 * dense.forecast.epoch_s
    assert "memory and time of a step were measured" in str(edge_wise)
