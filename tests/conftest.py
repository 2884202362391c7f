"""What test files share: small data sets, run folders by hand, children to measure and kill."""

import contextlib
import gc
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import linux_machine
import numpy as np
import pandas as pd
import pytest
from slurm_cluster import Cluster, cluster, unavailable

from ogbnlib.config import TrainConfig
from ogbnlib.environment import WINDOWS_VARIABLE
from ogbnlib.errors import parse_bytes
from ogbnlib.graph import npz
from ogbnlib.graph.store import Store, open_store
from ogbnlib.memory.limits import Limit, make_limit
from ogbnlib.memory.record import SAMPLE_COLUMNS

MB = 2**20
Config = Callable[..., TrainConfig]
# for this process and all others
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(npz.__file__).parents[1] / "__pycache__"))

# Another user who may read everything, as Python may be installed in root's home, and write only
# own files.
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
SETS = ("bounding-set", "inh-caps", "ambient-caps")
NOBODY += [f"--{which}=-all,+dac_read_search" for which in SETS]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file under `folder` and its content, to show that nothing was written."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 180.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"waited {timeout_s:.0f} s for {what}")


# The longest come first, so that no process of pytest-xdist is alone with one at the end. The first
# compiles the kernels, while the second one's files need none.
FIRST = ["faults", "engine", "watch", "sandbox", "audit", "jobs", "linux_v2", "three_commands"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with `FIRST`; the other files keep their order."""
    places = {f"test_{name}.py": place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(FIRST)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests with the marker `cuda` where there is no GPU."""
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch.cuda.is_available() is false: no GPU, or a torch without CUDA")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one process, but for those of one notebook each."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFileOrNotebook(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            notebook = re.search(r"\[(\d\d_\w+)\]", test)
            return notebook[1] if notebook and "test_notebooks" in file else file

    return ByFileOrNotebook(config, log)


@contextlib.contextmanager
def touched(file: Path, condition: Callable[[], Any]) -> Iterator[None]:
    """Create `file`, for which a child process waits, once `condition` holds."""

    def wait() -> None:
        wait_until(condition, file.name)
        file.touch()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def cli(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, with its output."""
    argv = [sys.executable, "-m", "ogbnlib", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, **how)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def python_child(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed a line; it and its children are killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def force_windows(memory: str | int) -> None:
    """Set the memory for windows until the test ends, for children too; "off": for any store."""
    if memory == "off":
        memory = "1 TB"
    is_size = memory != "auto" and isinstance(memory, str)
    os.environ[WINDOWS_VARIABLE] = str(parse_bytes(memory) if is_size else memory)


@pytest.fixture(autouse=True)
def automatic_windows() -> Iterator[None]:
    """End `force_windows` with the test."""
    yield
    os.environ.pop(WINDOWS_VARIABLE, None)


@contextlib.contextmanager
def files_of(num_bytes: int) -> Iterator[None]:
    """A file may have so many bytes: the kernel writes a part and refuses the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def uncached_file(path: Path, num_bytes: int) -> Path:
    """A file of random bytes, of which no page is cached: the first reader is charged for all."""
    with open(path, "wb") as file:
        file.write(os.urandom(num_bytes))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def raw_arrays(path: Path) -> dict[str, np.ndarray]:
    """edge_index, x and y (-1 without a label) of a folder in OGB's binary layout, by numpy."""
    data = np.load(path / "raw" / "data.npz")
    labels = np.load(path / "raw" / "node-label.npz")["node_label"].ravel()
    y = np.nan_to_num(labels, nan=-1).astype(int)
    return {"edge_index": data["edge_index"], "x": data["node_feat"], "y": y}


def random_arrays(
    num_nodes: int, num_edges: int, num_features: int, num_classes: int
) -> dict[str, Any]:
    """A random graph; its first 30 nodes have labels."""
    random = np.random.default_rng(0)
    y = np.r_[num_classes - 1, random.integers(0, num_classes, 29), np.full(num_nodes - 30, -1)]
    return {
        "edge_index": random.integers(0, num_nodes, (2, num_edges)),
        "x": random.standard_normal((num_nodes, num_features)).astype(np.float32),
        "y": y,
        "splits": {"train": np.arange(20), "valid": np.array([25, 21]), "test": np.arange(26, 30)},
    }


def csc_of(
    edge_index: np.ndarray, num_nodes: int, undirected: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """colptr and row of a graph: in the edges' order, or both ways, sorted, without repeats."""
    src, dst = edge_index
    if undirected:
        dst, src = np.unique(np.stack([np.r_[dst, src], np.r_[src, dst]]), axis=1)
    order = np.argsort(dst, kind="stable")
    return np.searchsorted(dst[order], np.arange(num_nodes + 1)), src[order]


def official_csv(root: Path, edge_index: Any, x: Any, y: Any, splits: dict[str, Any]) -> Path:
    """`root`/ogbn_arxiv as csv files as it is downloaded; a node without a label has label 0."""
    folder = root / "ogbn_arxiv"
    for part in ("split/time", "raw", "processed"):
        (folder / part).mkdir(parents=True)
    (folder / "RELEASE_v1.txt").touch()
    files = {
        "raw/edge": edge_index.T,
        "raw/node-feat": x.astype(np.float64).round(3),
        "raw/node-label": np.maximum(y, 0).reshape(-1, 1),
        "raw/node_year": [[2015]] * len(x),
        "raw/num-node-list": [[len(x)]],
        "raw/num-edge-list": [[edge_index.shape[1]]],
        **{f"split/time/{name}": np.reshape(ids, (-1, 1)) for name, ids in splits.items()},
    }
    for name, array in files.items():
        text = "".join(",".join(map(str, line)) + "\n" for line in np.asarray(array).tolist())
        (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def left_in(folder: Path) -> list[str]:
    """The names in a folder but for files of locks, which stay and mean nothing."""
    return sorted(path.name for path in folder.iterdir() if path.suffix not in (".lock", ".once"))


def weights(folder: Path, name: str = "checkpoint.pt") -> dict[str, Any]:
    """Tensors of a run's model."""
    import torch

    model: dict[str, Any] = torch.load(folder / name, weights_only=True)["model"]
    return model


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def scores(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses and accuracies of each epoch, without the times, which differ between equal runs."""
    names = ("epoch", "loss", "train", "valid", "test")
    return [{name: row[name] for name in names} for row in history]


def batches_of(loader: Any, epoch: int, start: int = 0) -> list[Any]:
    """The batches of an epoch from position `start` of its order."""
    from ogbnlib.sampling.policies import set_epoch

    set_epoch(loader, epoch, start)
    return list(loader)


def flip(file: Path, at: int, bits: int = 1) -> None:
    """Damage one byte of a file."""
    content = bytearray(file.read_bytes())
    content[at] ^= bits
    file.write_bytes(content)


def freeze() -> None:
    """Exempt all present objects: each garbage collection would walk the imports for 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    freeze()


@pytest.fixture(scope="session")
def synth_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 111,060 nodes, 1.6 M edges, 1,207 / 125 / 214 seeds: papers100M / 1000."""
    from ogbnlib.sources.synth import synthesize_store

    return synthesize_store(
        tmp_path_factory.mktemp("data") / "synth", scale=0.001, progress=False
    ).path


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 nodes, 3,000 edges in no order, 4 classes that features and most neighbors tell apart.

    Labels are NaN outside the splits, as in papers100M.
    """
    from ogb_layout import write_raw

    random = np.random.default_rng(0)
    n = 300
    classes = random.integers(4, size=n)
    x = np.eye(4)[classes] @ random.normal(size=(4, 8)) + 0.5 * random.normal(size=(n, 8))
    parts = np.split(random.permutation(n)[:210], [120, 160])
    splits = dict(zip(("train", "valid", "test"), map(np.sort, parts), strict=True))
    y = np.full(n, np.nan, np.float32)
    for part in splits.values():
        y[part] = classes[part]
    path = tmp_path_factory.mktemp("data") / "tiny"
    edge_index = random.integers(n, size=(2, 3000))
    for i in range(2000):
        edge_index[0, i] = random.choice(np.flatnonzero(classes == classes[edge_index[1, i]]))
    edge_index = edge_index[:, random.permutation(3000)]
    arrays = {"edge_index": edge_index, "x": x.astype(np.float32), "y": y}
    write_raw(path, **arrays, splits=splits, num_classes=4)
    return path


@pytest.fixture(scope="session")
def tiny_store(tiny_dir: Path) -> Path:
    from ogbnlib.sources.convert import convert

    return convert(tiny_dir, tiny_dir.with_name("stores") / "tiny", progress=False).path


@pytest.fixture
def store(tiny_store: Path) -> Store:
    return open_store(tiny_store)


@pytest.fixture(scope="session")
def tiny_config(tiny_store: Path) -> Callable[..., TrainConfig]:
    """A config on `tiny_store`, with changes; `lookahead` is for `force_windows`."""
    import ogbnlib.training.train  # noqa: F401

    freeze()

    def make(*, lookahead: str | int = "auto", **changes: Any) -> TrainConfig:
        force_windows(lookahead)
        values = {"dataset": str(tiny_store), "epochs": 2, "batch_size": 16, "hidden_channels": 8}
        return TrainConfig.create({**values, "device": "cpu", **changes})

    return make


@pytest.fixture
def command_line() -> Callable[..., int]:
    """Runs a command of ogbnlib in this process and returns its exit code."""
    from ogbnlib.__main__ import main

    return lambda *arguments: main([*arguments])


@pytest.fixture(params=[16, npz.CHUNK_BYTES], ids="chunks of {}".format)
def file_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a store's file that are read at a time."""
    monkeypatch.setattr(npz, "CHUNK_BYTES", request.param)


@pytest.fixture
def table_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of predictions are written in pieces of a few rows."""
    monkeypatch.setattr("ogbnlib.inference.tables._PIECE_BYTES", 100)


@pytest.fixture
def columns_in_memory(monkeypatch: pytest.MonkeyPatch, tiny_store: Path) -> Callable[[int], None]:
    """Leaves exact predictions on `tiny_store` the memory of so many columns of all nodes."""
    from ogbnlib.inference import exact
    from ogbnlib.propagation.plan import fixed_bytes

    size = open_store(tiny_store).size

    def leave(columns: int) -> None:
        room = fixed_bytes(size, 3) + exact._STEP_BYTES + (columns * 4 + 2) * size.num_nodes
        monkeypatch.setattr(exact, "left_bytes", lambda limit: room)

    return leave


@pytest.fixture
def process_of_1_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    """`store.loader` sees a process of 1 MB, so a memory_limit of 1 MB leaves nothing: windows."""
    monkeypatch.setattr("ogbnlib.windows.own_loop.own_memory", lambda: (MB, MB, MB))


@pytest.fixture
def kernel_limit() -> Iterator[Callable[[int], Limit]]:
    """Makes a limit that the kernel enforces; skips where no memory cgroup can be made."""
    limits: list[Limit] = []

    def make(limit_bytes: int) -> Limit:
        limit, refused = make_limit(limit_bytes)
        limits.append(limit)
        if not limit.name.startswith("cgroup"):
            pytest.skip(f"no memory cgroup can be made here: {'; '.join(refused)}")
        return limit

    yield make
    for limit in limits:
        limit.close()


def write_run(
    folder: Path,
    *,
    exit_code: int | None = 137,
    events: list[dict[str, Any]] | None = None,
    samples: list[dict[str, float]] | None = None,
    config: dict[str, Any] | None = None,
    **result: Any,
) -> Path:
    """The folder of a run as `sandbox.run` leaves it; without `exit_code` it has no result.json."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"dataset": "somewhere", "loading": "eager", **(config or {})}
    TrainConfig.create(values).save(folder / "config.json")
    if events is None:
        events = [
            {"time_s": 100.0, "event": "start"},
            {"time_s": 101.0, "event": "begin", "phase": "load"},
            {"time_s": 102.0, "event": "part", "name": "edge_index (COO)", "bytes": 160 * MB},
            {"time_s": 103.0, "event": "end", "phase": "load"},
            {"time_s": 104.0, "event": "begin", "phase": "build valid loader"},
        ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if samples is None:
        same = {"rss_shmem_bytes": 0, "rss_file_bytes": 30 * MB}
        sizes = [(50 + 40 * i) * MB for i in range(5)]
        samples = [{"time_s": 100.5 + i, "rss_anon_bytes": n, **same} for i, n in enumerate(sizes)]
    table = pd.DataFrame(samples, columns=[*SAMPLE_COLUMNS])
    table.to_csv(folder / "timeline.csv", index=False)
    if exit_code is not None:
        names = ("memory_limit_bytes", "limit_by", "killed_by", "oom_kills")
        known = {"exit_code": exit_code, **dict.fromkeys(names), "duration_s": 5.0}
        (folder / "result.json").write_text(json.dumps({**known, **result}))
    return folder


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A real Slurm cluster of two nodes on this machine, for the whole session."""
    if reason := unavailable():
        pytest.skip(reason)
    with cluster() as running:
        yield running


@pytest.fixture(scope="session")
def linux_v2() -> Iterator[linux_machine.Machine]:
    """A Linux with cgroup v2, booted once for the whole session, see `linux_machine`."""
    if reason := linux_machine.unavailable():
        pytest.skip(reason)
    with linux_machine.machine() as booted:
        yield booted


@pytest.fixture(scope="session")
def linux_systemd() -> Iterator[linux_machine.Machine]:
    """A Debian booted by systemd, once for the whole session; its scripts are a user's."""
    if reason := linux_machine.systemd_unavailable():
        pytest.skip(reason)
    try:
        debian = linux_machine.make_debian()
    except RuntimeError as error:
        pytest.skip(str(error))
    with linux_machine.machine(debian) as booted:
        # This Python may need a newer C library than that of Debian.
        tried = booted.run("$python -c 'import numpy, psutil, ogbnlib'")
        if tried.returncode != 0:
            pytest.skip(f"{sys.executable} does not run in that Debian: {tried.stdout[-500:]}")
        yield booted
