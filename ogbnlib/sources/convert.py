"""From any `Source` to a store, in bounded memory: nothing of the graph's size is ever held.

The CSC comes from a bucketed external sort. One pass over the edges writes (dst, src) pairs to a temporary file,
chunk by chunk, each chunk sorted by ranges of destinations; then one range after the other is read, sorted in RAM by a
stable counting sort and appended to `row.npy`. Both directions of disk traffic are sequential or in long pieces, and
within a column the order is that of the input. Features are converted in a second thread meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from tqdm import tqdm

from ..errors import InputError, format_bytes, parse_bytes
from ..files import DROP_BYTES, StrPath, check_new, check_space
from ..graph.bits import NodeSet
from ..graph.checks import FiniteCheck, index_dtype, label_dtype, split_problems
from ..graph.npz import Array
from ..graph.sort import EdgeSort, Kept
from ..graph.store import Store
from ..graph.writer import StoreWriter
from ..memory.cgroup import effective_limit
from ..memory.reading import own_memory
from .data import Source
from .ogb import open_raw

FeatureDtype = Literal["float16", "float32"]
Progress = bool | Callable[[str], object]  # a bar or nothing; a function is handed a line every 30 s
_LINE_EVERY_S = 30.0
_DEFAULT_BYTES = 2**30  # beside what the process holds already, which a notebook with torch loaded does
_KERNEL_BYTES = 96 * 2**20  # compiling the kernels
_CHUNKS_BYTES = 64 * 2**20 + 2 * DROP_BYTES  # features and edges on their way, and pages not yet on disk
_MIN_WORKSPACE = 32 * 2**20

Item = TypeVar("Item")


def _ahead(items: Iterator[Item]) -> Iterator[Item]:
    """`items`, each made in another thread while the one before it is used: inflating takes half of all the time."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


# The conversion ------------------------------------------------------------------------------------------------------


class _Abandoned(Exception):
    """Another thread has failed; its error is the one to report."""


class _Conversion:
    def __init__(
        self,
        source: Source,
        writer: StoreWriter,
        done: Callable[[int], object],
        feature_dtype: np.dtype[Any],
        keep_hops: int | None,
    ) -> None:
        self.source, self.writer, self._done = source, writer, done
        self.x_dtype, self.keep_hops = feature_dtype, keep_hops
        self.kept: Kept | None = None
        self.stop, self._lock = threading.Event(), threading.Lock()

    def done(self, count: int) -> None:
        if self.stop.is_set():
            raise _Abandoned
        with self._lock:
            self._done(count)

    def features(self) -> None:
        """x.npy, checked; runs beside the rest."""
        out, begin = self.writer.create("x", self.x_dtype, (self.source.num_features,)), 0
        check = FiniteCheck(self.x_dtype)
        for chunk in _ahead(self.source.x_chunks()):
            out.write(self._kept_rows(check(chunk, begin), begin))
            begin += len(chunk)
            self.done(chunk.nbytes)
        if problem := check.problem():
            raise InputError(f"{self.source.name}, node_feat: {problem}")
        self.writer.close("x")

    def _kept_rows(self, values: Array, begin: int) -> Array:
        return values if self.kept is None else values[self.kept.mask(begin, begin + len(values))]

    def labelled(self, splits: dict[str, Array]) -> NodeSet:
        """The nodes with a label, after the splits were checked against them."""
        nodes, begin = NodeSet(self.source.num_nodes), 0
        for chunk in self.source.label_chunks():
            nodes.add(begin + np.flatnonzero(chunk >= 0))
            begin += len(chunk)
        for name, problem in split_problems(splits, self.source.num_nodes, nodes.contains):
            raise InputError(f"{self.source.name}, split {name}: {problem}")
        return nodes

    def labels_and_splits(self, splits: dict[str, Array]) -> None:
        out, begin = self.writer.create("y", label_dtype(self.source.num_classes)), 0
        for chunk in self.source.label_chunks():
            out.write(self._kept_rows(chunk, begin))
            begin += len(chunk)
            self.done(chunk.nbytes)
        self.writer.close("y")
        for name, ids in splits.items():
            self.writer.write(name, ids if self.kept is None else self.kept.ids(ids))

    def node_ids(self) -> None:
        assert self.kept is not None
        out, step = self.writer.create("node_id", index_dtype(self.source.num_nodes)), 2**20
        for begin in range(0, self.source.num_nodes, step):
            out.write(begin + np.flatnonzero(self.kept.mask(begin, min(begin + step, self.source.num_nodes))))
        self.writer.close("node_id")

    def columns(self, edges: EdgeSort) -> None:
        num_nodes = self.source.num_nodes if self.kept is None else self.kept.num_nodes
        edges.write(self.writer.create("row", index_dtype(num_nodes)), self.writer.create("colptr", "<i8"))
        self.writer.close("row")
        self.writer.close("colptr")

    def run(self, undirected: bool, workspace: int) -> None:
        source, splits = self.source, self.source.read_splits()
        labelled = self.labelled(splits)
        edges = EdgeSort(
            self.writer.folder, source.num_nodes, source.num_edges,
            undirected=undirected, workspace=workspace, done=self.done,
        )  # fmt: skip
        with ThreadPoolExecutor(1) as pool:
            features: Future[None] | None = None
            try:
                if self.keep_hops is None:
                    features = self._start(pool)
                edges.read(_ahead(source.edge_chunks(edges.chunk_edges)))
                if self.keep_hops is not None:
                    self.kept = edges.keep_hops(labelled, self.keep_hops)
                    features = self._start(pool)
                self.columns(edges)
                self.labels_and_splits(splits)
                if self.kept is not None:
                    self.node_ids()
                assert features is not None
                features.result()
            except BaseException as error:
                self.stop.set()
                failure = features.exception() if features is not None else None
                if isinstance(error, _Abandoned) and failure is not None:
                    raise failure from None
                raise

    def _start(self, pool: ThreadPoolExecutor) -> Future[None]:
        features = pool.submit(self.features)
        features.add_done_callback(lambda ended: self.stop.set() if ended.exception() is not None else None)
        return features


class _Lines:
    """Stands in for a bar where nobody watches one: a line every 30 s."""

    def __init__(self, total: int, say: Callable[[str], object]) -> None:
        self.total, self.say, self.count = total, say, 0
        self.begin = self.last = time.monotonic()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *error: object) -> None: ...

    def update(self, count: int) -> None:
        self.count, now = self.count + count, time.monotonic()
        if now - self.last >= _LINE_EVERY_S:
            self.last, left_s = now, (self.total - self.count) * (now - self.begin) / max(1, self.count)
            self.say(f"  converting: {100 * self.count / self.total:.0f} %, {max(0.0, left_s):.0f} s left")


def _bar(progress: Progress, total: int) -> Any:
    if callable(progress):
        return _Lines(total, progress)
    return tqdm(total=total, unit="B", unit_scale=True, desc="convert", disable=not progress, mininterval=1)


def disk_bytes(source: Source, undirected: bool, feature_dtype: np.dtype[Any]) -> tuple[int, int]:
    """Bytes of the finished store, at most, and of the temporary files beside it."""
    num_pairs = source.num_edges * (2 if undirected else 1)
    item = np.dtype(index_dtype(source.num_nodes)).itemsize
    per_node = 8 + np.dtype(label_dtype(source.num_classes)).itemsize + source.num_features * feature_dtype.itemsize
    return source.num_nodes * per_node + num_pairs * item + 2**20, num_pairs * 2 * item


def _workspace(source: Source, memory_limit: str | int | None, keep_hops: int | None) -> int:
    """What is left for sorting, in bytes."""
    held = own_memory()[0]
    if memory_limit is None:
        limit = min(held + _DEFAULT_BYTES, int(0.95 * effective_limit()[0]))
    else:
        limit = parse_bytes(memory_limit)
    data_bytes = source.num_nodes * source.num_features * source.feature_dtype.itemsize + 16 * source.num_edges
    bits = source.num_nodes // 8 * (1 if keep_hops is None else 6)
    fixed = held + _KERNEL_BYTES + min(_CHUNKS_BYTES, 4 * data_bytes) + bits
    if limit < fixed + _MIN_WORKSPACE:
        raise InputError(
            f"memory_limit: expected at least {format_bytes(fixed + _MIN_WORKSPACE)} to convert {source.name} "
            f"({format_bytes(held)} are held by this process already), got {format_bytes(limit)}"
        )
    return limit - fixed


def write_store(
    source: Source,
    path: StrPath,
    *,
    origin: dict[str, Any],
    undirected: bool = False,
    feature_dtype: FeatureDtype | None = None,
    memory_limit: str | int | None = None,
    keep_hops: int | None = None,
    progress: Progress = True,
    check: Callable[[], None] = lambda: None,
) -> Store:
    """Write any `Source` as a store whose `origin` says where it is from; see `convert`."""
    if feature_dtype not in (None, "float16", "float32"):
        raise InputError(f"feature_dtype: expected float16 or float32, got {feature_dtype!r}")
    if keep_hops is not None and (isinstance(keep_hops, bool) or not isinstance(keep_hops, int) or keep_hops < 1):
        raise InputError(f"keep_hops: expected the number of layers, at least 1, or None, got {keep_hops!r}")
    workspace = _workspace(source, memory_limit, keep_hops)
    target, x_dtype = Path(path).resolve(), np.dtype(feature_dtype or source.feature_dtype)
    check_new(target)
    final, temporary = disk_bytes(source, undirected, x_dtype)
    needed = f"{format_bytes(final)} for the store, {format_bytes(temporary)} until it is done"
    check_space(target, final + temporary, f"{format_bytes(final + temporary)} of free disk space ({needed})")
    total = source.num_nodes * (source.num_features * source.feature_dtype.itemsize + 2) + 16 * source.num_edges
    total += temporary * (1 + (keep_hops or 0))

    def done(count: int) -> None:
        check()
        bar.update(count)

    with StoreWriter(target) as writer, _bar(progress, total) as bar, _clear_errors(target):
        _Conversion(source, writer, done, x_dtype, keep_hops).run(undirected, workspace)
        return writer.finish(source.name, source.num_classes, undirected=undirected, keep_hops=keep_hops, origin=origin)


@contextlib.contextmanager
def _clear_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(f"{target}: the disk is full ({error.strerror}); nothing was left behind") from None


def origin_of(folder: Path) -> dict[str, Any]:
    """What a store says of the OGB folder it was made from: its path, and each file's size and mtime in ns."""
    files = sorted(file for part in ("raw", "split") for file in (folder / part).rglob("*") if file.is_file())
    files += [folder / "meta.json"] if (folder / "meta.json").is_file() else []
    stats = ((str(file.relative_to(folder)), file.stat()) for file in files)
    return {"raw": str(folder.resolve()), "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats}}


def convert(
    raw_dir: StrPath,
    store_dir: StrPath,
    *,
    undirected: bool = False,
    feature_dtype: FeatureDtype | None = None,
    memory_limit: str | int | None = None,
    keep_hops: int | None = None,
    progress: Progress = True,
    check: Callable[[], None] = lambda: None,
) -> Store:
    """Turn a data set in OGB's binary layout into a store, in bounded memory; the store appears whole or not at all.

    Args:
        raw_dir: a folder that `open_raw` opens.
        store_dir: new or empty.
        undirected: add reverse edges; columns are then sorted and without repeats.
        feature_dtype: float16 halves disk and traffic; values that it can't hold are refused. By default the data set's
            own, float32 for float64.
        memory_limit: "4 GB" or bytes for this whole process; by default 1 GB beside what it holds already, or its
            limit where that is less. It also does inside a memory cgroup of that size, written pages included. A larger
            one makes fewer and longer ranges to sort; 1 GB is enough for ogbn-papers100M.
        keep_hops: keep only the nodes that a model of so many layers can reach from a labelled node against the edges'
            direction, and only the edges that it can follow. Ids change; the original ones are in `node_id`.
        progress: True shows a bar; a function is called with a line every 30 s instead.
        check: called between chunks; what it raises ends the conversion, and nothing is left behind.

    Raises:
        InputError: before anything is written, for bad parameters, a target in use or held by another converter, too
            small a limit or too little disk space; while streaming, for damage, ids out of range, features that are
            not finite or too large, and splits that overlap or have no label. Nothing is left behind then. After a
            SIGKILL the hidden `.NAME.part` remains, which the next conversion clears.
    """
    raw = open_raw(raw_dir)
    if Path(store_dir).resolve() == raw.path.resolve():
        raise InputError(f"store_dir: expected another folder than raw_dir, got {store_dir} for both")
    return write_store(
        raw, store_dir, origin={**origin_of(raw.path), "num_nodes": raw.num_nodes}, undirected=undirected,
        feature_dtype=feature_dtype, memory_limit=memory_limit, keep_hops=keep_hops, progress=progress, check=check,
    )  # fmt: skip
