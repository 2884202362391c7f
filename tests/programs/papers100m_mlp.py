"""An MLP on the features of labelled nodes alone, as OGB's examples/nodeproppred/papers100M/mlp.py:
`python papers100m_mlp.py STORE`."""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch_geometric.nn import MLP

import ogbnlib

# ogbnlib: begin
store = ogbnlib.open_store(sys.argv[1])
train_set, val_set, test_set = (
    TensorDataset(
        torch.from_numpy(store.decode(store.x[ids]).astype(np.float32)),
        torch.from_numpy(store.y[ids]).long(),
    )
    for ids in store.splits.values()
)
# ogbnlib: end

torch.manual_seed(0)
model = MLP([store.num_features, 128, 128, store.num_classes], dropout=0.2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
train_loader = DataLoader(train_set, batch_size=256, shuffle=True)


def train() -> float:
    model.train()
    total = 0.0
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(y)
    return total / len(train_set)


@torch.no_grad()
def test(x: Tensor, y: Tensor) -> float:
    model.eval()
    return float((model(x).argmax(dim=-1) == y).float().mean())


for epoch in range(1, 6):
    print(f"Epoch: {epoch:02d}, Loss: {train():.4f}, Valid: {test(*val_set.tensors):.4f}")
print(f"Test: {test(*test_set.tensors):.4f}")
