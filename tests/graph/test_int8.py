"""Features of one byte: all that reads a store sees the decoded values, near the data's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import raw_arrays, same
from torch_geometric.data import Data

from ogbnlib import InputError, TrainConfig, predict
from ogbnlib.graph.store import Store, open_store
from ogbnlib.graph.writer import verify_store
from ogbnlib.propagation.hops import propagate, propagated
from ogbnlib.sources.convert import convert
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]


def save(data: Data, path: Path, **how: Any) -> Store:
    return Store.from_data(data, path, num_classes=4, progress=False, **how)


@pytest.fixture(scope="module")
def coded(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("int8") / "coded"
    return convert(tiny_dir, path, feature_dtype="int8", progress=False)


@pytest.fixture(scope="module")
def decoded(coded: Store, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of float32 that has the values of `coded`."""
    return save(coded.to_data(), tmp_path_factory.mktemp("int8") / "decoded")


def test_values_are_within_half_a_step_and_the_store_verifies(coded: Store, tiny_dir: Path) -> None:
    x = raw_arrays(tiny_dir)["x"]
    assert (coded.x.dtype, coded.feature_itemsize) == (np.int8, 1)
    assert coded.files["x"].bytes == 4096 + x.size
    steps = (x.max(0) - x.min(0)) / 254
    assert (np.abs(coded.read("x") - x) <= 0.501 * steps).all()
    assert coded.read("x", "float16").dtype == np.float16
    assert verify_store(coded.path) == []
    assert open_store(coded.path).int8 is not None


@pytest.mark.parametrize("constant", [0.0, -3.5])
def test_a_column_of_one_value_stays_it(coded: Store, tmp_path: Path, constant: float) -> None:
    data = coded.to_data()
    data.x[:, 2] = constant
    store = save(data, tmp_path / "store", feature_dtype="int8")
    assert (store.read("x")[:, 2] == constant).all()


def test_values_that_would_not_be_finite_when_decoded_are_refused(
    coded: Store, tmp_path: Path
) -> None:
    data = coded.to_data()
    data.x[5, 2] = torch.finfo(torch.float32).max  # as a code for missing values
    with pytest.raises(InputError, match=r"column 2 .* 3\.40282e\+38"):
        save(data, tmp_path / "store", feature_dtype="int8")


def test_rows_propagated_from_other_values_are_refused(coded: Store, tmp_path: Path) -> None:
    data = coded.to_data()
    config = TrainConfig.create(dataset="d", loading="propagated", model="sgc")
    first = save(data, tmp_path / "d", feature_dtype="int8")
    propagated(first, config, progress=False, say=print)
    (tmp_path / "d").rename(tmp_path / "before")
    data.x *= 4
    second = save(data, tmp_path / "d", feature_dtype="int8")
    assert first.files["x"].crc32 == second.files["x"].crc32
    with pytest.raises(InputError, match=str(second.path)):
        propagated(second, config, progress=False, say=print)


@pytest.mark.parametrize(
    "changes", [{"loading": "shared"}, {"loading": "store", "lookahead": "1 kB"}], ids=str
)
def test_a_run_is_that_of_the_decoded_values(
    coded: Store, decoded: Store, tiny_config: Config, tmp_path: Path, changes: dict[str, Any]
) -> None:
    runs, classes = [], []
    for store in (coded, decoded):
        folder = tmp_path / store.path.name
        runs.append(train(tiny_config(dataset=str(store.path), **changes), folder))
        for sampled in (False, True):
            out = folder / f"{sampled}.npy"
            predict(folder, out, sampled=sampled, progress=False, say=lambda text: None)
            classes.append(np.load(out).tolist())
    assert same(runs[0].model.state_dict(), runs[1].model.state_dict())
    assert classes[:2] == classes[2:]


def test_pygs_feature_store_and_a_propagation_see_decoded_values(
    coded: Store, decoded: Store, tmp_path: Path
) -> None:
    ids = torch.tensor([5, 0, 299])
    stores = [store.feature_store() for store in (coded, decoded)]
    assert torch.equal(*(store.get_tensor(None, "x", index=ids) for store in stores))
    assert propagate(coded, tmp_path / "a", progress=False).x.dtype == np.float32
    for norm in ("row", "sym"):
        how: dict[str, Any] = {"norm": norm, "feature_dtype": "float32", "progress": False}
        hops = [
            propagate(store, tmp_path / f"{norm}-{store.path.name}", **how).x
            for store in (coded, decoded)
        ]
        np.testing.assert_array_equal(*hops)


def test_it_is_for_stores_on_disk(tiny_config: Config) -> None:
    with pytest.raises(InputError, match="feature_dtype: int8"):
        tiny_config(feature_dtype="int8", loading="shared")
