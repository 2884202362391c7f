"""The promises of `convert`: the same arrays as in RAM, within any limit, whole or not at all."""

import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import csc_of, left_in, random_arrays, raw_arrays
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ogb_layout import write_raw

from ogbnlib.errors import InputError
from ogbnlib.graph import edge_sort, npz
from ogbnlib.graph.edge_sort import EdgeSort, Pairs
from ogbnlib.graph.store import Store, open_store
from ogbnlib.graph.writer import verify_store
from ogbnlib.memory.limits import Limit
from ogbnlib.memory.signals import Stopped
from ogbnlib.progress import Count
from ogbnlib.runs.supervise import supervise
from ogbnlib.sources import convert as module
from ogbnlib.sources.arrays import from_arrays
from ogbnlib.sources.convert import convert
from ogbnlib.sources.ogb import open_raw
from ogbnlib.sources.source import Source

N, E, F, C = 200, 1500, 5, 4


@st.composite
def graphs(draw: st.DrawFn) -> Source:
    """Duplicates, self-loops, isolated nodes and hubs; often none or one node with all edges."""
    num_nodes = draw(st.integers(3, 150))
    node = st.integers(0, num_nodes - 1)
    dst = st.one_of(node, st.just(draw(node)))
    edges = draw(st.lists(st.tuples(node, dst), max_size=120))
    x, splits = np.ones((num_nodes, 1), np.float32), {"train": [0], "valid": [1], "test": [2]}
    edge_index = np.array(edges, np.int64).reshape(-1, 2).T
    return from_arrays("any", edge_index, x, np.zeros(num_nodes, np.int64), splits)


@pytest.fixture(scope="module")
def graph() -> dict[str, Any]:
    return random_arrays(N, E, F, C)


@pytest.fixture
def raw(tmp_path: Path, graph: dict[str, Any]) -> Path:
    (tmp_path / "in").mkdir()
    return write_raw(tmp_path / "in" / "raw", **graph).path


@pytest.fixture
def tiny_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few edges, and ranges of a few nodes that are split again and again."""
    monkeypatch.setattr(module, "_workspace", lambda *_: 400)
    monkeypatch.setattr(edge_sort, "_MAX_BUCKETS", 8)
    monkeypatch.setattr(npz, "CHUNK_BYTES", 256)


def rewrite(file: Path, **members: np.ndarray) -> None:
    with np.load(file) as archive:
        content = {**archive, **members}
    np.savez_compressed(file, **content)


def assert_same(store: Store, raw: Path, undirected: bool = False) -> None:
    dataset, arrays = open_raw(raw), raw_arrays(raw)
    colptr, row = csc_of(arrays["edge_index"], dataset.num_nodes, undirected)
    np.testing.assert_array_equal(store.colptr, colptr)
    np.testing.assert_array_equal(store.row, row)
    assert store.row.dtype == np.int32
    np.testing.assert_array_equal(store.x, arrays["x"].astype(store.x.dtype))
    np.testing.assert_array_equal(store.y, arrays["y"])
    for name, ids in dataset.read_splits().items():
        np.testing.assert_array_equal(store.splits[name], ids)
    assert verify_store(store.path) == []


@pytest.mark.parametrize("workspace", [48, 10**6])
@pytest.mark.parametrize("undirected", [False, True])
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(source=graphs())
def test_any_graph_gives_the_csc_of_the_sort_in_ram(
    source: Source, workspace: int, undirected: bool, tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "_workspace", lambda *_: workspace)
    path = tmp_path_factory.mktemp("any") / "s"
    store = convert(source, path, undirected=undirected, progress=False)
    edges = np.hstack([np.zeros((2, 0), int), *map(np.stack, source.edge_chunks(999))])
    colptr, row = csc_of(edges, source.num_nodes, undirected)
    np.testing.assert_array_equal(store.colptr, colptr)
    np.testing.assert_array_equal(store.row, row)
    assert verify_store(store.path) == []
    ends = (2 if undirected else 1) * source.num_edges
    assert store.summary["edges_read"] == source.num_edges
    assert store.summary["merged_edges"] == ends - len(row)


@pytest.mark.usefixtures("tiny_budget")
@pytest.mark.parametrize("undirected", [False, True])
def test_any_order_endianness_and_width_gives_the_same_store(
    raw: Path, tmp_path: Path, graph: dict[str, Any], undirected: bool
) -> None:
    edges, years = np.asfortranarray(graph["edge_index"].astype(">i4")), np.full((N, 1), 2019)
    values = {"node_feat": graph["x"].astype(">f8"), "edge_index": edges}
    rewrite(raw / "raw" / "data.npz", **values, node_year=years)  # papers100M has years
    options: Any = {"feature_dtype": "float16", "undirected": undirected, "progress": False}
    assert_same(convert(raw, tmp_path / "s", **options), raw, undirected)


def test_ids_beyond_two_to_the_31_go_through_the_pairs_unharmed(tmp_path: Path) -> None:
    high = 3_000_000_000
    pairs = Pairs(tmp_path / "pairs", high, 30, np.int64)
    src, dst = np.array([high - 1, 5, high - 2]), np.array([7, high - 1, high - 3])
    pairs.add(src, dst)
    assert [pairs.count(number) for number in range(pairs.num_ranges)] == [1, 0, 2]
    first, last = [next(pairs.pieces(number, 2)) for number in (0, 2)]
    assert first.tolist() == [[7, high - 1]]
    assert (last + [2 << 30, 0]).tolist() == [[high - 1, 5], [high - 3, high - 2]]
    pairs.close()


def test_offsets_beyond_two_to_the_31_edges_stay_whole(tmp_path: Path) -> None:
    class Out:
        length = 3_000_000_000

        def write(self, values: np.ndarray) -> None:
            self.last = values

    how: Any = {"undirected": False, "workspace": 2**20, "done": lambda count: None}
    edges, colptr = EdgeSort(tmp_path, 2, 3, **how), Out()
    edges.read([(np.array([0, 1, 0]), np.array([0, 1, 1]))])
    edges.write(Out(), colptr)  # type: ignore[arg-type]
    assert colptr.last.tolist() == [3_000_000_001, 3_000_000_003]


@pytest.mark.parametrize(
    ("file", "how"), [("raw/data.npz", "replaced"), ("split/time/valid.csv.gz", "written to")]
)
def test_a_file_that_is_replaced_meanwhile_ends_it(
    raw: Path, tmp_path: Path, file: str, how: str
) -> None:
    folder = Path(shutil.copytree(raw, tmp_path / "raw"))
    times = (folder / file).stat()

    def replace_once(count: Count) -> None:
        if not calls:
            shutil.copyfile(folder / file, tmp_path / "other")
            if how == "replaced":  # by a file of the same size and time: only the inode is another
                os.utime(tmp_path / "other", ns=(times.st_atime_ns, times.st_mtime_ns))
                os.replace(tmp_path / "other", folder / file)
            else:
                (folder / file).write_bytes((tmp_path / "other").read_bytes())
        calls.append(1)

    calls: list[int] = []
    with pytest.raises(InputError, match=f"{file}: "):
        convert(folder, tmp_path / "s", progress=replace_once)
    assert not (tmp_path / "s").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.usefixtures("tiny_budget")
@pytest.mark.parametrize(
    ("value", "dtype", "match"),
    [
        (np.inf, "int8", "row 7"),
        (70_000, "float16", "65504.* row 7; .*float32"),
        (1e39, "float32", "row 7; scale"),
    ],
)
def test_features_that_cannot_be_held_are_counted(
    raw: Path, tmp_path: Path, graph: dict[str, Any], value: float, dtype: Any, match: str
) -> None:
    x = graph["x"].astype(np.float64)
    x[90, 0] = x[7, 3] = value
    rewrite(raw / "raw" / "data.npz", node_feat=x)
    with pytest.raises(InputError, match=f"node_feat: .*{match}"):
        convert(raw, tmp_path / "s", feature_dtype=dtype, progress=False)
    assert left_in(tmp_path) == ["in"]


@pytest.mark.slow
def test_it_lives_in_a_cgroup_smaller_than_the_raw_file(
    tmp_path: Path, kernel_limit: Callable[[int], Limit]
) -> None:
    from ogbnlib.sources.synth import synthesize

    limit = kernel_limit(340 * 2**20)
    dataset = synthesize(tmp_path / "raw", 0.005)
    features_bytes = 4 * dataset.num_nodes * dataset.num_features
    assert features_bytes + 16 * dataset.num_edges > 400 * 2**20 * 0.97
    call = "convert(*sys.argv[1:], memory_limit='340 MB', undirected=True)"
    code = f"import sys; from ogbnlib.sources.convert import convert; {call}"
    (tmp_path / "run").mkdir()
    argv = [sys.executable, "-c", code, str(dataset.path), str(tmp_path / "s")]
    outcome = supervise(argv, tmp_path / "run", limit, echo=False)
    assert outcome.exit_code == 0, outcome.tail
    assert_same(open_store(tmp_path / "s"), dataset.path, undirected=True)


@pytest.mark.usefixtures("file_chunks")
@pytest.mark.parametrize("file_chunks", [64], indirect=True)  # many chunks
def test_an_error_ends_a_conversion_and_its_threads(tmp_path: Path) -> None:
    splits, labels = {"train": [0], "valid": [1], "test": [2]}, np.zeros(500, np.int64)
    source = from_arrays("made", np.zeros((2, 10), np.int64), np.ones((500, 4)), labels, splits)
    before, calls = set(threading.enumerate()), itertools.count()

    def stop(count: Count) -> None:
        if next(calls) == 20:
            raise Stopped("enough")

    with pytest.raises(Stopped, match="enough") as caught:
        convert(source, tmp_path / "store", progress=stop)
    assert left_in(tmp_path) == []
    # Its frames, with their iterators, still exist.
    assert caught.value.__traceback__ is not None
    after = set(threading.enumerate()) - before
    assert not [thread for thread in after if "Executor" in thread.name]
