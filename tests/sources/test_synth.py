"""The promises of synth: a papers100M in miniature that is deterministic, bounded and worth learning on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from ogbnlib.errors import InputError
from ogbnlib.graph.store import open_store
from ogbnlib.graph.verify import verify_store
from ogbnlib.sources import synth
from ogbnlib.sources.catalog import prepare_store
from ogbnlib.sources.convert import convert
from ogbnlib.sources.ogb import RawDataset, open_raw
from ogbnlib.sources.synth import estimate, synthesize, synthesize_store

TINY = 1e-4  # 11,106 nodes


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> RawDataset:
    return synthesize(tmp_path_factory.mktemp("synth") / "tiny", TINY, progress=False)


def contents(dataset: RawDataset) -> dict[str, bytes]:
    files = (file for file in dataset.path.rglob("*") if file.is_file() and file.name != "meta.json")
    return {str(file.relative_to(dataset.path)): file.read_bytes() for file in files}


def test_importing_the_module_imports_no_torch() -> None:
    code = "import sys, ogbnlib.sources.synth; assert not {'torch', 'ogb'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_counts_are_those_of_papers100m_to_scale(dataset: RawDataset) -> None:
    assert dataset.num_nodes == round(111_059_956 * TINY)
    assert dataset.num_edges / dataset.num_nodes == pytest.approx(14.548, rel=0.03)
    assert (dataset.num_features, dataset.num_classes) == (128, 172)
    sizes = {name: len(ids) for name, ids in dataset.read_splits().items()}
    assert sizes == {"train": round(1_207_179 * TINY), "valid": round(125_265 * TINY), "test": round(214_338 * TINY)}


def test_exactly_the_nodes_of_the_splits_have_labels(dataset: RawDataset) -> None:
    splits = dataset.read_splits()
    labelled = np.sort(np.concatenate(list(splits.values())))
    np.testing.assert_array_equal(labelled, np.unique(labelled))
    np.testing.assert_array_equal(np.flatnonzero(dataset.read_y() >= 0), labelled)


def test_splits_follow_the_years(dataset: RawDataset) -> None:
    year, splits = dataset.read_year(), dataset.read_splits()
    assert year is not None
    assert year[splits["train"]].max() <= 2017
    assert set(year[splits["valid"]]) == {2018}
    assert set(year[splits["test"]]) == {2019}


def test_every_paper_cites_older_ones(dataset: RawDataset) -> None:
    year = dataset.read_year()
    assert year is not None
    src, dst = dataset.read_edge_index()
    assert (year[dst] <= year[src]).all()
    assert (src != dst).all()
    assert np.bincount(dst).max() > 20 * len(src) / dataset.num_nodes  # a heavy tail


def test_features_are_exact_in_float16(dataset: RawDataset) -> None:
    x = dataset.read_x()
    np.testing.assert_array_equal(x, x.astype(np.float16).astype(np.float32))
    assert np.abs(x.mean()) < 0.05
    assert x.std() == pytest.approx(1.0, abs=0.1)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(dataset: RawDataset, tmp_path: Path) -> None:
    again = synthesize(tmp_path / "again", TINY, progress=False)
    other = synthesize(tmp_path / "other", TINY, seed=1, progress=False)
    assert contents(again) == contents(dataset)
    assert not np.array_equal(other.read_y(), dataset.read_y())
    assert not np.array_equal(other.read_x(), dataset.read_x())


def test_the_size_of_a_chunk_changes_nothing(
    dataset: RawDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synth, "_NODES", 997)
    small = synthesize(tmp_path / "small", TINY, progress=False)
    np.testing.assert_array_equal(small.read_edge_index(), dataset.read_edge_index())
    np.testing.assert_array_equal(small.read_x(), dataset.read_x())
    np.testing.assert_array_equal(small.read_y(), dataset.read_y())


def test_the_estimate_is_near_the_truth(dataset: RawDataset) -> None:
    expected = estimate(TINY)
    assert expected["num_nodes"] == dataset.num_nodes
    assert expected["num_edges"] == pytest.approx(dataset.num_edges, rel=0.03)
    written = sum(len(content) for content in contents(dataset).values())
    assert expected["bytes"] == pytest.approx(written, rel=0.25)


def test_ogbs_own_class_opens_it(dataset: RawDataset) -> None:
    from ogbnlib.sources.official import read_with_ogb

    through_ogb = read_with_ogb(dataset.path)
    np.testing.assert_array_equal(through_ogb.read_x(), dataset.read_x())
    np.testing.assert_array_equal(through_ogb.read_edge_index(), dataset.read_edge_index())


def ridge_accuracy(dataset: RawDataset, hops: int, undirected: bool) -> float:
    """Test accuracy of ridge regression on the features and the mean features of 1 .. `hops` hops."""
    x, y, splits = dataset.read_x(), dataset.read_y(), dataset.read_splits()
    colptr, row = dataset.read_csc(undirected)
    adjacency = sp.csr_matrix((np.ones(len(row), np.float32), row, colptr), (dataset.num_nodes, dataset.num_nodes))
    degree = np.maximum(np.diff(colptr), 1)[:, None]
    parts = [x]
    for _ in range(hops):
        parts.append(adjacency @ parts[-1] / degree)
    train, test = ([part[splits[name]] for part in parts] for name in ("train", "test"))
    a, b = np.hstack(train), np.hstack(test)
    target = np.eye(dataset.num_classes)[y[splits["train"]]]
    weights = np.linalg.solve(a.T @ a + 30.0 * np.eye(a.shape[1]), a.T @ (target - target.mean(axis=0)))
    return float(((b @ weights + target.mean(axis=0)).argmax(axis=1) == y[splits["test"]]).mean())


def test_hops_and_reverse_edges_each_help(tmp_path: Path) -> None:
    dataset = synthesize(tmp_path / "learn", 0.002, num_features=32, num_classes=20, progress=False)
    features = ridge_accuracy(dataset, 0, False)
    one, two = ridge_accuracy(dataset, 1, False), ridge_accuracy(dataset, 2, False)
    one_both, two_both = ridge_accuracy(dataset, 1, True), ridge_accuracy(dataset, 2, True)
    share = np.bincount(dataset.read_y()[dataset.read_splits()["test"]]).max() / len(dataset.read_splits()["test"])
    assert share < features < one < two
    assert one < one_both < two_both < 0.9
    assert two < two_both


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"scale": 0}, "scale"),
        ({"scale": 1.5}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": "0.1"}, "scale"),
        ({"scale": 1e-6}, "scale"),
        ({"seed": -1}, "seed"),
        ({"num_features": 0}, "num_features"),
        ({"num_classes": 1}, "num_classes"),
        ({"num_classes": 2000}, "num_classes"),
    ],
)
def test_a_bad_parameter_is_named_and_nothing_is_written(tmp_path: Path, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        synthesize(tmp_path / "new", **{"scale": TINY, "progress": False, **arguments})
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(synth.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(InputError, match="free disk space, found 1 kB"):
        synthesize(tmp_path / "new", TINY, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused_and_replaced_only_on_request(dataset: RawDataset, tmp_path: Path) -> None:
    target = tmp_path / "data"
    synthesize(target, TINY, seed=3, progress=False)
    with pytest.raises(InputError, match=str(target)):
        synthesize(target, TINY, progress=False)
    replaced = synthesize(target, TINY, progress=False, overwrite=True)
    assert contents(replaced) == contents(dataset)


def test_an_interrupted_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(synth._Model, "features", fail)
    with pytest.raises(KeyboardInterrupt):
        synthesize(tmp_path / "new", TINY, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_progress_can_be_silenced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    synthesize(tmp_path / "quiet", TINY, progress=False)
    assert capfd.readouterr() == ("", "")
    synthesize(tmp_path / "loud", TINY)
    assert "synthesize" in capfd.readouterr().err
    assert open_raw(tmp_path / "loud").num_classes == 172


# Straight to a store -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("feature_dtype", ["float16", "float32"])
def test_a_store_is_the_one_that_converting_the_raw_files_gives(
    dataset: RawDataset, tmp_path: Path, undirected: bool, feature_dtype: Any
) -> None:
    options: dict[str, Any] = {"undirected": undirected, "feature_dtype": feature_dtype, "progress": False}
    straight = synthesize_store(tmp_path / "straight", TINY, **options)
    converted = convert(dataset.path, tmp_path / "converted", **options)
    assert straight.files == converted.files
    assert (straight.num_classes, straight.undirected) == (converted.num_classes, undirected)
    assert straight.origin["synthetic"] == {"scale": TINY, "seed": 0}
    assert verify_store(straight.path) == []


def test_a_store_does_not_depend_on_the_size_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = synthesize_store(tmp_path / "one", TINY, num_features=3, num_classes=5, progress=False)
    monkeypatch.setattr(synth, "_NODES", 997)
    other = synthesize_store(tmp_path / "other", TINY, num_features=3, num_classes=5, progress=False)
    assert one.files == other.files


@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"scale": 0}, "scale"), ({"seed": -1}, "seed"), ({"feature_dtype": "int8"}, "feature_dtype"),
     ({"memory_limit": "50 MB"}, "memory_limit: expected at least")],
)  # fmt: skip
def test_a_bad_parameter_of_a_store_is_named(tmp_path: Path, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        synthesize_store(tmp_path / "new", **{"scale": TINY, "progress": False, **arguments})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("undirected", [False, True])
def test_a_store_for_a_notebook_is_made_once(dataset: RawDataset, tmp_path: Path, undirected: bool) -> None:
    raw = str(dataset.path)
    made = [prepare_store(raw, tmp_path, 0.01, undirected=undirected)]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    made += [prepare_store(name, tmp_path, 0.01, undirected=undirected) for name in (raw, made[0])]
    assert len(set(made)) == 1
    assert open_store(made[0]).undirected == undirected
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_store_of_other_data_or_the_other_direction_is_not_taken(dataset: RawDataset, tmp_path: Path) -> None:
    synthesize_store(tmp_path / f"{dataset.path.name}-directed", 1e-4, progress=False)
    with pytest.raises(InputError, match=r"expected the store of .*, found one of other data"):
        prepare_store(str(dataset.path), tmp_path, 0.01, undirected=False)
    with pytest.raises(InputError, match=r"undirected: expected .* to be undirected"):
        prepare_store(str(tmp_path / f"{dataset.path.name}-directed"), tmp_path, 0.01)
