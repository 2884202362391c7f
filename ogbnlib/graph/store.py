"""The on-disk graph: a folder of plain `.npy` files and a versioned `store.json`, opened
memory-mapped.

`np.load(file, mmap_mode="r")` opens each; `store_format` lists them.
"""

import importlib
import io
import math
import mmap
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError, clear_errors, naming
from ..files import Stamp, StrPath, home, replaced, stamp
from . import npz
from .array_checks import finite
from .int8 import Int8Columns
from .npz import Array
from .store_format import HEADER_BYTES, META, SPLITS, FileInfo, check_file, read_meta
from .text import Text, decoded


@dataclass(frozen=True)
class GraphSize:
    """The numbers of a data set that decide memory."""

    name: str
    num_nodes: int
    num_edges: int  # as `stored`; if `undirected`, a store's include reverse edges
    num_features: int
    num_classes: int
    num_seeds: Mapping[str, int]  # by split
    undirected: bool = False
    # OGB's binary layout or its csv files are still to be converted
    stored: Literal["raw", "csv", "store"] = "raw"
    feature_itemsize: int = 4  # in the store
    hops: int | None = None  # of propagated features, which have no edges; None for a graph


def _from_above(module: str, name: str) -> Any:  # on use: imports at the top go only to rooms below
    return getattr(importlib.import_module(f"ogbnlib.{module}"), name)


def _mapped(name: str) -> cached_property[Any]:
    def mapped(store: "Store") -> Any:
        info = store.files.get(name)
        if info is None:
            return None
        with store.open_file(name) as file:
            array = np.memmap(file, info.dtype, "r", offset=HEADER_BYTES, shape=info.shape)
        array.stamp = store.stamps[name]  # type: ignore[attr-defined]  # for another process that maps it by its path
        return Text(array) if array.dtype.kind == "S" else array

    return cached_property(mapped)


@dataclass(frozen=True, kw_only=True)
class Store(GraphSize):
    """An open store, see `open_store`; when it is unpickled, it is opened again.

    `colptr`, `row`, `x`, `y`, `node_id` and `node_name` are read-only memory maps, made at first
    use. `node_name` is int64, or `Text`, which is decoded on use; `label_name` is an array of text;
    these and `node_id` are None if the store has none. `splits` are int64 ids in RAM.
    A file that was replaced or written to since `open_store` is refused. If `x` is int8, `decode`
    returns the values of its rows, and `read` decodes.
    """

    path: Path
    origin: Mapping[str, Any] = field(repr=False, compare=False)
    files: Mapping[str, FileInfo] = field(repr=False, compare=False)
    crc32: int = field(repr=False, compare=False)  # of store.json
    stamps: Mapping[str, Stamp] = field(repr=False, compare=False)
    int8: Int8Columns | None = field(default=None, repr=False, compare=False)
    # counts of the conversion; {} for propagated features and stores of earlier versions
    summary: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_meta()  # here, as an error in a process that is just starting gets lost
        return _reopen, (self.path, self.crc32)

    def __fspath__(self) -> str:  # where a data set's path is expected
        return str(self.path)

    @staticmethod
    def from_data(data: Any, path: StrPath, **options: Any) -> "Store":
        """Write a PyG `Data` as a store, see `sources.pyg_data.from_data`."""
        return _from_above("sources.pyg_data", "from_data")(data, path, **options)

    def to_data(self) -> Any:
        """Read the store into a PyG `Data` in RAM, see `sampling.loading.to_data`."""
        return _from_above("sampling.loading", "to_data")(self)

    def loader(self, nodes: Any = "train", **options: Any) -> Any:
        """Return a PyG `NodeLoader` with the trainer's batches, see `sampling.loading.loader`."""
        return _from_above("sampling.loading", "loader")(self, nodes, **options)

    def feature_store(self) -> Any:
        """Return a PyG `FeatureStore` of features and labels; `loader` is faster for stores larger
        than memory."""
        return _from_above("sampling.loading", "StoreFeatures")(self)

    def graph_store(self) -> Any:
        """Return a PyG `GraphStore` of the edges."""
        return _from_above("sampling.loading", "StoreGraph")(self)

    def sampler(self, num_neighbors: Sequence[int], seed: int = 0) -> Any:
        """Return a sampler for PyG's node and link loaders, see `sampling.loading.PassSampler`."""
        return _from_above("sampling.loading", "PassSampler")(
            self.colptr, self.row, num_neighbors, seed=seed
        )

    @property
    def size(self) -> GraphSize:
        return GraphSize(**{item.name: getattr(self, item.name) for item in fields(GraphSize)})

    @property
    def feature_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.files["x"].dtype)

    def decode(self, rows: Array, columns: slice = slice(None)) -> Array:
        """Return columns of rows of `x` [n, F] as floats: int8 as float32, others unchanged."""
        return rows[:, columns] if self.int8 is None else self.int8.decode(rows, columns)

    @property
    def nbytes(self) -> int:
        return sum(info.bytes for info in self.files.values())

    def file_path(self, name: str) -> Path:
        return self.path / f"{name}.npy"

    def _check_meta(self) -> None:
        if not (self.path / META).is_file() or read_meta(self.path)["crc32"] != self.crc32:
            raise replaced(self.path / META)

    def check_open(self, name: str, descriptor: int) -> None:
        """Raise an `InputError` if an open file of array `name` is not the one that `open_store`
        saw."""
        now, before = stamp(descriptor), self.stamps[name]
        if now[:2] != before[:2]:
            raise replaced(self.file_path(name))
        if now != before:  # some network file systems renumber their inodes
            self._check_meta()

    def check_maps(self) -> None:
        """Raise an `InputError` if files were written to in place: that changes maps, unlike a new
        file."""
        for name, before in self.stamps.items():
            if (
                (file := self.file_path(name)).is_file()
                and (now := stamp(file)) != before
                and now[2] == before[2]
            ):
                raise replaced(file)

    def open_file(self, name: str) -> io.FileIO:
        """Open the file of array `name` for reading, with the check of `check_open`."""
        try:
            file = io.FileIO(str(self.file_path(name)))
        except FileNotFoundError:
            raise replaced(self.file_path(name)) from None
        self.check_open(name, file.fileno())
        return file

    colptr, row, x, y = _mapped("colptr"), _mapped("row"), _mapped("x"), _mapped("y")
    node_id, node_name = _mapped("node_id"), _mapped("node_name")

    @cached_property
    def label_name(self) -> Array | None:
        return self.read("label_name") if "label_name" in self.files else None

    def damaged(self, name: str, problem: str) -> InputError:
        """Return the error for a damaged array; `problem` has the expected and the found value."""
        hint = f"run `python -m ogbnlib verify {self.path}`, then copy or convert the store again"
        return InputError(f"{self.file_path(name)}: {problem}; {hint}")

    @cached_property
    def splits(self) -> dict[str, Array]:
        return {name: self.read(name) for name in SPLITS}

    def advise_random(self) -> None:
        """Turn off read-ahead of page faults in this object's maps (madvise(2), MADV_RANDOM)."""
        for array in (self.colptr, self.row, self.x, self.y):
            array._mmap.madvise(mmap.MADV_RANDOM)

    def chunks(self, name: str, checked: bool = False) -> Iterator[tuple[int, Array]]:
        """Yield array `name` in pieces of about 8 MB, read, not mapped, each with the index of its
        first row.

        With `checked`, a checksum mismatch is an `InputError` after the last piece.
        """
        info, file = self.files[name], self.file_path(name)
        row_bytes = np.dtype(info.dtype).itemsize * math.prod(info.shape[1:])
        step, crc32 = max(1, npz.CHUNK_BYTES // max(1, row_bytes)), 0
        with self.open_file(name) as stream:
            stream.seek(HEADER_BYTES)
            for begin in range(0, info.shape[0], step):
                shape = (min(step, info.shape[0] - begin), *info.shape[1:])
                with naming(file):
                    values = np.fromfile(stream, info.dtype, math.prod(shape))
                if len(values) != math.prod(shape):
                    raise InputError(f"{file}: the file became shorter while it was read")
                crc32 = zlib.crc32(values.data, crc32) if checked else crc32
                yield begin, values.reshape(shape)
        if checked and crc32 != info.crc32:
            raise self.damaged(name, f"expected the checksum {info.crc32:08x}, found {crc32:08x}")

    def read(self, name: str, dtype: DTypeLike | None = None) -> Array:
        """Read array `name` into RAM, names as text, features in another float dtype if asked; the
        peak is the result and a chunk."""
        # Ids out of range would read foreign memory. Checksums of features (56 GB in papers100M)
        # are left to `verify`.
        info, begin = self.files[name], 0
        out = np.empty(
            info.shape, dtype or (np.float32 if name == "x" and self.int8 else info.dtype)
        )
        chunks = (
            self.decode(part) if name == "x" else part
            for _, part in self.chunks(name, checked=name != "x")
        )
        for values in (
            finite(chunks, out.dtype, str(self.file_path(name)))
            if out.dtype.kind == "f"
            else chunks
        ):
            out[begin : begin + len(values)] = values
            begin += len(values)
        return decoded(out)

    def read_edge_index(self) -> Array:
        """Return edges int64 [2, E], sources above destinations, column by column, reverse edges
        included."""
        edge_index, step = np.empty((2, self.num_edges), np.int64), 2**16
        for _ in self.chunks("colptr", checked=True):
            pass
        for begin, sources in self.chunks("row", checked=True):
            edge_index[0, begin : begin + len(sources)] = sources
        for begin in range(0, self.num_nodes, step):
            offsets = self.colptr[begin : begin + step + 1]
            edge_index[1, offsets[0] : offsets[-1]] = np.repeat(
                np.arange(len(offsets) - 1) + begin, np.diff(offsets)
            )
        return edge_index


@clear_errors()
def open_store(path: StrPath) -> Store:
    """Open a store in milliseconds. Sizes, dtypes and shapes of all files are checked, their
    content is not."""
    path = home(path).absolute()
    meta = read_meta(path)
    if (hops := meta.get("keep_hops")) is not None:  # of an earlier version
        problem = f"nodes beyond {hops} hops from a labelled node are missing; convert the data again for all"
        warnings.warn(f"{path}: made with keep_hops={hops}: {problem}", stacklevel=2)
    files = {
        name: FileInfo(**{**entry, "shape": tuple(entry["shape"])})
        for name, entry in meta["files"].items()
    }
    names = (
        "name",
        "num_nodes",
        "num_edges",
        "num_features",
        "num_classes",
        "undirected",
        "origin",
    )
    return Store(
        path=path, files=files, crc32=meta["crc32"],
        stamps={name: check_file(path / f"{name}.npy", info) for name, info in files.items()},
        stored="store", feature_itemsize=np.dtype(files["x"].dtype).itemsize,
        num_seeds={split: files[split].shape[0] for split in SPLITS}, hops=meta.get("hops"),
        int8=Int8Columns(*(np.array(part, np.float32) for part in meta["int8"])) if "int8" in meta else None,
        summary=meta.get("summary", {}), **{name: meta[name] for name in names},
    )  # fmt: skip


def _reopen(path: StrPath, crc32: int) -> Store:
    store = open_store(path)
    if store.crc32 != crc32:
        raise replaced(store.path / META)
    return store


def is_store(path: StrPath) -> bool:
    """Return whether `path` is a store's folder, without reading it."""
    return (home(path) / META).is_file()
