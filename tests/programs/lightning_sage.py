"""A LightningModule and PyG's LightningNodeData, as PyG's
examples/pytorch_lightning/graph_sage.py: `python lightning_sage.py STORE`."""

import sys

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningNodeData
from torch_geometric.nn import GraphSAGE
from torchmetrics import Accuracy

import ogbnlib

# ogbnlib: begin
store = ogbnlib.open_store(sys.argv[1])
data = (store.feature_store(), store.graph_store())
train_ids, val_ids = (torch.from_numpy(store.splits[name]) for name in ("train", "valid"))
node_sampler = store.sampler([25, 10])
# ogbnlib: end

nodes = {"input_train_nodes": train_ids, "input_val_nodes": val_ids}
datamodule = LightningNodeData(data, **nodes, node_sampler=node_sampler, batch_size=128)


class Model(lightning.LightningModule):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.gnn = GraphSAGE(in_channels, 64, 2, out_channels, dropout=0.5)
        self.accuracy = Accuracy(task="multiclass", num_classes=out_channels)
        self.losses: list[float] = []

    def step(self, batch: Data) -> tuple[Tensor, Tensor]:
        out = self.gnn(batch.x, batch.edge_index)[: batch.batch_size]
        return out, batch.y[: batch.batch_size]

    def training_step(self, batch: Data, index: int) -> Tensor:
        loss = F.cross_entropy(*self.step(batch))
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_epoch_end(self) -> None:
        print(f"Epoch: {self.current_epoch}, Loss: {sum(self.losses) / len(self.losses):.4f}")
        self.losses.clear()

    def validation_step(self, batch: Data, index: int) -> None:
        out, y = self.step(batch)
        self.accuracy(out.softmax(dim=-1), y)
        self.log("val_acc", self.accuracy, on_epoch=True, batch_size=len(y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


lightning.seed_everything(0)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(max_epochs=5, accelerator="cpu", **quiet)
trainer.fit(Model(store.num_features, store.num_classes), datamodule)
print(f"Val: {float(trainer.callback_metrics['val_acc']):.4f}")
