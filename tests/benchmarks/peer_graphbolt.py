"""GraphBolt's side of `bench_training.py --peer graphbolt`: batches per second from arrays in RAM.

It runs in an environment of its own, as DGL's last GraphBolt for PyPI needs torch 2.2: `python
peer_graphbolt.py JSON`, with the arguments of `main`; `folder` has colptr, row, x, y and train as
.npy. Loader and model are those of DGL's examples/graphbolt/node_classification.py.
"""

import itertools
import json
import sys
import time

import dgl.graphbolt as gb
import dgl.nn.pytorch as dglnn
import numpy as np
import torch
import torch.nn.functional as F


class SAGE(torch.nn.Module):
    def __init__(self, widths: list[int]):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            dglnn.SAGEConv(a, b, "mean") for a, b in itertools.pairwise(widths)
        )

    def forward(self, blocks, x):
        for i, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, x)
            x = F.relu(x) if i < len(self.layers) - 1 else x
        return x


def main(folder: str, fan_out: list[int], batch_size: int, hidden: int, threads: int, **how):
    torch.set_num_threads(threads)
    names = ("colptr", "row", "x", "y", "train")
    arrays = {name: torch.from_numpy(np.load(f"{folder}/{name}.npy")) for name in names}
    graph = gb.fused_csc_sampling_graph(arrays["colptr"], arrays["row"])
    features = gb.BasicFeatureStore({("node", None, "feat"): gb.TorchBasedFeature(arrays["x"])})
    labels = arrays["y"][arrays["train"]].long()
    seeds = arrays["train"].to(arrays["row"].dtype)  # GraphBolt expects ids of one type
    items = gb.ItemSet((seeds, labels), names=("seed_nodes", "labels"))
    pipe = gb.ItemSampler(items, batch_size=batch_size, shuffle=True)
    # GraphBolt names the hop farthest from the seeds first
    pipe = pipe.sample_neighbor(graph, fan_out[::-1])
    loader = gb.DataLoader(pipe.fetch_feature(features, node_feature_keys=["feat"]), num_workers=0)
    model = SAGE([arrays["x"].shape[1], *[hidden] * (len(fan_out) - 1), int(labels.max()) + 1])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    done = -1
    while True:
        for batch in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=how["precision"] == "bf16"):
                out = model(batch.blocks, batch.node_features["feat"])
                loss = F.cross_entropy(out.float(), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if not done:  # the first batch is left out
                begin = time.perf_counter()
            elif time.perf_counter() - begin > how["seconds"]:
                return print(done / (time.perf_counter() - begin))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
