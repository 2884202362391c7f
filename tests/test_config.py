"""Promises of `config`: clear words for every mistake, and files that appear whole or not."""

import inspect
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError, format_bytes, parse_bytes
from ogbnlib.parameters import parse_assignments, read_parameters
from ogbnlib.registry import MODELS
from ogbnlib.runs.sandbox import run
from ogbnlib.training.train import train

SPLITS = ("train", "valid", "test")


def make(**values: Any) -> TrainConfig:
    return TrainConfig.create({"dataset": "somewhere", **values})


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        *(("num_neighbors", text, (3, 2)) for text in ("3 2", "3,2", "[3, 2]", [3, 2])),
        *(("undirected", text, True) for text in ("true", "yes", "1", True)),
        ("undirected", "false", False),
        ("lr", "1e-3", 1e-3),
        ("seed", " 7 ", 7),
        ("num_threads", "none", None),
        ("num_threads", "auto", "auto"),
        ("spool", "4 GB", 2**32),
        ("eval_splits", "val,test", ("valid", "test")),
        ("eval_splits", "", ()),
    ],
    ids=str,
)
def test_values_are_understood_as_command_line_papermill_and_python_pass_them(
    name: str, given: object, value: object
) -> None:
    assert getattr(make(**{name: given}), name) == value


def test_every_mistake_is_in_one_error_and_an_unknown_name_brings_the_closest_known_one() -> None:
    words = "^num_neighbors: .* 5; lr: .*'fast'.*; unknown parameter 'batchsize': .*'batch_size'"
    with pytest.raises(InputError, match=words):
        TrainConfig.create(dataset="somewhere", batchsize=3, lr="fast", num_neighbors=5)


def test_values_in_a_dict_are_no_config() -> None:
    for start in (run, train):
        with pytest.raises(InputError, match=r"^config: expected a TrainConfig, got a dict"):
            start({"dataset": "somewhere"})  # type: ignore[arg-type]


def test_help_and_completion_show_each_parameter_with_its_default_and_meaning() -> None:
    signature = inspect.signature(TrainConfig.create)
    assert [*signature.parameters] == [*TrainConfig.model_fields]
    assert ", batch_size=128," in str(signature)
    assert "\nbatch_size=128\n    Seeds per sampled batch." in inspect.getdoc(TrainConfig.create)


BAD_VALUES = [
    ("batch_size", "many", "integer"),
    ("batch_size", 0, "greater than 0"),
    ("lr", math.nan, "finite"),
    ("loading", "sharde", "'shared'"),
    ("model", "transformer", ", ".join(MODELS)),
    ("num_neighbors", [3, 0], "at least 1"),
    ("num_neighbors", 3, "tuple"),
    ("persistent_workers", True, "num_workers"),
    ("dataset", "  ", "empty"),
    ("spool", "much", "4 GB"),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD_VALUES, ids=lambda part: repr(part)[:24])
def test_a_bad_value_is_refused_with_the_parameters_name_and_what_was_found(
    name: str, value: Any, words: str
) -> None:
    with pytest.raises(InputError, match=f"^{name}: ") as caught:
        make(**{name: value})
    assert words in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_hidden_channels_that_the_heads_do_not_divide_are_refused_for_gat_only() -> None:
    assert make(hidden_channels=10).hidden_channels == 10
    with pytest.raises(InputError, match=r"^hidden_channels: .*heads=4"):
        make(model="gat", hidden_channels=10)
    assert make(model="gat", hidden_channels=10, model_args='{"heads": 5}').heads == 5
    for bad in ({"heads": 0}, {"heads": 2.0}, {"width": 3}):
        with pytest.raises(InputError, match=rf"^model_args: .*{next(iter(bad.values()))}"):
            make(model="gat", model_args=bad)


@pytest.mark.parametrize(
    ("values", "evaluated"),
    [
        ({}, [["valid", "test"], ["valid", "test"], [*SPLITS]]),
        ({"train_eval": "every_epoch", "eval_every": 2}, [[], [*SPLITS], [*SPLITS]]),
        ({"train_eval": "final", "eval_splits": ""}, [[], [], ["train"]]),
    ],
    ids=str,
)
def test_splits_are_evaluated_every_so_often_and_after_the_last_epoch(
    values: dict[str, Any], evaluated: list[list[str]]
) -> None:
    config = TrainConfig.create(dataset="x", epochs=3, **values)
    assert [config.splits_to_evaluate(epoch) for epoch in (1, 2, 3)] == evaluated
    for split in SPLITS:
        assert config.num_evaluations(split) == sum(split in splits for splits in evaluated)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    values = {"num_neighbors": "15 10 5", "eval_splits": "", "num_threads": None, "lr": 0.1 + 0.2}
    config = make(**values, undirected="yes")
    config.save(tmp_path / "config.json")
    assert TrainConfig.load(tmp_path / "config.json") == config
    assert list(tmp_path.iterdir()) == [tmp_path / "config.json"]


GONE = {"sampling": "nodes", "lr_schedule": "constant", "lookahead": 4096, "pin_memory": True}


def test_a_saved_parameter_that_is_gone_is_left_out_or_refused(tmp_path: Path) -> None:
    config = make(model="gat")
    file = tmp_path / "config.json"
    saved = config.model_dump(mode="json")
    file.write_text(json.dumps({**saved, **GONE}))
    assert TrainConfig.load(file) == config
    refused, notes = config.changes({**saved, **GONE})
    assert (refused, [note.split()[0] for note in notes]) == ([], ["lookahead", "pin_memory"])
    file.write_text('{"epochs": 3}')
    with pytest.raises(InputError, match=f"^{file}: .*dataset"):
        TrainConfig.load(file)
    for name, value in {"lr_schedule": "cosine:T_max=9", "sampling": "labor", "heads": 8}.items():
        file.write_text(json.dumps({**saved, name: value}))
        with pytest.raises(InputError, match=rf"config\.json: .*{name}.*0\.[12]\.0"):
            TrainConfig.load(file)


def test_sizes_are_read_and_printed_in_binary_units() -> None:
    sizes = {"2 GB": 2**31, "2g": 2**31, "1.5 GiB": 3 * 2**29, "64k": 2**16, 2**30: 2**30}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    shown = [format_bytes(n) for n in (5 * 2**28, 310 * 2**20, 2048, None)]
    assert shown == ["1.25 GB", "310 MB", "2 kB", "unknown"]


@pytest.mark.parametrize("size", [8, "8", 0, "", "8 XB", "-1 GB", "0 GB", True, None, math.inf])
def test_what_is_no_size_is_refused_with_the_parameters_name(size: object) -> None:
    with pytest.raises(InputError, match=r"^limit: "):
        parse_bytes(size, "limit")


def test_the_fan_outs_of_an_evaluation_are_one_for_all_hops_or_one_for_each() -> None:
    def fan_out(value: object) -> tuple[int, ...]:
        config = TrainConfig.create(dataset="x", num_neighbors=[5, 3], eval_num_neighbors=value)
        assert config.fan_out(training=True) == (5, 3)
        return config.fan_out(training=False)

    fan_outs = [fan_out(value) for value in (None, "none", -1, "-1", "-1 4", [7, 2])]
    assert fan_outs == [(5, 3), (5, 3), (-1, -1), (-1, -1), (-1, 4), (7, 2)]
    for bad in (0, "3 0", [-2], "1 2 3", True, "all", [], "[]"):
        with pytest.raises(InputError, match=r"^eval_num_neighbors"):
            fan_out(bad)


def test_a_file_of_parameters_has_texts_lists_of_texts_and_maps_as_in_json(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "num_neighbors: [3, 2]  # a list\nmemory_limit: 7 GB\n"
        "model_args: {heads: 8, norm: True, act: relu, sizes: [1, a], rate: 1e-3,\n"
        """  tag: '["A"]'}\n"""
    )
    mine = {"heads": 8, "norm": True, "act": "relu", "sizes": [1, "a"], "rate": 0.001, "tag": ["A"]}
    assert read_parameters(tmp_path / "mine.yaml") == {
        "num_neighbors": ["3", "2"],
        "memory_limit": "7 GB",
        "model_args": mine,
    }
    os.mkfifo(tmp_path / "pipe")  # as `--config <(...)` gives it
    threading.Thread(target=(tmp_path / "pipe").write_text, args=["lr: 0.1\n"], daemon=True).start()
    assert read_parameters(tmp_path / "pipe") == {"lr": "0.1"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("epochs", text) for text in ("010", "0x10", "1_000", "1:30", "true", "1e1", "3")),
        *(("spool", text) for text in ("off", "auto", "2097152", "4 GB", "no", "8")),
        *(("undirected", text) for text in ("yes", "off", "True", "1", "null", "~")),
        *(("dataset", text) for text in ("2024", "2024-01-02", "off", "1:30", "1e3")),
        *(("num_neighbors", text) for text in ("[010, 5]", "[1:30]", "3", "[-1]")),
        *(("num_threads", text) for text in ("none", "auto", "null", "010")),
    ],
)
def test_a_file_set_and_a_string_in_python_are_read_alike(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "mine.yaml").write_text(f"{name}: {text}\n")

    def read(values: dict[str, Any]) -> object:
        try:
            return getattr(make(**values), name)
        except InputError:
            return InputError

    expected = read(parse_assignments([f"{name}={text}"]))
    assert read(read_parameters(tmp_path / "mine.yaml")) == expected
    assert read({name: text}) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [1, 1]\nb: [*a, *a]", "line 2: expected values without YAML's & and"),
        ("a: " + "x" * 2**20, "at most 1 MB .*, found more"),
        ("epochs: 1\nepochs: 2", "line 2: expected each name once, found epochs again"),
        ("? [1, 2]\n: 3", "unhashable key .*line 1"),
        *((text, "expected .*batch_size: 128") for text in ("[1, 2]", "a: [1", "\xff")),
    ],
    ids=lambda part: part[:24],
)
def test_a_file_without_parameters_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=rf"mine\.yaml.*{words}"):
        read_parameters(tmp_path / "mine.yaml")
