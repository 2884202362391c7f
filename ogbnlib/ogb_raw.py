"""OGB's on-disk layout both ways, as ogbn-papers100M has it, in memory bounded by what is asked for.

`raw/data.npz` of ogbn-papers100M is a compressed zip: numpy can neither map it nor read a part of it, and OGB's own
loader holds its 82.8 GB several times over. Here every member is streamed through a chunk, both ways. Importing this
module imports neither torch nor ogb.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import importlib
import importlib.util
import json
import math
import os
import shutil
import struct
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numba import njit
from numpy.typing import DTypeLike, NDArray
from tqdm import tqdm

from ogbnlib.config import InputError, unknown_name, write_json

Array = NDArray[Any]
Chunks = Iterable[tuple[Array, Array]]
StrPath = str | os.PathLike[str]

SPLITS = ("train", "valid", "test")
CHUNK_BYTES = 8 * 2**20
MAX_CLASSES = 2**24  # labels are stored as float32, which counts exactly no further


@dataclass(frozen=True)
class MemberInfo:
    """The header of one array in an .npz file; `nbytes` is its size once uncompressed."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    nbytes: int


# ---------------------------------------------------------------------------------------------------- .npz, by chunks


class NpzWriter:
    """A compressed .npz file written from chunks; memory is bounded by a chunk.

    Level 1 because features are close to noise: level 6 takes twice the time for 1 % less.
    """

    def __init__(self, path: StrPath) -> None:
        self._zip = zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED, compresslevel=1)

    def __enter__(self) -> NpzWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    def write(self, name: str, shape: Sequence[int], dtype: DTypeLike, chunks: Iterable[Array]) -> None:
        """Append the member `name`, C order; `chunks` are its values in that order, cut anywhere, of any shape."""
        dtype, written = np.dtype(dtype), 0
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(shape)}
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(member, header)
            for chunk in chunks:
                member.write(np.ascontiguousarray(chunk, dtype).reshape(-1).view(np.uint8).data)
                written += chunk.size
        if written != math.prod(shape):
            raise ValueError(f"{name}: shape {tuple(shape)} was announced, but its chunks held {written} values")


class _Member:
    """One array of an .npz file as a stream of values; damage of any kind becomes an `InputError`."""

    def __init__(self, file: Path, name: str) -> None:
        self.where = f"{file}, member {name}"
        with self._damage():
            self._zip = zipfile.ZipFile(file)
            if f"{name}.npy" not in self._zip.namelist():
                found = ", ".join(entry.removesuffix(".npy") for entry in self._zip.namelist())
                raise InputError(f"{self.where}: expected such a member, found only: {found or 'none'}")
            self._stream = self._zip.open(f"{name}.npy")
            version = np.lib.format.read_magic(self._stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran_order, dtype = read(self._stream)
            left = self._zip.getinfo(f"{name}.npy").file_size - self._stream.tell()
        self.info = MemberInfo(shape, dtype, fortran_order, math.prod(shape) * dtype.itemsize)
        if dtype.hasobject:
            raise InputError(f"{self.where}: expected numbers, found pickled objects, which are never loaded")
        if left != self.info.nbytes:
            raise InputError(
                f"{self.where}: expected {self.info.nbytes} bytes for shape {shape} of {dtype}, found {left}"
            )

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, struct.error) as error:
            raise InputError(f"{self.where}: expected a sound file, found damage ({error}); copy it anew") from None

    def __enter__(self) -> _Member:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()
        self._zip.close()

    def read(self, count: int) -> Array:
        """The next `count` values, in the member's own dtype."""
        values = np.empty(count, self.info.dtype)
        view, filled = values.view(np.uint8).data, 0
        with self._damage():
            while filled < len(view):
                got = self._stream.readinto(view[filled : filled + CHUNK_BYTES])  # type: ignore[attr-defined]
                if not got:
                    raise EOFError("it ends early")
                filled += got
        return values

    def skip(self, count: int) -> None:
        # Read on rather than seek: a seek in a stored member stops zipfile from checking the CRC.
        step = max(1, CHUNK_BYTES // self.info.dtype.itemsize)
        for begin in range(0, count, step):
            self.read(min(step, count - begin))

    def finish(self) -> None:
        """zipfile compares the CRC only when it sees the end, which is one read past the last value."""
        with self._damage():
            if self._stream.read(1):
                raise EOFError("it holds more than its header announces")


def _targets(out: Array, fortran_order: bool, count: int) -> Iterator[tuple[Array, int]]:
    """Views of about `count` values that together cover `out` [N, F] in the stream's order, each with its first row."""
    if fortran_order:
        for column in out.T:
            for begin in range(0, len(column), count):
                yield column[begin : begin + count], begin
    else:
        rows = max(1, count // max(1, out.shape[1]))
        for begin in range(0, len(out), rows):
            yield out[begin : begin + rows], begin


def _labels(values: Array, num_classes: int, where: str, start: int = 0) -> Array:
    """Labels in any number type to int16 (int64 beyond 32,767 classes), -1 where there is none."""
    values = values.reshape(-1)
    known = ~np.isnan(values) if values.dtype.kind == "f" else values != -1
    wrong = known & ((values != np.floor(values)) | (values < 0) | (values >= num_classes))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"{where}: expected whole labels from 0 to {num_classes - 1}, or NaN (-1 in whole numbers) where there is "
            f"none; found {values[at]} at node {start + at}"
        )
    labels = np.full(len(values), -1, np.int16 if num_classes <= 32767 else np.int64)
    labels[known] = values[known].astype(labels.dtype)
    return labels


# ------------------------------------------------------------------------------------------------------ COO to CSC


@njit(cache=True, nogil=True)
def _first_outside(src, dst, num_nodes):  # type: ignore[no-untyped-def]
    for i in range(len(src)):
        if src[i] < 0 or src[i] >= num_nodes or dst[i] < 0 or dst[i] >= num_nodes:
            return i
    return -1


@njit(cache=True, nogil=True)
def _count(col, ptr):  # type: ignore[no-untyped-def]
    for v in col:
        ptr[v + 2] += 1


@njit(cache=True, nogil=True)
def _place(src, dst, undirected, ptr, row):  # type: ignore[no-untyped-def]
    """ptr[v + 1] is the next free place of column v; False when the columns were counted on other edges."""
    for i in range(len(src)):
        for way in range(2 if undirected else 1):
            col, value = (dst[i], src[i]) if way == 0 else (src[i], dst[i])
            place = ptr[col + 1]
            if place >= len(row):
                return False
            row[place] = value
            ptr[col + 1] = place + 1
    return True


@njit(cache=True, nogil=True)
def _sort_and_compact(colptr, row):  # type: ignore[no-untyped-def]
    """Sort every column, drop repeats and close the gaps, all in place; returns the number of edges left."""
    kept, begin = 0, colptr[0]
    for v in range(len(colptr) - 1):
        end = colptr[v + 1]
        column = row[begin:end]
        column.sort()
        last = -1
        for i in range(begin, end):
            if row[i] != last:
                last = row[i]
                row[kept] = last
                kept += 1
        colptr[v + 1] = kept
        begin = end
    return kept


def csc_from_chunks(
    num_nodes: int, num_edges: int, chunks: Callable[[], Chunks], undirected: bool = False
) -> tuple[Array, Array]:
    """The CSC form of a graph that arrives in chunks, by a stable counting sort; the COO is never held.

    Edge (src -> dst) goes to column dst and `row` holds src, in the order of arrival. That is PyG's `to_csc` with a
    stable sort; torch's default sort, which it uses without pyg-lib, is not. With `undirected` the graph is that of
    PyG's `to_undirected`: both directions, each column sorted and without repeats.

    Args:
        num_edges: the number of edges that `chunks` hands out, before reverse edges are added.
        chunks: called twice; each time the same edges, as pairs of equally long whole-number arrays.

    Returns:
        colptr int64 [num_nodes + 1] and row int32 (int64 from 2**31 nodes on) [E], in RAM. The peak is those two and a
        chunk; with `undirected`, row takes 2 * num_edges values until repeats are dropped.

    Raises:
        InputError: when an id is not from 0 to num_nodes - 1, or the number of edges is another.
    """
    ptr = np.zeros(num_nodes + 2, np.int64)

    def checked() -> Chunks:
        seen = 0
        for src, dst in chunks():
            bad = -1 if len(src) == len(dst) else min(len(src), len(dst))
            bad = _first_outside(src, dst, num_nodes) if bad < 0 else bad
            if bad >= 0:
                raise InputError(f"edge_index: expected pairs of ids below {num_nodes}; edge {seen + bad} is not")
            seen += len(src)
            if seen > num_edges:
                break
            yield src, dst
        if seen != num_edges:
            raise InputError(f"edge_index: expected {num_edges} edges, found {'more' if seen > num_edges else seen}")

    for src, dst in checked():
        _count(dst, ptr)
        if undirected:
            _count(src, ptr)
    np.cumsum(ptr, out=ptr)
    row = np.empty(int(ptr[-1]), np.int32 if num_nodes < 2**31 else np.int64)
    for src, dst in checked():
        if not _place(src, dst, undirected, ptr, row):
            raise InputError("edge_index: expected the same edges on both passes, found others on the second")
    colptr = ptr[:-1]
    if undirected:
        kept = _sort_and_compact(colptr, row)
        row.resize(kept, refcheck=False)  # gives the tail back without a copy
    return colptr, row


# ------------------------------------------------------------------------------------------------------ data sets


@dataclass(frozen=True, kw_only=True)
class _Dataset:
    path: Path
    name: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int

    def edge_chunks(self, chunk_edges: int = 2**20) -> Iterator[tuple[Array, Array]]:
        """(src, dst) int64 pairs in file order, `chunk_edges` at a time; ids are checked."""
        raise NotImplementedError

    def read_csc(self, undirected: bool = False) -> tuple[Array, Array]:
        """colptr int64 [N + 1] and row int32 [E] in RAM; see `csc_from_chunks` for order, peak and errors."""
        return csc_from_chunks(self.num_nodes, self.num_edges, self.edge_chunks, undirected)

    def release(self, *names: Literal["x", "edge_index", "y"]) -> None:
        """Let go of the arrays that this object holds itself; without effect on a data set streamed from disk."""


@dataclass(frozen=True, kw_only=True)
class RawDataset(_Dataset):
    """A data set in OGB's binary layout, on disk; each `read_*` streams one member into one new array in RAM.

    Every read raises `InputError`, naming file and member, on damage (CRC, truncation) and on values that cannot be.
    """

    @property
    def _data(self) -> Path:
        return self.path / "raw" / "data.npz"

    def members(self) -> dict[str, MemberInfo]:
        """Headers of all arrays of raw/data.npz, and of `node_label`; no data is read."""
        return {**_headers(self._data), **_headers(self.path / "raw" / "node-label.npz")}

    def read_x(self, dtype: DTypeLike = "float32", progress: bool = False) -> Array:
        """Features [N, F] as float32 or float16; the peak is the result and about 20 MB."""
        if np.dtype(dtype) not in (np.float32, np.float16, np.float64):
            raise InputError(f"dtype: expected float16, float32 or float64, got {dtype!r}")
        bad, first = 0, self.num_nodes
        with _Member(self._data, "node_feat") as member:
            info = member.info
            x, count = np.empty(info.shape, dtype), CHUNK_BYTES // info.dtype.itemsize
            with tqdm(total=info.nbytes, unit="B", unit_scale=True, desc="node_feat", disable=not progress) as bar:
                for target, begin in _targets(x, info.fortran_order, count):
                    values = member.read(target.size).reshape(target.shape)
                    with np.errstate(over="ignore"):
                        target[...] = values
                    finite = np.isfinite(target)
                    if not finite.all():
                        bad += int((~finite).sum())
                        first = min(first, begin + int(np.argwhere(~finite)[:, 0].min()))
                    bar.update(values.nbytes)
            member.finish()
            if bad:
                raise InputError(
                    f"{member.where}: expected values that are finite as {x.dtype}, found {bad} NaN or Inf, "
                    f"the first in row {first}"
                )
        return x

    def edge_chunks(self, chunk_edges: int = 2**20) -> Iterator[tuple[Array, Array]]:
        """(src, dst) int64 pairs in file order, `chunk_edges` at a time; the edge index is never held.

        Row 1 of a [2, E] array starts halfway: a second stream, wound forward, follows the first.

        Raises:
            InputError: naming the first edge with an id outside 0 .. N-1.
        """
        with _Member(self._data, "edge_index") as first, _Member(self._data, "edge_index") as second:
            paired = first.info.fortran_order
            if not paired:
                second.skip(self.num_edges)
            for begin in range(0, self.num_edges, chunk_edges):
                count = min(chunk_edges, self.num_edges - begin)
                if paired:
                    src, dst = first.read(2 * count).reshape(count, 2).T
                else:
                    src, dst = first.read(count), second.read(count)
                src, dst = np.ascontiguousarray(src, np.int64), np.ascontiguousarray(dst, np.int64)
                bad = _first_outside(src, dst, self.num_nodes)
                if bad >= 0:
                    raise InputError(
                        f"{first.where}: expected node ids from 0 to {self.num_nodes - 1}; "
                        f"edge {begin + bad} is ({src[bad]}, {dst[bad]})"
                    )
                yield src, dst
            (first if paired else second).finish()

    def read_edge_index(self) -> Array:
        """Edges int64 [2, E], source above destination."""
        edge_index, at = np.empty((2, self.num_edges), np.int64), 0
        for src, dst in self.edge_chunks():
            edge_index[0, at : at + len(src)], edge_index[1, at : at + len(src)] = src, dst
            at += len(src)
        return edge_index

    def read_y(self) -> Array:
        """Labels [N], int16 (int64 beyond 32,767 classes); -1 where the file has NaN."""
        return np.concatenate(list(_label_chunks(self.path, self.num_classes)))

    def read_splits(self) -> dict[str, Array]:
        """Node ids int64 of `train`, `valid` and `test`, in file order."""
        return _read_splits(_split_folder(self.path), self.num_nodes)

    def read_year(self) -> Array | None:
        """Years int64 [N], or None where the data set has none."""
        if "node_year" not in _headers(self._data):
            return None
        with _Member(self._data, "node_year") as member:
            year = member.read(math.prod(member.info.shape)).astype(np.int64)
            member.finish()
        return year


@dataclass(frozen=True, kw_only=True)
class OfficialDataset(_Dataset):
    """A data set that OGB's own readers brought into RAM, with the reads of `RawDataset`.

    `read_x` and `read_edge_index` hand out the held array itself where no conversion is needed: follow them with
    `release("x")` or `release("edge_index")` and the caller is its only owner.
    """

    arrays: dict[str, Any] = field(repr=False)

    def _held(self, name: str) -> Any:
        if name not in self.arrays:
            raise InputError(f"{self.name}: {name} was released and can be read no more; open the data set again")
        return self.arrays[name]

    def release(self, *names: Literal["x", "edge_index", "y"]) -> None:
        for name in names:
            self.arrays.pop(name, None)

    def read_x(self, dtype: DTypeLike = "float32", progress: bool = False) -> Array:
        """Features [N, F]; the held array when it has that dtype. NaN or Inf is an `InputError`."""
        with np.errstate(over="ignore"):
            x: Array = self._held("x").astype(dtype, copy=False)
        step = max(1, CHUNK_BYTES // (x.itemsize * max(1, self.num_features)))
        finite = [np.isfinite(x[begin : begin + step]).all(axis=1) for begin in range(0, len(x), step)]
        bad = np.flatnonzero(~np.concatenate(finite))
        if bad.size:
            raise InputError(f"{self.name}, node_feat: found NaN or Inf in {bad.size} rows, the first is row {bad[0]}")
        return x

    def edge_chunks(self, chunk_edges: int = 2**20) -> Iterator[tuple[Array, Array]]:
        src, dst = self._held("edge_index")
        for begin in range(0, self.num_edges, chunk_edges):
            yield src[begin : begin + chunk_edges], dst[begin : begin + chunk_edges]

    def read_edge_index(self) -> Array:
        """Edges int64 [2, E], the held array itself."""
        return np.asarray(self._held("edge_index"))

    def read_y(self) -> Array:
        """Labels [N], int16 (int64 beyond 32,767 classes); -1 where there is none."""
        return _labels(self._held("y"), self.num_classes, f"{self.name}, node_label")

    def read_splits(self) -> dict[str, Array]:
        """Node ids int64 of `train`, `valid` and `test`."""
        return dict(self.arrays["splits"])

    def read_year(self) -> Array | None:
        """Years int64 [N], or None."""
        year = self.arrays["year"]
        return None if year is None else year.reshape(-1).astype(np.int64)


def _headers(file: Path) -> dict[str, MemberInfo]:
    if not file.is_file():
        raise InputError(f"{file}: expected a file in OGB's binary layout, found none")
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
    except zipfile.BadZipFile as error:
        raise InputError(f"{file}: expected an .npz (zip) file, found a damaged or other one ({error})") from None
    headers = {}
    for name in names:
        with _Member(file, name) as member:
            headers[name] = member.info
    return headers


def _label_chunks(path: Path, num_classes: int) -> Iterator[Array]:
    with _Member(path / "raw" / "node-label.npz", "node_label") as member:
        num_nodes, step = math.prod(member.info.shape), CHUNK_BYTES // member.info.dtype.itemsize
        for begin in range(0, num_nodes, step):
            yield _labels(member.read(min(step, num_nodes - begin)), num_classes, member.where, begin)
        member.finish()


def _split_folder(path: Path) -> Path:
    folder = path / "split"
    found = sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    if folder / "time" in found or len(found) == 1:
        split = folder / "time" if folder / "time" in found else found[0]
        missing = [f"{name}.csv.gz" for name in SPLITS if not (split / f"{name}.csv.gz").is_file()]
        if not missing:
            return split
        raise InputError(f"{split}: expected train, valid and test.csv.gz, found no {', '.join(missing)}")
    raise InputError(f"{folder}: expected a folder named time, or just one, found {[entry.name for entry in found]}")


def _read_splits(folder: Path, num_nodes: int) -> dict[str, Array]:
    splits = {}
    for name in SPLITS:
        file = folder / f"{name}.csv.gz"
        try:
            with gzip.open(file, "rt") as lines:
                ids = np.array(lines.read().split(), dtype=np.int64)
        except (ValueError, EOFError, OSError, zlib.error) as error:
            raise InputError(f"{file}: expected one node id a line, gzipped; {error}") from None
        if not ids.size or ids.min() < 0 or ids.max() >= num_nodes:
            found = f"{ids.min()} to {ids.max()}" if ids.size else "none"
            raise InputError(f"{file}: expected node ids from 0 to {num_nodes - 1}, found {found}")
        splits[name] = ids
    return splits


def _hint(path: Path) -> str:
    """What to say of a folder without raw/data.npz."""
    if not path.is_dir():
        return f"{path}: expected a data set folder, found {'a file' if path.exists() else 'no such folder'}"
    if (path / "data.npz").is_file():
        return f"{path}: expected a data set folder, found its raw folder; pass {path.resolve().parent}"
    if (path / "raw" / "edge.csv.gz").is_file():
        return f"{path}: expected raw/data.npz, found OGB's csv layout; open it by name with read_official"
    nested = [entry.parent.parent for entry in path.glob("*/raw/data.npz")]
    if len(nested) == 1:
        return f"{path}: expected raw/data.npz, found a data set one folder down; pass {nested[0]}"
    return f"{path}: expected raw/data.npz in it, found none" + (f" but in {sorted(nested)}" if nested else "")


def open_raw(path: StrPath, *, num_classes: int | None = None) -> RawDataset:
    """Open a folder in OGB's binary layout, ours or the official ogbn-papers100M; no large member is read.

    `node_feat` may be float16, 32 or 64 of either byte order, `edge_index` any whole numbers, both in C or Fortran
    order. Without `num_classes` it is taken from meta.json and, where there is none, is the largest label plus one.

    Raises:
        InputError: naming file and member, when anything is missing, damaged, or of another shape or type.
    """
    path = Path(path)
    data = path / "raw" / "data.npz"
    if not data.is_file():
        raise InputError(_hint(path))
    headers = {**_headers(data), **_headers(path / "raw" / "node-label.npz")}
    sizes = {}
    for name in ("num_nodes_list", "num_edges_list"):
        with _Member(data, name) as member:
            if member.info.shape != (1,) or member.info.dtype.kind not in "iu":
                raise InputError(f"{member.where}: expected one whole number, found shape {member.info.shape}")
            sizes[name] = int(member.read(1)[0])
            member.finish()
    num_nodes, num_edges = sizes["num_nodes_list"], sizes["num_edges_list"]
    shapes = {"edge_index": "iu", "node_feat": "f", "node_label": "fiu", "node_year": "iu"}
    for name, kinds in shapes.items():
        file = path / "raw" / "node-label.npz" if name == "node_label" else data
        info = headers.get(name)
        if info is None and name == "node_year":
            continue
        if info is None:
            raise InputError(f"{file}, member {name}: expected such a member, found none")
        per_node = {(num_nodes, 1), (num_nodes,)}
        fits = {"edge_index": info.shape == (2, num_edges), "node_feat": info.shape[:1] == (num_nodes,)}
        if not fits.get(name, info.shape in per_node) or (name == "node_feat" and len(info.shape) != 2):
            raise InputError(
                f"{file}, member {name}: expected a shape for {num_nodes} nodes and {num_edges} edges, "
                f"found {info.shape}"
            )
        if info.dtype.kind not in kinds:
            kind = "floats" if kinds == "f" else "numbers" if "f" in kinds else "whole numbers"
            raise InputError(f"{file}, member {name}: expected {kind}, found {info.dtype}")
    _split_folder(path)
    meta = _read_meta(path)
    for key, value in (("num_nodes", num_nodes), ("num_edges", num_edges)):
        if meta.get(key, value) != value:
            raise InputError(f"{path / 'meta.json'}: {key} is {meta[key]}, but raw/data.npz has {value}")
    num_classes = num_classes if num_classes is not None else meta.get("num_classes")
    if num_classes is None:
        num_classes = 1 + max((int(chunk.max()) for chunk in _label_chunks(path, MAX_CLASSES)), default=-1)
    return RawDataset(
        path=path,
        name=str(meta.get("name", path.resolve().name)),
        num_nodes=num_nodes,
        num_edges=num_edges,
        num_features=headers["node_feat"].shape[1],
        num_classes=num_classes,
    )


def _read_meta(path: Path) -> dict[str, Any]:
    file = path / "meta.json"
    if not file.is_file():
        return {}
    try:
        meta = json.loads(file.read_text())
    except ValueError as error:
        raise InputError(f"{file}: expected JSON, found something else ({error})") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("num_classes", 1), int) or meta.get("num_classes", 1) < 1:
        raise InputError(f"{file}: expected an object with num_classes of at least 1, found {meta!r}")
    return meta


# ------------------------------------------------------------------------------------------------------ writing

_RELEASE = "RELEASE_v1.txt"  # ogb asks on the terminal whether to update when it is missing
_MAPPING = """Node i is row i of node_feat and node_label in raw/; label c is class c. No outside identifiers are known.
"""


def _numpy(value: Any, name: str) -> Array:
    """An array or a torch tensor (on any device) as numpy, without a copy where there need be none."""
    try:
        array = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}: expected a numpy array or a torch tensor numpy can hold; {error}") from None
    if array.dtype.kind not in "fiub":
        raise InputError(f"{name}: expected numbers, got {array.dtype}")
    return array


def _split_ids(splits: Mapping[str, Any], labels: Array) -> dict[str, Array]:
    """Checked int64 ids of the three splits, given as ids or as boolean masks over all nodes."""
    if not isinstance(splits, Mapping) or sorted(splits) != sorted(SPLITS):
        found = sorted(splits) if isinstance(splits, Mapping) else type(splits).__name__
        raise InputError(f"splits: expected a dict with train, valid and test, got {found}")
    num_nodes, checked = len(labels), {}
    taken = np.zeros(num_nodes, np.uint8)
    for number, name in enumerate(SPLITS, 1):
        where, ids = f"splits[{name!r}]", _numpy(splits[name], f"splits[{name!r}]")
        if ids.dtype.kind == "b" and ids.shape == (num_nodes,):
            ids = np.flatnonzero(ids)
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise InputError(f"{where}: expected node ids [n], at least one, got {ids.dtype} {list(ids.shape)}")
        if ids.min() < 0 or ids.max() >= num_nodes:
            raise InputError(f"{where}: expected ids from 0 to {num_nodes - 1}, got {ids.min()} to {ids.max()}")
        if taken[ids].any():
            node = ids[taken[ids] > 0][0]
            raise InputError(f"{where}: expected no overlap, but node {node} is also in {SPLITS[taken[node] - 1]}")
        if len(np.unique(ids)) != len(ids):
            raise InputError(f"{where}: expected each node once, got {len(ids) - len(np.unique(ids))} repeats")
        if (labels[ids] < 0).any():
            raise InputError(f"{where}: expected labelled nodes, but node {ids[labels[ids] < 0][0]} has no label")
        taken[ids], checked[name] = number, ids.astype(np.int64)
    return checked


@contextlib.contextmanager
def new_folder(path: StrPath, overwrite: bool = False) -> Iterator[Path]:
    """A hidden neighbour of `path` to build in, which takes its place once the block ends without an error.

    Raises:
        InputError: when `path` is a file or a folder with anything in it; with `overwrite`, when that is no data set.
    """
    path = Path(path).absolute()
    old = path.is_dir() and any(path.iterdir())
    if path.exists() and (not path.is_dir() or (old and not overwrite)):
        raise InputError(f"{path}: expected a new or empty folder, found {'other content' if old else 'a file'}")
    if old and not (path / "raw" / "data.npz").is_file():
        raise InputError(f"{path}: overwrite replaces data sets only, and this folder holds no raw/data.npz")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    try:
        yield beside
        for file in sorted(beside.rglob("*")):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
        umask = os.umask(0)
        os.umask(umask)
        beside.chmod(0o777 & ~umask)
        if old:
            # Two renames: whatever is killed in between, the old data set or the new one is there, whole.
            replaced = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
            os.replace(path, replaced)
            try:
                os.replace(beside, path)
            except OSError:
                os.replace(replaced, path)
                raise
            shutil.rmtree(replaced)
        else:
            os.replace(beside, path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def write_layout(
    folder: Path,
    name: str,
    num_classes: int,
    splits: Mapping[str, Array],
    edge_rows: Sequence[Iterable[Array]],
    members: Mapping[str, tuple[Sequence[int], DTypeLike, Iterable[Array]]],
    labels: Iterable[Array],
    num_edges: int,
) -> None:
    """Write OGB's binary layout into `folder` from chunks that are trusted; `members` must hold node_feat."""
    for part in ("raw", "split/time", "mapping", "processed"):  # ogb saves into processed/ without making it
        (folder / part).mkdir(parents=True)
    num_nodes, num_features = members["node_feat"][0]
    with NpzWriter(folder / "raw" / "data.npz") as data:
        data.write("edge_index", (2, num_edges), np.int64, (chunk for row in edge_rows for chunk in row))
        for member, (shape, dtype, chunks) in members.items():
            data.write(member, shape, dtype, chunks)
        data.write("num_nodes_list", (1,), np.int64, [np.array([num_nodes])])
        data.write("num_edges_list", (1,), np.int64, [np.array([num_edges])])
    with NpzWriter(folder / "raw" / "node-label.npz") as label:
        label.write("node_label", (num_nodes, 1), np.float32, labels)
    for split, ids in splits.items():
        with (
            open(folder / "split" / "time" / f"{split}.csv.gz", "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,  # no name, no time: same ids, same bytes
        ):
            packed.write("".join(f"{node}\n" for node in ids.tolist()).encode())
    (folder / "mapping" / "README.md").write_text(_MAPPING)
    (folder / _RELEASE).touch()
    sizes = {"num_nodes": num_nodes, "num_edges": num_edges, "num_features": num_features, "num_classes": num_classes}
    write_json(folder / "meta.json", {"name": name, **sizes})


def _slices(array: Array, rows: int) -> Iterator[Array]:
    return (array[begin : begin + rows] for begin in range(0, len(array), rows))


def _checked_features(x: Array) -> Iterator[Array]:
    with np.errstate(over="ignore"):
        for chunk in _slices(x, max(1, CHUNK_BYTES // (4 * max(1, x.shape[1])))):
            yield chunk.astype(np.float32, copy=False)


def write_raw(
    path: StrPath,
    *,
    edge_index: Any,
    x: Any,
    y: Any,
    splits: Mapping[str, Any],
    year: Any = None,
    num_classes: int | None = None,
    name: str | None = None,
    overwrite: bool = False,
) -> RawDataset:
    """Put any graph into OGB's binary layout, as ogbn-papers100M has it, so that OGB's own classes open it too.

    Everything is checked before anything is written, and the folder appears whole or not at all.

    Args:
        edge_index: whole numbers [2, E], source above destination; a numpy array or a torch tensor, as the others.
        x: features [N, F], finite; stored as float32.
        y: labels [N] or [N, 1]: -1 or NaN where there is none.
        splits: node ids, or boolean masks over all nodes, of train, valid and test.
        year: whole numbers [N] or [N, 1].
        num_classes: the largest label plus one when not given.
        overwrite: replace a data set that is there already; any other folder is still refused.

    Raises:
        InputError: naming the argument and what is wrong with it.
    """
    edge_index, x, y = _numpy(edge_index, "edge_index"), _numpy(x, "x"), _numpy(y, "y")
    if x.ndim != 2 or 0 in x.shape:
        raise InputError(f"x: expected features [N, F] of at least one node and feature, got shape {list(x.shape)}")
    num_nodes = len(x)
    if y.shape not in {(num_nodes,), (num_nodes, 1)}:
        raise InputError(f"y: expected one label for each of the {num_nodes} rows of x, got shape {list(y.shape)}")
    if edge_index.ndim != 2 or edge_index.shape[0] != 2 or edge_index.dtype.kind not in "iu":
        raise InputError(f"edge_index: expected whole numbers [2, E], got {edge_index.dtype} {list(edge_index.shape)}")
    num_edges = edge_index.shape[1]
    if num_edges and (edge_index.min() < 0 or edge_index.max() >= num_nodes):
        raise InputError(
            f"edge_index: expected node ids from 0 to {num_nodes - 1}, got {edge_index.min()} to {edge_index.max()}"
        )
    begin = 0
    for chunk in _checked_features(x):
        finite = np.isfinite(chunk).all(axis=1)
        if not finite.all():
            raise InputError(f"x: expected finite float32 values; row {begin + int(finite.argmin())} has others")
        begin += len(chunk)
    if num_classes is not None and (isinstance(num_classes, bool) or not 0 < num_classes <= MAX_CLASSES):
        raise InputError(f"num_classes: expected 1 to {MAX_CLASSES}, got {num_classes!r}")
    labels = _labels(y, num_classes or MAX_CLASSES, "y")
    if labels.max() < 0:
        raise InputError("y: expected at least one label, got none")
    num_classes = num_classes or int(labels.max()) + 1
    ids = _split_ids(splits, labels)
    members: dict[str, tuple[Sequence[int], DTypeLike, Iterable[Array]]] = {
        "node_feat": (x.shape, np.float32, _checked_features(x))
    }
    if year is not None:
        year = _numpy(year, "year")
        if year.shape not in {(num_nodes,), (num_nodes, 1)} or year.dtype.kind not in "iu":
            raise InputError(f"year: expected whole numbers [{num_nodes}], got {year.dtype} {list(year.shape)}")
        members["node_year"] = ((num_nodes, 1), np.int64, _slices(year, 2**20))
    with new_folder(path, overwrite) as folder:
        rows = [_slices(row, 2**20) for row in edge_index]
        floats = (np.where(chunk < 0, np.float32("nan"), chunk.astype(np.float32)) for chunk in _slices(labels, 2**20))
        write_layout(folder, name or Path(path).absolute().name, num_classes, ids, rows, members, floats, num_edges)
    return open_raw(path)


# ------------------------------------------------------------------------------------------------------ through ogb


def meta_dict(path: StrPath) -> dict[str, Any]:
    """The `meta_dict` with which ogb's NodePropPredDataset and PygNodePropPredDataset open a folder of this layout.

    Raises:
        InputError: as `open_raw`, and when the RELEASE file is missing, without which ogb would ask on the terminal.
    """
    dataset = open_raw(path)
    if not (dataset.path / _RELEASE).is_file():
        raise InputError(
            f"{dataset.path / _RELEASE}: expected this file; ogb takes the data set for outdated without it"
        )
    return {
        "dir_path": str(dataset.path.absolute()),
        "version": 1,
        "download_name": dataset.name,
        "url": "",
        "num tasks": 1,
        "num classes": dataset.num_classes,
        "eval metric": "acc",
        "task type": "multiclass classification",
        "add_inverse_edge": "False",
        "has_node_attr": "True",
        "has_edge_attr": "False",
        "split": _split_folder(dataset.path).name,
        "additional node files": "node_year" if "node_year" in dataset.members() else "None",
        "additional edge files": "None",
        "is hetero": "False",
        "binary": "True",
    }


def _through_ogb(name: str, root: Path, folder: Path, meta: Mapping[str, Any], own: bool) -> OfficialDataset:
    """Read `folder` with ogb's own class and raw readers, past its cache.

    ogb 1.3.6 saves processed/data_processed as a pickle of protocol 4, which torch.load(weights_only=True), the default
    since torch 2.6, cannot read (snap-stanford/ogb#497). So neither that file is read nor a second one written.
    """
    nodeprop = importlib.import_module("ogb.nodeproppred.dataset")

    class PastCache(nodeprop.NodePropPredDataset):  # type: ignore[misc, name-defined]
        def pre_process(self) -> None:
            raw = os.path.join(self.root, "raw")
            if self.binary:
                self.graph = nodeprop.read_binary_graph_raw(raw)[0]
                with np.load(os.path.join(raw, "node-label.npz"), allow_pickle=False) as file:
                    self.labels = file["node_label"]
            else:
                extra = [file for file in self.meta_info["additional node files"].split(",") if file != "None"]
                inverse = self.meta_info["add_inverse_edge"] == "True"
                self.graph = nodeprop.read_csv_graph_raw(raw, add_inverse_edge=inverse, additional_node_files=extra)[0]
                label = nodeprop.pd.read_csv(os.path.join(raw, "node-label.csv.gz"), compression="gzip", header=None)
                self.labels = label.values

    with contextlib.redirect_stdout(sys.stderr):  # ogb prints; standard output belongs to the caller
        graph, labels = PastCache(name, root=str(root), meta_dict=dict(meta) if own else None)[0]
    if graph["node_feat"] is None:
        raise InputError(f"{folder}: expected node features, found none")
    num_nodes = int(graph["num_nodes"])
    arrays = {
        "x": graph["node_feat"],
        "edge_index": graph["edge_index"].astype(np.int64, copy=False),
        "y": labels,
        "splits": _read_splits(folder / "split" / str(meta["split"]), num_nodes),
        "year": graph.get("node_year"),
    }
    return OfficialDataset(
        path=folder,
        name=name,
        num_nodes=num_nodes,
        num_edges=arrays["edge_index"].shape[1],
        num_features=arrays["x"].shape[1],
        num_classes=int(meta["num classes"]),
        arrays=arrays,
    )


def read_with_ogb(path: StrPath) -> OfficialDataset:
    """Open a folder in OGB's binary layout the way OGB does: every array in RAM, through its own class."""
    meta = meta_dict(path)
    return _through_ogb(str(meta["download_name"]), Path(path), Path(path), meta, own=True)


def _download(meta: Mapping[str, Any], root: Path, folder: Path) -> None:
    """Fetch and unpack with ogb's own functions, without its prompt; `folder` appears whole or not at all."""
    url = importlib.import_module("ogb.utils.url")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=root) as beside:
        try:
            archive = url.download_url(meta["url"], beside)
            url.extract_zip(archive, beside)
        except (OSError, RuntimeError, zipfile.BadZipFile) as error:
            raise InputError(f"download: {meta['url']} could not be fetched and unpacked ({error})") from None
        os.replace(os.path.join(beside, meta["download_name"]), folder)


def read_official(
    name: str, root: StrPath, download: bool = False, reader: Literal["auto", "stream", "ogb"] = "auto"
) -> RawDataset | OfficialDataset:
    """Open one of OGB's own data sets, such as ogbn-arxiv, ogbn-products or ogbn-papers100M, by its official name.

    Sizes, address and layout come from ogb's master.csv. ogbn-papers100M (binary layout) is streamed, since ogb's
    loader needs more than 128 GB for it (snap-stanford/ogb#407); the others are read into RAM by ogb.

    Args:
        root: the folder that holds, say, ogbn_arxiv.
        download: consent to fetch the data set when it is not there; nothing is ever asked on the terminal.
        reader: "stream" or "ogb" to insist on one of the two ways.

    Raises:
        InputError: for an unknown or unfit name, absent data without consent, or a failed download.
    """
    if reader not in ("auto", "stream", "ogb"):
        raise InputError(f"reader: expected auto, stream or ogb, got {reader!r}")
    master = importlib.util.find_spec("ogb").submodule_search_locations[0]  # type: ignore[union-attr, index]
    with open(os.path.join(master, "nodeproppred", "master.csv"), newline="") as file:
        head, *lines = csv.reader(file)
    table = {column: {line[0]: line[i] for line in lines} for i, column in enumerate(head) if i}
    if name not in table:
        raise InputError(f"dataset: {unknown_name(name, table, 'official data set')}")
    meta, root = table[name], Path(root)
    if meta["is hetero"] == "True" or meta["eval metric"] != "acc":
        raise InputError(f"dataset: expected one kind of node and accuracy as the metric, which {name} has not")
    folder, binary = root / name.replace("-", "_"), meta["binary"] == "True"
    if reader == "stream" and not binary:
        raise InputError(f"reader: {name} comes as csv files, which cannot be streamed; use reader='auto' or 'ogb'")
    expected = folder / "raw" / ("data.npz" if binary else "edge.csv.gz")
    if not expected.is_file():
        if folder.exists():
            raise InputError(f"{expected}: expected this file, found none; move {folder} away or complete it")
        if not download:
            raise InputError(f"{folder}: {name} is not there; pass download=True, or root= the folder that holds it")
        _download(meta, root, folder)
    if binary and reader != "ogb":
        return open_raw(folder, num_classes=int(meta["num classes"]))
    release = folder / f"RELEASE_v{meta['version']}.txt"
    if not release.is_file():
        raise InputError(f"{release}: expected this file; ogb takes the data set for outdated, so download it again")
    return _through_ogb(name, root, folder, meta, own=False)
