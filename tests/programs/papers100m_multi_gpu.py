"""One process for each part of the train split, as PyG's papers100m_gcn_multigpu.py, here on the
CPU with gloo: `python papers100m_multi_gpu.py STORE`."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GCN

import ogbnlib
from ogbnlib import Store


def run(rank: int, world_size: int, store: Store, rendezvous: str, model: GCN) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    train(rank, world_size, store, model)
    dist.barrier()
    # Not in `train`: a `DistributedDataParallel` that outlives the group ends it with Python's lock
    # held, for which gloo's threads may wait (pytorch/pytorch#56297). So 39 of 400 ends hung.
    dist.destroy_process_group()


def train(rank: int, world_size: int, store: Store, model: GCN) -> None:
    # ogbnlib: begin
    train_ids = torch.from_numpy(store.splits["train"])
    own_ids = train_ids.split(len(train_ids) // world_size)[rank]
    options = {"num_neighbors": [10, 10], "batch_size": 32}
    train_loader = store.loader(own_ids, shuffle=True, drop_last=True, **options)
    val_loader = store.loader("val", **options)
    # ogbnlib: end

    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(1, 6):
        parallel.train()
        total = torch.zeros(())
        for batch in train_loader:
            optimizer.zero_grad()
            out = parallel(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"Epoch: {epoch:02d}, Loss: {total / world_size / len(train_loader):.4f}")

    if rank == 0:
        model.eval()
        with torch.no_grad():
            correct = sum(
                int((model(b.x, b.edge_index)[: b.batch_size].argmax(dim=-1) == b.y).sum())
                for b in val_loader
            )
        print(f"Val Acc: {correct / store.num_seeds['valid']:.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    opened = ogbnlib.open_store(sys.argv[1])
    gcn = GCN(opened.num_features, 64, 2, opened.num_classes)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(2, opened, f"{folder}/rendezvous", gcn), nprocs=2)
