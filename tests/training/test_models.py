"""Promises of `models`: bipartite layers leave out only what nobody reads."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from all_models import SAMPLED, untrimmed
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.sampler import NodeSamplerInput

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.launcher import check_precision
from ogbnlib.memory.recorder import EventLog
from ogbnlib.sampling.sampler import CSCSampler
from ogbnlib.training import fused_sage as sage
from ogbnlib.training.distributed import Ranks
from ogbnlib.training.learner import Learner, loss_and_gradient
from ogbnlib.training.network import GNN

Batch = tuple[Tensor, Tensor, list[int], list[int]]


def batch(num_neighbors: Sequence[int], seeds: int = 7, features: int = 6) -> Batch:
    """x, edge_index and the counts per hop of a sampled batch on a random graph of 200 nodes."""
    random = np.random.default_rng(1)
    degree = random.integers(0, 12, size=200)
    colptr = np.concatenate([[0], np.cumsum(degree)])
    row = random.integers(200, size=colptr[-1])
    for node in np.flatnonzero(degree > 0)[::2]:
        row[colptr[node]] = node  # a self-loop
    sampler = CSCSampler(colptr, row, list(num_neighbors))
    out = sampler.sample_from_nodes(NodeSamplerInput(input_id=None, node=torch.arange(seeds)))
    x = torch.randn(len(out.node), features, generator=torch.Generator().manual_seed(0))
    return x, torch.stack([out.row, out.col]), out.num_sampled_nodes, out.num_sampled_edges


def model(name: str, layers: int, **more: object) -> GNN:
    torch.manual_seed(0)
    values = {"model": name, "num_neighbors": [2] * layers, "hidden_channels": 8, **more}
    return GNN(TrainConfig.create(dataset="x", **values), 6, 5).eval()


def by_pyg(name: str, gnn: GNN, x: Tensor, edges: Tensor) -> Tensor:
    """PyG's default forward with the same weights: its own layers, each on every node and edge."""
    stock = {"sage": SAGEConv, "gcn": GCNConv, "gat": GATConv}[name]
    for layer, conv in enumerate(gnn.convs):
        last = layer == len(gnn.convs) - 1
        options = {"heads": conv.heads, "concat": not last} if name == "gat" else {}
        plain = stock(conv.in_channels, conv.out_channels, **options)
        plain.load_state_dict(conv.state_dict())
        x = plain(x, edges) if last else F.relu(plain(x, edges))
    return x


@pytest.mark.parametrize("fanouts", [[4], [4, 3, 2], [-1, -1]], ids=str)
@pytest.mark.parametrize("name", SAMPLED)
def test_seeds_get_the_scores_of_every_layer_on_every_node(name: str, fanouts: list[int]) -> None:
    gnn = model(name, len(fanouts))
    x, edges, nodes_per_hop, edges_per_hop = batch(fanouts)
    assert (edges[0] == edges[1]).any()  # PyG replaces a self-loop that is there by the one it adds
    expected = untrimmed(name, gnn.convs, x, edges)[: nodes_per_hop[0]]
    if name in ("sage", "gcn", "gat"):
        torch.testing.assert_close(by_pyg(name, gnn, x, edges)[: nodes_per_hop[0]], expected)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            torch.testing.assert_close(gnn(x, edges, nodes_per_hop, edges_per_hop), expected)


def gradients(name: str, fused: bool = True, **more: object) -> list[Tensor]:
    """The loss of a step, the weights' gradients, and a number that the random state then gives."""
    gnn = model(name, 3, **more).train()
    x, edges, *hops = batch([4, 3, 2], seeds=20)
    torch.manual_seed(5)
    labels = torch.arange(20) % 5
    if fused and gnn.fuses(x):
        names = ("num_sampled_nodes", "num_sampled_edges")
        sampled = Data(x, edges, **dict(zip(names, hops, strict=True)))
        loss = gnn.add_gradients(sampled, partial(loss_and_gradient, labels=labels, scale=0.05))
    else:
        loss = F.cross_entropy(gnn(x, edges, *hops), labels, reduction="sum")
        (loss * 0.05).backward()
    return [loss.detach(), *(p.grad for p in gnn.parameters() if p.grad is not None), torch.rand(1)]


# A bfloat16 has 8 bits, and the two sides round at other places.
@pytest.mark.parametrize(
    ("dropout", "precision", "within"),
    [(0.0, "fp32", 1e-6), (0.5, "fp32", 1e-6), (0.5, "bf16", 0.01)],
)
def test_fused_layers_have_pygs_gradients(dropout: float, precision: str, within: float) -> None:
    values = {"dropout": dropout, "precision": precision}
    both = (gradients("sage", fused, **values) for fused in (True, False))
    for one, other in zip(*both, strict=True):
        assert one.dtype == other.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=within, atol=within)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fused_gradients_ignore_threads(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sage, "PART_ROWS", 3)
    results = []
    for threads in (3, 1):
        with sage.torch_threads(threads):
            results.append(gradients("sage", dropout=0.5, precision=precision))
            assert torch.get_num_threads() == threads
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@torch.no_grad()
def test_float16_features_are_widened_and_wrong_edges_refused() -> None:
    gnn, (x, edges, nodes, counts) = model("sage", 2), batch([4, 3])
    half, full = (gnn(given, edges, nodes, counts) for given in (x.half(), x.half().float()))
    assert torch.equal(half, full)
    with pytest.raises(InputError, match=r"^edge_index: "):
        gnn(x, edges + len(x), nodes, counts)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_batch_without_edges_is_computed(name: str) -> None:
    out = model(name, 2)(torch.ones(3, 6), torch.empty(2, 0, dtype=torch.int64), [3, 0, 0], [0, 0])
    assert out.shape == (3, 5)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SAMPLED)
def test_checkpointed_gradients_are_the_plain_ones_bit_for_bit(name: str, precision: str) -> None:
    plain = gradients(name, dropout=0.5, precision=precision)
    again = gradients(name, dropout=0.5, precision=precision, activation_checkpointing=True)
    assert len(plain) > 4
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_float16_on_a_cpu_is_refused_and_bfloat16_proposed(device: str) -> None:
    if device == "auto" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InputError, match=r"^precision: expected .* for 'fp16'.*use 'bf16'"):
        check_precision("fp16", device)
    check_precision("bf16", device)


@pytest.mark.parametrize("place", ["convs.1", "convs.0.lin_l", ""])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_called_in_training_and_in_evaluation(place: str, kind: str) -> None:
    x, edges, *hops = batch([4, 3])
    sampled = Data(x, edges, num_sampled_nodes=hops[0], num_sampled_edges=hops[1])
    sampled.batch_size = hops[0][0]
    sampled.y = torch.zeros(sampled.batch_size, dtype=torch.int64)
    gnn = model("sage", 2)
    config = TrainConfig.create(dataset="x", num_neighbors=[2, 2], hidden_channels=8)
    learner = Learner(config, gnn, torch.device("cpu"), Ranks(), EventLog(None))
    expected = learner._add_gradients(sampled, 1.0)[0]
    calls: list[str] = []
    handle = getattr(gnn.get_submodule(place), kind)(lambda *_: calls.append(place))
    torch.testing.assert_close(learner._add_gradients(sampled, 1.0)[0], expected)
    assert calls == [place]
    with torch.no_grad():
        gnn(x, edges, *hops)
    assert calls == [place] * 2
    handle.remove()
    assert learner._add_gradients(sampled, 1.0)[1]
    assert calls == [place] * 2
