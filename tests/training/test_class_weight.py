"""Promises about weighted classes: the loss is torch's, in any batches, and a run keeps its weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import left_in, random_arrays
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.graph.store import Store
from ogbnlib.sources.arrays import write_raw
from ogbnlib.sources.convert import convert
from ogbnlib.training import learner
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]
WHOLE: dict[str, Any] = {"num_neighbors": [-1, -1], "eval_splits": (), "train_eval": "never"}


def balanced(store: Store) -> Tensor:
    labels = np.asarray(store.y[store.splits["train"]], np.int64)
    weights = compute_class_weight("balanced", classes=np.arange(store.num_classes), y=labels)
    return torch.from_numpy(weights).float()


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_weighted_loss_and_its_gradient_are_torchs(scale: float) -> None:
    scores = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 4
    weight = torch.tensor([0.1, 2.0, 0.0, 1.0, 3.0])
    loss, gradient = learner.loss_and_gradient(scores, labels, scale, weight)
    scores.requires_grad_()
    expected = F.cross_entropy(scores, labels, weight, reduction="sum")
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    (expected_gradient,) = torch.autograd.grad(expected * scale, scores)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("batch_size", [16, 200])
def test_an_epochs_loss_is_torchs_weighted_mean_over_the_split(
    tiny_config: Config, store: Store, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    seen = []
    own = learner.loss_and_gradient

    def kept(scores: Tensor, labels: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        seen.append((scores.clone(), labels))
        return own(scores, labels, **more)

    monkeypatch.setattr(learner, "loss_and_gradient", kept)
    config = tiny_config(epochs=1, batch_size=batch_size, class_weight="balanced", **WHOLE)
    loss = train(config).history[0]["loss"]
    scores, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert loss == pytest.approx(float(F.cross_entropy(scores, labels, balanced(store))), rel=1e-6)
    assert loss != pytest.approx(float(F.cross_entropy(scores, labels)), rel=1e-6)


def test_small_batches_make_the_step_of_a_large_one(tiny_config: Config) -> None:
    more = {**WHOLE, "epochs": 2, "class_weight": "balanced", "weight_decay": 0.1}
    large = train(tiny_config(batch_size=120, **more)).model.state_dict()
    small = train(tiny_config(batch_size=8, accumulate=15, **more)).model.state_dict()
    for name, value in large.items():
        torch.testing.assert_close(small[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("header", ["", "class,weight\n"])
def test_weights_of_a_file_count_up_to_a_factor(
    tiny_config: Config, store: Store, tmp_path: Path, header: str
) -> None:
    lines = [f"{number},{7 * weight:.9f}" for number, weight in enumerate(balanced(store))]
    file = tmp_path / "weights.csv"
    file.write_text(header + "\n".join(lines) + "\n\n")
    config = tiny_config(epochs=1, **WHOLE)
    one, other = (
        train(config.replace(class_weight=name)).history[0]["loss"] for name in (file, "balanced")
    )
    assert one == pytest.approx(other, rel=1e-6)
    file.write_text("0,2\n1,2\n2,2\n3,2\n")
    plain, equal = (
        train(config.replace(class_weight=name)).history[0]["loss"] for name in ("none", file)
    )
    assert equal == pytest.approx(plain, rel=1e-6)


def test_classes_have_the_names_of_the_store(tiny_config: Config, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    names = np.array(["cat", "dog", "emu"])[random.integers(0, 3, 60)]
    folder = tmp_path / "mine"
    folder.mkdir()
    np.save(folder / "edges.npy", random.integers(0, 60, (2, 300)))
    np.save(folder / "features.npy", random.standard_normal((60, 5)).astype(np.float32))
    rows = "".join(f"{node},{name}\n" for node, name in enumerate(names))
    (folder / "labels.csv").write_text(f"node_id,label\n{rows}")
    for split, ids in (("train", range(40)), ("valid", range(40, 50)), ("test", range(50, 60))):
        np.save(folder / f"{split}.npy", np.array(ids))
    store = convert(folder, tmp_path / "store", progress=False)
    assert store.class_names == ["cat", "dog", "emu"]
    file = tmp_path / "weights.csv"
    file.write_text("emu,3\ncat,0.5\n")
    config = tiny_config(dataset=str(store.path), class_weight=str(file), epochs=1, **WHOLE)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        own = learner.loss_and_gradient

        def kept(scores: Tensor, labels: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
            seen.append(more["weight"])
            return own(scores, labels, **more)

        patch.setattr(learner, "loss_and_gradient", kept)
        train(config)
    assert float(seen[0][2] / seen[0][0]) == pytest.approx(6)
    assert float(seen[0][1] / seen[0][0]) == pytest.approx(2)  # without a line the weight is 1
    file.write_text("emu,3\n0,0.5\n")
    with pytest.raises(InputError, match="such as cat, dog, emu, found '0'"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "^class_weight: expected none, balanced, or a csv file .* found no file"),
        ("0,1\n1\n", "line 2: expected a class and its weight, found \\['1'\\]"),
        ("0,1\n1,2,3\n", "line 2: expected a class and its weight"),
        ("0,-1\n", "line 1: expected a weight of at least 0, found '-1'"),
        ("0,nan\n", "line 1: expected a weight of at least 0, found 'nan'"),
        ("0,1\n1,inf\n", "line 2: expected a weight of at least 0, found 'inf'"),
        ("0,heavy\n", "line 1: expected a weight of at least 0, found 'heavy'"),
        ("0,1\n0,2\n", "line 2: expected each class once, found '0' again"),
        ("0,1\n9,2\n", "expected classes of .* such as 0, 1, 2, found '9'"),
        ("0,1\n\x00\xff", "weights.csv"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_written(
    tiny_config: Config, tmp_path: Path, content: str | None, words: str
) -> None:
    file = tmp_path / "weights.csv"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    before = left_in(tmp_path)
    with pytest.raises(InputError, match=words):
        train(tiny_config(class_weight=str(file)), tmp_path / "run")
    assert left_in(tmp_path) == before


def test_weights_of_zero_alone_are_refused(tiny_config: Config, tmp_path: Path) -> None:
    file = tmp_path / "weights.csv"
    file.write_text("".join(f"{number},0\n" for number in range(4)))
    with pytest.raises(InputError, match="expected a weight above 0 for a class of the train"):
        train(tiny_config(class_weight=str(file)))


def test_a_class_without_train_nodes_has_no_weight(tiny_config: Config, tmp_path: Path) -> None:
    arrays = random_arrays(60, 200, 4, num_classes=3)
    arrays["y"][:20] = np.arange(20) % 2
    write_raw(tmp_path / "raw", **arrays, num_classes=3)
    convert(tmp_path / "raw", tmp_path / "store", progress=False)
    config = tiny_config(dataset=str(tmp_path / "store"), class_weight="balanced", epochs=1)
    loss = train(config).history[0]["loss"]
    assert loss is not None
    assert np.isfinite(loss)


def test_a_resumed_run_keeps_its_weights(tiny_config: Config, tmp_path: Path) -> None:
    file = tmp_path / "weights.csv"
    file.write_text("0,3\n")
    config = tiny_config(class_weight=str(file), epochs=1, **WHOLE)
    train(config, tmp_path / "run")
    file.write_text("0,2\n")
    more = config.replace(epochs=2)
    words = (
        "^class_weight: expected the weights that .*checkpoint.pt was trained with, found others"
    )
    for changes in ({}, {"class_weight": "none"}, {"class_weight": "balanced"}):
        with pytest.raises(InputError, match=words):
            train(more.replace(**changes), tmp_path / "run", resume=True)
    other = tmp_path / "moved.csv"
    other.write_text("0,3\n")
    resumed = train(more.replace(class_weight=str(other)), tmp_path / "run", resume=True)
    straight = train(more.replace(class_weight=str(other)))
    assert [row["loss"] for row in resumed.history] == [row["loss"] for row in straight.history]
