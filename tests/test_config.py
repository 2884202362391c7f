"""Promises of `config`: clear words for every mistake, and files that appear whole or not at all."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest
from conftest import tree

from ogbnlib.config import TrainConfig, parameters, parse_assignments, read_parameters
from ogbnlib.errors import InputError, format_bytes, parse_bytes
from ogbnlib.files import write_atomically
from ogbnlib.runs.sandbox import run
from ogbnlib.training.train import train


def make(**values: Any) -> TrainConfig:
    return TrainConfig.create({"dataset": "somewhere", **values})


@pytest.mark.parametrize("text", ["3 2", "3,2", "[3, 2]", "(3, 2)", " 3  2 ", [3, 2], (3, 2), ["3", "2"]])
def test_num_neighbors_is_understood_in_every_form_a_user_writes_it(text: object) -> None:
    assert make(num_neighbors=text).num_neighbors == (3, 2)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("true", True), ("True", True), ("yes", True), ("1", True), (True, True)]
    + [("false", False), ("False", False), ("no", False), ("0", False), (False, False)],
)
def test_booleans_are_understood_as_the_words_that_papermill_passes(given: object, meant: bool) -> None:
    assert make(undirected=given).undirected is meant


def test_numbers_and_none_are_understood_as_strings() -> None:
    config = make(batch_size="64", lr="1e-3", dropout="0.5", num_threads="none", eval_batch_size="null", seed=" 7 ")
    assert (config.batch_size, config.lr, config.dropout, config.seed) == (64, 1e-3, 0.5, 7)
    assert config.num_threads is None
    assert config.eval_batch_size is None


@pytest.mark.parametrize(
    ("given", "meant"), [("valid", ("valid",)), ("valid,test", ("valid", "test")), ("['test']", ("test",)), ("", ())]
)
def test_eval_splits_are_understood_as_words(given: str, meant: tuple[str, ...]) -> None:
    assert make(eval_splits=given).eval_splits == meant


@pytest.mark.parametrize("build", [TrainConfig, TrainConfig.create])
def test_every_way_to_make_a_config_has_the_same_words_for_a_mistake(build: Callable[..., TrainConfig]) -> None:
    said = r"^unknown parameter 'batchsize': did you mean 'batch_size'\?.*; "
    said += r"num_neighbors: expected a list such as \[3, 2\], got 5; lr: expected a number, got 'fast'$"
    with pytest.raises(InputError, match=said):
        build(dataset="somewhere", batchsize=3, lr="fast", num_neighbors=5)


@pytest.mark.parametrize("start", [run, train])
def test_values_in_a_dict_are_no_config(start: Callable[..., object]) -> None:
    with pytest.raises(
        InputError, match=r"^config: expected a TrainConfig, got a dict; make it with TrainConfig\.create"
    ):
        start({"dataset": "somewhere"})


def test_help_shows_each_parameter_with_default_choices_and_meaning() -> None:
    text, signature = inspect.getdoc(TrainConfig.create) or "", inspect.signature(TrainConfig.create)
    assert [*signature.parameters] == [*TrainConfig.model_fields]
    assert signature.parameters["batch_size"].default == 128
    assert "batch_size=128: Seeds per sampled batch." in text
    assert "loading='shared' (eager, lazy, shared, store, propagated): Where the graph lives" in text
    assert len(parameters()) == len(TrainConfig.model_fields)
    assert all(meaning.endswith(".") for meaning in parameters().values())


def test_minus_one_takes_all_neighbors() -> None:
    assert make(num_neighbors="-1 5").num_neighbors == (-1, 5)


BAD_VALUES = [
    ("batch_size", "many", "whole number"),
    ("batch_size", 2.5, "2.5"),
    ("batch_size", "2.5", "whole number"),
    ("batch_size", True, "True"),
    ("batch_size", 0, "greater than 0"),
    ("hidden_channels", None, "None"),
    ("epochs", -1, "-1"),
    ("lr", "nan", "finite"),
    ("lr", math.nan, "finite"),
    ("lr", math.inf, "finite"),
    ("lr", 0, "greater than 0"),
    ("dropout", 1.0, "less than 1"),
    ("dropout", False, "False"),
    ("seed", 2**31, "less than"),
    ("num_threads", 0, "greater than 0"),
    ("download", "perhaps", "true or false"),
    ("download", 2, "true or false"),
    ("loading", "sharde", "did you mean 'shared'"),
    ("model", "transformer", "sage, gcn, gat"),
    ("feature_dtype", "float64", "float32, float16"),
    ("num_neighbors", "3 x", "whole number"),
    ("num_neighbors", [3, 2.5], "2.5"),
    ("num_neighbors", [True, 2], "True"),
    ("num_neighbors", [], "fan-out"),
    ("num_neighbors", [3, 0], "at least 1"),
    ("num_neighbors", [-2], "at least 1"),
    ("num_neighbors", 3.7, "3.7"),
    ("eval_splits", ["valid", "tset"], "did you mean 'test'"),
    ("eval_splits", "train", "train_eval"),
    ("eval_splits", "test,test", "once"),
    ("persistent_workers", True, "num_workers"),
    ("dataset", "  ", "empty"),
    ("dataset", 5, "string"),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD_VALUES, ids=lambda part: repr(part)[:24])
def test_a_bad_value_is_refused_with_the_parameters_name_and_what_was_found(name: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: ") as caught:
        make(**{name: value})
    assert words in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_a_missing_dataset_is_named() -> None:
    with pytest.raises(InputError, match=r"^dataset: expected a value"):
        TrainConfig.create()


def test_hidden_channels_that_the_heads_do_not_divide_are_refused_for_gat_only() -> None:
    assert make(hidden_channels=10, heads=4).hidden_channels == 10
    with pytest.raises(InputError, match=r"^hidden_channels: expected a multiple of heads=4"):
        make(model="gat", hidden_channels=10, heads=4)


def test_an_unknown_name_brings_the_closest_known_one() -> None:
    with pytest.raises(InputError, match=r"unknown parameter 'num_neighbours': did you mean 'num_neighbors'\?"):
        make(num_neighbours="3 2")


def test_several_mistakes_are_reported_at_once() -> None:
    with pytest.raises(InputError) as caught:
        make(batchsize=3, lr="fast", epochs=-1, loading="none")
    for word in ("'batchsize'", "'batch_size'", "lr: ", "epochs: ", "loading: "):
        assert word in str(caught.value)


def test_a_config_is_frozen() -> None:
    config = make()
    with pytest.raises(pydantic.ValidationError):
        config.epochs = 7  # type: ignore[misc]


def test_replace_validates_like_a_new_config() -> None:
    assert make(epochs=2).replace(epochs="5").epochs == 5
    with pytest.raises(InputError, match="epochs"):
        make().replace(epochs="x")


@pytest.mark.parametrize(
    ("values", "evaluated"),
    [
        ({}, [["valid", "test"], ["valid", "test"], ["train", "valid", "test"]]),
        ({"train_eval": "every_epoch", "eval_every": 2}, [[], ["train", "valid", "test"], ["train", "valid", "test"]]),
        ({"train_eval": "never", "eval_every": 5, "eval_splits": "valid"}, [[], [], ["valid"]]),
        ({"train_eval": "final", "eval_splits": ""}, [[], [], ["train"]]),
        ({"train_eval": "every_epoch", "eval_splits": ""}, [["train"], ["train"], ["train"]]),
    ],
    ids=str,
)
def test_splits_are_evaluated_every_so_often_and_after_the_last_epoch(
    values: dict[str, Any], evaluated: list[list[str]]
) -> None:
    config = TrainConfig.create(dataset="x", epochs=3, **values)
    assert [config.splits_to_evaluate(epoch) for epoch in (1, 2, 3)] == evaluated
    for split in ("train", "valid", "test"):
        assert config.num_evaluations(split) == sum(split in splits for splits in evaluated)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    config = make(num_neighbors="15 10 5", eval_splits="", num_threads=None, lr=0.1 + 0.2, undirected="yes")
    config.save(tmp_path / "config.json")
    assert TrainConfig.load(tmp_path / "config.json") == config
    assert list(tmp_path.iterdir()) == [tmp_path / "config.json"]


def test_a_parameter_of_an_earlier_version_is_ignored_with_a_warning(tmp_path: Path) -> None:
    config = make()
    (tmp_path / "config.json").write_text(
        json.dumps({**config.model_dump(mode="json"), "cuda_snapshot": True, "sampler": "numba"})
    )
    with pytest.warns(UserWarning, match="cuda_snapshot, sampler: ignored"):
        assert TrainConfig.load(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"dataset": "x", "epo', "expected JSON"),
        (b"", "expected JSON"),
        (b"\xff\xfe\x00", "expected JSON"),
        (b"[1, 2]", "JSON object"),
        (b'{"dataset": "x", "epochs": "many"}', "epochs: "),
        (b'{"dataset": "x", "epoch": 3}', "did you mean 'epochs'"),
        (b'{"epochs": 3}', "dataset: "),
    ],
)
def test_a_damaged_config_file_is_named_and_left_alone(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(str(path))) as caught:
        TrainConfig.load(path)
    assert words in str(caught.value)
    assert tree(tmp_path) == {"config.json": content}


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json: .*no such file"):
        TrainConfig.load(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "count"),
    [("2 GB", 2**31), ("2GB", 2**31), ("2g", 2**31), ("1.5 GiB", 3 * 2**29), ("512 MB", 2**29), ("64k", 2**16)]
    + [("1 TB", 2**40), (2**30, 2**30), (str(2**30), 2**30), (float(2**30), 2**30), ("1048576 B", 2**20)],
)
def test_sizes_are_understood_in_binary_units(text: object, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("size", [8, "8", 8.0, 512])
def test_a_bare_small_number_is_refused_as_ambiguous(size: object) -> None:
    with pytest.raises(InputError, match=r"^memory_limit: .*ambiguous without a unit.* GB"):
        parse_bytes(size)


@pytest.mark.parametrize(
    "size", ["", "eight GB", "8 XB", "-1 GB", "0 GB", True, None, math.nan, math.inf, [8], "8 GB x"]
)
def test_what_is_no_size_is_refused_with_the_parameters_name(size: object) -> None:
    with pytest.raises(InputError, match=r"^limit: expected a size such as"):
        parse_bytes(size, "limit")


def test_sizes_are_printed_in_the_units_they_are_read_in() -> None:
    assert [format_bytes(n) for n in (5 * 2**28, 310 * 2**20, 2048, None)] == ["1.25 GB", "310 MB", "2 kB", "unknown"]


@pytest.mark.parametrize("pairs", [["batch_size"], ["=3"], ["lr=1", "lr=2"]])
def test_a_malformed_assignment_names_set(pairs: list[str]) -> None:
    with pytest.raises(InputError, match=r"^--set: "):
        parse_assignments(pairs)


def test_an_assignment_keeps_everything_after_the_first_equals_sign() -> None:
    assert parse_assignments(["dataset=/a=b", "lr=1"]) == {"dataset": "/a=b", "lr": "1"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failing_writer_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file: Any) -> None:
        file.write(b"half of the n")
        file.flush()
        raise error("stop")

    with pytest.raises(error):
        write_atomically(path, write)
    assert tree(tmp_path) == {"file": b"old"}


def test_a_file_under_way_is_not_seen_under_its_name(tmp_path: Path) -> None:
    seen = []

    def write(file: Any) -> None:
        file.write(b"new")
        file.flush()
        seen.append((tmp_path / "file").exists())

    write_atomically(tmp_path / "file", write)
    assert seen == [False]
    assert tree(tmp_path) == {"file": b"new"}


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_atomically(tmp_path / "file", lambda file: file.write(b"x"))
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_saved_config_is_plain_json_of_all_parameters(tmp_path: Path) -> None:
    make().save(tmp_path / "config.json")
    assert set(json.loads((tmp_path / "config.json").read_text())) == set(TrainConfig.model_fields)


def test_the_fan_outs_of_an_evaluation_are_one_for_all_hops_or_one_for_each() -> None:
    def fan_out(value: object) -> tuple[int, ...]:
        config = TrainConfig.create(dataset="x", num_neighbors=[5, 3], eval_num_neighbors=value)
        assert config.fan_out(training=True) == (5, 3)
        return config.fan_out(training=False)

    assert [fan_out(value) for value in (None, "none", -1, "-1", "-1 4", [7, 2])] == [
        *((5, 3), (5, 3), (-1, -1), (-1, -1), (-1, 4), (7, 2))
    ]
    for bad in (0, "3 0", [-2], "1 2 3", True, "all"):
        with pytest.raises(InputError, match=r"^eval_num_neighbors"):
            fan_out(bad)


def test_a_file_of_parameters_is_read_as_papermill_reads_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("num_neighbors: [3, 2]  # a list\nmemory_limit: 7 GB\nfeature_dtype: float16\n")
    found = {"num_neighbors": [3, 2], "memory_limit": "7 GB", "feature_dtype": "float16"}
    assert read_parameters(tmp_path / "mine.yaml") == found
    os.mkfifo(tmp_path / "pipe")  # as `--config <(...)` gives it
    threading.Thread(target=(tmp_path / "pipe").write_text, args=["lr: 0.1\n"], daemon=True).start()
    assert read_parameters(tmp_path / "pipe") == {"lr": 0.1}


@pytest.mark.parametrize("text", ["[1, 2]", "batch_size 128", "a: [1", "7: 8", "", "\xff"])
def test_a_file_that_has_no_parameters_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"mine\.yaml: expected .*batch_size: 128"):
        read_parameters(tmp_path / "mine.yaml")


def test_a_parameter_that_a_file_has_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("lr: 0.1\nepochs: 3\nlr: 0.2\n")
    with pytest.raises(InputError, match=r"mine\.yaml: expected each parameter once, found lr twice"):
        read_parameters(tmp_path / "mine.yaml")
