"""A user's own model is trained like the built-in ones, and an unusable one is refused."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import left_in, same, weights

from ogbnlib.__main__ import main
from ogbnlib.config import TrainConfig
from ogbnlib.errors import Diverged, InputError
from ogbnlib.graph.store import open_store
from ogbnlib.inference.predictions import predict
from ogbnlib.memory.signals import Stopped
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run
from ogbnlib.training.call import Call, random_batch
from ogbnlib.training.custom_model import make_model
from ogbnlib.training.learner import Learner
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]

RESIDUAL = """
import torch
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv


class Net(torch.nn.Module):
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
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_my_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    my_model(RESIDUAL)


def my_model(code: str) -> None:
    Path("my_model.py").write_text(code)


@pytest.fixture
def own(tiny_config: Config) -> Config:
    three = {"num_neighbors": [4, 3, 2], "dropout": 0.3, "epochs": 3, "train_eval": "never"}
    return lambda **changes: tiny_config(**{"model": "my_model.py:Net", **three, **changes})


def test_a_residual_model_goes_on_bit_for_bit(own: Config, monkeypatch: pytest.MonkeyPatch) -> None:
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
        my_model(RESIDUAL.replace("F.relu", "F.elu"))  # for the next experiment
        with pytest.raises(Stopped, match="in epoch 2"):
            train(often, "run", resume=True)
    resumed = train(own(), "run", resume=True)
    assert same(resumed.model.state_dict(), straight.model.state_dict())
    assert same(weights(Path("run")), straight.model.state_dict())
    assert Path("run/model.py").read_text() == RESIDUAL
    said = "\n".join(event.get("text", "") for event in Run("run").events)
    assert re.search(r"my_model\.py: changed .*model\.py", said)
    values = "hidden_channels=8, dropout=0.3, in_channels=8, out_channels=4, num_layers=3"
    assert f"Net({values})" in said


def test_a_model_that_needs_all_nodes_trains_and_predicts(own: Config, tiny_store: Path) -> None:
    model, args = "torch_geometric.nn:GraphSAGE", {"jk": "cat"}
    config = own(model=model, model_args=args, dropout=0.0, epochs=1, num_neighbors=[3, 2])
    result = train(config, "run")
    store = open_store(tiny_store)
    nodes = store.splits["test"]
    path = predict("run", "out.npy", nodes=nodes, sampled=True, progress=False, say=len)
    assert float((np.load(path) == store.y[nodes]).mean()) == result.history[-1]["test"]


def test_pyg_leaves_no_file_of_a_layer(own: Config) -> None:
    own(epochs=1).save("config.json")
    Path("tmp").mkdir()
    code = (
        "import os; from ogbnlib import TrainConfig, train\n"
        "train(TrainConfig.load('config.json'), progress=False); print(os.listdir('tmp'))"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env={**os.environ, "TMPDIR": "tmp"}, capture_output=True, text=True)
    assert "_propagate_" in done.stdout, done.stderr
    assert not list(Path("tmp").glob("*_propagate_*"))


def test_a_forward_may_take_the_whole_batch_or_features_alone() -> None:
    my_model(
        f"""{HEAD}{INIT}
    def forward(self, data):
        assert data.n_id.shape == (len(data.x),)
        assert sum(data.num_sampled_nodes) == data.num_nodes
        assert sum(data.num_sampled_edges) == data.num_edges
        return self.lin(data.x[: data.batch_size])


class Features(Net):
    def forward(self, x):
        return self.lin(x)
"""
    )
    for name in ("Net", "Features"):
        config = TrainConfig.create(dataset="x", model=f"my_model.py:{name}")
        model = make_model(config, 6, 5)
        batch = random_batch([4, 4, 4], [4, 4], 6)
        assert Call.of(model, "fp32")(model, batch, torch.device("cpu")).shape == (4, 5)


@pytest.mark.slow
def test_two_ranks_evaluate_the_batch_norm_that_they_save(own: Config, tiny_store: Path) -> None:
    my_model(RESIDUAL.replace("torch.nn.LayerNorm if", "torch.nn.BatchNorm1d if"))
    # 5 batches: one rank has none.
    config = own(epochs=2, lr=0.1, train_eval="final", batch_size=24, eval_batch_size=16)
    ended = run(config, run_dir="run", num_ranks=2, echo=False)
    assert ended.exit_code == 0, ended.diagnosis
    store, last = open_store(tiny_store), ended.metrics.iloc[-1]
    found = np.load(predict("run", "out.npy", nodes="all", sampled=True, progress=False, say=len))
    for split, nodes in store.splits.items():
        assert float((found[nodes] == store.y[nodes]).mean()) == last[split]
    # The first rank has three of the five batches, the last without another one beside it.
    assert int(weights(Path("run"))["norms.0.num_batches_tracked"]) == 2 * 3


CALLS = """
    def forward(self, x, edge_index):
        Net.calls = getattr(Net, "calls", 0) + 1
        if {when}:
            {then}
        return self.scores(x, edge_index)
"""
LATER = 'Net.calls >= 4 and "--try" not in sys.argv'  # the try-out itself is sound


def my_model_does(then: str, when: str, first: str = "") -> None:
    code = RESIDUAL.replace("def forward", "def scores") + CALLS.format(then=then, when=when)
    my_model(f"import os, signal, sys, time\n{first}{code}")


@pytest.mark.slow
def test_a_wait_for_a_rank_that_hangs_ends(own: Config) -> None:
    first = "from ogbnlib.training import distributed\ndistributed._PATIENCE_S = 3.0\n"
    my_model_does("time.sleep(1000)", 'Net.calls == 4 and os.environ.get("RANK") == "1"', first)
    ended = run(own(), run_dir="run", num_ranks=2, echo=False)
    assert ended.exit_code == 78, ended.diagnosis
    assert "a rank hangs" in ended.result["last_output"]
    assert ended.diagnosis.facts.rank is None


def test_scores_that_are_nan_are_no_class(own: Config) -> None:
    began = 'Net.began = self.training or getattr(Net, "began", False)'
    scores = "return self.lin(x) * (1.0 if self.training or not Net.began else torch.nan)"
    my_model(model_with(f"{began}\n        {scores}"))
    with pytest.raises(Diverged, match=r"40 of 40 .*NaN in epoch 1"):
        train(own(dropout=0.0), "run")
    assert (Run("run").exit_code, len(Run("run").metrics)) == (77, 0)


@pytest.mark.slow
def test_a_run_whose_model_ends_the_process_has_not_finished(own: Config) -> None:
    my_model_does("os._exit(0)", LATER)
    ended = run(own(), run_dir="run", num_ranks=2, echo=False)
    assert (ended.is_finished, ended.exit_code) == (False, 78), ended.diagnosis
    assert ended.diagnosis.cause == "not finished"
    Path("run/model.py").write_text(RESIDUAL)
    assert run(run_dir="run", resume=True, echo=False).is_finished


@pytest.mark.slow
def test_a_model_that_ends_the_process_at_once_is_refused(own: Config) -> None:
    my_model_does("os.kill(os.getpid(), 9)", "Net.calls >= 1")
    before = left_in(Path())
    with pytest.raises(InputError, match="exit code"):
        run(own(), run_dir="run", echo=False)
    assert left_in(Path()) == before


def test_a_training_whose_model_exits_is_not_finished(own: Config) -> None:
    my_model_does("sys.exit(0)", LATER)
    assert run(own(), run_dir="run", echo=False).exit_code == 1


def test_a_prediction_whose_model_exits_with_a_text_prints_it(
    own: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    my_model(f"import os, sys\nif 'EXPIRED' in os.environ:\n    sys.exit('no licence')\n{RESIDUAL}")
    train(own(epochs=1), "run")
    monkeypatch.setenv("EXPIRED", "1")
    assert main(["predict", "run", "--out", "out.npy", "--sampled"]) == 1
    assert "no licence" in capsys.readouterr().err.splitlines()


@pytest.mark.slow
def test_a_models_thread_or_process_keeps_no_run_from_ending(own: Config) -> None:
    starts = 'threading.Thread(target=time.sleep, args=(10_000,)).start()\nsubprocess.Popen(["sleep", "300"])'
    my_model(f"import subprocess, threading, time\n{starts}\n{RESIDUAL}")
    assert run(own(epochs=1), run_dir="run", echo=False).is_finished


def test_a_models_copy_finds_files_beside_it(own: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import own_utils\nfrom pathlib import Path\n{RESIDUAL}".replace(
        "        super().__init__()\n",
        "        super().__init__()\n        text = Path(__file__).with_name('w.txt').read_text()\n"
        "        self.register_buffer('k', torch.tensor([own_utils.K, float(text)]))\n",
    )
    for number, name in enumerate(("elsewhere", "one")):
        Path(name).mkdir()
        Path(name, "w.txt").write_text(f"{number}")
        Path(name, "own_utils.py").write_text(f"K = {number}.0\n")
        Path(name, "net.py").write_text(code)
    monkeypatch.syspath_prepend(str(Path("elsewhere").resolve()))
    train(own(model="one/net.py:Net", epochs=1), "run")
    # the run goes on with its copy, PyG's lines too
    Path("one/net.py").write_text(f"# a line more\n{code}")
    train(own(model="one/net.py:Net", epochs=2), "run", resume=True)
    assert weights(Path("run"))["k"].tolist() == [1.0, 1.0]
    del sys.modules["own_utils"]


def test_weights_that_do_not_fit_the_model_are_one_sentence(own: Config) -> None:
    my_model(GOOD)
    train(own(dropout=0.0, epochs=1), "run")
    more = GOOD.replace("self.lin = ", "self.more, self.lin = nn.Linear(2, 2), ")
    Path("run/model.py").write_text(more)
    refused = r"checkpoint\.pt: expected the weights of this Net, .*other content .*more\.weight.*__init__ must"
    with pytest.raises(InputError, match=refused):
        train(own(dropout=0.0, epochs=2), "run", resume=True)
    with pytest.raises(InputError, match=refused):
        predict("run", "out.npy", sampled=True, progress=False, say=len)
    assert Run("run").exit_code == 0


HEAD = "import torch\nfrom torch import nn\nclass Net(nn.Module):\n"
INIT = (
    "    def __init__(self, in_channels, out_channels):\n        super().__init__()\n"
    "        self.lin = nn.Linear(in_channels, out_channels)\n"
)


def model_with(forward: str) -> str:
    return f"{HEAD}{INIT}    def forward(self, x, edge_index):\n        {forward}\n"


GOOD = model_with("return self.lin(x)")
# what a model's code is, the config's changes, the error and a fact in it
WRONG: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "not a module": ("class Net: pass\n", {}, InputError, "class Net derived from"),
    "a failing import": ("import nothing_of_it\n", {}, ModuleNotFoundError, "nothing_of_it"),
    "a notebook's": (GOOD, {"model": "__main__:Net"}, InputError, "%%writefile my_model.py"),
    "dropout that is not taken": (GOOD, {"dropout": 0.5}, InputError, "^dropout: .* got 0.5"),
    "a forward that fails": (model_with("return self.lin(x[:, 1:])"), {}, RuntimeError, "mat1"),
    "seeds alone": (model_with("return self.lin(x)[:4]"), {}, InputError, r"\[12, .*\[4, 5\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_model_is_refused(case: str) -> None:
    code, changes, kind, words = WRONG[case]
    my_model(code)
    config = TrainConfig.create({"dataset": "x", "model": "my_model.py:Net", **changes})
    with pytest.raises(kind, match=words):
        make_model(config, 6, 5)
    assert "__pycache__" not in left_in(Path())


def test_it_is_refused_before_anything_is_written(own: Config) -> None:
    my_model(model_with("return self.lin(x[:, 1:])"))
    config, before = own(dropout=0.0), left_in(Path())
    with pytest.raises(InputError, match=r'my_model\.py", line 8(?s:.*)mat1'):
        run(config, run_dir="run", echo=False)
    my_model(GOOD.replace("out_channels)\n    def", "out_channels + 1)\n    def"))
    for begin in (lambda: train(config, "run"), lambda: run(config, run_dir="run", echo=False)):
        with pytest.raises(InputError, match=r"^my_model.py:Net: expected scores .*\[16, 5\]"):
            begin()
    assert left_in(Path()) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("model", ["my_model.py:Net", "my_model:Net"])
def test_code_in_the_run_folder_of_another_user_is_refused(own: Config, model: str) -> None:
    config = own(model=model, epochs=1)
    train(config, "run")
    Path("run/model.py").unlink(missing_ok=True)
    sys.modules.pop("my_model", None)
    my_model("raise SystemExit('it ran')")
    os.chown("run", 12345, 12345)
    for work in (
        lambda: train(config.replace(epochs=3), "run", resume=True),
        lambda: run(config.replace(epochs=3), run_dir="run", resume=True),
        lambda: predict("run", "out.npy", sampled=True, progress=False),
    ):
        with pytest.raises(InputError, match=r"^run: expected a run of your own, .*copy the"):
            work()
    Path("run/config.json").rename("run/model.py")  # a new run, which the copy of a model awaits
    with pytest.raises(InputError, match=r"^run: expected a run of your own, "):
        train(config, "run", resume=True)
