"""A run's model as its folder has it."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

import torch

from ..config import TrainConfig
from ..files import StrPath
from ..graph.npz import Array
from ..graph.store import Store
from ..training.checkpoint import check_data, fingerprint, read_model

Rows: TypeAlias = tuple[Array, Array]  # positions of rows in the result, int64, and their scores


class SavedModel(NamedTuple):
    """A run's parameters, its weights by name, and the fingerprint of its data set."""

    config: TrainConfig
    weights: Mapping[str, torch.Tensor]
    data: Mapping[str, object]
    path: Path  # of the weights

    @classmethod
    def open(cls, run_dir: StrPath) -> Self:
        return cls(*read_model(run_dir))

    @property
    def batch_size(self) -> int:
        """Seeds of a batch, as in the run's evaluations."""
        return self.config.eval_batch_size or self.config.batch_size

    def check_data(self, store: Store) -> None:
        """Refuse a data set other than the one that the weights were trained on."""
        check_data(self.path, self.data, fingerprint(store, self.config))
