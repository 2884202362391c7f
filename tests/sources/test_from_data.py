"""A PyG `Data` becomes a store with the same arrays and edges, or is refused in a sentence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
import torch_geometric
from conftest import left_in
from torch_geometric.data import Data, HeteroData, InMemoryDataset

from ogbnlib import InputError, TrainConfig, plan, run, train
from ogbnlib.graph.store import Store

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
    attributes |= changes
    return Data(**{name: value for name, value in attributes.items() if value is not None})


def edges(data: Data) -> list[list[int]]:
    return sorted(data.edge_index.T.tolist())


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"x": torch.randn(N, 5, dtype=torch.float64)}, {}),
        ({"y": (torch.arange(N) % 3).reshape(N, 1)}, {}),
        ({"edge_index": torch.empty(2, 0, dtype=torch.int64)}, {}),
        ({"edge_index": torch_geometric.EdgeIndex([[1, 3], [2, 0]], sparse_size=(N, N))}, {}),
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


def hetero() -> HeteroData:
    """Papers with labels that cite each other, and authors."""
    data, papers = HeteroData(), data_of()
    for name, value in papers.to_dict().items():
        if name != "edge_index":
            data["paper"][name] = value
    data["author"].x = torch.ones(7, 2)
    data["paper", "cites", "paper"].edge_index = papers.edge_index
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [2, 3]])
    return data


ADJ = torch.eye(N).to_sparse_csr()
BAD_DATA = {
    "several kinds of nodes": (hetero(), "paper, author; .*node_type_subgraph"),
    "no x": (data_of(x=None), "x; .*torch.ones"),
    "no y": (data_of(y=None), "y; .*-1 for none"),
    "no edge_index": (data_of(edge_index=None), r"edge_index; .*to_edge_index\(data.adj_t\).*torch.empty"),
    "no masks": (data_of(train_mask=None, val_mask=None, test_mask=None), "get_idx_split"),
    "several masks": (data_of(val_mask=torch.ones(N, 10).bool()), r"data.val_mask\[:, 0\]"),
    "short mask": (data_of(val_mask=mask(20, 40)[1:]), "data.val_mask: .* 59 .* 60 nodes"),
    "one-hot y": (data_of(y=torch.eye(3)[torch.arange(N) % 3]), r"y: .*argmax.*targets=True"),
    "long y": (data_of(y=torch.arange(N + 1) % 3), r"y: .* 60 rows, .*\[61\]"),
    "y of numbers": (data_of(y=torch.rand(N)), "y: .*node 0"),
    "y in float16": (data_of(y=(torch.arange(N) % 3 + 2047.0).half()), "y: .*2047 in float16, .*2048.0 at node 1"),
    "edge beyond": (data_of(edge_index=torch.tensor([[0], [N]])), "edge_index: .*edge 0"),
    "x of NaN": (data_of(x=torch.full((N, 2), torch.nan)), "x: .*row 0"),
    "stray y": (data_of(y=torch.arange(N) % 3 * 7_000_000), "y: .* label 14000000; .*num_classes"),
    "overlap": (data_of(test_mask=mask(39, 60)), r"splits\['test'\]: .*valid, found 1 such as 39"),
    "unlabelled": (data_of(y=torch.arange(N) % 3 - 1), r"splits\['train'\]: .*label such as 0"),
    "x of y": (data_of(x=torch.cat([torch.rand(N, 5), (torch.arange(N) % 3)[:, None]], 1)), "x, column 5: .*labels"),
    "sparse x": (data_of(x=scipy.sparse.csr_matrix(np.eye(N))), "x: .*sparse"),
    "sparse edge_index": (data_of(edge_index=ADJ), r"to_edge_index\(matrix\)\[0\].*flip\(0\)"),
    "scipy's edge_index": (data_of(edge_index=scipy.sparse.eye(N)), "from_scipy_sparse_matrix"),
    "edge_index of rows": (data_of(edge_index=torch.zeros(20, 2).long()), r"\[20, 2\]; .*edge_index.T"),
    "edge_index of floats": (data_of(edge_index=torch.zeros(2, 20)), "edge_index.long"),
    "a list": ([data_of()], "got list"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_DATA)
def test_what_can_not_be_a_store_is_refused(case: str, tmp_path: Path) -> None:
    data, match = BAD_DATA[case]
    with pytest.raises(InputError, match=match):
        Store.from_data(data, tmp_path / "store", progress=False)
    assert left_in(tmp_path) == []


def test_the_remedies_of_a_refusal_make_a_store(tmp_path: Path) -> None:
    bare = data_of(train_mask=None, val_mask=None, test_mask=None)
    remedied = {
        "one kind": hetero().node_type_subgraph(["paper"]).to_homogeneous(),
        "splits": torch_geometric.transforms.RandomNodeSplit(num_val=9, num_test=9)(bare),
        "rows are sources": data_of(edge_index=torch_geometric.utils.to_edge_index(ADJ)[0]),
    }
    for name, data in remedied.items():
        assert Store.from_data(data, tmp_path / name, progress=False).num_nodes == N


def test_the_remedy_for_adj_t_keeps_the_edges_and_the_rest_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = data_of()
    data.edge_index = data.edge_index.unique(dim=1)  # a sparse matrix has no parallel edges
    sparse = torch_geometric.transforms.ToSparseTensor(layout=torch.sparse_csr)(data.clone())
    sparse.edge_index = torch_geometric.utils.to_edge_index(sparse.adj_t)[0].flip(0)
    store = Store.from_data(sparse, tmp_path / "store", progress=False)
    assert edges(store.to_data()) == edges(data)
    assert "keep adj_t of the data" in capsys.readouterr().out


def test_a_mask_of_two_nodes_is_a_mask(tmp_path: Path) -> None:
    data = Data(torch.eye(2), torch.tensor([[0], [1]]), y=torch.tensor([1, 1]))
    none = torch.tensor([0, 0])
    data.update({"train_mask": torch.tensor([1, 0]), "val_mask": none, "test_mask": none})
    store = Store.from_data(data, tmp_path / "store", progress=False)
    assert store.num_seeds == {"train": 1, "valid": 0, "test": 0}


class Mine(InMemoryDataset):
    """Graphs that are saved as PyG saves them."""

    def __init__(self, root: Path, graphs: list[Data]) -> None:
        self.graphs = graphs
        super().__init__(str(root))
        self.load(self.processed_paths[0])

    processed_file_names = ("data.pt",)

    def process(self) -> None:
        self.save(self.graphs, self.processed_paths[0])


def test_what_pyg_saves_of_one_graph_is_that_graph(tmp_path: Path) -> None:
    expected = Store.from_data(data_of(), tmp_path / "expected", progress=False).files
    dataset = Mine(tmp_path / "one", [data_of()])
    saved = torch.load(dataset.processed_paths[0], weights_only=False)
    torch.save(data_of(), tmp_path / "graph.pt")
    ends = {name: torch.tensor([0, len(value)]) for name, value in data_of().to_dict().items()}
    forms: dict[str, Any] = {
        "Data": torch.load(tmp_path / "graph.pt", weights_only=False),
        "data set": dataset,
        "dataset[0]": dataset[0],
        "attributes, slices, class": saved,
        "attributes": saved[0],
        "Data, slices": (data_of(), ends),
        "Data, None": (data_of(), None),
    }
    for name, form in forms.items():
        store = Store.from_data(form, tmp_path / "stores" / name, progress=False)
        assert store.files == expected, name
    several = Mine(tmp_path / "three", [data_of()] * 3)
    saved = torch.load(several.processed_paths[0], weights_only=False)
    for graphs in (several, saved):
        with pytest.raises(InputError, match=r"got 3; .* dataset\[i\]"):
            Store.from_data(graphs, tmp_path / "store", progress=False)


def test_more_than_memory_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.from_data(data_of(), tmp_path / "store", progress=False)
    monkeypatch.setattr("ogbnlib.sampling.pyg_stores.available_bytes", lambda: 2**12)
    with pytest.raises(InputError, match=r"5 kB .*store.loader"):
        store.to_data()


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    return Store.from_data(data_of(val_mask=mask(0, 0)), tmp_path / "empty", progress=False)


def test_an_empty_split_is_not_evaluated_which_is_said_once(empty: Store, tmp_path: Path) -> None:
    values = {"dataset": empty, "loading": "store", "epochs": 2, "num_neighbors": [3]}
    config = TrainConfig.create(values)
    done = run(config, "4 GB", run_dir=tmp_path / "run", echo=False).require_finished()
    assert done.result["forecast"]["peak_bytes"]["predicted"] > 0
    assert done.metrics["valid"].isna().all()
    assert done.metrics["test"].notna().all()
    notes = [event.get("text", "") for event in done.events if event["event"] == "note"]
    assert sum("valid split" in note for note in notes) == 1
    resumed = run(config.replace(epochs=4), run_dir=tmp_path / "run", resume=True, echo=False)
    assert resumed.config == config.replace(epochs=4, num_threads=1)


@pytest.mark.parametrize("loading", ["store", "eager", "lazy", "shared", "propagated"])
@pytest.mark.parametrize("num_neighbors", [[3, 2], [-1, 2]])
def test_an_empty_split_has_no_part_in_a_forecast(
    empty: Store, loading: str, num_neighbors: list[int]
) -> None:
    model = "sign" if loading == "propagated" else "sage"
    values = {"dataset": empty, "loading": loading, "num_neighbors": num_neighbors}
    config = TrainConfig.create({**values, "model": model})
    advice = plan(config, "4 GB")
    assert advice.verdict == "FITS"
    alone = plan(config.replace(eval_splits=["test"]), "4 GB")
    assert advice.forecast.peak_bytes == alone.forecast.peak_bytes
    size = replace(empty.size, num_seeds={"train": 20, "valid": 0, "test": 0})
    assert plan(config, "4 GB", size=size).verdict == "FITS"


def test_what_needs_the_nodes_of_an_empty_split_is_refused(empty: Store, tmp_path: Path) -> None:
    assert empty.num_seeds == {"train": 20, "valid": 0, "test": 20}
    with pytest.raises(InputError, match="nodes: "):
        empty.loader("val")
    bare = data_of(train_mask=mask(0, 0))
    untrained = Store.from_data(bare, tmp_path / "untrained", progress=False)
    assert len(list(untrained.loader("val"))) == 1
    refused = ((empty, {"keep": "best"}, "keep=best: .*valid"), (untrained, {}, "train split"))
    for store, changes, match in refused:
        config = TrainConfig.create(dataset=str(store.path), **changes)
        for call in (lambda config: train(config, tmp_path / "refused"), plan):
            with pytest.raises(InputError, match=match):
                call(config)
    assert not (tmp_path / "refused").exists()


def test_val_is_valid_wherever_a_split_is_named(tmp_path: Path) -> None:
    store = Store.from_data(data_of(), tmp_path / "store", progress=False)
    np.testing.assert_array_equal(store.splits["valid"], range(20, 40))
    with pytest.raises(KeyError, match="other"):
        store.splits["other"]
    assert [batch.n_id[:20].tolist() for batch in store.loader("val")] == [list(range(20, 40))]
    config = TrainConfig.create(dataset="none", eval_splits="val test")
    assert config.eval_splits == ("valid", "test")
    splits = {"val": [0], "valid": [1], "test": [2]}
    with pytest.raises(InputError, match="splits: "):
        Store.from_data(data_of(), tmp_path / "other", splits=splits, progress=False)
