"""A store that is replaced or written to while it is in use is refused, never read on."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.loader import NodeLoader

from ogbnlib import InputError, TrainConfig, open_store, train
from ogbnlib.graph.store import Store
from ogbnlib.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("process_of_1_mb")
SENTENCE = r"\.(npy|json): .* replaced"


def rename(new: Path, old: Path) -> None:
    """As after `rm -r old; mv new old`."""
    shutil.rmtree(old)
    new.rename(old)


def remove(new: Path, old: Path) -> None:
    shutil.rmtree(old)


def write_over(new: Path, old: Path) -> None:
    """As `cp new/* old/` does: the same inodes with other content."""
    shutil.copytree(new, old, dirs_exist_ok=True)


def write_over_with_its_times(new: Path, old: Path) -> None:
    """As `rsync --inplace --times --ignore-times` of files that were made in the same second."""
    times = {file.name: file.stat() for file in old.iterdir()}
    write_over(new, old)
    for file in old.glob("*.npy"):
        os.utime(file, ns=(times[file.name].st_atime_ns, times[file.name].st_mtime_ns))


def replace_arrays(new: Path, old: Path) -> None:
    """Of the files those alone that are read late; as `rsync` does, with their times."""
    for name in ("x", "row", "colptr", "y"):
        shutil.copy2(new / f"{name}.npy", old / "beside")
        (old / "beside").rename(old / f"{name}.npy")


@pytest.fixture
def old(tiny_store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_store, tmp_path / "old"))


@pytest.fixture
def new(old: Path, tmp_path: Path) -> Path:
    """The same graph with other features and labels; each file has the size of the old one's."""
    data = open_store(old).to_data()
    data.x, data.y = data.x.flip(0), torch.where(data.y >= 0, 3 - data.y, data.y)
    how = {"splits": open_store(old).splits, "num_classes": 4, "progress": False}
    return Store.from_data(data, tmp_path / "tiny", **how).path  # which becomes its name


USES: dict[str, Callable[[Store, Any], object]] = {
    "map": lambda store, sampler: store.y,
    "read": lambda store, sampler: store.read("x"),
    "windows": lambda store, sampler: store.disk_array("x"),
    "loader": lambda store, sampler: store.loader("train", memory_limit="1 MB"),
    "worker's sampler": lambda store, sampler: pickle.loads(pickle.dumps(sampler)),
    "worker's store": lambda store, sampler: pickle.loads(pickle.dumps(store)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("change", [remove, write_over, write_over_with_its_times, replace_arrays])
def test_a_file_that_is_opened_is_the_one_that_was_there(
    use: str, change: Callable[[Path, Path], None], old: Path, new: Path
) -> None:
    store = open_store(old)
    sampler = store.sampler([2])
    before = np.array(store.row)
    change(new, old)
    with pytest.raises(InputError, match=SENTENCE):
        USES[use](store, sampler)
    if change is replace_arrays:  # a map outlives the name of its file
        np.testing.assert_array_equal(store.row, before)


@pytest.mark.parametrize("make", ["windows", "PyG's"])
@pytest.mark.parametrize("change", [write_over, write_over_with_its_times])
def test_a_pass_over_files_that_were_written_to_is_refused(
    make: str, change: Callable[[Path, Path], None], old: Path, new: Path
) -> None:
    store = open_store(old)
    if make == "PyG's":
        stores, ids = (store.feature_store(), store.graph_store()), torch.arange(store.num_nodes)
        loader: Any = NodeLoader(stores, store.sampler([2]), input_nodes=ids, batch_size=64)
    else:
        loader = store.loader(None, batch_size=64, memory_limit="1 MB")
    assert len(list(loader)) == 5
    for file in old.iterdir():  # which changes their ctime, but not their content
        file.chmod(0o640)
    assert len(list(loader)) == 5
    change(new, old)
    with pytest.raises(InputError, match=SENTENCE):
        list(loader)


def test_a_copy_with_the_times_of_the_original_is_the_same_store(old: Path, tmp_path: Path) -> None:
    store = open_store(old)
    shutil.copytree(old, tmp_path / "copy")  # copies times too
    rename(tmp_path / "copy", old)
    assert store.x.shape == (300, 8)
    assert len(store.splits["train"]) == 120


def test_a_run_ends_with_a_replaced_store_and_resumes(
    old: Path, new: Path, tiny_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk = {"dataset": str(old), "loading": "store", "lookahead": "20 kB", "spool": "off"}
    config: TrainConfig = tiny_config(**on_disk, epochs=3, num_workers=0)
    kept = shutil.copytree(old, tmp_path / "kept")
    plain = train(config).model.state_dict()
    evaluate = Trainer.evaluate

    def replacing(self: Trainer, split: str) -> float:
        if self.state.position and self.state.epoch == 1 and new.exists():
            rename(new, old)
        return evaluate(self, split)

    monkeypatch.setattr(Trainer, "evaluate", replacing)
    with pytest.raises(InputError, match=SENTENCE):
        train(config, tmp_path / "run")
    shutil.rmtree(old)
    kept.rename(old)
    resumed = train(config, tmp_path / "run", resume=True).model.state_dict()
    assert all(torch.equal(resumed[name], plain[name]) for name in plain)
