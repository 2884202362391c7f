"""A loop of one's own gets the trainer's batches, and PyG's loaders run on it."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import batches_of
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import ImbalancedSampler, LinkLoader, NodeLoader
from torch_geometric.nn import GAT, GraphSAGE, SAGEConv
from torch_geometric.sampler import NegativeSampling
from torch_geometric.utils import trim_to_layer

from ogbnlib import InputError, TrainConfig, convert
from ogbnlib.graph.store import Store
from ogbnlib.memory.recorder import EventLog
from ogbnlib.sampling.pyg_stores import StoreData
from ogbnlib.windows.store_loader import StoreLoader

pytestmark = pytest.mark.usefixtures("process_of_1_mb")
Config = Callable[..., TrainConfig]
Make = Callable[[], Any]
HOW = pytest.mark.parametrize("how", [{}, {"memory_limit": "1 MB"}, {"num_workers": 1}], ids=str)
FIELDS = ("x", "edge_index", "y", "n_id", "input_id")


def assert_same(ours: Iterable[Data], theirs: Iterable[Data]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        for name in FIELDS:
            assert torch.equal(a[name], b[name].to(a[name].dtype)), name
        for name in ("num_sampled_nodes", "num_sampled_edges", "batch_size"):
            assert a[name] == b[name]


@pytest.mark.parametrize(
    ("memory_limit", "dtype"), [(None, "float32"), ("1 MB", "float16"), (None, "int8")], ids=str
)
def test_a_loop_gets_the_trainers_batches_epoch_after_epoch(
    memory_limit: str | None, dtype: str, tiny_dir: Path, tiny_config: Config, tmp_path: Path
) -> None:
    store = convert(tiny_dir, tmp_path / "store", feature_dtype=dtype, progress=False)  # type: ignore[arg-type]
    config = tiny_config(dataset=str(store.path), loading="store", seed=7, num_neighbors=[4, 3])
    loaders = config.policy.load()(store, config, EventLog(None))
    how = {"num_neighbors": [4, 3], "batch_size": 16, "seed": 7, "memory_limit": memory_limit}
    loader = store.loader(**how)
    assert (loader.windows.window_batches is None) == (memory_limit is None)
    orders = []
    for epoch in (1, 2):
        theirs = batches_of(loaders.train_loader(), epoch)
        ours = list(loader)
        assert len(ours) == len(loader)
        assert_same(ours, theirs)
        assert {batch.x.dtype for batch in ours} == {torch.float32}
        assert {batch.y.dtype for batch in ours} == {torch.int64}
        orders.append(torch.cat([batch.n_id[: batch.batch_size] for batch in ours]))
    assert not torch.equal(orders[0], orders[1])
    loader.set_epoch(2)
    assert_same(loader, batches_of(loaders.train_loader(), 2))
    for split in ("valid", "test"):
        loader = store.loader(split, **how)
        for _ in range(2):
            assert_same(loader, loaders.eval_batches(split))
    loaders.close()


@pytest.mark.parametrize("memory_limit", [None, "1 MB"])
@torch.no_grad()
def test_seeds_score_the_same_in_trimmed_layers(store: Store, memory_limit: str | None) -> None:
    loader = store.loader(num_neighbors=[4, 3, 2], batch_size=16, memory_limit=memory_limit)
    convs = [SAGEConv(store.num_features, 8), SAGEConv(8, 8), SAGEConv(8, 4)]
    for batch in loader:
        hops = batch.num_sampled_nodes, batch.num_sampled_edges
        for net in (GraphSAGE(store.num_features, 8, 3, 4), GAT(store.num_features, 8, 3, 4)):
            names = "num_sampled_nodes_per_hop", "num_sampled_edges_per_hop"
            whole = net(batch.x, batch.edge_index)[: batch.batch_size]
            trimmed = net(batch.x, batch.edge_index, **dict(zip(names, hops, strict=True)))
            torch.testing.assert_close(trimmed[: batch.batch_size], whole)
        x = whole = batch.x
        edge_index = batch.edge_index
        for i, conv in enumerate(convs):
            whole = conv(whole, batch.edge_index)
            x, edge_index, _ = trim_to_layer(i, *hops, x, edge_index)
            x = conv(x, edge_index)
        assert len(x) < len(whole)
        torch.testing.assert_close(x[: batch.batch_size], whole[: batch.batch_size])


def test_ids_and_masks_replace_a_split(store: Store) -> None:
    ids = store.splits["train"]
    expected = list(store.loader("train", batch_size=32))
    mask = torch.zeros(store.num_nodes, dtype=torch.bool)
    mask[torch.from_numpy(ids)] = True
    assert_same(store.loader(ids, batch_size=32, shuffle=True), expected)
    assert_same(store.loader(mask, batch_size=32, shuffle=True), expected)  # the ids are ascending
    assert_same(store.loader("train", batch_size=32, num_workers=1), expected)
    # all nodes in their order, as in PyG
    batches = list(store.loader(None, num_neighbors=[-1], batch_size=128))
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in batches])
    assert torch.equal(seeds, torch.arange(store.num_nodes))
    labels = torch.cat([batch.y for batch in batches])
    assert torch.equal(labels, torch.from_numpy(store.read("y")).long())
    unlabelled = np.flatnonzero(store.y < 0)
    (batch,) = store.loader(unlabelled.tolist(), num_neighbors=[2], batch_size=1000)
    np.testing.assert_array_equal(batch.n_id[: batch.batch_size], unlabelled)
    assert set(batch.y.tolist()) == {-1}


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"nodes": "validation"}, "nodes: .*train, valid, test.*'validation'"),
        ({"nodes": [0, 300]}, "nodes: .*0 to 299.*0 to 300"),
        ({"nodes": [1, 1]}, "nodes: .*1 repeats"),
        ({"nodes": [0.5]}, r"nodes: .*\[n\]"),
        ({"nodes": np.ones(5, bool)}, "nodes: .*5 .*300"),
        ({"num_neighbors": [0]}, "num_neighbors: "),
        ({"memory_limit": 8}, "memory_limit: .*ambiguous"),
        ({"memory_limit": "1 kB"}, "memory_limit: .*1 MB.*1 kB"),
    ],
)
def test_a_mistake_is_one_sentence(store: Store, arguments: dict[str, object], facts: str) -> None:
    with pytest.raises(InputError, match=facts):
        store.loader(**arguments)


QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)


@pytest.fixture
def lightning_model(store: Store) -> Make:
    """Makes a model that remembers the batches it has seen; skips without Lightning."""
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = GraphSAGE(store.num_features, 64, 2, store.num_classes, dropout=0.5)
            self.seen: list[tuple[int, list[int]]] = []
            self.checked: list[list[int]] = []

        def training_step(self, batch: Data, index: int) -> Tensor:
            self.seen.append((self.current_epoch, batch.input_id.tolist()))
            size = batch.batch_size
            return F.cross_entropy(self.net(batch.x, batch.edge_index)[:size], batch.y[:size])

        def validation_step(self, batch: Data, index: int) -> None:
            self.checked.append(batch.n_id.tolist())

        def predict_step(self, batch: Data, index: int) -> Tensor:
            return batch.n_id[: batch.batch_size]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    return Model


def test_lightning_fits_overfits_and_predicts(store: Store, lightning_model: Make) -> None:
    import lightning

    class Splits(lightning.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> StoreLoader:
            return store.loader("train", num_neighbors=[4, 3], batch_size=16)  # type: ignore[no-any-return]

        def predict_dataloader(self) -> StoreLoader:
            return store.loader("test", num_neighbors=[4, 3], batch_size=16)  # type: ignore[no-any-return]

    def trainer(max_epochs: int = 1, **options: Any) -> Any:
        how = {"accelerator": "cpu", "enable_checkpointing": False, **QUIET, **options}
        return lightning.Trainer(max_epochs=max_epochs, **how)

    model, fitted = lightning_model(), trainer(2)
    fitted.fit(model, Splits())
    first, second = ([i for epoch, ids in model.seen if epoch == k for i in ids] for k in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second
    for where in ({"datamodule": Splits()}, {"dataloaders": Splits().predict_dataloader()}):
        predicted = torch.cat(fitted.predict(model, **where))
        assert torch.equal(predicted, torch.from_numpy(store.splits["test"]))
    trainer(overfit_batches=2).fit(lightning_model(), Splits())


def edges_of(batch: Data) -> set[tuple[int, int]]:
    return set(map(tuple, batch.n_id[batch.edge_index].T.tolist()))


def test_pygs_node_loader_reads_the_stores_as_it_reads_the_data(store: Store) -> None:
    both, data = (store.feature_store(), store.graph_store()), store.to_data()
    seeds = {"input_nodes": torch.from_numpy(store.splits["train"]), "batch_size": 50}
    for fan_out in (-1, 3):
        passes = []
        for graph in (both, data):
            torch.manual_seed(1)
            passes.append(list(NodeLoader(graph, store.sampler([fan_out, fan_out]), **seeds)))
        for ours, theirs in zip(*passes, strict=True):
            for name in ("x", "n_id", "edge_index"):
                assert torch.equal(ours[name], theirs[name])
            assert torch.equal(ours.y, theirs.y.long())
            if fan_out < 0:  # all in-edges of all nodes but those of the last hop
                inner = ours.n_id[: sum(ours.num_sampled_nodes[:-1])]
                kept = torch.isin(data.edge_index[1], inner)
                assert edges_of(ours) == set(map(tuple, data.edge_index[:, kept].T.tolist()))


@pytest.mark.parametrize("mode", [None, "binary", "triplet"])
def test_pygs_link_loader_samples_both_ends_and_negatives(store: Store, mode: str | None) -> None:
    positive = torch.from_numpy(store.read_edge_index()[:, ::30])
    negative = None if mode is None else NegativeSampling(mode, 2)

    both = store.feature_store(), store.graph_store()
    options = {"batch_size": 16, "neg_sampling": negative, "edge_label_index": (None, positive)}
    found, ends = list(LinkLoader(both, store.sampler([3, 2], seed=5), **options)), []
    for batch in found:
        np.testing.assert_array_equal(batch.x, store.x[batch.n_id.numpy()])
        edges = set(map(tuple, store.read_edge_index().T.tolist()))
        assert edges_of(batch) <= edges
        if mode == "triplet":
            assert batch.dst_neg_index.shape == (len(batch.src_index), 2)
            ends.append(batch.n_id[torch.stack([batch.src_index, batch.dst_pos_index])])
        else:
            size = len(batch.input_id)
            ends.append(batch.n_id[batch.edge_label_index[:, :size]])
            if mode == "binary":
                assert batch.edge_label.tolist() == [1.0] * size + [0.0] * 2 * size
    assert torch.equal(torch.cat(ends, dim=1), positive)
    if mode is not None:
        times = {"edge_label_time": torch.arange(4), "batch_size": 4}
        with_times = LinkLoader(both, store.sampler([3]), (None, positive[:, :4]), **times)
        with pytest.raises(InputError, match="edge_label_time"):
            next(iter(with_times))


def test_the_stores_have_no_types_but_their_own(store: Store) -> None:
    features, graph = store.feature_store(), store.graph_store()
    assert features[None, "x", None].shape == features.get_tensor_size(None, "x")
    for group, name in (("paper", "x"), ("paper", "y"), (None, "z"), (None, "row"), ("x", "x")):
        with pytest.raises(KeyError, match=str(store.path)):
            features[group, name, None]
        with pytest.raises(KeyError):
            features.get_tensor_size(group, name)
    assert len(graph[None, "csc"]) == 2
    cites = ("paper", "cites", "paper")
    for edge_type, layout in (("two", "csc"), (cites, "csc"), (None, "coo"), (None, "csr")):
        with pytest.raises(KeyError, match="not found"):
            graph[edge_type, layout]


@HOW
def test_a_transform_is_called_as_in_pyg(store: Store, how: dict[str, Any]) -> None:
    def doubled(batch: Data) -> Data:
        assert batch.x.dtype == torch.float32
        batch.x, batch.z = 2 * batch.x, batch.y + 1
        return batch

    how = {"num_neighbors": [4, 3], "batch_size": 16, **how}
    plain = list(store.loader("valid", **how))
    later = store.loader("valid", **how)
    later.transform = doubled
    for loader in (store.loader("valid", transform=doubled, **how), later):
        for ours, theirs in zip(loader, plain, strict=True):
            assert torch.equal(ours.x, 2 * theirs.x)
            assert torch.equal(ours.z, theirs.y + 1)
    later.transform = None
    assert_same(later, plain)
    # what is returned may be of any type
    sizes = list(store.loader("valid", transform=lambda batch: batch.batch_size, **how))
    assert sizes == [batch.batch_size for batch in plain]
    assert later([3, 1]).n_id[:2].tolist() == store.splits["valid"][[3, 1]].tolist()


def test_an_epoch_that_is_no_number_of_one_is_refused(store: Store) -> None:
    loader = store.loader(batch_size=16)
    for epoch in (-1, "2", 1.5, None):
        with pytest.raises(InputError, match="set_epoch"):
            loader.set_epoch(epoch)
    loader.set_epoch(np.int64(2))
    assert len(list(loader)) == len(loader)


@HOW
def test_a_loop_goes_on_within_an_epoch(store: Store, how: dict[str, Any]) -> None:
    def loader() -> StoreLoader:
        return store.loader(num_neighbors=[4, 3], batch_size=16, **how)  # type: ignore[no-any-return]

    straight = loader()
    expected = [*straight, *straight]
    length = len(straight)
    for done in (0, 2, length):
        resumed = loader()
        resumed.set_epoch(1, start=16 * done)
        assert len(resumed) == length
        assert_same([*resumed, *resumed], expected[done:])


def test_a_resumed_lightning_training_sees_the_remaining_epochs(
    store: Store, tmp_path: Path, lightning_model: Make
) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    def fit(checkpoint: Path | None = None) -> Any:
        how = {"num_neighbors": [4, 3], "batch_size": 16}
        loaders = [store.loader(split, **how) for split in ("train", "valid")]
        saved = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
        options = {"callbacks": [saved], "num_sanity_val_steps": 0, **QUIET}
        trainer = lightning.Trainer(max_epochs=4, accelerator="cpu", **options)
        model = lightning_model()
        trainer.fit(model, *loaders, ckpt_path=checkpoint, weights_only=False)
        return model

    straight = fit()
    order = [batch.input_id.tolist() for batch in store.loader(num_neighbors=[4, 3], batch_size=16)]
    assert [ids for _, ids in straight.seen[: len(order)]] == order  # those of a plain loop
    checked = straight.checked[: len(straight.checked) // 4]
    assert straight.checked == 4 * checked
    for file in sorted(tmp_path.glob("*.ckpt")):
        steps = int(file.stem.partition("=")[2])
        assert fit(file).seen == straight.seen[steps:], file.name


class Doubles(torch.utils.data.Sampler[int]):
    """Every seed of a loader twice, in one order; without a generator that a loader could set."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return 2 * self.count

    def __iter__(self) -> Iterator[int]:
        return iter([place // 2 for place in range(2 * self.count)])


@HOW
def test_pygs_imbalanced_sampler_repeats_seeds(store: Store, how: dict[str, Any]) -> None:
    ids = torch.from_numpy(store.splits["train"])
    labels = store.to_data().y

    def loader(**more: Any) -> StoreLoader:
        sampler = ImbalancedSampler(labels, input_nodes=ids, num_samples=500)
        options = {"num_neighbors": [4, 3], "batch_size": 16, "sampler": sampler, **how, **more}
        return store.loader(ids, **options)  # type: ignore[no-any-return]

    expected = [batch.clone() for batch in loader()]
    assert [batch.batch_size for batch in expected] == [16] * 31 + [4]
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in expected])
    assert len(seeds.unique()) < len(seeds)
    assert any(len({*batch.input_id.tolist()}) < batch.batch_size for batch in expected)
    for batch in expected:
        seeds = batch.n_id[: batch.batch_size]
        assert torch.equal(seeds, ids[batch.input_id])
        assert torch.equal(batch.y, labels[seeds])
        np.testing.assert_array_equal(batch.x, store.x[batch.n_id.numpy()])
    # classes come about equally often, unlike in the split
    drawn = torch.bincount(torch.cat([batch.y for batch in expected]))
    drawn = drawn[drawn > 0]
    assert drawn.max() < 3 * drawn.min()
    # the seed and the epoch decide, whatever torch's generator
    torch.manual_seed(9)
    running = loader()
    assert_same(running, expected)
    second = list(running)
    assert not torch.equal(second[0].input_id, expected[0].input_id)
    assert not torch.equal(next(iter(loader(seed=1))).input_id, expected[0].input_id)
    resumed = loader()
    resumed.set_epoch(1, start=3 * 16)
    assert_same([*resumed, *resumed], [*expected[3:], *second])


def test_any_sampler_with_a_length_decides_the_order(store: Store) -> None:
    ids = store.splits["valid"]
    for sampler in ([3, 1, 1], torch.utils.data.SubsetRandomSampler([3, 1]), Doubles(len(ids))):
        batches = list(store.loader("valid", batch_size=8, sampler=sampler))
        drawn = torch.cat([batch.input_id for batch in batches]).tolist()
        assert sorted(drawn) == sorted(sampler)
        if not isinstance(sampler, torch.utils.data.SubsetRandomSampler):
            assert drawn == [*sampler]
    (batch,) = store.loader("valid", batch_size=2, sampler=[3, 1, 1], drop_last=True)
    assert batch.input_id.tolist() == [3, 1]
    with pytest.raises(InputError, match=r"drop_last: .*8 nodes, got 1"):
        store.loader("valid", batch_size=8, sampler=[0], drop_last=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("memory_limit", [None, "1 MB"])
@pytest.mark.parametrize("cache", [False, True])
def test_pygs_layer_wise_inference_takes_a_loader_of_all_nodes(
    dtype: str, memory_limit: str | None, cache: bool, tiny_dir: Path, tmp_path: Path
) -> None:
    store = convert(tiny_dir, tmp_path / "store", feature_dtype=dtype, progress=False)  # type: ignore[arg-type]
    model = GraphSAGE(store.num_features, 8, num_layers=2, out_channels=store.num_classes).eval()
    loader = store.loader(None, num_neighbors=[-1], batch_size=64, memory_limit=memory_limit)
    data = store.to_data()
    with torch.no_grad():
        expected = model(data.x, data.edge_index)
    torch.testing.assert_close(model.inference(loader, cache=cache), expected)
    assert torch.equal(loader.data.x, data.x)
    assert loader.data.num_nodes == store.num_nodes


def test_all_features_are_read_only_if_memory_has_room(tiny_dir: Path, tmp_path: Path) -> None:
    store = convert(tiny_dir, tmp_path / "store", feature_dtype="float16", progress=False)
    large = dataclasses.replace(store, num_nodes=2**40)
    for read in (large.to_data, lambda: StoreData(large).x):
        with pytest.raises(InputError, match=rf"{store.path}: \d+\.\d+ GB .*store\.loader"):
            read()
