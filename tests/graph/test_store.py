"""A store: plain files, opened in milliseconds; every damage is found and named."""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import csc_of, flip, raw_arrays
from damage import change_meta, put, rewrite

from ogbnlib.errors import InputError, format_bytes
from ogbnlib.graph.store import Store, open_store
from ogbnlib.graph.store_format import HEADER_BYTES, META, SPLITS
from ogbnlib.graph.writer import verify_store
from ogbnlib.propagation.hops import propagate
from ogbnlib.sources.convert import convert

FILES = ("colptr", "row", "x", "y", "train", "valid", "test")


@pytest.fixture(scope="module")
def made(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """With reverse edges and float16 features."""
    path = tmp_path_factory.mktemp("store") / "tiny"
    return convert(tiny_dir, path, undirected=True, feature_dtype="float16", progress=False)


@pytest.fixture(scope="module")
def plain(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return convert(tiny_dir, tmp_path_factory.mktemp("store") / "plain", progress=False)


@pytest.fixture
def copy(made: Store, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.path, tmp_path / "copy"))


def test_a_store_and_its_sizes_print_as_a_short_card(made: Store, tmp_path: Path) -> None:
    seeds = ", ".join(f"{split} {made.num_seeds[split]}" for split in SPLITS)
    card = [
        f"Store      {made.name}",
        f"nodes      {made.num_nodes}",
        f"edges      {made.num_edges:,} (undirected)",
        f"features   {made.num_features}",
        f"classes    {made.num_classes}",
        f"splits     {seeds}",
        "dtype      float16 (features)",
        f"path       {made.path}",
    ]
    disk_bytes = sum(file.stat().st_size for file in made.path.glob("*.npy"))
    assert repr(made).splitlines() == str(made).splitlines()
    assert repr(made).splitlines() == [*card, f"on disk    {format_bytes(disk_bytes)}"]
    assert repr(made.size).splitlines() == [f"GraphSize  {made.name}", *card[1:6]]
    hops = propagate(made, tmp_path / "hops", hops=2, progress=False)
    assert "edges      none, 2 hops" in repr(hops)


def test_the_card_shows_a_foreign_name_as_text(made: Store) -> None:
    card = repr(replace(made.size, name="a\x1b[2J", num_classes=0))
    assert "\x1b" not in card
    assert "none, but targets" in card


def test_anyone_can_map_the_files_with_numpy(made: Store) -> None:
    arrays = {"colptr": made.colptr, "row": made.row, "x": made.x, "y": made.y}
    for name, array in {**arrays, **made.splits}.items():
        np.testing.assert_array_equal(np.load(made.path / f"{name}.npy", mmap_mode="r"), array)
        assert made.files[name].bytes == made.file_path(name).stat().st_size
    assert [array.dtype.str for array in arrays.values()] == ["<i8", "<i4", "<f2", "<i2"]
    assert all(isinstance(array, np.memmap) for array in arrays.values())
    assert not made.x.flags.writeable
    # data begin on a page
    values = np.fromfile(made.file_path("x"), np.float16, offset=HEADER_BYTES)
    np.testing.assert_array_equal(values, made.x.ravel())


@pytest.mark.usefixtures("file_chunks")
def test_it_reads_into_ram_what_the_raw_data_set_has(plain: Store, tiny_dir: Path) -> None:
    raw = raw_arrays(tiny_dir)
    np.testing.assert_array_equal(plain.read("x"), raw["x"])
    np.testing.assert_array_equal(plain.read("x", "float16"), raw["x"].astype("float16"))
    np.testing.assert_array_equal(plain.read("y"), raw["y"])
    for name, expected in zip(("colptr", "row"), csc_of(raw["edge_index"], 300), strict=True):
        np.testing.assert_array_equal(plain.read(name), expected)
        assert not isinstance(plain.read(name), np.memmap)
    by_column = raw["edge_index"][:, np.argsort(raw["edge_index"][1], kind="stable")]
    np.testing.assert_array_equal(plain.read_edge_index(), by_column)


def test_features_that_the_wanted_type_cannot_hold_are_refused(
    plain: Store, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(plain.path, tmp_path / "copy"))
    stored = np.lib.format.open_memmap(path / "x.npy", mode="r+")
    stored[7, 1] = 1e6
    stored.flush()
    with pytest.raises(InputError, match=r"x\.npy: .*65504.* row 7"):
        open_store(path).read("x", "float16")
    assert open_store(path).read("x")[7, 1] == 1e6


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", ["header", "first", "last"])
def test_one_flipped_bit_anywhere_is_found_and_the_file_named(
    copy: Path, name: str, where: str
) -> None:
    assert verify_store(copy) == []
    file = copy / f"{name}.npy"
    size = file.stat().st_size
    flip(file, {"header": 20, "first": HEADER_BYTES, "last": size - 1}[where])
    problems = verify_store(copy)
    assert any(str(file) in problem for problem in problems), problems
    damaged = [p for p in problems if ".npy: expected the checksum" in p]
    assert all(f"{name}.npy" in problem for problem in damaged)


def test_one_flipped_bit_of_the_description_is_found(copy: Path) -> None:
    content = (copy / META).read_bytes()
    for at in range(0, len(content), 7):
        flip(copy / META, at)
        with pytest.raises(InputError, match=META):
            open_store(copy)
        (copy / META).write_bytes(content)
    assert verify_store(copy) == []


@pytest.mark.parametrize("name", ["row", "x", "train", META])
@pytest.mark.parametrize("left", ["nothing", "all but a byte", "no file", "a pipe"])
def test_a_truncated_or_missing_file_is_named(copy: Path, name: str, left: str) -> None:
    file = copy / (name if name == META else f"{name}.npy")
    if left in ("no file", "a pipe"):
        file.unlink()
        if left == "a pipe":
            os.mkfifo(file)
    else:
        os.truncate(file, 0 if left == "nothing" else file.stat().st_size - 1)
    with pytest.raises(InputError) as error:
        open_store(copy)
    assert file.name in str(error.value)
    assert verify_store(copy) == [str(error.value)]


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("colptr", lambda v: v.__setitem__(0, 1), "ascending|found 1 and"),
        ("colptr", lambda v: v.__setitem__(5, v[-1] + 1), "ascending .*6"),
        ("colptr", lambda v: v.__setitem__(-1, v[-1] + 1), "ascending .* 0 to"),
        ("colptr", lambda v: v.__setitem__([1, 2, 3], [2**62, -(2**63), -(2**62)]), "ascending"),
        ("row", lambda v: v.__setitem__(3, -1), "ids from 0 to .*-1"),
        ("row", lambda v: v.__setitem__(slice(None), 300), "ids from 0 to 299, found 300"),
        ("x", lambda v: v.__setitem__((7, 1), np.inf), "finite .*row 7"),
        ("train", lambda v: v.__setitem__(0, 10**6), "1000000"),
        ("train", lambda v: v.__setitem__(0, -1), "-1"),
        ("train", lambda v: v.__setitem__(0, v[1]), "1 repeats"),
        ("y", lambda v: v.__setitem__(slice(None), 10**3), "label"),
        ("y", lambda v: v.__setitem__(-1, -2), "label"),
    ],
)
def test_impossible_values_with_a_right_checksum_are_found(
    copy: Path, name: str, change: Callable[[np.ndarray], object], match: str
) -> None:
    rewrite(copy, name, change)
    (problem,) = verify_store(copy)
    assert re.search(match, problem), problem
    with pytest.raises(InputError, match=match):
        convert(copy, copy.with_name("new"), progress=False)


CHANGES: list[dict[str, Any]] = [
    *({"num_nodes": 10**12}, {"num_features": 10**9}, {"num_classes": 0}),
    *({"int8": [[1.0], [2.0]]}, {"files": {"x": {}}}, {"version": 4}, {"format": "other"}),
]


TYPES = {
    "num_classes": ["5", None, 4.0, True, -1, 2**40],
    "num_features": [8.0, 0],
    "num_nodes": [300.0, 0],
    "num_edges": [1200.0],
    **{"origin": [[1], None], "undirected": ["no", None], "name": [5, None]},
    "hops": ["2", -1, True],
    "int8": [[[1.0] * 8], [[1.0] * 8] * 3, [["1"] * 8] * 2, [[1.0] * 8] * 2, [[3e38] * 8] * 2],
    **{"files": [[], None], "summary": [None]},
}
CHANGES += [{name: value} for name, values in TYPES.items() for value in values]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_description_that_no_store_has_is_refused(copy: Path, change: dict[str, Any]) -> None:
    change_meta(copy, {**json.loads((copy / META).read_text()), **change})
    is_another = "version" in change or "format" in change
    words = "ogbnlib-store, version 1 to 3" if is_another else META
    with pytest.raises(InputError, match=words) as error:
        open_store(copy)
    assert verify_store(copy) == [str(error.value)]


def test_a_store_with_fields_of_earlier_versions_opens(copy: Path) -> None:
    meta = json.loads((copy / META).read_text())
    change_meta(copy, {**meta, "reordering": None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify_store(copy) == []


@pytest.mark.parametrize("entry", [{"crc32": "1"}, {"shape": [-1]}, {"dtype": "|O"}, {"bytes": 9}])
def test_an_array_of_a_wrong_description_is_refused(copy: Path, entry: dict[str, Any]) -> None:
    meta = json.loads((copy / META).read_text())
    meta["files"]["x"] |= entry
    change_meta(copy, meta)
    assert "x" in verify_store(copy)[0]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda p: put(p, "x", np.ones((300, 8), ">f4")), "files.x.dtype"),
        (lambda p: put(p, "y", np.ones(300, ">i2")), "files.y.dtype"),
        (lambda p: put(p, "x", np.ones((300, 8), np.int8)), "expected x.npy of f2 f4"),
        (lambda p: put(p, "../evil", np.arange(5)), "files.../evil"),
        (lambda p: put(p, "node_name", np.ones(300)), "node_name.npy of i8 S"),
        (lambda p: put(p, "label_name", np.array([b"\xff\xfe"] * 4)), "label_name.npy: .*UTF-8"),
    ],
)
def test_an_array_that_no_store_has_is_refused(
    copy: Path, change: Callable[[Path], object], match: str
) -> None:
    change(copy)
    (problem,) = verify_store(copy)
    assert re.search(match, problem), problem
    with pytest.raises(InputError, match=match):
        convert(copy, copy.with_name("new"), progress=False)
