"""Two processes, whose loaders go on within an epoch after a restart, and layer-wise inference in
one of them, as PyG's distributed_sampling.py: `python distributed_sampling.py STORE`."""

import math
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE

import ogbnlib


# ogbnlib: begin
def own_loader(path: str, rank: int, world_size: int) -> NeighborLoader:
    store = ogbnlib.open_store(path)
    train_ids = torch.from_numpy(store.splits["train"])
    own_ids = train_ids.split(math.ceil(len(train_ids) / world_size))[rank]
    return store.loader(own_ids, num_neighbors=[25, 10], batch_size=16, shuffle=True)
    # ogbnlib: end


def run(rank: int, world_size: int, path: str, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    train(rank, world_size, path)
    dist.barrier()
    # Not in `train`: a `DistributedDataParallel` that outlives the group ends it with Python's lock
    # held, for which gloo's threads may wait (pytorch/pytorch#56297). So 39 of 400 ends hung.
    dist.destroy_process_group()


def train(rank: int, world_size: int, path: str) -> None:
    store = ogbnlib.open_store(path)
    torch.manual_seed(12345)
    sage = GraphSAGE(store.num_features, 64, 2, store.num_classes)
    model = DistributedDataParallel(sage)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(1, 6):
        model.train()
        total = 0.0
        count = 0
        for start in (0, 32):  # an epoch in two attempts, each with a new loader
            loader = own_loader(path, rank, world_size)
            loader.set_epoch(epoch, start)
            for batch in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(
                    model(batch.x, batch.edge_index)[: batch.batch_size], batch.y
                )
                loss.backward()
                optimizer.step()
                total += float(loss.detach()) * batch.batch_size
                count += batch.batch_size
                if count == 32:
                    break
        assert count == len(loader.dataset), "each node once"
        if rank == 0:
            print(f"Epoch: {epoch:02d}, Loss: {total / count:.4f}")

    dist.barrier()
    if rank == 0:
        sage.eval()
        everything = store.loader(None, num_neighbors=[-1], batch_size=4096)
        out = sage.inference(everything).argmax(dim=-1)
        for split, ids in store.splits.items():
            accuracy = float((out[ids].numpy() == store.y[ids]).mean())
            print(f"{split}: {accuracy:.4f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(2, sys.argv[1], f"{folder}/rendezvous"), nprocs=2)
