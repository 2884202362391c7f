"""Real graphs through the raw writer and OGB's own loader, trained as a user would train them."""

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from ogbnlib import TrainConfig, write_raw
from ogbnlib.training.train import train

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def write_graph(name: str, path: Path) -> None:
    """The graph of ../shared/data in OGB's layout with a seeded 60/20/20 split."""
    source = DATA / f"{name}.npz"
    if not source.is_file():
        pytest.skip(f"{source} is not here: real graphs are not part of this repository")
    with np.load(source, allow_pickle=False) as file:
        x = sp.csr_matrix((file["x_data"], file["x_indices"], file["x_indptr"]), shape=tuple(file["x_shape"])).toarray()
        edge_index, y = file["edge_index"], file["y"]
    order = np.random.default_rng(0).permutation(len(y))
    train_ids, valid_ids, test_ids = np.split(order, [int(0.6 * len(y)), int(0.8 * len(y))])
    write_raw(path, edge_index=edge_index, x=x, y=y, splits={"train": train_ids, "valid": valid_ids, "test": test_ids})


def real_config(dataset: Path, epochs: int, **more: object) -> TrainConfig:
    """A two-layer GraphSAGE of hidden size 64, evaluated once, at the end."""
    values = {"num_neighbors": [5, 5], "batch_size": 128, "hidden_channels": 64, "dropout": 0.5, "undirected": True}
    values |= {"epochs": epochs, "eval_every": epochs, "train_eval": "never"}
    return TrainConfig.create({**values, "dataset": dataset, **more})


def test_graphsage_reaches_the_accuracy_of_the_literature_on_amazon_photo(tmp_path: Path) -> None:
    write_graph("amazon_photo", tmp_path / "photo")
    accuracy = train(real_config(tmp_path / "photo", 30, reader="ogb"), tmp_path / "run").history[-1]["test"]
    assert accuracy is not None
    assert accuracy >= 0.92
    print(f"amazon_photo: test accuracy {accuracy:.4f}")


def test_coauthor_cs_reaches_it_too_and_bfloat16_comes_within_a_hundredth(tmp_path: Path) -> None:
    write_graph("coauthor_cs", tmp_path / "cs")
    exact, half = (
        train(real_config(tmp_path / "cs", 5, device="cpu", precision=precision, reader=reader)).history[-1]["test"]
        for precision, reader in (("fp32", "ogb"), ("bf16", "auto"))
    )
    assert exact is not None
    assert half is not None
    assert exact >= 0.91
    assert abs(exact - half) <= 0.01
    print(f"coauthor_cs: test accuracy {exact:.4f} in fp32, {half:.4f} in bf16")
