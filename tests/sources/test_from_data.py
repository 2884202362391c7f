"""What a PyG user has as a `Data` becomes a store that says the same, or is refused in a
sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import left_in
from torch_geometric.data import Data, HeteroData

from ogbnlib import InputError, TrainConfig, train
from ogbnlib.graph.store import Store
from ogbnlib.runs.folder import Run

N = 60


def mask(begin: int, end: int) -> torch.Tensor:
    return (torch.arange(N) >= begin) & (torch.arange(N) < end)


def data_of(**changes: Any) -> Data:
    """60 nodes, of which the last ten have no edge."""
    random = torch.Generator().manual_seed(0)
    attributes = {
        "x": torch.randn(N, 5, generator=random),
        "y": torch.arange(N) % 3,
        "edge_index": torch.randint(N - 10, (2, 200), generator=random),
        "train_mask": mask(0, 20), "val_mask": mask(20, 40), "test_mask": mask(40, 60),
    }  # fmt: skip
    return Data(
        **{name: value for name, value in (attributes | changes).items() if value is not None}
    )


def edges(data: Data) -> list[list[int]]:
    return sorted(data.edge_index.T.tolist())


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"x": torch.randn(N, 5, dtype=torch.float64)}, {}),
        ({"x": torch.randn(N, 5).bfloat16()}, {}),
        ({"y": (torch.arange(N) % 3).reshape(N, 1)}, {}),
        ({"edge_index": torch.empty(2, 0, dtype=torch.int64)}, {}),
        ({"train_mask": mask(0, 20).byte(), "val_mask": mask(20, 40).long(), "test_mask": mask(40, 60).float()}, {}),
        ({"train_mask": mask(0, 0), "val_mask": mask(0, 0), "test_mask": mask(0, 0)}, {}),
        ({"train_mask": None}, {"splits": {"train": mask(0, 20), "val": range(20, 40), "test": mask(40, 60).numpy()}}),
    ],
)  # fmt: skip
def test_a_data_comes_back_from_its_store(
    changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    data = data_of(**changes)
    back = Store.from_data(data, tmp_path / "store", progress=False, **options).to_data()
    assert {name: value.dtype for name, value in back.to_dict().items()} == {
        "x": torch.float32, "y": torch.int64, "edge_index": torch.int64,
        **dict.fromkeys(("train_mask", "val_mask", "test_mask"), torch.bool),
    }  # fmt: skip
    assert torch.equal(back.x, data.x.detach().float())
    assert torch.equal(back.y, data.y.long().flatten())
    assert edges(back) == edges(data)
    for name in ("val_mask", "test_mask"):
        assert torch.equal(back[name], data[name].bool())


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (HeteroData(), "got HeteroData"),
        (data_of(x=None), "found no x$"),
        (data_of(test_mask=None), r"found no test_mask; pass splits=\{'train': ids"),
        (data_of(val_mask=torch.ones(N, 10, dtype=torch.bool)), r"data.val_mask: .*data.val_mask\[:, 0\]"),
        (data_of(y=torch.eye(3)[torch.arange(N) % 3]), r"y: .*one label.*one-hot labels; use y.argmax\(axis=1\)"),
        (data_of(x=torch.eye(N).to_sparse()), "x: expected a numpy array or a torch tensor"),
    ],
)  # fmt: skip
def test_what_can_not_be_a_store_is_refused_in_a_sentence(
    data: Any, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=sentence):
        Store.from_data(data, tmp_path / "store", progress=False)
    assert left_in(tmp_path) == []


def test_what_a_store_does_not_keep_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = data_of(edge_attr=torch.ones(200, 2), edge_weight=torch.ones(200))
    Store.from_data(data, tmp_path / "store", progress=False)
    said = capsys.readouterr().err
    assert "does not keep edge_attr, edge_weight of the data" in said


def test_more_than_memory_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.from_data(data_of(), tmp_path / "store", progress=False)
    monkeypatch.setattr("ogbnlib.sampling.loading.available_bytes", lambda: 2**12)
    with pytest.raises(InputError, match=r"5 kB for all of it in RAM.*use store.loader"):
        store.to_data()


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    return Store.from_data(data_of(val_mask=mask(0, 0)), tmp_path / "empty", progress=False)


def test_an_empty_split_is_not_evaluated_which_is_said_once(empty: Store, tmp_path: Path) -> None:
    config = TrainConfig.create(
        dataset=str(empty.path), loading="store", epochs=2, num_neighbors=[3], progress="none"
    )
    history = train(config, tmp_path / "run").history
    assert [row["valid"] for row in history] == [None, None]
    assert all(row["test"] is not None for row in history)
    notes = [
        event.get("text", "") for event in Run(tmp_path / "run").events if event["event"] == "note"
    ]
    assert sum("the valid split has no nodes: it is not evaluated" in note for note in notes) == 1


def test_what_needs_the_nodes_of_an_empty_split_is_refused(empty: Store, tmp_path: Path) -> None:
    assert {name: len(ids) for name, ids in empty.splits.items()} == {
        "train": 20,
        "valid": 0,
        "test": 20,
    }
    with pytest.raises(InputError, match="nodes: expected a split with nodes"):
        empty.loader("val")
    untrained = Store.from_data(
        data_of(train_mask=mask(0, 0)), tmp_path / "untrained", progress=False
    )
    assert len(list(untrained.loader("val"))) == 1
    for store, changes, sentence in (
        (empty, {"keep": "best"}, "keep=best: expected nodes in the valid split, found none"),
        (untrained, {}, "expected nodes in the train split to train on, found none"),
    ):
        with pytest.raises(InputError, match=sentence):
            train(TrainConfig.create(dataset=str(store.path), **changes), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_val_is_valid_wherever_a_split_is_named(tmp_path: Path) -> None:
    store = Store.from_data(data_of(), tmp_path / "store", progress=False)
    np.testing.assert_array_equal(store.splits["valid"], range(20, 40))
    with pytest.raises(KeyError, match="other"):
        store.splits["other"]
    assert [batch.n_id[:20].tolist() for batch in store.loader("val")] == [list(range(20, 40))]
    assert TrainConfig.create(dataset="none", eval_splits="val test").eval_splits == (
        "valid",
        "test",
    )
    splits = {"val": [0], "valid": [1], "test": [2]}
    with pytest.raises(InputError, match="splits: expected a dict with train, valid"):
        Store.from_data(data_of(), tmp_path / "other", splits=splits, progress=False)
