"""Conversion of any `Source` to a store (a folder of .npy files, see `graph.store`).

Memory is bounded: features and edges pass through it in chunks, and a set of nodes takes one bit
per node. A bucketed external sort (`graph.edge_sort`) produces the CSC, while a second thread
converts the features.
"""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError, Problems, clear_errors, format_bytes, parse_bytes
from ..files import StrPath, check_new, check_space, home, new_folder
from ..graph.array_checks import finite, is_labelled, split_problems
from ..graph.edge_sort import EdgeSort
from ..graph.int8 import Int8Columns
from ..graph.node_set import NodeSet
from ..graph.npz import Array
from ..graph.store import Store, is_store, open_store
from ..graph.store_format import index_dtype, label_dtype
from ..graph.summary import count_labels
from ..graph.writer import StoreWriter
from ..io.blocks import DROP_BYTES
from ..memory.cgroup import effective_limit
from ..memory.reading import own_memory
from ..progress import Progress, counted
from .description import DESCRIPTION, read_description
from .leaks import refuse_leaks
from .official import OFFICIAL_DIR, is_official, locate_official, open_official
from .ogb import csv_layout, open_raw
from .source import Source
from .store_source import from_store

FeatureDtype = Literal["float16", "float32", "int8"]
# added to the memory that the process already uses, such as a notebook's with torch loaded
_DEFAULT_BYTES = 2**30
_KERNEL_BYTES = 96 * 2**20  # to compile the kernels (numba)
# chunks of features and edges, and written pages that are not yet on disk
_CHUNKS_BYTES = 64 * 2**20 + 2 * DROP_BYTES
_MIN_WORKSPACE = 32 * 2**20

Item = TypeVar("Item")


def _ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield `items`; a second thread produces the next one while the caller uses the current one.

    Decompressing takes half of the time.
    """
    # Callers close this generator explicitly. Otherwise the garbage collector may close it in a
    # thread that is just starting. There the wait for the second thread never returns, because
    # Python 3.11 then holds the lock that guards the ends of all threads.
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


def _check_labels(source: Source, splits: dict[str, Array]) -> dict[str, object]:
    """Refuse splits that can't be trained on; return the label counts of the store's summary.

    With the option `drop_unlabelled`, unlabelled nodes are first removed from `splits`, in place.
    """
    labelled = NodeSet(source.num_nodes)
    begin = 0
    sizes = np.zeros(source.num_classes, np.int64)
    for chunk in source.label_chunks():
        some = is_labelled(chunk)
        labelled.add(begin + np.flatnonzero(some))
        if source.num_classes:
            np.add.at(sizes, chunk[some], 1)
        begin += len(chunk)
    num_seeds = sum(map(len, splits.values()))
    if source.options.get("drop_unlabelled"):
        for name, ids in splits.items():
            bare = (ids >= 0) & (ids < source.num_nodes)
            bare[bare] = ~labelled.contains(ids[bare])
            splits[name] = ids[~bare]
    num_dropped = num_seeds - sum(map(len, splits.values()))
    problems = Problems()
    for name, problem in split_problems(splits, source.num_nodes, labelled.contains):
        hint = (
            "; drop_unlabelled: true in dataset.yaml leaves them out"
            if "without a label" in problem
            else ""
        )
        problems.add(f"{source.where(name)}: {problem}{hint}")
    problems.refuse()
    if source.num_classes:
        return {**count_labels(sizes, source.num_nodes), "dropped_seeds": num_dropped}
    return {
        "unlabelled_nodes": source.num_nodes - labelled.count(),
        "dropped_seeds": num_dropped,
    }


class _Conversion:
    """Writer of all arrays of a store; a second thread writes the features.

    If one thread fails, the other one raises a `CancelledError` at its next chunk.
    """

    def __init__(
        self,
        source: Source,
        writer: StoreWriter,
        dtype: np.dtype[np.generic],
        done: Callable[[int], object],
    ) -> None:
        self._source = source
        self._writer = writer
        self._dtype = dtype
        self._done = done
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def write(self, undirected: bool, workspace: int) -> None:
        """Write the store; `workspace` is the memory for sorting the edges, in bytes."""
        splits = self._source.read_splits()
        self._writer.entries["summary"] = _check_labels(self._source, splits)
        with ThreadPoolExecutor(1) as pool:
            features = pool.submit(self._write_features)
            try:
                self._write_edges(undirected, workspace)
                self._write_nodes(splits)
                features.result()
            except CancelledError:
                features.result()
                raise
            finally:
                self._stop.set()

    def _count(self, number: int) -> None:
        if self._stop.is_set():
            raise CancelledError  # the other thread has failed, and its error is reported
        with self._lock:
            self._done(number)

    def _write_chunks(
        self, name: str, kind: DTypeLike, chunks: Iterable[Array], row_shape: tuple[int, ...] = ()
    ) -> None:
        with self._writer.create(name, kind, row_shape) as out:
            for chunk in chunks:
                out.write(chunk)
                self._count(chunk.nbytes)

    def _write_edges(self, undirected: bool, workspace: int) -> None:
        source = self._source
        edges = EdgeSort(
            self._writer.folder,
            source.num_nodes,
            source.num_edges,
            undirected=undirected,
            workspace=workspace,
            done=self._count,
        )
        with contextlib.closing(_ahead(source.edge_chunks(edges.chunk_edges))) as ahead:
            edges.read(ahead)
        with (
            self._writer.create("row", index_dtype(source.num_nodes)) as row,
            self._writer.create("colptr", "<i8") as colptr,
        ):
            edges.write(row, colptr)
        self._writer.entries["summary"] |= {
            "edges_read": edges.num_read,
            "dropped_edges": source.num_edges - edges.num_read,
            "merged_edges": (1 + undirected) * edges.num_read - row.length,
            "self_loops": edges.num_self_loops,
            "isolated_nodes": source.num_nodes - edges.connected.count(),
        }

    def _write_nodes(self, splits: Mapping[str, Array]) -> None:
        source = self._source
        self._write_chunks(
            "y", label_dtype(source.num_classes), source.label_chunks(), source.target_shape
        )
        for split, nodes in splits.items():
            self._writer.write(split, nodes)
        names = source.node_names()
        if names is not None:
            self._write_chunks("node_name", *names)
        if source.label_names is not None:
            self._writer.write("label_name", source.label_names)

    def _write_features(self) -> None:
        width = self._source.num_features
        try:
            if self._dtype != np.int8:
                with self._features(self._dtype) as chunks:
                    self._write_chunks("x", self._dtype, chunks, (width,))
                return
            with self._features(np.float32) as chunks:  # the first pass finds the columns' ranges
                columns = Int8Columns.covering(map(self._counted, chunks), width)
            self._writer.entries |= columns.entries()
            with self._features(np.float32) as chunks:
                self._write_chunks("x", np.int8, map(columns.encode, chunks), (width,))
        except BaseException:
            self._stop.set()
            raise

    def _counted(self, chunk: Array) -> Array:
        self._count(chunk.size)
        return chunk

    @contextlib.contextmanager
    def _features(self, dtype: DTypeLike) -> Iterator[Iterator[Array]]:
        with contextlib.closing(_ahead(self._source.x_chunks())) as ahead:
            yield finite(ahead, dtype, f"{self._source.name}, node_feat")


def disk_bytes(
    source: Source, undirected: bool, feature_dtype: np.dtype[np.generic]
) -> tuple[int, int]:
    """Return the maximal bytes of the finished store and the bytes of the temporary files.

    The store's splits and node names are not counted.
    """
    num_pairs = source.num_edges * (1 + undirected)
    item = np.dtype(index_dtype(source.num_nodes)).itemsize
    per_node = (
        8
        + np.dtype(label_dtype(source.num_classes)).itemsize * math.prod(source.target_shape)
        + source.num_features * feature_dtype.itemsize
    )
    return source.num_nodes * per_node + num_pairs * item + 2**20, num_pairs * 2 * item


def _workspace(source: Source, memory_limit: str | int | None) -> int:
    used = own_memory()[0]
    limit = min(used + _DEFAULT_BYTES, int(0.95 * effective_limit()[0]))
    if memory_limit is not None:
        limit = parse_bytes(memory_limit)
    data_bytes = (
        source.num_nodes * source.num_features * source.feature_dtype.itemsize
        + 16 * source.num_edges
    )
    fixed = (
        used
        + _KERNEL_BYTES
        + min(_CHUNKS_BYTES, 4 * data_bytes)
        + source.num_nodes // 8
        + 8 * source.num_classes
    )
    least = fixed + _MIN_WORKSPACE
    if limit < least:
        raise InputError(
            f"memory_limit: expected at least {format_bytes(least)} to convert {source.name} "
            f"(this process uses {format_bytes(used)}), got {format_bytes(limit)}"
        )
    return limit - fixed


def open_source(
    name: StrPath, data_dir: StrPath = OFFICIAL_DIR, description: StrPath | None = None
) -> Source:
    """Open a store, an official data set or a folder for conversion.

    A folder has a `dataset.yaml` (or the file `description`), OGB's layout, or files of canonical
    names.
    """
    path = home(name)
    is_folder = not is_store(path) and not is_official(str(path))
    if description is not None and not is_folder:
        raise InputError(f"description: expected one of a folder of files, got it with {path}")
    if is_store(path):
        return from_store(open_store(path))
    if is_folder:
        return _open_folder(path, None if description is None else home(description))
    official = locate_official(str(path), home(data_dir))
    if not official.present:
        raise InputError(
            f"{official.folder}: {path} is not there: python -m ogbnlib download {path}"
        )
    return open_official(official)


def _open_folder(path: Path, description: Path | None) -> Source:
    from .draft import describe, no_data  # imports pyarrow and pandas
    from .folder import open_described

    if not path.is_dir():
        raise no_data(path)
    folder = Path(os.path.realpath(path))
    if folder.name == "raw" and (folder.parent / "split").is_dir():
        folder = folder.parent  # of OGB's layout
    file = description or folder / DESCRIPTION
    declared = read_description(file, folder) if file.is_file() else None
    options = {} if declared is None else declared.options
    if (folder / "raw" / "data.npz").exists() and not (declared and declared.files):
        source = open_raw(folder, num_classes=options.get("num_classes"))
        return replace(source, options=options)
    if declared is not None and declared.files:
        return open_described(declared)
    layout = csv_layout(folder) or describe(folder, file)
    return open_described(replace(layout, options=options))


@clear_errors()
def convert(
    source: StrPath | Source,
    path: StrPath,
    *,
    description: StrPath | None = None,
    undirected: bool | None = None,
    feature_dtype: FeatureDtype | None = None,
    memory_limit: str | int | None = None,
    progress: Progress = True,
    check: Callable[[], None] = lambda: None,
) -> Store:
    """Convert a data set to a store in bounded memory; the store appears whole or not at all.

    A file that changes is an `InputError`. After a SIGKILL the next conversion deletes the rest.

    Args:
        source: a folder of files, an official name in the folder "dataset", a store or a `Source`.
        path: a new or empty folder.
        description: a file to use as the folder's `dataset.yaml`, or the place of its draft.
        undirected: add reverse edges, sort each node's in-edges, drop duplicates.
        feature_dtype: float16 halves the bytes and refuses values beyond its range, int8 again:
            255 evenly spaced values a column. By default this and `undirected` are as in
            `dataset.yaml`, else as in the data, float64 as float32.
        memory_limit: "4 GB" or bytes for this process, written pages included. By default 95 % of
            its limit, at most 1 GB more than it uses now, which is enough for ogbn-papers100M.
        progress: show a bar, or in a log a line every 30 s; a function is called instead.
        check: called between chunks; its exception ends the conversion.
    """
    if not isinstance(source, Source):
        source = open_source(source, description=description)
    if undirected is None:
        undirected = source.options.get("undirected", False)
    feature_dtype = feature_dtype or source.options.get("feature_dtype")
    if feature_dtype not in (None, *get_args(FeatureDtype)):
        raise InputError(
            f"feature_dtype: expected {', '.join(get_args(FeatureDtype))}, got {feature_dtype!r}"
        )
    undirected = undirected or source.undirected
    add_reverse = undirected and not source.undirected
    workspace = _workspace(source, memory_limit)
    target = Path(os.path.realpath(home(path)))
    x_dtype = np.dtype(feature_dtype or source.feature_dtype)
    check_new(target)
    final, temporary = disk_bytes(source, add_reverse, x_dtype)
    check_space(
        target,
        final + temporary,
        f"{format_bytes(final + temporary)} of free disk space "
        f"({format_bytes(final)} for the store, {format_bytes(temporary)} until it is done)",
    )
    x_bytes = source.num_features * (2 if x_dtype == np.int8 else x_dtype.itemsize)  # two passes
    total = source.num_nodes * (x_bytes + 2) + 16 * source.num_edges + temporary
    refuse_leaks(source)
    with new_folder(target) as folder, counted("convert", total, progress, check=check) as done:
        writer = StoreWriter(folder)
        _Conversion(source, writer, x_dtype, done).write(add_reverse, workspace)
        source.check_unchanged()
        made_of = {**source.origin, "num_nodes": source.num_nodes}
        writer.finish(source.name, source.num_classes, undirected=undirected, origin=made_of)
    return open_store(target)
