"""From OGB's raw layout to a store, in bounded memory: no member of the raw file is ever held.

The CSC comes from a bucketed external sort. One pass over the edges writes (dst, src) pairs to a temporary file,
chunk by chunk, each chunk sorted by ranges of destinations; then one range after the other is read, sorted in RAM by a
stable counting sort and appended to `row.npy`. Both directions of disk traffic are sequential or in long pieces, and
within a column the order is that of the input, so the result equals `RawDataset.read_csc` bit for bit. Features are
converted in a second thread meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from tqdm import tqdm

from ..errors import InputError, format_bytes, parse_bytes
from ..files import DROP_BYTES, Stream, StrPath
from ..graph import npz
from ..graph.bits import NodeSet, has, kernel, put, rank
from ..graph.npz import Array, MemberInfo
from ..graph.sort import _Pairs, csc_from_pairs, index_dtype, plan_shift
from ..graph.store import SPLITS, Store, label_dtype
from ..graph.writer import StoreWriter, check_target
from ..memory.reading import own_memory
from .ogb import open_raw

FeatureDtype = Literal["float16", "float32"]
_DEFAULT_BYTES = 2**30  # beside what the process holds already, which a notebook with torch loaded does
# Beside the sort: compiling the kernels, chunks of features and edges on their way, and pages not yet on disk.
_FIXED_BYTES = 160 * 2**20 + 2 * DROP_BYTES
_MIN_WORKSPACE = 32 * 2**20


class Source(Protocol):
    """What is converted, in pieces: a `RawDataset`, or a model that makes the data up as they are asked for."""

    @property
    def name(self) -> str: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_edges(self) -> int: ...
    @property
    def num_features(self) -> int: ...
    @property
    def num_classes(self) -> int: ...
    def edge_chunks(self, chunk_edges: int = ...) -> Iterator[tuple[Array, Array]]: ...
    def x_info(self) -> MemberInfo: ...
    def x_chunks(self) -> Iterator[Array]: ...
    def label_chunks(self) -> Iterator[Array]: ...
    def has_year(self) -> bool: ...
    def year_chunks(self) -> Iterator[Array]: ...
    def read_splits(self) -> dict[str, Array]: ...


Item = TypeVar("Item")


def _ahead(items: Iterator[Item]) -> Iterator[Item]:
    """`items`, each made in another thread while the one before it is used: inflating takes half of all the time."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


@kernel
def _reach(pairs: Any, base: Any, inside: Any, reached: Any) -> None:
    """Add to `reached` the source of every edge whose destination is `inside`."""
    for i in range(len(pairs)):
        if has(inside, base + pairs[i, 0]):
            put(reached, pairs[i, 1])


@kernel
def _keep(pairs: Any, base: Any, expanded: Any, kept: Any, before: Any) -> Any:
    """Keep the edges into `expanded` nodes, with new ids, at the front of `pairs`; returns how many there are."""
    first, count = rank(kept, before, base), 0
    for i in range(len(pairs)):
        dst = base + pairs[i, 0]
        if has(expanded, dst):
            src = pairs[i, 1]
            pairs[count, 0] = rank(kept, before, dst) - first
            pairs[count, 1] = rank(kept, before, src)
            count += 1
    return count


class _Kept:
    """The nodes that keep_hops keeps, those of them that are expanded, and their new ids."""

    def __init__(self, kept: NodeSet, expanded: NodeSet) -> None:
        self.kept, self.expanded = kept, expanded
        self.num_nodes = kept.count()
        self.ids, self.mask = kept.ranks, kept.mask

    def edges(self, pairs: Array, base: int) -> Array:
        return pairs[: _keep(pairs, base, self.expanded.words, self.kept.words, self.kept.before)]


# The conversion ------------------------------------------------------------------------------------------------------


class _Stopped(Exception):
    """Another thread has failed; its error is the one to report."""


class _Conversion:
    def __init__(
        self,
        source: Source,
        writer: StoreWriter,
        bar: Any,
        *,
        undirected: bool,
        feature_dtype: FeatureDtype,
        keep_hops: int | None,
        workspace: int,
    ) -> None:
        self.source, self.writer, self.bar = source, writer, bar
        self.undirected, self.keep_hops, self.x_dtype = undirected, keep_hops, np.dtype(feature_dtype)
        self.id_dtype = index_dtype(source.num_nodes)
        self.workspace = workspace
        self.chunk_edges = max(1, min(2**20, workspace // 128))
        self.edge_bytes = 3 * np.dtype(self.id_dtype).itemsize  # a pair, and its entry in row
        self.kept: _Kept | None = None
        self.stop, self._lock = threading.Event(), threading.Lock()
        self._serial = 0

    def done(self, count: int) -> None:
        if self.stop.is_set():
            raise _Stopped
        with self._lock:
            self.bar.update(count)

    def _scratch(self) -> Path:
        self._serial += 1
        return self.writer.folder / f"pairs-{self._serial}.tmp"

    # features

    def features(self) -> None:
        """x.npy, checked; runs beside the rest."""
        out = self.writer.create("x", self.x_dtype, (self.source.num_features,))
        info, check = self.source.x_info(), _FeatureCheck(self.x_dtype)
        begin = 0
        if not info.fortran_order:
            for chunk in _ahead(self.source.x_chunks()):
                values = check(chunk, begin)
                out.write(self._kept_rows(values, begin))
                begin += len(chunk)
                self.done(chunk.nbytes)
        else:
            columns = Stream(self.writer.folder / "x-columns.tmp")
            try:
                for chunk in _ahead(self.source.x_chunks()):
                    columns.append(check(chunk, begin % self.source.num_nodes).view(np.uint8).data)
                    begin += len(chunk)
                    self.done(chunk.nbytes)
                columns.drop()
                for begin, values in self._transposed(columns.fd):
                    out.write(self._kept_rows(values, begin))
                    self.done(0)
            finally:
                columns.close()
            columns.path.unlink()
        check.finish(self.source.name)
        self.writer.close("x")

    def _transposed(self, fd: int) -> Iterator[tuple[int, Array]]:
        num_nodes, num_features = self.source.num_nodes, self.source.num_features
        item = self.x_dtype.itemsize
        rows = max(1, npz.CHUNK_BYTES // (item * num_features))
        for begin in range(0, num_nodes, rows):
            count = min(rows, num_nodes - begin)
            parts = [os.pread(fd, count * item, (column * num_nodes + begin) * item) for column in range(num_features)]
            yield begin, np.frombuffer(b"".join(parts), self.x_dtype).reshape(num_features, count).T

    def _kept_rows(self, values: Array, begin: int) -> Array:
        return values if self.kept is None else values[self.kept.mask(begin, begin + len(values))]

    # labels, splits, years

    def _per_node(self, name: str, dtype: Any, chunks: Iterator[Array]) -> None:
        out, begin = self.writer.create(name, dtype), 0
        for chunk in chunks:
            out.write(self._kept_rows(chunk, begin))
            begin += len(chunk)
            self.done(chunk.nbytes)
        self.writer.close(name)

    def seeds(self, splits: dict[str, Array]) -> NodeSet:
        """The nodes with a label and those of the splits, as bits."""
        nodes, begin = NodeSet(self.source.num_nodes), 0
        for chunk in self.source.label_chunks():
            nodes.add(begin + np.flatnonzero(chunk >= 0))
            begin += len(chunk)
        for ids in splits.values():
            nodes.add(ids)
        return nodes

    def labels_and_splits(self, splits: dict[str, Array]) -> None:
        self._per_node("y", label_dtype(self.source.num_classes), self.source.label_chunks())
        y = np.load(self.writer.folder / "y.npy", mmap_mode="r")
        taken: dict[str, Array] = {}
        for name in SPLITS:
            ids = splits[name] if self.kept is None else self.kept.ids(splits[name])
            where = f"{self.source.name}, split {name}"
            if len(np.unique(ids)) != len(ids):
                raise InputError(f"{where}: expected each node once, found {len(ids) - len(np.unique(ids))} repeats")
            if (y[ids] < 0).any():
                node = splits[name][int((y[ids] < 0).argmax())]
                raise InputError(f"{where}: expected labelled nodes, but node {node} has no label")
            for other, before in taken.items():
                if (shared := np.intersect1d(ids, before)).size:
                    raise InputError(f"{where}: expected no node of {other}, found {len(shared)}")
            taken[name] = ids
            self.writer.write(name, ids)

    def years(self) -> None:
        if not self.source.has_year():
            return
        low = high = 0
        for chunk in self.source.year_chunks():
            low, high = min(low, int(chunk.min())), max(high, int(chunk.max()))
        small = low >= -(2**15) and high < 2**15
        self._per_node("year", np.int16 if small else np.int64, self.source.year_chunks())

    # the graph

    def pairs(self) -> _Pairs:
        """All edges on disk, by range of destinations; with `undirected` in both directions."""
        num_nodes = self.source.num_nodes
        num_pairs = self.source.num_edges * (2 if self.undirected else 1)
        shift = plan_shift(num_nodes, num_pairs, self.edge_bytes, self.workspace)
        pairs = _Pairs(self._scratch(), num_nodes, shift, self.id_dtype)
        for src, dst in _ahead(self.source.edge_chunks(self.chunk_edges)):
            pairs.append(src, dst, self.undirected)
            self.done(16 * len(src))
        pairs.written()
        return pairs

    def closure(self, pairs: _Pairs, seeds: NodeSet) -> _Kept:
        """The nodes within `keep_hops` in-hops of `seeds`: one pass over the pairs per hop."""
        assert self.keep_hops is not None
        inside = expanded = seeds
        for _ in range(self.keep_hops):
            reached = inside.copy()
            for number in range(pairs.num_ranges):
                for piece in pairs.pieces(number, self.chunk_edges):
                    _reach(piece, number << pairs.shift, inside.words, reached.words)
                    self.done(piece.nbytes)
            inside, expanded = reached, inside
        return _Kept(inside, expanded)

    def columns(self, pairs: _Pairs) -> None:
        """row.npy and colptr.npy from the pairs, range by range; deletes the pairs."""
        num_nodes = self.source.num_nodes if self.kept is None else self.kept.num_nodes
        self._row, self._colptr = self.writer.create("row", index_dtype(num_nodes)), self.writer.create("colptr", "<i8")
        self._colptr.write(np.zeros(1, np.int64))
        self._sort(pairs, 0)
        self.writer.close("row")
        self.writer.close("colptr")

    def _sort(self, pairs: _Pairs, base: int) -> None:
        """Append the columns of `pairs`, whose first destination is node `base`."""
        for number in range(pairs.num_ranges):
            first, width, count = base + (number << pairs.shift), pairs.width(number), pairs.count(number)
            if count * self.edge_bytes + width * 8 <= self.workspace:
                self._sort_in_ram(pairs.read(number), first, width)
            elif width == 1:
                self._stream_column(pairs, number, first)
            else:
                # More edges than an average range has: split it, as the whole was.
                shift = plan_shift(width, count, self.edge_bytes, self.workspace)
                parts = _Pairs(self._scratch(), width, min(shift, (width - 1).bit_length() - 1), self.id_dtype)
                for piece in pairs.pieces(number, self.chunk_edges):
                    parts.append(piece[:, 1], piece[:, 0])
                parts.written()
                self._sort(parts, first)
                continue
            self.done(count * pairs.pair_bytes)
        pairs.delete()

    def _columns_kept(self, first: int, width: int) -> int:
        if self.kept is None:
            return width
        low, high = self.kept.ids(np.array([first, first + width]))
        return int(high - low)

    def _sort_in_ram(self, pairs: Array, first: int, width: int) -> None:
        if self.kept is not None:
            pairs = self.kept.edges(pairs, first)
        colptr, row = csc_from_pairs(self._columns_kept(first, width), pairs[:, 0], pairs[:, 1], self.undirected)
        self._colptr.write(colptr[1:] + self._row.length)
        self._row.write(row)

    def _stream_column(self, pairs: _Pairs, number: int, first: int) -> None:
        """One column that is too long for the workspace; with `undirected` as bits, which sorts and drops repeats."""
        num_nodes = self.source.num_nodes if self.kept is None else self.kept.num_nodes
        sources = NodeSet(num_nodes if self.undirected else 0)
        for piece in pairs.pieces(number, self.chunk_edges):
            edges = piece if self.kept is None else self.kept.edges(piece, first)
            if self.undirected:
                sources.add(edges[:, 1])
            else:
                self._row.write(edges[:, 1])
        for begin in range(0, sources.num_nodes, 2**20):
            end = min(begin + 2**20, num_nodes)
            self._row.write(begin + np.flatnonzero(sources.mask(begin, end)))
        self._colptr.write(np.full(self._columns_kept(first, 1), self._row.length))

    def node_ids(self) -> None:
        assert self.kept is not None
        out, step = self.writer.create("node_id", self.id_dtype), 2**20
        for begin in range(0, self.source.num_nodes, step):
            out.write(begin + np.flatnonzero(self.kept.mask(begin, min(begin + step, self.source.num_nodes))))
        self.writer.close("node_id")

    def run(self) -> None:
        splits = self.source.read_splits()
        with ThreadPoolExecutor(1) as pool:
            features: Future[None] | None = None
            try:
                if self.keep_hops is None:
                    features = self._start(pool)
                pairs = self.pairs()
                if self.keep_hops is not None:
                    self.kept = self.closure(pairs, self.seeds(splits))
                    features = self._start(pool)
                self.columns(pairs)
                self.labels_and_splits(splits)
                self.years()
                if self.kept is not None:
                    self.node_ids()
                assert features is not None
                features.result()
            except BaseException as error:
                self.stop.set()
                failure = features.exception() if features is not None else None
                if isinstance(error, _Stopped) and failure is not None:
                    raise failure from None
                raise

    def _start(self, pool: ThreadPoolExecutor) -> Future[None]:
        features = pool.submit(self.features)

        def ended(future: Future[None]) -> None:
            if future.exception() is not None:
                self.stop.set()

        features.add_done_callback(ended)
        return features


class _FeatureCheck:
    """Casts chunks of features and counts what is not finite, before or after."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype, self.most = dtype, float(np.finfo(dtype).max)
        self.bad, self.first_bad, self.large, self.first_large = 0, -1, 0, -1

    def __call__(self, values: Array, begin: int) -> Array:
        """`values` [n, F] or [n] in the wanted dtype; `begin` is the row of the first."""
        with np.errstate(over="ignore"):
            out = values.astype(self.dtype, order="C", copy=False)
        # NaN makes both comparisons false.
        if not (values.size == 0 or (values.max() <= self.most and values.min() >= -self.most)):
            given, finite = np.isfinite(values), np.isfinite(out)
            for wrong, count, first in ((~given, "bad", "first_bad"), (given & ~finite, "large", "first_large")):
                if wrong.any():
                    setattr(self, count, getattr(self, count) + int(wrong.sum()))
                    row, known = begin + int(np.argwhere(wrong)[:, 0].min()), getattr(self, first)
                    setattr(self, first, row if known < 0 else min(row, known))
        return out

    def finish(self, name: str) -> None:
        if self.bad:
            raise InputError(
                f"{name}, node_feat: expected finite values, found {self.bad} NaN or Inf, "
                f"the first in row {self.first_bad}"
            )
        if self.large:
            raise InputError(
                f"{name}, node_feat: found {self.large} values beyond {self.most:g}, the largest {self.dtype}, the "
                f"first in row {self.first_large}; use feature_dtype='float32'"
            )


def _disk_bytes(source: Source, undirected: bool, feature_dtype: FeatureDtype) -> tuple[int, int]:
    """Bytes of the finished store, at most, and of the temporary files beside it."""
    num_pairs = source.num_edges * (2 if undirected else 1)
    item, x_bytes = np.dtype(index_dtype(source.num_nodes)).itemsize, np.dtype(feature_dtype).itemsize
    x_bytes *= source.num_nodes * source.num_features
    per_node = 8 + np.dtype(label_dtype(source.num_classes)).itemsize + 2 * source.has_year()
    return (
        x_bytes + source.num_nodes * per_node + num_pairs * item + 2**20,
        num_pairs * 2 * item + (x_bytes if source.x_info().fortran_order else 0),
    )


def _workspace(source: Source, limit: int, keep_hops: int | None) -> int:
    """What is left of `limit` for sorting, in bytes."""
    held = own_memory()[0]
    bits = -(-source.num_nodes // 64) * 8
    fixed = held + _FIXED_BYTES + bits * (0 if keep_hops is None else 5)
    if limit < fixed + _MIN_WORKSPACE:
        raise InputError(
            f"memory_limit: expected at least {format_bytes(fixed + _MIN_WORKSPACE)} for {source.name} "
            f"({format_bytes(held)} are held by this process already), got {format_bytes(limit)}"
        )
    return limit - fixed


def write_store(
    source: Source,
    path: StrPath,
    *,
    undirected: bool,
    feature_dtype: FeatureDtype,
    memory_limit: str | int | None,
    keep_hops: int | None,
    progress: bool,
    origin: dict[str, Any],
) -> Store:
    """Write any `Source` as a store; see `convert`."""
    if feature_dtype not in ("float16", "float32"):
        raise InputError(f"feature_dtype: expected float16 or float32, got {feature_dtype!r}")
    if keep_hops is not None and (isinstance(keep_hops, bool) or not isinstance(keep_hops, int) or keep_hops < 1):
        raise InputError(f"keep_hops: expected the number of layers, at least 1, or None, got {keep_hops!r}")
    limit = own_memory()[0] + _DEFAULT_BYTES if memory_limit is None else parse_bytes(memory_limit)
    workspace = _workspace(source, limit, keep_hops)
    target = Path(path).resolve()
    check_target(target)
    final, temporary = _disk_bytes(source, undirected, feature_dtype)
    free = shutil.disk_usage(next(folder for folder in target.parents if folder.is_dir())).free
    if free < final + temporary:
        raise InputError(
            f"{target}: expected {format_bytes(final + temporary)} of free disk space ({format_bytes(final)} for the "
            f"store, {format_bytes(temporary)} until it is done), found {format_bytes(free)}"
        )
    num_pairs = source.num_edges * (2 if undirected else 1)
    total = source.x_info().nbytes + 16 * source.num_edges + source.num_nodes * (2 + 8 * source.has_year())
    total += num_pairs * 2 * np.dtype(index_dtype(source.num_nodes)).itemsize * (1 + (keep_hops or 0))
    with (
        StoreWriter(target) as writer,
        tqdm(total=total, unit="B", unit_scale=True, desc="convert", disable=not progress, mininterval=1) as bar,
    ):
        conversion = _Conversion(
            source, writer, bar,
            undirected=undirected, feature_dtype=feature_dtype, keep_hops=keep_hops, workspace=workspace,
        )  # fmt: skip
        with _clear_errors(target):
            conversion.run()
        return writer.finish(source.name, source.num_classes, undirected=undirected, keep_hops=keep_hops, origin=origin)


@contextlib.contextmanager
def _clear_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(f"{target}: the disk is full ({error.strerror}); nothing was left behind") from None


def convert(
    raw_dir: StrPath,
    store_dir: StrPath,
    *,
    undirected: bool = False,
    feature_dtype: FeatureDtype = "float16",
    memory_limit: str | int | None = None,
    keep_hops: int | None = None,
    progress: bool = True,
) -> Store:
    """Turn a data set in OGB's binary layout into a store, in bounded memory; the store appears whole or not at all.

    Args:
        raw_dir: a folder that `open_raw` opens.
        store_dir: new or empty.
        undirected: add reverse edges; columns are then sorted and without repeats.
        feature_dtype: float16 halves disk and traffic; values that it can't hold are refused.
        memory_limit: "4 GB" or bytes for this whole process; by default 1 GB beside what it holds already. It also does
            inside a memory cgroup of that size, written pages included. A larger one makes fewer and longer ranges to
            sort; 1 GB is enough for ogbn-papers100M.
        keep_hops: keep only the nodes that a model of so many layers can reach from a labelled node against the edges'
            direction, and only the edges that it can follow. Ids change; the original ones are in `node_id`.

    Raises:
        InputError: before anything is written, for bad parameters, a target in use or held by another converter, too
            small a limit or too little disk space; while streaming, for damage, ids out of range, features that are
            not finite or too large, and splits that overlap or have no label. Nothing is left behind then. After a
            SIGKILL the hidden `.NAME.part` and `.NAME.lock` remain; the next conversion clears them.
    """
    raw = open_raw(raw_dir)
    if Path(store_dir).resolve() == raw.path.resolve():
        raise InputError(f"store_dir: expected another folder than raw_dir, got {store_dir} for both")
    sizes = {"num_nodes": raw.num_nodes, "num_edges": raw.num_edges}
    return write_store(
        raw, store_dir, undirected=undirected, feature_dtype=feature_dtype, memory_limit=memory_limit,
        keep_hops=keep_hops, progress=progress, origin={"raw": str(raw.path.resolve()), **sizes},
    )  # fmt: skip
