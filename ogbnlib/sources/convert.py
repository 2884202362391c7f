"""Conversion of any `Source` to a store (a folder of .npy files, see `graph.store`).

Features and edges pass through it in chunks, and a set of nodes takes one bit per node. An external
sort (`graph.edge_sort`) produces the CSC, while a second thread converts the features.
"""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError, clear_errors, format_bytes, parse_bytes
from ..files import StrPath, check_new, check_space, home, new_folder
from ..graph.array_checks import finite, is_labelled, split_problems
from ..graph.edge_sort import EdgeSort
from ..graph.int8 import Int8Columns
from ..graph.node_set import NodeSet
from ..graph.npz import Array
from ..graph.store import Store, is_store, open_store
from ..graph.store_format import INT8_VERSION, index_dtype, label_dtype
from ..graph.summary import count_labels
from ..graph.writer import StoreWriter
from ..io.blocks import DROP_BYTES
from ..memory.cgroup import effective_limit
from ..memory.reading import own_memory
from ..progress import Progress, counted
from .description import FeatureDtype as FeatureDtype
from .leaks import refuse_leaks
from .official import OFFICIAL_DIR, is_official, official_folder
from .source import Source, from_store, standardized

# added to the memory that the process already uses, such as a notebook's with torch loaded
_DEFAULT_BYTES = 2**30
_KERNEL_BYTES = 96 * 2**20  # to compile the kernels (numba)
# chunks of features and edges, and written pages that are not yet on disk
_CHUNKS_BYTES = 64 * 2**20 + 2 * DROP_BYTES
_MIN_WORKSPACE = 32 * 2**20  # for sorting the edges
_WIDE = 100  # times the median standard deviation of the columns

Item = TypeVar("Item")


def _ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield `items`, none of which is None; a second thread reads and decompresses the next one,
    half of the work, while the caller uses the current one."""
    # Callers close this generator explicitly. Otherwise the garbage collector may close it in a
    # thread that is just starting. There the wait for the second thread never returns, because
    # Python 3.11 then holds the lock that guards the ends of all threads.
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, None)  # None after the last item
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


def _checked_splits(source: Source) -> tuple[dict[str, Array], dict[str, object]]:
    """Return the int64 ids of each split, and the label counts of the store's summary.

    With the option `drop_unlabelled`, the splits have no unlabelled nodes. A split that training
    could not use is refused.
    """
    labelled = NodeSet(source.num_nodes)
    begin = 0  # node of the chunk's first label
    class_sizes = np.zeros(source.num_classes, np.int64)  # nodes of each class; empty for targets
    for chunk in source.label_chunks():
        has_label = is_labelled(chunk)  # bool [n]
        labelled.add(begin + np.flatnonzero(has_label))
        if source.num_classes:
            np.add.at(class_sizes, chunk[has_label], 1)
        begin += len(chunk)
    splits = source.read_splits()
    num_seeds = sum(map(len, splits.values()))  # before nodes are dropped
    if source.options.drop_unlabelled:
        for name, ids in splits.items():
            is_dropped = (ids >= 0) & (ids < source.num_nodes)  # others are refused below
            is_dropped[is_dropped] = ~labelled.contains(ids[is_dropped])
            splits[name] = ids[~is_dropped]
    for name, problem in split_problems(
        splits,
        source.num_nodes,
        labelled.contains,
        for_repeats="; a mask has true and false",
        for_unlabelled="; drop_unlabelled: true in dataset.yaml leaves them out",
    ):
        raise InputError(f"{source.where(name)}: {problem}")
    counts: dict[str, object] = {"unlabelled_nodes": source.num_nodes - labelled.count()}
    if source.num_classes:
        counts = count_labels(class_sizes, source.num_nodes)
    return splits, {**counts, "dropped_seeds": num_seeds - sum(map(len, splits.values()))}


@dataclass
class _Conversion:
    """Writer of all arrays of a store; a second thread writes the features.

    If one thread fails, the other one raises a `CancelledError` at its next chunk.
    """

    source: Source
    writer: StoreWriter
    dtype: np.dtype[np.generic]  # of the stored features
    done: Callable[[int], object]  # called with the bytes of each chunk, for the progress
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sample: list[Array] = field(default_factory=list)  # some rows of features, [n, F] each
    _num_sampled: int = 0  # rows from which they were taken

    def write(self, splits: Mapping[str, Array], undirected: bool, workspace: int) -> None:
        """Write the store; `workspace` is the memory for sorting the edges, in bytes."""
        with ThreadPoolExecutor(1) as pool:
            features = pool.submit(self._write_features)
            try:
                self._write_edges(undirected, workspace)
                self._write_nodes(splits)
                features.result()
                self.writer.entries["summary"] |= self._scales()
            except CancelledError:
                features.result()  # raises the error of the second thread, which failed first
                raise
            finally:
                self._stop.set()  # if this thread failed: leaving `pool` waits for the second one

    def _count(self, num_bytes: int) -> None:
        if self._stop.is_set():
            raise CancelledError  # the other thread has failed, and its error is reported
        with self._lock:  # `done` adds to one number, from two threads
            self.done(num_bytes)

    def _write_chunks(
        self, name: str, dtype: DTypeLike, chunks: Iterable[Array], row_shape: tuple[int, ...] = ()
    ) -> None:
        with self.writer.create(name, dtype, row_shape) as out:
            for chunk in chunks:
                out.write(chunk)

    def _write_edges(self, undirected: bool, workspace: int) -> None:
        source = self.source
        edges = EdgeSort(
            self.writer.folder,
            source.num_nodes,
            source.num_edges,
            undirected=undirected,
            workspace=workspace,
            done=self._count,
        )
        with contextlib.closing(_ahead(source.edge_chunks(edges.chunk_edges))) as chunks:
            edges.read(chunks)  # to temporary files
        with (
            self.writer.create("row", index_dtype(source.num_nodes)) as row,
            self.writer.create("colptr", "<i8") as colptr,  # int64, little-endian
        ):
            edges.write(row, colptr)
        self.writer.entries["summary"] |= {
            "edges_read": edges.num_read,
            "dropped_edges": source.num_edges - edges.num_read,  # of unknown nodes
            "merged_edges": (1 + undirected) * edges.num_read - row.length,  # 0 if directed
        }

    def _write_nodes(self, splits: Mapping[str, Array]) -> None:
        source = self.source
        self._write_chunks(
            "y", label_dtype(source.num_classes), source.label_chunks(), source.target_shape
        )
        for split, ids in splits.items():
            self.writer.write(split, ids)  # int64 [n]
        names = source.node_names()
        if names is not None:
            self._write_chunks("node_name", *names)  # their dtype and chunks
        if source.label_names is not None:
            self.writer.write("label_name", source.label_names)  # UTF-8 bytes [C]

    def _write_features(self) -> None:
        width = self.source.num_features
        try:
            if self.dtype != np.int8:
                with self._features(self.dtype) as chunks:
                    self._write_chunks("x", self.dtype, chunks, (width,))
                return
            with self._features(np.float32) as chunks:  # the first pass finds the columns' ranges
                columns = Int8Columns.covering(chunks, width, self.source.features_at)
            self.writer.entries["version"] = INT8_VERSION
            self.writer.entries["int8"] = [part.tolist() for part in columns]
            with self._features(np.float32) as chunks:
                self._write_chunks("x", np.int8, map(columns.encode, chunks), (width,))
        except BaseException:
            self._stop.set()  # the first thread must not go on writing edges
            raise

    @contextlib.contextmanager
    def _features(self, dtype: DTypeLike) -> Iterator[Iterator[Array]]:
        with contextlib.closing(_ahead(self.source.x_chunks())) as chunks:  # why: see `_ahead`
            yield map(self._sampled, finite(chunks, dtype, self.source.features_at))  # [n, F] each

    def _sampled(self, chunk: Array) -> Array:
        # Keep each `step`-th row of a pass: 2**19 values, 2 MB in float32. Int8 has two passes.
        step = -(-self.source.num_nodes * self.source.num_features // 2**19)  # rounded up
        first = -self._num_sampled % step  # the chunk's first row whose number `step` divides
        self._sample.append(chunk[first::step].copy())  # a view would keep the whole chunk
        self._num_sampled += len(chunk)
        self._count(chunk.size * self.dtype.itemsize)
        return chunk

    def _scales(self) -> dict[str, str]:
        """Return the summary's entry that names columns of far larger spread than most, or {}."""
        spread = np.concatenate(self._sample).std(axis=0, dtype=np.float64)
        usual = np.median(spread[spread > 0].tolist() or [1.0])  # without constant columns
        # what each column was divided by; 1 if it was not standardized
        divisor = np.array(self.source.origin.get("standardized", {}).get("deviation", 1.0))
        names = self.source.columns(np.flatnonzero((spread > _WIDE * usual) & (divisor == 1)))
        return {f"spread_over_{_WIDE}_times_the_median": names} if names else {}


def _check_disk(
    path: Path, source: Source, undirected: bool, feature_dtype: np.dtype[np.generic]
) -> int:
    """Refuse a disk without room for the store, and return the bytes of the temporary files.

    The store's splits and node names are not counted.
    """
    num_pairs = source.num_edges * (1 + undirected)
    id_bytes = np.dtype(index_dtype(source.num_nodes)).itemsize
    bytes_per_node = (
        8  # an int64 of colptr
        + np.dtype(label_dtype(source.num_classes)).itemsize * math.prod(source.target_shape)
        + source.num_features * feature_dtype.itemsize
    )
    final = source.num_nodes * bytes_per_node + num_pairs * id_bytes + 2**20  # 1 MB of headers
    temporary = num_pairs * 2 * id_bytes  # both ends of each edge, until they are sorted
    check_space(
        path,
        final + temporary,
        f"{format_bytes(final + temporary)} of free disk space "
        f"({format_bytes(final)} for the store, {format_bytes(temporary)} until it is done)",
    )
    return temporary


def _workspace(source: Source, memory_limit: str | int | None) -> int:
    # the bytes for sorting the edges: the memory limit less all other uses of memory
    used = own_memory()[0]  # by this process now, bytes
    limit = min(used + _DEFAULT_BYTES, int(0.95 * effective_limit()[0]))  # bytes; 5 % to spare
    if memory_limit is not None:
        limit = parse_bytes(memory_limit)
    x_bytes = source.num_nodes * source.num_features * source.feature_dtype.itemsize
    data_bytes = x_bytes + 16 * source.num_edges  # an edge has two ids in int64
    fixed = (
        used
        + _KERNEL_BYTES
        + min(_CHUNKS_BYTES, 4 * data_bytes)  # small data need less than full chunks
        + source.num_nodes // 8  # the set of labelled nodes, one bit a node
        + 8 * source.num_classes  # the nodes of each class, int64
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
    """Open a store, an official data set or a folder (see `open_folder`) for conversion."""
    from .folder import open_folder, open_official  # imports pyarrow and pandas

    path = home(name)
    if not is_store(path) and not is_official(str(path)):
        return open_folder(path, None if description is None else home(description))
    if description is not None:
        raise InputError(f"description: expected one of a folder of files, got it with {path}")
    if is_store(path):
        return from_store(open_store(path))
    folder = official_folder(str(path), home(data_dir))  # such as dataset/ogbn_arxiv
    if not folder.exists():
        raise InputError(
            f"{folder}: expected the files of {path}, found none: python -m ogbnlib download {path}"
        )
    return open_official(str(path), folder)


@clear_errors()
def convert(
    source: StrPath | Source,
    path: StrPath,
    *,
    description: StrPath | None = None,
    undirected: bool | None = None,
    feature_dtype: FeatureDtype | None = None,
    standardize: bool | Sequence[str] | None = None,
    memory_limit: str | int | None = None,
    progress: Progress = True,
) -> Store:
    """Convert a data set to a store in bounded memory; the store appears whole or not at all.

    A file that changes is an `InputError`. The next conversion deletes what a SIGKILL leaves.

    Args:
        source: a folder of files, an official name in the folder "dataset", a store or a `Source`.
        path: a new or empty folder.
        description: a file to use as the folder's `dataset.yaml`, or the place of its draft.
        undirected: add reverse edges, sort each node's in-edges, drop duplicates.
        feature_dtype: float16 halves the bytes and refuses values beyond its range; int8 halves
            them again, by 255 evenly spaced values a column. By default this and `undirected` are
            as in `dataset.yaml`, else as in the data, float64 as float32.
        standardize: subtract the train nodes' mean from each feature, divide by their deviation:
            True, or names and patterns of columns. `store.origin["standardized"]` has both.
        memory_limit: "4 GB" or bytes for this process, written pages included. By default 95 % of
            its limit, at most 1 GB more than it uses now, which is enough for ogbn-papers100M.
        progress: show a bar, or in a log a line every 30 s; a function is called instead.
    """
    if not isinstance(source, Source):
        source = open_source(source, description=description)
    if not source.num_nodes * source.num_features:
        raise InputError(f"{source.name}: expected nodes with features, found none")
    options = source.options.overridden(
        undirected=undirected, feature_dtype=feature_dtype, standardize=standardize
    )
    if source.undirected and options.undirected is False:
        raise InputError(
            f"undirected: {source.name} has the reverse of each edge, which can't be taken out again; "
            "convert the original data"
        )
    add_reverse = bool(options.undirected) and not source.undirected
    workspace = _workspace(source, memory_limit)
    target = Path(os.path.realpath(home(path)))  # the target of a link
    x_dtype = np.dtype(options.feature_dtype or source.feature_dtype)
    check_new(target)  # before the data are read
    temporary = _check_disk(target, source, add_reverse, x_dtype)
    # Bytes for the progress: features, edges as they are read and as they are sorted.
    # A feature in int8 counts twice, as it is read twice; a pass for mean and deviation counts 1.
    value_bytes = (2 if x_dtype == np.int8 else x_dtype.itemsize) + bool(options.standardize)
    total = source.num_nodes * source.num_features * value_bytes + 16 * source.num_edges + temporary
    splits, counts = _checked_splits(source)
    refuse_leaks(source)
    with new_folder(target) as folder, counted("convert", total, progress) as done:
        writer = StoreWriter(folder)
        writer.entries["summary"] = counts
        if options.standardize:
            source = standardized(source, options.standardize, splits["train"], done)
        _Conversion(source, writer, x_dtype, done).write(splits, add_reverse, workspace)
        source.check_unchanged()  # before the new store appears
        writer.finish(
            source.name,
            source.num_classes,
            undirected=add_reverse or source.undirected,
            origin={**source.origin, "num_nodes": source.num_nodes},
        )
    return open_store(target)
