"""The files of release 0.2.0, made by its commands, with every later version.

`release_0_2_0` has a store of 400 nodes, a run of three epochs, its prediction, and the weights that
0.2.0 came to after two epochs more.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import weights

from ogbnlib import InputError, Run, open_store, run
from ogbnlib.graph.writer import verify_store
from ogbnlib.inference.predictions import predict

RELEASE = Path(__file__).parent / "release_0_2_0"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy as the working folder: the run's config names its data by the relative path `store`."""
    shutil.copytree(RELEASE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_store_and_run_open_with_their_sizes_end_and_record(copy: Path) -> None:
    assert verify_store("store") == []
    size = open_store("store").size
    assert (size.num_nodes, size.num_edges, size.num_features) == (400, 4616, 8)
    assert size.num_seeds == {"train": 193, "valid": 103, "test": 104}
    old = Run.open("run")
    assert (old.exit_code, old.diagnosis.cause) == (0, "finished")
    assert old.config.num_neighbors == (4, 3)
    assert old.metrics["epoch"].tolist() == [1, 2, 3]
    assert "train epoch" in {phase.name for phase in old.phases}
    assert old.held_peak_bytes > 0


def test_its_model_predicts_what_it_predicted(copy: Path) -> None:
    predict("run", "now.npy", nodes="all")
    assert np.array_equal(np.load("now.npy"), np.load("prediction.npy"))


def test_the_run_goes_on_to_the_same_weights(copy: Path) -> None:
    config = Run.open("run").config.replace(epochs=5)
    with pytest.raises(InputError, match="class_weight was 'none', now 'balanced'"):
        run(config.replace(class_weight="balanced"), run_dir="run", resume=True, echo=False)
    assert run(config, run_dir="run", resume=True, echo=False).exit_code == 0
    with np.load("resumed_weights.npz") as expected:
        resumed = weights(copy / "run")
        assert resumed.keys() == set(expected)
        for name, value in resumed.items():
            # Another processor may add in another order.
            torch.testing.assert_close(value, torch.from_numpy(expected[name]))
    # 0.2.0 wrote no F1
    assert Run.open("run").metrics["valid_macro_f1"].notna().tolist() == [False] * 3 + [True] * 2
