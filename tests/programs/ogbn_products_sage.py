"""Three layers, a transform and PyG's own `model.inference`, as PyG's
examples/ogbn_products_sage.py: `python ogbn_products_sage.py STORE`."""

import sys

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric.nn import GraphSAGE

import ogbnlib

# ogbnlib: begin
store = ogbnlib.open_store(sys.argv[1])
options = {"batch_size": 256, "transform": T.AddSelfLoops()}
train_loader = store.loader("train", num_neighbors=[15, 10, 5], **options)
subgraph_loader = store.loader(None, num_neighbors=[-1], **options)
splits = {name: torch.from_numpy(ids) for name, ids in store.splits.items()}
y = torch.from_numpy(store.read("y")).long()
# ogbnlib: end

torch.manual_seed(0)
model = GraphSAGE(store.num_features, 64, num_layers=3, out_channels=store.num_classes, dropout=0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)


def train() -> float:
    model.train()
    total = 0.0
    for batch in train_loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y)
        loss.backward()
        optimizer.step()
        total += float(loss.detach())
    return total / len(train_loader)


@torch.no_grad()
def test() -> dict[str, float]:
    model.eval()
    y_pred = model.inference(subgraph_loader).argmax(dim=-1)
    return {name: float((y_pred[ids] == y[ids]).float().mean()) for name, ids in splits.items()}


for epoch in range(1, 6):
    print(f"Epoch {epoch:02d}, Loss: {train():.4f}")
print(test())
