"""Propagated features are A^k X, whatever columns are held, pieces read, and kills between."""

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MB, flip, left_in, python_child, wait_until
from graphs import make_store, matrix, powers, random_edges
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ogbnlib import InputError, open_store, propagate
from ogbnlib.graph.store import Store
from ogbnlib.graph.writer import verify_store
from ogbnlib.propagation import hops as module
from ogbnlib.propagation import sweep


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**16), num_nodes=st.integers(5, 200), density=st.floats(0, 12), columns=st.integers(1, 11),
    norm=st.sampled_from(["row", "sym", "gcn"]), hops=st.integers(1, 4),
    nodes=st.sampled_from(["labelled", "all"]), dtype=st.sampled_from(["float16", "float32"]),
    width=st.integers(1, 11), next_width=st.integers(1, 11), nodes_at_once=st.integers(1, 80),
    edges_at_once=st.integers(1, 50), size=st.sampled_from([1e-5, 1.0, 300.0]),
)  # fmt: skip
def test_it_is_the_power_of_the_adjacency(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_nodes: int, density: float, columns: int, norm: str,
    hops: int, nodes: str, dtype: str, width: int, next_width: int, nodes_at_once: int,
    edges_at_once: int, size: float,
) -> None:  # fmt: skip
    random, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("graph")
    edges = random_edges(random, num_nodes, int(density * num_nodes))
    x = (size * random.normal(size=(num_nodes, columns))).astype(np.float32)
    store = make_store(folder / "store", edges, x, seed)
    how: dict[str, Any] = {"hops": hops, "norm": norm, "nodes": nodes}
    plan, widths = module.plan_hops, ([width, next_width] * 2)[:hops]  # in turn for each hop

    def planned(*given: Any, **more: Any) -> Any:
        return dataclasses.replace(plan(*given, **more), widths=widths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "SLICE_NODES", nodes_at_once)
        patch.setattr(sweep, "PIECE_EDGES", edges_at_once)
        patch.setattr(module, "plan_hops", planned)
        kept = np.arange(num_nodes)
        if nodes == "labelled":
            kept = np.unique(np.concatenate([*store.splits.values()]))
        expected = powers(matrix(edges, num_nodes, norm), x, hops)[kept]
        if dtype == "float16" and np.abs(expected).max() > 65000:
            with pytest.raises(InputError, match="feature_dtype='float32'"):
                propagate(store, folder / "made", **how, feature_dtype=dtype, progress=False)
            return
        made = propagate(store, folder / "made", **how, feature_dtype=dtype, progress=False)
    assert made.feature_dtype == dtype
    # What may be off: a rounding a hop, of each term; below 6e-8 float16 has nothing.
    terms = powers(abs(matrix(edges, num_nodes, norm)), np.abs(x), hops)[kept]
    allowed = 4e-7 * 64 * terms if dtype == "float32" else 2**-11 * (hops + 2) * terms + 6e-8
    rows = np.asarray(made.x, np.float64).reshape(made.num_nodes, -1, columns)
    assert np.all(np.abs(rows - expected) <= allowed)
    assert np.array_equal(kept, np.arange(num_nodes) if made.node_id is None else made.node_id)


def test_the_result_is_a_sound_store_with_labels_and_splits(store: Store, tmp_path: Path) -> None:
    made = propagate(store, tmp_path / "made", hops=3, norm="row", progress=False)
    assert verify_store(made.path) == []
    assert (made.hops, made.num_features) == (3, 4 * store.num_features)
    assert (made.num_edges, made.num_classes) == (0, 4)
    assert made.node_id is not None
    for name, ids in store.splits.items():
        assert np.array_equal(made.node_id[made.splits[name]], ids)
        assert np.array_equal(made.y[made.splits[name]], store.y[ids])
    assert left_in(tmp_path) == ["made"]


KILLED = """
import dataclasses, sys
from ogbnlib import open_store, propagate
from ogbnlib.propagation import sweep
import ogbnlib.propagation.hops as hops
sweep.SLICE_NODES, planned, width = 500, hops.plan_hops, int(sys.argv[3])
hops.plan_hops = lambda *args, **how: dataclasses.replace(planned(*args, **how), widths=[width] * 4)
print("ready", flush=True)
propagate(open_store(sys.argv[1]), sys.argv[2], hops=4, progress=False)
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_next_call_gives_the_same_bytes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(40000, 32)).astype("f2")
    store = make_store(tmp_path / "store", random_edges(random, 40000, 400000), x)
    made = propagate(store, tmp_path / "whole", hops=4, progress=False).path
    whole = (made / "x.npy").read_bytes()
    work, target = tmp_path / ".made.part" / "hops", tmp_path / "made"
    for kill in range(int(os.environ.get("OGBNLIB_KILLS", "3"))):
        shutil.rmtree(work, ignore_errors=True)
        with python_child(KILLED, str(store.path), str(target), str(1 + kill % 3)) as child:
            hop = work / str(1 + kill % 4)
            wait_until(lambda hop=hop: child.poll() is not None or hop.exists(), "a hop")
            time.sleep(float(random.uniform(0, 0.3)))
            child.kill()
        assert not target.exists() or verify_store(target) == []
        if target.exists():
            assert (target / "x.npy").read_bytes() == whole
            shutil.rmtree(target)
    assert (propagate(store, target, hops=4, progress=False).path / "x.npy").read_bytes() == whole
    assert left_in(tmp_path) == ["made", "store", "whole"]


def test_an_ended_propagation_leaves_nothing(store: Store, tmp_path: Path) -> None:
    planned: list[str] = []

    def check() -> None:
        if planned:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        propagate(store, tmp_path / "made", progress=False, check=check, say=planned.append)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("how", "facts"),
    [
        ({"hops": 0}, "hops: .*1, got 0"),
        ({"norm": "col"}, "norm: .*row, sym, gcn, got 'col'"),
        ({"memory_limit": "10 MB"}, r"memory_limit: .* raise .* \d{2,} MB"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_written(
    tiny_store: Path, tmp_path: Path, how: dict[str, Any], facts: str
) -> None:
    with pytest.raises(InputError, match=facts):
        propagate(open_store(tiny_store), tmp_path / "made", **how, progress=False)
    assert left_in(tmp_path) == []


def test_a_full_disk_and_propagated_features_are_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = propagate(store, tmp_path / "made", progress=False)
    with pytest.raises(InputError, match=r"graph.* 2 hops"):
        propagate(made, tmp_path / "again", progress=False)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(InputError, match=r"other: .*found 1 kB"):
        propagate(store, tmp_path / "other", progress=False)
    assert left_in(tmp_path) == ["made"]


@pytest.mark.parametrize("name", ["colptr", "row", "x"])
def test_damage_is_found_before_work_begins(tiny_store: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(tiny_store, tmp_path / "store")
    flip(tmp_path / "store" / f"{name}.npy", -6, 0x11)
    with pytest.raises(InputError, match=rf"{name}\.npy: "):
        propagate(open_store(tmp_path / "store"), tmp_path / "made", hops=1, progress=False)
    assert left_in(tmp_path) == ["store"]


@pytest.mark.slow
def test_it_keeps_to_a_hard_limit(tmp_path: Path, kernel_limit: Callable[[int], Any]) -> None:
    random = np.random.default_rng(0)
    n = 600_000
    x = random.normal(size=(n, 64)).astype(np.float16)  # 73 MB, and as much again between two hops
    store = make_store(tmp_path / "store", random.integers(n, size=(2, 3 * n)), x)
    limit = kernel_limit(340 * MB)
    code = """
import sys
from ogbnlib import open_store, propagate

propagate(open_store(sys.argv[1]), sys.argv[2], nodes="all", memory_limit="340 MB")
"""
    argv = [sys.executable, "-c", code, str(store.path), str(tmp_path / "made")]
    # they are compiled in it as well
    cold = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run(limit.command(argv), capture_output=True, text=True, env=cold)
    assert done.returncode == 0, done.stderr
    assert ": 1 pass over" not in done.stdout
    assert open_store(tmp_path / "made").num_nodes == n
