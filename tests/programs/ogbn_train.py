"""Any of PyG's basic models with sampled evaluation, as PyG's examples/ogbn_train.py; classes are
drawn equally often: `python ogbn_train.py STORE [sage | gat]`."""

import sys

import torch
import torch.nn.functional as F
from torch_geometric.loader import ImbalancedSampler, NeighborLoader
from torch_geometric.nn import GAT, GraphSAGE

import ogbnlib

# ogbnlib: begin
store = ogbnlib.open_store(sys.argv[1])
labels = torch.from_numpy(store.y[store.splits["train"]]).long()
options = {"num_neighbors": [10, 10], "batch_size": 128}
train_loader = store.loader("train", sampler=ImbalancedSampler(labels), **options)
val_loader = store.loader("val", **options)
test_loader = store.loader("test", **options)
# ogbnlib: end

torch.manual_seed(0)
networks = {"sage": GraphSAGE, "gat": GAT}
network = networks[sys.argv[2] if len(sys.argv) > 2 else "sage"]
model = network(store.num_features, 64, 2, store.num_classes, dropout=0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003, weight_decay=0.0005)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=2)


def train() -> float:
    model.train()
    total = 0.0
    count = 0
    for batch in train_loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * batch.batch_size
        count += batch.batch_size
    return total / count


@torch.no_grad()
def test(loader: NeighborLoader) -> float:
    model.eval()
    correct = count = 0
    for batch in loader:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        correct += int((out.argmax(dim=-1) == batch.y[: batch.batch_size]).sum())
        count += batch.batch_size
    return correct / count


for epoch in range(1, 6):
    loss = train()
    accuracy = test(val_loader)
    scheduler.step(accuracy)
    print(f"Epoch {epoch:02d}, Loss: {loss:.4f}, Val: {accuracy:.4f}")
print(f"Test: {test(test_loader):.4f}")
