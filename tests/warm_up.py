"""The fixed part of any run, whose memory is `forecast.memory_parts.RUNTIME_BYTES`."""

import torch

from ogbnlib import marks
from ogbnlib.config import TrainConfig
from ogbnlib.memory.recorder import EventLog
from ogbnlib.training.call import random_batch
from ogbnlib.training.distributed import Ranks
from ogbnlib.training.learner import Learner
from ogbnlib.training.network import GNN
from ogbnlib.training.train import compile_all


def warm_up() -> None:
    """Import, compile and allocate what any run needs: a step of a small model without data."""
    config = TrainConfig.create(dataset="none", num_neighbors=[3, 2], batch_size=128, device="cpu")
    with marks.phase("compile kernels, once on this machine"):
        compile_all(list(config.num_neighbors))
    labels = torch.zeros(128, dtype=torch.int64)
    batch = random_batch([128, 384, 768], [384, 768], 128).update(
        {"y": labels, "input_id": torch.arange(128)}
    )
    learner = Learner(config, GNN(config, 128, 172), torch.device("cpu"), Ranks(), EventLog(None))
    learner.step(iter([batch]), 0, 0, 128)
