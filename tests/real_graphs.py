"""The real graphs of ../shared/data, which are not part of this repository, in OGB's layout."""

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from ogb_layout import write_raw

from ogbnlib import TrainConfig

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def write_graph(name: str, path: Path) -> None:
    """The graph of ../shared/data in OGB's layout with a seeded 60/20/20 split."""
    source = DATA / f"{name}.npz"
    if not source.is_file():
        pytest.skip(f"{source} is not here: real graphs are not part of this repository")
    with np.load(source, allow_pickle=False) as file:
        x = sp.csr_matrix(
            (file["x_data"], file["x_indices"], file["x_indptr"]), shape=tuple(file["x_shape"])
        ).toarray()
        edge_index, y = file["edge_index"], file["y"]
    order = np.random.default_rng(0).permutation(len(y))
    train_ids, valid_ids, test_ids = np.split(order, [int(0.6 * len(y)), int(0.8 * len(y))])
    splits = {"train": train_ids, "valid": valid_ids, "test": test_ids}
    write_raw(path, edge_index=edge_index, x=x, y=y, splits=splits)


def real_config(dataset: Path, epochs: int, **more: object) -> TrainConfig:
    """A two-layer GraphSAGE of hidden size 64, evaluated once, at the end."""
    values = {"num_neighbors": [5, 5], "batch_size": 128, "hidden_channels": 64, "dropout": 0.5}
    values |= {"epochs": epochs, "eval_every": epochs, "train_eval": "never", "undirected": True}
    return TrainConfig.create({**values, "dataset": dataset, **more})
