"""GraphSAGE with layer-wise inference, as PyG's examples/reddit.py: `python reddit.py STORE`."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv

import ogbnlib

# ogbnlib: begin
store = ogbnlib.open_store(sys.argv[1])
data = store.to_data()
train_loader = store.loader("train", num_neighbors=[25, 10], batch_size=128)
subgraph_loader = store.loader(None, num_neighbors=[-1], batch_size=2048)
# ogbnlib: end


class SAGE(torch.nn.Module):
    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(
            [SAGEConv(in_channels, hidden_channels), SAGEConv(hidden_channels, out_channels)]
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i < len(self.convs) - 1:
                x = F.dropout(x.relu(), 0.5, self.training)
        return x

    @torch.no_grad()
    def inference(self, x_all: Tensor, loader: NeighborLoader) -> Tensor:
        for i, conv in enumerate(self.convs):
            xs = []
            for batch in loader:
                x = conv(x_all[batch.n_id], batch.edge_index)[: batch.batch_size]
                xs.append(x.relu() if i < len(self.convs) - 1 else x)
            x_all = torch.cat(xs)
        return x_all


torch.manual_seed(0)
model = SAGE(data.num_features, 64, store.num_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train() -> tuple[float, float]:
    model.train()
    total_loss = total_correct = total = 0.0
    for batch in train_loader:
        optimizer.zero_grad()
        y = batch.y[: batch.batch_size]
        y_hat = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(y_hat, y)
        loss.backward()
        optimizer.step()
        total_loss += float(loss) * batch.batch_size
        total_correct += int((y_hat.argmax(dim=-1) == y).sum())
        total += batch.batch_size
    return total_loss / total, total_correct / total


@torch.no_grad()
def test() -> list[float]:
    model.eval()
    y_hat = model.inference(data.x, subgraph_loader).argmax(dim=-1)
    masks = (data.train_mask, data.val_mask, data.test_mask)
    return [float((y_hat[mask] == data.y[mask]).float().mean()) for mask in masks]


for epoch in range(1, 6):
    loss, accuracy = train()
    print(f"Epoch: {epoch:02d}, Loss: {loss:.4f}, Approx. Train: {accuracy:.4f}")
print("Train: {:.4f}, Val: {:.4f}, Test: {:.4f}".format(*test()))
