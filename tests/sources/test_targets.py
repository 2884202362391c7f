"""Float labels and several labels a node, "targets": from files and `Data` to a loop of one's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

import ogbnlib
from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.forecast.run_forecast import predict
from ogbnlib.graph.store import Store
from ogbnlib.graph.writer import verify_store
from ogbnlib.sources.convert import convert
from ogbnlib.training.train import train

N = 60
SPLITS = {"train": np.arange(20), "valid": np.arange(20, 40), "test": np.arange(40, 50)}


def targets_of(*shape: int) -> NDArray[np.float32]:
    """Numbers, some missing; nodes from 50 on, of no split, have none at all."""
    values = np.random.default_rng(0).normal(size=(N, *shape)).astype(np.float32)
    values[50:] = np.nan
    if shape:
        values[::3, 0] = np.nan
    return values


def write_folder(folder: Path) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(1)
    np.save(folder / "edges.npy", rng.integers(0, N, (2, 300)))
    np.save(folder / "features.npy", rng.normal(size=(N, 4)).astype(np.float32))
    for split, ids in SPLITS.items():
        np.save(folder / f"{split}.npy", ids)
    return folder


def write_targets(file: Path, values: NDArray[Any]) -> None:
    frame = pd.DataFrame(values.reshape(N, -1)).add_prefix("value ")
    if file.suffix == ".npy":
        np.save(file, values)
    elif file.suffix == ".parquet":
        frame.to_parquet(file)
    else:
        frame.to_csv(file, index=False)


def check_everywhere(store: Store, values: NDArray[Any]) -> None:
    """Compare `values` with all that a user reads from a store: NaN equals NaN here."""
    expected = values.astype(np.float32)
    assert '"version": 3' in (store.path / "store.json").read_text()
    assert verify_store(store.path) == []
    np.testing.assert_array_equal(store.read("y"), expected)
    np.testing.assert_array_equal(store.to_data().y.numpy(), expected)
    feature_store = store.feature_store()
    index = torch.tensor([3, 55, 0])
    rows = feature_store.get_tensor(group_name=None, attr_name="y", index=index)
    np.testing.assert_array_equal(rows.numpy(), expected[index])
    for nodes in (*SPLITS, None):
        for batch in store.loader(nodes, num_neighbors=[3, 2], batch_size=7):
            seeds = batch.n_id[: batch.batch_size]
            assert batch.y.dtype == torch.float32
            np.testing.assert_array_equal(batch.y.numpy(), expected[seeds])


BITS = np.random.default_rng(2).integers(0, 2, (N, 112))


@pytest.mark.parametrize(
    ("ending", "values"),
    [
        *(("npy", values) for values in (targets_of(), targets_of(5), BITS)),
        *((ending, targets_of(5)) for ending in ("csv", "parquet")),
        ("npy", BITS.astype(bool)),
    ],
)
def test_numbers_in_a_file_reach_the_batches_of_an_own_loop(
    tmp_path: Path, ending: str, values: NDArray[Any]
) -> None:
    folder = write_folder(tmp_path / "data")
    write_targets(folder / f"targets.{ending}", values)
    store = convert(folder, tmp_path / "store")
    assert store.has_targets
    assert store.num_classes == 0
    check_everywhere(store, values)
    again = convert(store, tmp_path / "int8", feature_dtype="int8", undirected=True)
    check_everywhere(again, values)


@pytest.mark.parametrize("shape", [(), (1,), (5,)])
def test_from_data_keeps_the_shape_of_y(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = targets_of(*shape)
    data = Data(torch.randn(N, 4), torch.randint(0, N, (2, 300)), y=torch.from_numpy(values))
    splits = {"train": np.arange(1, 20, 3), "valid": [], "test": []}
    store = Store.from_data(data, tmp_path / "store", splits=splits, targets=True)
    np.testing.assert_array_equal(store.to_data().y.numpy(), values)
    batch = next(iter(store.loader("train", shuffle=False, batch_size=4)))
    np.testing.assert_array_equal(batch.y.numpy(), values[[1, 4, 7, 10]])


def test_values_are_declared(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data")
    frame = pd.DataFrame(targets_of(2), columns=["price", "size"]).assign(note="x")
    frame.to_csv(folder / "sold.csv", index=False)
    arrays = "".join(f"  {name}.npy: {name}\n" for name in ("edges", "features", *SPLITS))
    columns = "{price: value, size: value, note: left out}"
    (folder / "dataset.yaml").write_text(f"files:\n{arrays}  sold.csv: {columns}\n")
    np.testing.assert_array_equal(convert(folder, tmp_path / "store").y, targets_of(2))


def test_trainer_and_plan_refuse_targets_in_one_sentence(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data")
    write_targets(folder / "targets.npy", targets_of(5))
    store = convert(folder, tmp_path / "store")
    config = TrainConfig.create(dataset=store.path, loading="store")
    for call in (
        train,
        ogbnlib.run,
        predict,
        lambda _: ogbnlib.propagate(store, tmp_path / "hops"),
    ):
        with pytest.raises(InputError, match=r"targets.*trainer.*store\.loader"):
            call(config)
    assert not (tmp_path / "hops").exists()


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (np.r_[1e300, np.zeros(N - 1)], {}, "float32.*node 0"),
        (targets_of()[:-1], {}, f"targets.npy: expected {N} rows, .*{N - 1}"),
        (np.full(N, np.nan), {}, "without a label"),
        (np.array(["a"] * N), {}, "targets.npy, .*row 0: .*'a'"),
        (targets_of(), {"num_classes": 3}, "num_classes: "),
    ],
)
def test_wrong_targets_are_refused(
    tmp_path: Path, values: NDArray[Any], options: dict[str, Any], message: str
) -> None:
    folder = write_folder(tmp_path / "data")
    np.save(folder / "targets.npy", values)
    if options:
        (folder / "dataset.yaml").write_text("num_classes: 3\n")
    with pytest.raises(InputError, match=message):
        convert(folder, tmp_path / "store")
    assert not (tmp_path / "store").exists()
