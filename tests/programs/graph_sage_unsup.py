"""GraphSAGE that tells edges from other pairs, then a logistic regression on its embeddings, as
PyG's examples/graph_sage_unsup.py: `python graph_sage_unsup.py STORE`."""

import sys

import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch_geometric.loader import LinkNeighborLoader
from torch_geometric.nn import GraphSAGE

import ogbnlib

# ogbnlib: begin
store = ogbnlib.open_store(sys.argv[1])
data = (store.feature_store(), store.graph_store())
edges = torch.from_numpy(store.read_edge_index())[:, ::50]
sampled = {"edge_label_index": (None, edges), "neighbor_sampler": store.sampler([10, 10])}
# ogbnlib: end

train_loader = LinkNeighborLoader(
    data, num_neighbors=[10, 10], batch_size=256, shuffle=True, neg_sampling_ratio=1.0, **sampled
)

torch.manual_seed(0)
model = GraphSAGE(store.num_features, 64, num_layers=2, out_channels=64)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train() -> float:
    model.train()
    total = 0.0
    count = 0
    for batch in train_loader:
        optimizer.zero_grad()
        h = model(batch.x, batch.edge_index)
        source, target = batch.edge_label_index
        scores = (h[source] * h[target]).sum(dim=-1)
        loss = F.binary_cross_entropy_with_logits(scores, batch.edge_label)
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(scores)
        count += len(scores)
    return total / count


@torch.no_grad()
def test() -> float:
    model.eval()
    everything = store.to_data()
    h = model(everything.x, everything.edge_index).numpy()
    ids, others = store.splits["train"], store.splits["test"]
    classifier = LogisticRegression(max_iter=200).fit(h[ids], store.y[ids])
    return float(classifier.score(h[others], store.y[others]))


for epoch in range(1, 4):
    print(f"Epoch: {epoch:03d}, Loss: {train():.4f}")
print(f"Test: {test():.4f}")
