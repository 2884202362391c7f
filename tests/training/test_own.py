"""Promises of `own`: a model of the user's own is trained as ours are, and a wrong one refused in one sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import left_in, wait_until
from real_graphs import real_config, write_graph
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.forecast.planner import plan
from ogbnlib.graph.store import GraphSize
from ogbnlib.memory.signals import Stopped
from ogbnlib.runs.folder import Run, is_locked
from ogbnlib.runs.sandbox import run
from ogbnlib.training.own import Call, make_model, random_batch
from ogbnlib.training.step import Learner
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]

RESIDUAL = '''
import torch
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv


class Net(torch.nn.Module):
    """Residual GraphSAGE with LayerNorm."""

    def __init__(self, in_channels, hidden_channels, out_channels, num_layers=3, dropout=0.0, norm=True):
        super().__init__()
        self.dropout = dropout
        self.first = torch.nn.Linear(in_channels, hidden_channels)
        self.convs = torch.nn.ModuleList(SAGEConv(hidden_channels, hidden_channels) for _ in range(num_layers))
        kind = torch.nn.LayerNorm if norm else torch.nn.Identity
        self.norms = torch.nn.ModuleList(kind(hidden_channels) for _ in range(num_layers))
        self.last = torch.nn.Linear(hidden_channels, out_channels)

    def forward(self, x, edge_index):
        x = self.first(x)
        for conv, norm in zip(self.convs, self.norms):
            x = x + F.dropout(F.relu(conv(norm(x), edge_index)), self.dropout, self.training)
        return self.last(x)
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with my_model.py, in which the user works."""
    (tmp_path / "my_model.py").write_text(RESIDUAL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def weights(folder: Path, name: str = "checkpoint.pt") -> dict[str, Tensor]:
    model: dict[str, Tensor] = torch.load(folder / name, weights_only=True)["model"]
    return model


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def notes(folder: Path) -> str:
    return "\n".join(event.get("text", "") for event in Run(folder).events if event["event"] == "note")


@pytest.fixture
def own(tiny_config: Config) -> Config:
    three = {"num_neighbors": [4, 3, 2], "dropout": 0.3, "epochs": 3, "train_eval": "never"}
    return lambda **changes: tiny_config(**{"model": "my_model.py:Net", **three, **changes})


# Its run --------------------------------------------------------------------------------------------------------------


def test_a_residual_model_that_dies_and_is_stopped_ends_with_the_weights_of_one_that_was_left_alone(
    own: Config, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, step, steps = train(own()), Learner.step, [0]

    def fails(self: Learner, *given: Any) -> None:
        step(self, *given)
        steps[0] += 1
        if steps[0] == 11:
            raise RuntimeError("as a kill would")
        if steps[0] == 15:
            os.kill(os.getpid(), signal.SIGUSR1)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", fails)
        often = own(checkpoint_every_s=1e-9)
        with pytest.raises(RuntimeError):
            train(often, "run")
        (here / "my_model.py").write_text(RESIDUAL.replace("F.relu", "F.elu"))  # for the next experiment
        with pytest.raises(Stopped, match="in epoch 2"):
            train(often, "run", resume=True)
    resumed = train(own(), "run", resume=True)
    assert same(resumed.model.state_dict(), straight.model.state_dict())
    assert same(weights(here / "run"), straight.model.state_dict())
    assert (here / "run" / "model.py").read_text() == RESIDUAL
    said = notes(here / "run")
    assert re.search(r"my_model\.py: it has changed since .* in line 22; going on with the copy .*model\.py", said)
    assert "Net(hidden_channels=8, dropout=0.3, in_channels=8, out_channels=4, num_layers=3)" in said


def test_kills_in_the_middle_of_an_epoch_of_child_and_parent_change_no_weight(own: Config, here: Path) -> None:
    """Each at an attempt's 11th step, where an epoch has eight and the model's trial is no more than one."""
    forward = "    def forward(self, x, edge_index):\n"
    kills = """
        Net.steps = getattr(Net, "steps", 0) + self.training
        if Net.steps == 11 and os.path.exists("victim"):
            victim = getattr(os, open("victim").read())()
            os.remove("victim")
            os.kill(victim, signal.SIGKILL)
            while os.getppid() == victim:  # it hears of its parent's death and stops, before it ends its run
                time.sleep(0.01)
"""
    code = "import os, signal, time\n" + RESIDUAL.replace(forward, forward + kills[1:])
    (here / "my_model.py").write_text(code)
    straight = train(own())
    often = own(checkpoint_every_s=1e-9)
    (here / "victim").write_text("getpid")
    assert run(often, run_dir="run", echo=False).exit_code == 137
    (here / "victim").write_text("getppid")
    again = "from ogbnlib import run; run(run_dir='run', resume=True)"
    parent = subprocess.run([sys.executable, "-c", again], stdout=subprocess.DEVNULL, check=False)
    assert parent.returncode == -signal.SIGKILL
    wait_until(lambda: not is_locked(here / "run"), "the child's end")
    resumed = train(own(), "run", resume=True)
    assert same(resumed.model.state_dict(), straight.model.state_dict())
    assert same(weights(here / "run"), straight.model.state_dict())
    epochs = [event for event in Run(here / "run").events if event.get("phase") == "train epoch"]
    assert [event["epoch"] for event in epochs if event["event"] == "begin"] == [1, 2, 2, 3, 3]


def test_a_run_goes_on_where_the_file_is_gone(own: Config, here: Path) -> None:
    straight = train(own(epochs=2))
    train(own(epochs=1), "run")
    (here / "my_model.py").unlink()
    assert same(train(own(epochs=2), "run", resume=True).model.state_dict(), straight.model.state_dict())
    assert "found no such file any more; going on with the copy of it" in notes(here / "run")


def test_a_module_that_changed_is_refused_with_the_line(own: Config, here: Path) -> None:
    package = here / "my_package_of_models"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "nets.py").write_text(RESIDUAL)
    config = own(model="my_package_of_models.nets:Net", epochs=1)
    train(config, "run")
    (package / "nets.py").write_text(RESIDUAL + "\nx = 1\n")
    with pytest.raises(
        InputError, match=r"nets\.py: it has changed since this run began, first in line 24; put .*model"
    ):
        train(config.replace(epochs=2), "run", resume=True)


def test_a_model_object_is_trained_itself_and_resumed_with_another(own: Config, here: Path, tmp_path: Path) -> None:
    def made() -> nn.Module:
        torch.manual_seed(5)
        return Plain(8, 8, 4)

    config = own(model="sage", num_neighbors=[3, 2], dropout=0.0)
    model = made()
    straight = train(config, model=model)
    assert straight.model is model
    train(config.replace(epochs=1), "run", model=made())
    assert Run("run").config.model == f"{__name__}:Plain"
    resumed = train(config, "run", resume=True, model=Plain(8, 8, 4))
    assert same(resumed.model.state_dict(), model.state_dict())
    with pytest.raises(InputError, match=r"can't resume with other values .*model was .*:Plain"):
        train(config, "run", resume=True)


class Plain(nn.Module):
    """GraphSAGE as PyG's introduction has it."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, dropout: float = 0.5):
        super().__init__()
        self.first, self.last = SAGEConv(in_channels, hidden_channels), SAGEConv(hidden_channels, out_channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.dropout(self.first(x, edge_index).relu()), edge_index)


SAME = """
from ogbnlib.config import TrainConfig
from ogbnlib.training.models import GNN

class Net(GNN):
    def __init__(self, num_features, num_classes, hidden_channels, num_layers, dropout):
        super().__init__(TrainConfig.create(
            dataset="x", hidden_channels=hidden_channels, num_neighbors=[1] * num_layers, dropout=dropout
        ), num_features, num_classes)
"""


def test_our_sage_as_a_model_of_your_own_has_the_same_losses(own: Config, here: Path) -> None:
    (here / "my_model.py").write_text(SAME)
    ours, theirs = train(own(model="sage")), train(own())
    assert [row["loss"] for row in theirs.history] == [row["loss"] for row in ours.history]
    assert same(theirs.model.state_dict(), ours.model.state_dict())


@pytest.mark.parametrize("name", ["GraphSAGE", "GAT", "GIN", "PNA"])
def test_pygs_own_models_are_called_with_the_counts_of_each_hop(name: str) -> None:
    more = {"aggregators": ["mean"], "scalers": ["identity"], "deg": [1, 2]} if name == "PNA" else {}
    config = TrainConfig.create(
        dataset="x", model=f"torch_geometric.nn:{name}", hidden_channels=8, model_args={"norm": "LayerNorm"}
    )
    if more:
        with pytest.raises(InputError, match=r"^torch_geometric.nn:PNA: can't be made with .*aggregators"):
            make_model(config, 6, 5)
        return
    call = Call.of(make_model(config, 6, 5), "fp32")
    assert call.arguments["num_sampled_nodes_per_hop"] == "num_sampled_nodes"
    assert call.arguments["num_sampled_edges_per_hop"] == "num_sampled_edges"


def test_a_forward_may_take_the_whole_batch_or_features_alone() -> None:
    class Whole(nn.Linear):
        def forward(self, data: Data) -> Tensor:  # type: ignore[override]
            assert data.n_id.shape == (len(data.x),)
            assert (sum(data.num_sampled_nodes), sum(data.num_sampled_edges)) == (data.num_nodes, data.num_edges)
            return super().forward(data.x[: data.batch_size])

    class Features(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    for model in (Whole(6, 5), Features(6, 5)):
        config = TrainConfig.create(dataset="x", model="mine:Net")
        assert make_model(config, 6, 5, given=model) is model
        scores = Call.of(model, "fp32")(model, random_batch(4, 2, 6), torch.device("cpu"))
        assert scores.shape == (4, 5)


def test_a_model_that_makes_its_weights_at_the_first_batch_has_them_before_its_optimizer(
    own: Config, here: Path
) -> None:
    lazy = RESIDUAL.replace("torch.nn.Linear(in_channels, hidden_channels)", "torch.nn.LazyLinear(hidden_channels)")
    (here / "my_model.py").write_text(lazy)
    assert same(train(own(epochs=1)).model.state_dict(), train(own(epochs=1)).model.state_dict())


def test_bfloat16_goes_around_its_forward() -> None:
    seen = []

    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    model = Seen(6, 5)
    scores = Call.of(model, "bf16")(model, random_batch(4, 2, 6), torch.device("cpu"))
    assert (seen, scores.dtype) == ([torch.bfloat16], torch.float32)


def test_two_ranks_of_a_child_train_it_with_batch_norm_to_the_end(own: Config, here: Path) -> None:
    (here / "my_model.py").write_text(RESIDUAL.replace("torch.nn.LayerNorm if", "torch.nn.BatchNorm1d if"))
    ended = run(own(epochs=1, batch_size=24), run_dir="run", num_ranks=2, echo=False)  # 5 batches: one rank has none
    assert ended.exit_code == 0, ended.diagnosis


# A wrong one ----------------------------------------------------------------------------------------------------------

HEAD = "import torch\nfrom torch import nn\nclass Net(nn.Module):\n"
INIT = (
    "    def __init__(self, in_channels, out_channels):\n        super().__init__()\n"
    "        self.lin = nn.Linear(in_channels, out_channels)\n"
)


def model_with(forward: str, init: str = INIT) -> str:
    return f"{HEAD}{init}    def forward(self, x, edge_index):\n        {forward}\n"


GOOD = model_with("return self.lin(x)")
WRONG: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "no file": (None, {}, r"my_model\.py: expected the file of the model .*, found no such file"),
    "no class": (GOOD, {"model": "my_model.py:Nte"}, r"expected a class Nte in it, found Net; did you mean 'Net'\?"),
    "no model in it": ("x = 1\n", {}, "expected a class Net in it, found no model"),
    "not a module": ("class Net: pass\n", {}, "expected Net to be a class derived from torch.nn.Module, found a class"),
    "a function": ("def Net(): pass\n", {}, "derived from torch.nn.Module, found function"),
    "a failing import": ("import os\nimport nothing_of_it\n", {}, "ModuleNotFoundError in line 2: No module named"),
    "a syntax error": ("x = 1\nclass Net(:\n", {}, "SyntaxError in line 2: "),
    "a script": ("import sys\nsys.exit(3)\n", {}, "SystemExit in line 2: 3"),
    "no such module": (GOOD, {"model": "no_such_module:Net"}, "^no_such_module: .*No module named 'no_such_module'"),
    "no such package": (GOOD, {"model": "no_such.module:Net"}, "^no_such.module: .*No module named 'no_such'"),
    "a notebook's": (GOOD, {"model": "__main__:Net"}, "%%writefile my_model.py"),
    "an argument missing": (
        GOOD.replace("self, in_channels", "self, depth, in_channels"),
        {},
        "^model_args: my_model.py:Net needs 'depth', which nobody gives",
    ),
    "an argument too many": (
        GOOD,
        {"model_args": {"out_chanels": 3}},
        "^model_args: unknown argument of my_model.py:Net 'out_chanels': did you mean 'out_channels'",
    ),
    "dropout that is not taken": (GOOD, {"dropout": 0.5}, "^dropout: got 0.5 for my_model.py:Net, which takes none"),
    "an __init__ that fails": (
        GOOD.replace("super().__init__()", "raise ValueError('no luck')"),
        {},
        "can't be made with in_channels=6, out_channels=5: ValueError in line 5: no luck",
    ),
    "a forward that fails": (
        model_with("return self.lin(x[:, 1:])"),
        {},
        "its forward fails on a random batch, x .12, 6. and .*RuntimeError in line 8: mat1 and mat2",
    ),
    "no forward": (HEAD + INIT, {}, r"found Net\.forward|required \"forward\""),
    "a forward of three": (
        GOOD.replace("x, edge_index", "x, edge_index, edge_weight"),
        {},
        r"found Net\.forward\(x, edge_index, edge_weight\): nobody gives 'edge_weight'",
    ),
    "a wrong width": (GOOD, {"model_args": {"out_channels": 7}}, r"scores \[12, .*; 5 classes\], found \[12, 7\]"),
    "seeds alone": (model_with("return self.lin(x)[:4]"), {}, r"scores \[12, .*found \[4, 5\]"),
    "rows of edges": (model_with("return self.lin(x[edge_index[0]])"), {}, r"found \[8, 5\]"),
    "two tensors": (model_with("return self.lin(x), x"), {}, "found tuple"),
    "classes": (model_with("return self.lin(x).argmax(1)"), {}, r"found \[12\]"),
    "no gradient": (model_with("return self.lin(x).detach()"), {}, "with a gradient, found torch.float32 without one"),
    "no parameters": (
        model_with("return x[:, :5]", "    def __init__(self):\n        super().__init__()\n"),
        {},
        "expected a model with parameters to train, found none",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_model_is_refused_in_one_sentence(here: Path, case: str) -> None:
    code, changes, words = WRONG[case]
    (here / "my_model.py").unlink() if code is None else (here / "my_model.py").write_text(code)
    config = TrainConfig.create({"dataset": "x", "model": "my_model.py:Net", **changes})
    with pytest.raises(InputError, match=words) as caught:
        make_model(config, 6, 5)
    assert "\n" not in str(caught.value)
    assert "__pycache__" not in left_in(here)


def test_it_is_refused_before_anything_is_written(own: Config, here: Path) -> None:
    (here / "my_model.py").write_text(GOOD.replace("out_channels)\n    def", "out_channels + 1)\n    def"))
    config, before = own(dropout=0.0), left_in(here)
    for begin in (lambda: train(config, "run"), lambda: run(config, run_dir="run", echo=False)):
        with pytest.raises(
            InputError, match=r"^my_model.py:Net: expected its forward to return scores .*, found \[16, 5\]"
        ):
            begin()
    assert left_in(here) == before


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"model": "sgae"},
            r"^model: expected sage, gcn, gat, sgc, sign, sagn, or your own as .*, got 'sgae'; did you mean 'sage'\?",
        ),
        ({"model": ":Net"}, "^model: "),
        ({"model": "my_model.py:"}, "^model: "),
        ({"model_args": '{"a": 1}'}, "^model_args: expected with a model of your own only, got model='sage'"),
        ({"model": "a.py:Net", "model_args": "heads=4"}, "^model_args: expected names and values as JSON has them"),
        ({"model": "a.py:Net", "model_args": [1]}, "^model_args: expected names and values as JSON"),
        ({"model": "a.py:Net", "model_args": {"f": len}}, "^model_args: expected names and values as JSON"),
        (
            {"model": "a.py:Net", "activation_checkpointing": True},
            "^activation_checkpointing: .*torch.utils.checkpoint",
        ),
    ],
)
def test_a_config_refuses_what_no_model_of_your_own_can_have(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TrainConfig.create(dataset="x", **values)


def test_model_args_are_the_same_from_python_the_command_line_and_a_saved_config(tmp_path: Path) -> None:
    given = {"heads": 4, "widths": (3, 2), "name": None}
    one = TrainConfig.create(dataset="x", model="a.py:Net", model_args=given)
    two = TrainConfig.create(dataset="x", model="a.py:Net", model_args=json.dumps(given))
    one.save(tmp_path / "config.json")
    assert one == two == TrainConfig.load(tmp_path / "config.json")
    assert one.model_args == {"heads": 4, "widths": [3, 2], "name": None}


def test_the_plan_says_what_it_does_not_know() -> None:
    size = GraphSize("x", 1000, 9000, 8, 4, {"train": 100, "valid": 10, "test": 10})
    own = TrainConfig.create(dataset="x", model="my_model.py:Net")
    unknown, known = plan(own, "4 GB", size=size), plan(own.replace(model="sage"), "4 GB", size=size)
    assert unknown.forecast.gpu["activations"] > known.forecast.gpu["activations"]
    assert "my_model.py:Net is not known: its weights and activations are taken for those of a sage" in str(unknown)
    assert "taken for those" not in str(known)


# A real graph ---------------------------------------------------------------------------------------------------------


def test_a_plain_graphsage_of_ones_own_reaches_the_accuracy_of_the_literature(tmp_path: Path) -> None:
    write_graph("amazon_photo", tmp_path / "photo")
    torch.manual_seed(0)
    accuracy = train(real_config(tmp_path / "photo", 15, dropout=0.0), model=Plain(745, 64, 8)).history[-1]["test"]
    assert accuracy is not None
    assert accuracy >= 0.92
    print(f"amazon_photo, a model of one's own: test accuracy {accuracy:.4f}")
