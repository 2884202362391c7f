"""Bad input to any command: exit code 2 (1 of `verify`), one sentence, nothing written."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from conftest import tree
from hypothesis import given
from hypothesis import strategies as st

from ogbnlib.__main__ import main
from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError

LONG = "n" * 300


@pytest.fixture(scope="module")
def site(tiny_dir: Path, tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a raw data set, a store, a run, and what is none of them."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(tiny_dir, folder / "raw")
    shutil.copytree(tiny_store, folder / "store")
    (folder / "full").mkdir()
    (folder / "full" / "mine").write_text("keep")
    (folder / "file").write_text("x")
    os.symlink("loop", folder / "loop")
    for number, (part, content) in enumerate(DAMAGE):
        damaged = folder / f"d{number}"
        shutil.copytree(folder / ("store" if "/" not in part else "raw"), damaged)
        (damaged / part).unlink()
        if content is None:
            (damaged / part).mkdir()
        else:
            (damaged / part).write_bytes(content)
    return folder


DAMAGE: list[tuple[str, bytes | None]] = [
    (part, content)
    for part in ("store.json", "colptr.npy", "raw/data.npz", "split/time/test.csv.gz")
    for content in (None, b"", bytes(5000))
]


STORES = [number for number, (part, _) in enumerate(DAMAGE) if "/" not in part]


VALUES = {
    "batch_size": ["0", "1.5", "x", "", "true", "nan", "9" * 20],
    "num_neighbors": ["0", "", "3x2", "-2"],
    "epochs": ["-1", "\x00"],
    "seed": [str(2**31)],
    "lr": ["0", "nan", "1e309"],
    "model": ["SAGE", "", "sage\r"],
    "eval_splits": ["train"],
    "device": ["cuda:0"],
    "undirected": ["perhaps"],
    "max_cuda_memory": ["8", "9" * 400 + " GB"],
    "batchsize": ["3"],
}
DATASETS = ["", "nowhere", "file", "loop", "full", LONG, "raw\r", "ogbn-arxvi"]
TRAIN = ["train", "--run-dir", "new", "--set", "dataset=store"]
PLACES = ["file/x", "loop", LONG, "full", "/dev/null"]
SIZES = ["8", "-1 GB", "", "9" * 400 + " GB"]


def begin(path: str) -> str:
    """What of a path is in any sentence about it."""
    return path.split("/x")[0].strip()[:40]


CASES: list[tuple[list[str], str]] = [
    *((["plan", "--set", f"{name}={value}"], name) for name in VALUES for value in VALUES[name]),
    *((["plan", "--set", f"dataset={value}"], begin(value)) for value in DATASETS),
    *((["plan", "--memory-limit", size], "memory_limit: ") for size in SIZES),
    *((["synth", place, "--scale", "0.0001"], begin(place)) for place in PLACES),
    *((["convert", "raw", place], begin(place)) for place in PLACES),
    *((["convert", place, "new"], begin(place)) for place in PLACES),
    *((["verify", place], begin(place)) for place in PLACES),
    *((["diagnose", place], begin(place)) for place in PLACES),
    *((["train", "--run-dir", place, "--resume"], begin(place)) for place in PLACES),
    *((["train", "--run-dir", place, "--set", "dataset=store"], begin(place)) for place in PLACES),
    *((["verify", f"d{i}"], f"d{i}") for i in STORES),
    *((["convert", f"d{i}", "new"], f"d{i}") for i in range(len(DAMAGE)) if i not in STORES),
    *((["plan", "--set", f"dataset=d{i}"], f"d{i}") for i in range(len(DAMAGE))),
    (["convert", "store", "new", "--description", "file"], "description: expected one of a folder"),
    (["convert", "raw", "new", "--memory-limit", "100 MB"], "memory_limit: "),
    (["convert", "raw", "raw"], "raw: expected a new or empty folder"),
    (["convert", "raw", "new", "--feature-dtype", "int16"], "feature_dtype: "),
    (["synth", "new", "--scale", "nan"], "scale: "),
    (["synth", "new", "--seed", "1.5"], "--seed"),
    (["diagnose"], "diagnose: "),
    (["diagnose", "raw", "--job", "1"], "diagnose: "),
    (["diagnose", "--job", "x"], "x"),
    ([*TRAIN, "--ranks", "0"], "num_ranks: "),
    ([*TRAIN, "--limit-by", "magic", "--memory-limit", "1 GB"], "magic"),
    (["train", "--run-dir", "new", "--set", "dataset=nowhere"], "nowhere"),
    (["train", "--run-dir", "new", "--set", "dataset=d6"], "d6"),
    ([*TRAIN, "--memory-limit", "8"], "memory_limit: "),
    (["diagnose", "--exit-code", "137", "--text", "Killed"], "got --exit-code and --text"),
    (["plan", "--config", "none.yaml"], "none.yaml: no such file"),
    (["plan", "--ladder", "--memory-limit", "8 GB"], "--ladder: expected neither --memory-limit"),
    (["plan", "--set", "batchsize=3"], "did you mean 'batch_size'"),
    (["plan", "--set", "epochs"], "--set: "),
    (["nothing"], "nothing"),
]


@pytest.mark.parametrize(("arguments", "words"), CASES, ids=lambda part: " ".join(part)[-40:])
def test_a_bad_input_is_one_sentence(
    site: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(site)
    with contextlib.chdir(site):
        code = main([*arguments])
    output = "".join(capsys.readouterr())
    assert code == (1 if arguments[0] == "verify" and "error: " not in output else 2), output
    assert words in output
    assert "Traceback" not in output
    assert tree(site) == before
    assert not (site / "new").exists()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(
    st.dictionaries(
        st.sampled_from(sorted(TrainConfig.model_fields)) | st.text(max_size=12), JSON, max_size=4
    )
)
def test_any_values_make_a_config_or_one_sentence_that_names_them(
    values: dict[str, object],
) -> None:
    try:
        config = TrainConfig.create(values)
    except InputError as error:
        text = str(error)
    else:
        assert TrainConfig.create(config.model_dump(mode="json")) == config
        return
    assert any(name in text for name in [*values, "dataset"])
