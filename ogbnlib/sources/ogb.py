"""OGB's on-disk layout as ogbn-papers100M has it, read in memory bounded by what is asked for.

OGB's own loader holds the 82.8 GB of ogbn-papers100M several times over; here every array is streamed through a chunk
into one new array. Importing this module imports neither torch nor ogb.
"""

from __future__ import annotations

import gzip
import json
import math
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike
from tqdm import tqdm

from ..errors import InputError
from ..files import StrPath
from ..graph import npz
from ..graph.npz import Array, Member, MemberInfo, row_blocks
from ..graph.sort import first_outside
from ..graph.store import SPLITS, Dataset, label_dtype

MAX_CLASSES = 2**24  # labels are stored as float32, which counts exactly no further


def clean_labels(values: Array, num_classes: int, where: str, start: int = 0) -> Array:
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
    labels = np.full(len(values), -1, label_dtype(num_classes))
    labels[known] = values[known].astype(labels.dtype)
    return labels


@dataclass(frozen=True, kw_only=True)
class RawDataset(Dataset):
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
        with Member(self._data, "node_feat") as member:
            info = member.info
            x, count = np.empty(info.shape, dtype), npz.CHUNK_BYTES // info.dtype.itemsize
            with tqdm(total=info.nbytes, unit="B", unit_scale=True, desc="node_feat", disable=not progress) as bar:
                for target, begin in row_blocks(x, info.fortran_order, count):
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
        with Member(self._data, "edge_index") as first, Member(self._data, "edge_index") as second:
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
                bad = first_outside(src, dst, self.num_nodes)
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

    def x_info(self) -> MemberInfo:
        """Shape, dtype and order of the features as they lie in the file."""
        return self.members()["node_feat"]

    def x_chunks(self) -> Iterator[Array]:
        """The features in the file's own dtype and order, about 8 MB at a time, unchecked.

        Whole rows [n, F]; from a file in Fortran order pieces [n] of one column each, column after column.
        """
        with Member(self._data, "node_feat") as member:
            info, count = member.info, max(1, npz.CHUNK_BYTES // member.info.dtype.itemsize)
            num_nodes, num_features = info.shape
            if info.fortran_order:
                for begin in (at for _ in range(num_features) for at in range(0, num_nodes, count)):
                    yield member.read(min(count, num_nodes - begin))
            else:
                rows = max(1, count // max(1, num_features))
                for begin in range(0, num_nodes, rows):
                    yield member.read(min(rows, num_nodes - begin) * num_features).reshape(-1, num_features)
            member.finish()

    def label_chunks(self) -> Iterator[Array]:
        """`read_y` in pieces."""
        return _label_chunks(self.path, self.num_classes)

    def has_year(self) -> bool:
        return "node_year" in _headers(self._data)

    def year_chunks(self) -> Iterator[Array]:
        """`read_year` in pieces; only where `has_year`."""
        with Member(self._data, "node_year") as member:
            left, step = math.prod(member.info.shape), npz.CHUNK_BYTES // member.info.dtype.itemsize
            while left:
                count = min(step, left)
                yield member.read(count).astype(np.int64)
                left -= count
            member.finish()

    def read_y(self) -> Array:
        """Labels [N], int16 (int64 beyond 32,767 classes); -1 where the file has NaN."""
        return np.concatenate(list(self.label_chunks()))

    def read_splits(self) -> dict[str, Array]:
        """Node ids int64 of `train`, `valid` and `test`, in file order."""
        return read_split_files(split_folder(self.path), self.num_nodes)

    def read_year(self) -> Array | None:
        """Years int64 [N], or None where the data set has none."""
        return np.concatenate(list(self.year_chunks())) if self.has_year() else None


@dataclass(frozen=True, kw_only=True)
class OfficialDataset(Dataset):
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
        step = max(1, npz.CHUNK_BYTES // (x.itemsize * max(1, self.num_features)))
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
        return clean_labels(self._held("y"), self.num_classes, f"{self.name}, node_label")

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
        with Member(file, name) as member:
            headers[name] = member.info
    return headers


def _label_chunks(path: Path, num_classes: int) -> Iterator[Array]:
    with Member(path / "raw" / "node-label.npz", "node_label") as member:
        num_nodes, step = math.prod(member.info.shape), npz.CHUNK_BYTES // member.info.dtype.itemsize
        for begin in range(0, num_nodes, step):
            yield clean_labels(member.read(min(step, num_nodes - begin)), num_classes, member.where, begin)
        member.finish()


def split_folder(path: Path) -> Path:
    folder = path / "split"
    found = sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    if folder / "time" in found or len(found) == 1:
        split = folder / "time" if folder / "time" in found else found[0]
        missing = [f"{name}.csv.gz" for name in SPLITS if not (split / f"{name}.csv.gz").is_file()]
        if not missing:
            return split
        raise InputError(f"{split}: expected train, valid and test.csv.gz, found no {', '.join(missing)}")
    raise InputError(f"{folder}: expected a folder named time, or just one, found {[entry.name for entry in found]}")


def read_split_files(folder: Path, num_nodes: int) -> dict[str, Array]:
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
        with Member(data, name) as member:
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
    split_folder(path)
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
