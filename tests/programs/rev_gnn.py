"""Reversible layers on random induced subgraphs, as PyG's examples/rev_gnn.py:
`python rev_gnn.py STORE`."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LayerNorm, Linear
from torch_geometric.loader import RandomNodeLoader
from torch_geometric.nn import GroupAddRev, SAGEConv

import ogbnlib

# ogbnlib: begin
store = ogbnlib.open_store(sys.argv[1])
data = store.to_data()  # these loaders cut the whole graph, which must fit into memory
train_loader = RandomNodeLoader(data, num_parts=10, shuffle=True)
test_loader = RandomNodeLoader(data, num_parts=1)
# ogbnlib: end


class Block(torch.nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = LayerNorm(channels)
        self.conv = SAGEConv(channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(self.norm(x).relu(), edge_index)


class RevGNN(torch.nn.Module):
    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin1 = Linear(in_channels, hidden_channels)
        self.convs = torch.nn.ModuleList(
            [GroupAddRev(Block(hidden_channels // 2), num_groups=2) for _ in range(3)]
        )
        self.lin2 = Linear(hidden_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin1(x)
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.lin2(F.dropout(x.relu(), 0.5, self.training))


torch.manual_seed(0)
model = RevGNN(store.num_features, 64, store.num_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)


def train() -> float:
    model.train()
    total = 0.0
    count = 0
    for batch in train_loader:
        optimizer.zero_grad()
        mask = batch.train_mask
        loss = F.cross_entropy(model(batch.x, batch.edge_index)[mask], batch.y[mask])
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * int(mask.sum())
        count += int(mask.sum())
    return total / count


@torch.no_grad()
def test() -> float:
    model.eval()
    (whole,) = test_loader
    y_pred = model(whole.x, whole.edge_index).argmax(dim=-1)
    return float((y_pred == whole.y)[whole.test_mask].float().mean())


for epoch in range(1, 6):
    print(f"Epoch: {epoch:03d}, Loss: {train():.4f}")
print(f"Test: {test():.4f}")
