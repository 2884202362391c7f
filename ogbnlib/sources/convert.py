"""Conversion of any `Source` to a store in bounded memory: nothing of the graph's size is ever in memory.

The CSC comes from a bucketed external sort. One pass over the edges writes (dst, src) pairs to a temporary file,
chunk by chunk, each chunk sorted by ranges of destinations. Then range by range is read, sorted in RAM by a stable
counting sort and appended to `row.npy`. Disk traffic is sequential or in long pieces both ways, and within a column the
order is that of the input. A second thread converts the features meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError, clear_errors, format_bytes, parse_bytes
from ..files import DROP_BYTES, StrPath, check_new, check_space, home, new_folder
from ..graph.bits import NodeSet
from ..graph.checks import finite, index_dtype, label_dtype, split_problems
from ..graph.npz import Array
from ..graph.sort import EdgeSort
from ..graph.store import Store, open_store
from ..graph.writer import StoreWriter
from ..memory.cgroup import effective_limit
from ..memory.reading import own_memory
from ..progress import Count, counted
from .data import ArraySource, Source, mask_ids
from .official import OFFICIAL_DIR, is_official, locate_official, open_official
from .ogb import open_raw, stamps
from .tables import TableSource, find_files, is_tables, open_tables, origin_of_files

FeatureDtype = Literal["float16", "float32"]
Progress = bool | Callable[[Count], object]  # whether to show it, or a function to call instead
_DEFAULT_BYTES = 2**30  # beyond the memory of a process with torch loaded, such as a notebook
_KERNEL_BYTES = 96 * 2**20  # compiling the kernels
_CHUNKS_BYTES = 64 * 2**20 + 2 * DROP_BYTES  # chunks of features and edges, and pages not yet on disk
_MIN_WORKSPACE = 32 * 2**20

Item = TypeVar("Item")


def _ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield `items`, each made in another thread while the one before it is used: inflating takes half of the time.

    Close it explicitly. The garbage collector may run in a thread that is just starting, where the wait for this
    thread's end never returns (Python 3.11 holds the lock of all threads' ends then).
    """
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


# The conversion ------------------------------------------------------------------------------------------------------


class _Abandoned(Exception):
    """Another thread has failed; its error is the one to report."""


class _Conversion:
    def __init__(self, source: Source, writer: StoreWriter, done: Callable[[int], object], x_dtype: DTypeLike) -> None:
        self.source, self.writer, self._done, self.x_dtype = source, writer, done, x_dtype
        self.stop, self._lock = threading.Event(), threading.Lock()

    def done(self, count: int) -> None:
        if self.stop.is_set():
            raise _Abandoned
        with self._lock:
            self._done(count)

    def per_node(self, name: str, dtype: DTypeLike, chunks: Iterable[Array], row_shape: tuple[int, ...] = ()) -> None:
        """Write the array `name` from `chunks` of rows, in order of the nodes."""
        with self.writer.create(name, dtype, row_shape) as out:
            for chunk in chunks:
                out.write(chunk)
                self.done(chunk.nbytes)

    def features(self) -> None:
        try:
            with contextlib.closing(_ahead(self.source.x_chunks())) as ahead:
                chunks = finite(ahead, self.x_dtype, f"{self.source.name}, node_feat")
                self.per_node("x", self.x_dtype, chunks, (self.source.num_features,))
        except BaseException:
            self.stop.set()
            raise

    def graph(self, edges: EdgeSort) -> None:
        source, writer = self.source, self.writer
        with contextlib.closing(_ahead(source.edge_chunks(edges.chunk_edges))) as ahead:
            edges.read(ahead)
        with writer.create("row", index_dtype(source.num_nodes)) as row, writer.create("colptr", "<i8") as colptr:
            edges.write(row, colptr)
        self.per_node("y", label_dtype(source.num_classes), source.label_chunks())

    def run(self, undirected: bool, workspace: int) -> None:
        source, splits = self.source, self.source.read_splits()
        labelled, begin = NodeSet(source.num_nodes), 0
        for chunk in source.label_chunks():
            labelled.add(begin + np.flatnonzero(chunk >= 0))
            begin += len(chunk)
        for name, problem in split_problems(splits, source.num_nodes, labelled.contains):
            raise InputError(f"{source.where(name)}: {problem}")
        sizes = (source.num_nodes, source.num_edges)
        edges = EdgeSort(self.writer.folder, *sizes, undirected=undirected, workspace=workspace, done=self.done)
        with ThreadPoolExecutor(1) as pool:
            features = pool.submit(self.features)
            try:
                self.graph(edges)
                for name, nodes in splits.items():
                    self.writer.write(name, nodes)
                if (names := source.name_chunks()) is not None:
                    self.per_node("node_name", *names)
                if source.label_names is not None:
                    self.writer.write("label_name", source.label_names)
                features.result()
            except _Abandoned:
                features.result()
            finally:
                self.stop.set()


def disk_bytes(source: Source, undirected: bool, feature_dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the bytes of the finished store, at most, and of the temporary files."""
    num_pairs = source.num_edges * (2 if undirected else 1)
    item = np.dtype(index_dtype(source.num_nodes)).itemsize
    per_node = 8 + np.dtype(label_dtype(source.num_classes)).itemsize + source.num_features * feature_dtype.itemsize
    return source.num_nodes * per_node + num_pairs * item + 2**20, num_pairs * 2 * item


def _workspace(source: Source, memory_limit: str | int | None) -> int:
    """The bytes left for sorting."""
    used, available = own_memory()[0], effective_limit()[0]
    limit = min(used + _DEFAULT_BYTES, int(0.95 * available)) if memory_limit is None else parse_bytes(memory_limit)
    data_bytes = source.num_nodes * source.num_features * source.feature_dtype.itemsize + 16 * source.num_edges
    fixed = used + _KERNEL_BYTES + min(_CHUNKS_BYTES, 4 * data_bytes) + source.num_nodes // 8
    if limit < (least := fixed + _MIN_WORKSPACE):
        name = "memory_limit"
        if memory_limit is None and "SLURM_JOB_ID" in os.environ:  # the job's, of which 5 % stay free
            name, least, limit = "--mem", int(least / 0.95), available
        expected = f"at least {format_bytes(least)} to convert {source.name} (this process uses {format_bytes(used)})"
        raise InputError(f"{name}: expected {expected}, got {format_bytes(limit)}")
    return limit - fixed


def open_source(name: StrPath, data_dir: StrPath = OFFICIAL_DIR, **options: Any) -> tuple[Source, dict[str, Any]]:
    """Return a named data set as a `Source`, and the origin that its store records.

    Args:
        data_dir: the folder of official data sets.
        options: those of `open_tables`; for a folder in OGB's layout only num_classes.

    Raises:
        InputError: see `open_official`, `open_tables` and `open_raw`; for an official data set that is missing.
    """
    name = home(name)
    if is_official(str(name)):
        official = locate_official(str(name), home(data_dir))
        if options:
            raise InputError(f"{name}: expected no files or columns beside an official name, got {', '.join(options)}")
        if not official.present:
            raise InputError(f"{official.folder}: {name} is not there: python -m ogbnlib download {name}")
        return open_official(official), origin_of(official.folder)
    tables = {*options} - {"num_classes"} or is_tables(name)
    source = open_tables(name, **options) if tables else open_raw(name, **options)
    return source, dict(source.origin) if isinstance(source, TableSource) else origin_of(source.path)


def from_data(data: Any, path: StrPath, *, splits: Mapping[str, Any] | None = None, **options: Any) -> Store:
    """Write a PyG `Data` of one kind of node as a store: `x`, `y`, `edge_index`, `train_mask`, `val_mask`, `test_mask`.

    Edges keep their order within a column. A message on standard error names the attributes that a store does not keep,
    such as edge_attr, and rounded features.

    Args:
        splits: node ids, or masks, of train, valid (or val) and test, instead of the masks; [] for an empty one.
        options: num_classes and name; and those of `convert`.

    Raises:
        InputError: naming the attribute, for a `HeteroData`, for attributes that are missing or do not fit together;
            see also `convert`.
    """
    if hasattr(data, "node_types") or not hasattr(data, "to_dict"):
        hint = "; see its to_homogeneous()" if hasattr(data, "node_types") else ""
        raise InputError(f"data: expected a PyG Data such as dataset[0], got {type(data).__name__}{hint}")
    masks = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"} if splits is None else {}
    required = ["edge_index", "x", "y", *masks.values()]
    values = {str(name): value for name, value in data.to_dict().items() if value is not None}
    if missing := [name for name in required if name not in values]:
        hint = "; pass splits={'train': ids, 'valid': ids, 'test': ids}" if {*missing} & {*masks.values()} else ""
        hint += "; set data.edge_index, the edges of adj_t" if "edge_index" in missing and "adj_t" in values else ""
        raise InputError(f"data: expected {', '.join(required)}, found no {', '.join(missing)}{hint}")
    for mask in masks.values():
        kind = f"{values[mask].dtype} {list(values[mask].shape)}"
        if (ids := mask_ids(values[mask], values["x"].shape[0])) is None:
            hint = f"; pass one column of each as splits, such as data.{mask}[:, 0]" if values[mask].ndim == 2 else ""
            raise InputError(f"data.{mask}: expected booleans [N], got {kind}{hint}")
        values[mask] = ids
    others = sorted({*values} - {*required, "num_nodes", "train_mask", "val_mask", "test_mask"})
    if others:
        print(f"{path}: a store does not keep {', '.join(others)} of the data", file=sys.stderr)
    if values.get("num_nodes", len(values["x"])) != len(values["x"]):
        raise InputError(f"data.num_nodes: expected {len(values['x'])}, one a row of x, got {values['num_nodes']}")
    splits = {split: values[mask] for split, mask in masks.items()} if splits is None else splits
    name, num_classes = options.pop("name", None) or Path(path).absolute().name, options.pop("num_classes", None)
    source = ArraySource.from_arrays(name, values["edge_index"], values["x"], values["y"], splits, num_classes)
    if source.x.dtype.itemsize > source.feature_dtype.itemsize and not options.get("feature_dtype"):
        print(f"{path}: x is {source.x.dtype}, and kept as {source.feature_dtype}", file=sys.stderr)
    return convert(source, path, **options)


def origin_of(folder: Path) -> dict[str, Any]:
    """Return the origin that a store records: the folder's path, and each file's size and mtime in ns."""
    if is_tables(folder):
        return origin_of_files(folder.resolve(), find_files(folder))
    return {"raw": str(folder.resolve()), "files": {name: [*stamp[:2]] for name, stamp in stamps(folder).items()}}


@clear_errors()
def convert(
    source: StrPath | Source,
    path: StrPath,
    *,
    undirected: bool = False,
    feature_dtype: FeatureDtype | None = None,
    memory_limit: str | int | None = None,
    progress: Progress = True,
    check: Callable[[], None] = lambda: None,
    origin: Mapping[str, Any] | None = None,
) -> Store:
    """Turn a data set into a store, in bounded memory; the store appears whole or not at all.

    Args:
        source: a folder in OGB's binary layout or of a user's own files (`open_tables`), an official name in the folder
            "dataset", or any `Source`.
        path: new or empty.
        undirected: add reverse edges; columns are then sorted and without repeats.
        feature_dtype: float16 halves disk and traffic; values beyond its range are refused. By default the data set's
            own, float32 for float64.
        memory_limit: "4 GB" or bytes for this whole process; by default 1 GB beyond its present memory, or the limit
            of the process if that is less. A memory cgroup of that size is enough, written pages included. A larger
            one makes fewer and longer ranges to sort; 1 GB is enough for ogbn-papers100M.
        progress: show it: a bar, in a log a line every 30 s. A function is called instead.
        check: called between chunks; its exception ends the conversion, and nothing is left behind.
        origin: the origin that the store records; for a folder by default `origin_of` it.

    Raises:
        InputError: before anything is written, for bad parameters, a target in use, a limit that is too small, or too
            little disk space; while streaming, for damage, disk errors, replaced files, ids out of range, features that
            are not finite or too large, and splits that overlap or have no label. Nothing is left behind then. A
            SIGKILL leaves the hidden `.NAME.part`, which the next conversion clears.
    """
    if isinstance(source, str | os.PathLike):
        source, of = open_source(source)
        origin = of if origin is None else origin
    if feature_dtype not in (None, "float16", "float32"):
        raise InputError(f"feature_dtype: expected float16 or float32, got {feature_dtype!r}")
    workspace = _workspace(source, memory_limit)
    target, x_dtype = Path(os.path.realpath(home(path))), np.dtype(feature_dtype or source.feature_dtype)
    check_new(target)
    final, temporary = disk_bytes(source, undirected, x_dtype)
    needed = f"{format_bytes(final)} for the store, {format_bytes(temporary)} until it is done"
    check_space(target, final + temporary, f"{format_bytes(final + temporary)} of free disk space ({needed})")
    total = source.num_nodes * (source.num_features * x_dtype.itemsize + 2) + 16 * source.num_edges + temporary

    with new_folder(target) as folder, counted("convert", total, progress) as advance:

        def done(count: int) -> None:
            check()
            advance(count)

        writer = StoreWriter(folder)
        _Conversion(source, writer, done, x_dtype).run(undirected, workspace)
        source.check_unchanged()
        made_of = {**(origin or {}), "num_nodes": source.num_nodes}
        writer.finish(source.name, source.num_classes, undirected=undirected, origin=made_of)
    return open_store(target)
