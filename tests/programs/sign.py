"""SIGN on features of several hops, as PyG's examples/sign.py; hops are propagated on disk, where
PyG's `T.SIGN` needs the whole graph in memory: `python sign.py STORE`."""

import sys
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear
from torch.utils.data import DataLoader

import ogbnlib

K = 2
# ogbnlib: begin
store = ogbnlib.open_store(sys.argv[1])
folder = tempfile.TemporaryDirectory()
hops = ogbnlib.propagate(store, folder.name, hops=K, progress=False)
xs = torch.from_numpy(hops.read("x", "float32")).split(store.num_features, dim=1)
y = torch.from_numpy(hops.read("y")).long()
splits = {name: torch.from_numpy(rows) for name, rows in hops.splits.items()}
# ogbnlib: end


class Net(torch.nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lins = torch.nn.ModuleList([Linear(in_channels, 64) for _ in range(K + 1)])
        self.lin = Linear((K + 1) * 64, out_channels)

    def forward(self, xs: list[Tensor]) -> Tensor:
        hs = [
            F.dropout(lin(x).relu(), 0.5, self.training)
            for x, lin in zip(xs, self.lins, strict=True)
        ]
        return self.lin(torch.cat(hs, dim=-1)).log_softmax(dim=-1)


torch.manual_seed(0)
model = Net(store.num_features, store.num_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
train_loader = DataLoader(splits["train"], batch_size=128, shuffle=True)


def train() -> float:
    model.train()
    total = 0.0
    for ids in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model([x[ids] for x in xs]), y[ids])
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(ids)
    return total / len(splits["train"])


@torch.no_grad()
def test(ids: Tensor) -> float:
    model.eval()
    return float((model([x[ids] for x in xs]).argmax(dim=-1) == y[ids]).float().mean())


for epoch in range(1, 6):
    print(f"Epoch: {epoch:03d}, Loss: {train():.4f}, Val: {test(splits['valid']):.4f}")
print(f"Test: {test(splits['test']):.4f}")
