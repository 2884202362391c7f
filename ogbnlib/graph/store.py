"""The on-disk graph: a folder of plain `.npy` files, memory-mapped, and a versioned `store.json`;
`store_format` lists the files."""

import io
import math
import mmap
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError, clear_errors, format_bytes, naming, printable
from ..files import StrPath, home
from ..registry import STORE_METHODS
from . import npz
from .array_checks import finite
from .int8 import Int8Columns
from .npz import Array
from .store_format import (
    HEADER_BYTES,
    META,
    SPLITS,
    FileInfo,
    Stamp,
    check_file,
    read_meta,
    replaced,
    stamp,
)
from .text import Text, decoded

if TYPE_CHECKING:
    from ..io.disk_array import DiskArray


@dataclass(frozen=True)
class GraphSize:
    """The numbers of a data set that decide memory."""

    name: str
    num_nodes: int
    num_edges: int  # in the data as `stored`; an undirected store has reverse edges, too
    num_features: int
    num_classes: int  # 0 if the nodes have targets in place of classes
    num_seeds: Mapping[str, int]  # by split
    undirected: bool = False
    stored: Literal["raw", "store"] = "raw"  # raw: still to be converted
    feature_itemsize: int = 4  # bytes of a feature value in the store
    hops: int | None = None  # of propagated features, which have no edges; None for a graph

    @property
    def has_targets(self) -> bool:
        """Whether `y` has float targets [N] or [N, T], for the user's own loop, not classes."""
        return self.num_classes == 0

    def _card(self) -> dict[str, str]:  # the lines of the repr, by their titles
        return {
            type(self).__name__: self.name,
            "nodes": f"{self.num_nodes:,}",
            "edges": f"{self.num_edges:,}{' (undirected)' * self.undirected}"
            if self.hops is None
            else f"none, {self.hops} hops were propagated",
            "features": f"{self.num_features:,}",
            "classes": "none, but targets" if self.has_targets else f"{self.num_classes:,}",
            "splits": ", ".join(f"{split} {count:,}" for split, count in self.num_seeds.items()),
        }

    def __repr__(self) -> str:
        lines = (f"{title:<10} {text}" for title, text in self._card().items())
        return "\n".join(map(printable, lines))


def _mapped(name: str) -> cached_property[Any]:
    # a property of `Store`: array `name`, mapped at first use, or None if the store has none
    def mapped(store: "Store") -> Array | Text | None:
        info = store.files.get(name)
        if info is None:
            return None
        with store.open_file(name) as file:
            # A propagated store has no edges; numpy before 2.2 can't map empty arrays.
            if 0 in info.shape:
                array = np.empty(info.shape, info.dtype).view(np.memmap)
            else:
                array = np.memmap(file, info.dtype, "r", offset=HEADER_BYTES, shape=info.shape)
        return Text(array) if array.dtype.kind == "S" else array

    return cached_property(mapped)


@dataclass(frozen=True, kw_only=True, repr=False)
class Store(GraphSize):
    """An open store, see `open_store`; when it is unpickled, it is opened again.

    `colptr`, `row`, `x`, `y`, `node_id` and `node_name` are read-only memory maps, made at first
    use. `node_name` is int64, or `Text`, which is decoded on use; `label_name` is an array of text.
    These two and `node_id` are None if the store has none. `splits` are int64 ids in RAM;
    `ids(names)` returns the ids of named nodes.

    A file that was replaced or written to since `open_store` is refused. If `x` is int8, `decode`
    and `read` return its values.
    """

    path: Path
    origin: Mapping[str, Any] = field(compare=False)
    files: Mapping[str, FileInfo] = field(compare=False)
    crc32: int = field(compare=False)  # of store.json
    stamps: dict[str, Stamp] = field(compare=False)
    int8: Int8Columns | None = field(default=None, compare=False)
    # counts of the conversion; {} for propagated features and stores of earlier versions
    summary: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # checked before pickling, because an error in a process that is just starting gets lost
        self._check_meta()
        for name in self.files:
            self.check_file(name, self.file_path(name))
        return _reopen, (self.path, self.crc32)

    def __fspath__(self) -> str:  # for functions that expect a data set's path
        return str(self.path)

    def _card(self) -> dict[str, str]:
        return super()._card() | {
            "dtype": f"{self.feature_dtype} (features)",
            "path": str(self.path),
            "on disk": format_bytes(self.nbytes),
        }

    # Methods that other packages define, see `registry`: ids of named nodes, and what PyG needs.
    ids = STORE_METHODS["ids"]
    from_data = STORE_METHODS["from_data"]
    from_arrays = STORE_METHODS["from_arrays"]
    to_data = STORE_METHODS["to_data"]
    feature_store = STORE_METHODS["feature_store"]
    graph_store = STORE_METHODS["graph_store"]
    sampler = STORE_METHODS["sampler"]
    loader = STORE_METHODS["loader"]

    @property
    def size(self) -> GraphSize:
        return GraphSize(**{item.name: getattr(self, item.name) for item in fields(GraphSize)})

    @property
    def feature_dtype(self) -> np.dtype[np.generic]:
        return np.dtype(self.files["x"].dtype)

    def decode(self, rows: Array, columns: slice = slice(None)) -> Array:
        """Return columns of rows of `x` [n, F] as floats: int8 decoded to float32, others
        unchanged."""
        return rows[:, columns] if self.int8 is None else self.int8.decode(rows, columns)

    @property
    def nbytes(self) -> int:  # on disk, without store.json
        return sum(info.bytes for info in self.files.values())

    def file_path(self, name: str) -> Path:
        return self.path / f"{name}.npy"

    def _check_meta(self) -> None:  # that store.json is the one that `open_store` read
        if not (self.path / META).is_file() or read_meta(self.path).crc32 != self.crc32:
            raise replaced(self.path / META)

    def check_file(self, name: str, file: StrPath | int) -> None:
        """Refuse a path or descriptor of array `name` that is not the file `open_store` saw."""
        opened = self.stamps[name]  # when the store was opened, or its checksum last compared
        try:
            now = stamp(file)
        except FileNotFoundError:
            raise replaced(self.file_path(name)) from None
        if (now.size, now.modified_ns) != (opened.size, opened.modified_ns):
            raise replaced(self.file_path(name))
        # With another inode, the file is a copy with the original's times, or a network file system
        # renumbers inodes: fine as long as store.json is the same.
        if now.inode != opened.inode:
            self._check_meta()
        # With the same inode and another ctime, the file has a new mode or link, or new content and
        # the old times: the checksum decides.
        elif now.changed_ns != opened.changed_ns:
            with open(self.file_path(name), "rb") as stream:
                stream.seek(HEADER_BYTES)
                crc32 = 0
                for piece in iter(partial(stream.read, npz.CHUNK_BYTES), b""):
                    crc32 = zlib.crc32(piece, crc32)
            if crc32 != self.files[name].crc32:
                raise replaced(self.file_path(name))
            self.stamps[name] = now  # compare the checksum once for each change

    def check_maps(self) -> None:
        """Refuse files that were written to in place, which changes maps; a new file does not."""
        for name, opened in [*self.stamps.items()]:  # a copy, as `check_file` sets items
            file = self.file_path(name)
            if file.is_file() and stamp(file).inode == opened.inode:  # the file that is mapped
                self.check_file(name, file)

    def open_file(self, name: str) -> io.FileIO:
        """Open the file of array `name` for reading, with the check of `check_file`."""
        self.check_file(name, self.file_path(name))  # that it exists
        file = io.FileIO(str(self.file_path(name)))
        self.check_file(name, file.fileno())
        return file

    def disk_array(
        self, name: str, chunk_bytes: int = npz.CHUNK_BYTES,
        abandoned: threading.Event | None = None,
    ) -> "DiskArray":  # fmt: skip
        """Open array `name` to read rows past the page cache, with the check of `check_file`; each
        read has `chunk_bytes` (a power of two), or raises `Interrupted` once `abandoned` is set."""
        from ..io.disk_array import DiskArray

        info = self.files[name]
        row_bytes = np.dtype(info.dtype).itemsize * math.prod(info.shape[1:])  # [] multiplies to 1
        file = self.file_path(name)
        self.check_file(name, file)  # that it exists
        array = DiskArray(file, HEADER_BYTES, row_bytes, info.shape[0], chunk_bytes, abandoned)
        self.check_file(name, array.descriptor)
        return array

    def fill_page_cache(self) -> None:
        """Read graph and features into the page cache, ten times as fast as page faults."""
        for name in ("colptr", "row", "x"):
            for _ in self.chunks(name):
                pass

    colptr = _mapped("colptr")
    row = _mapped("row")
    x = _mapped("x")
    y = _mapped("y")
    node_id = _mapped("node_id")
    node_name = _mapped("node_name")

    @cached_property
    def label_name(self) -> Array | None:
        return self.read("label_name") if "label_name" in self.files else None

    @property
    def class_names(self) -> list[str]:
        """The name of each class from `label_name`, or its number as text."""
        names: list[str] = [] if self.label_name is None else self.label_name.tolist()
        return names + [*map(str, range(len(names), self.num_classes))]

    def damaged(self, name: str, problem: str) -> InputError:
        """Return the error for a damaged array; `problem` has the expected and the found value."""
        return InputError(
            f"{self.file_path(name)}: {problem}; copy or convert the store again, then check it by "
            f"`python -m ogbnlib verify {self.path}`"
        )

    @cached_property
    def splits(self) -> dict[str, Array]:
        return {name: self.read(name) for name in SPLITS}

    def advise_random(self) -> None:
        """Turn off read-ahead of page faults in this object's maps (madvise(2), MADV_RANDOM)."""
        for array in filter(np.size, (self.colptr, self.row, self.x, self.y)):  # empty: no map
            array._mmap.madvise(mmap.MADV_RANDOM)

    def chunks(self, name: str, checked: bool = False) -> Iterator[tuple[int, Array]]:
        """Yield array `name` in pieces of about 8 MB, read, not mapped; each with the index of its
        first row. With `checked`, an id in `row` or a class in `y` that the store does not have is
        an `InputError`, as is a wrong checksum after the last piece."""
        info = self.files[name]
        ranges = {"row": ("ids", 0, self.num_nodes), "y": ("labels", -1, self.num_classes)}
        kind, low, high = ranges.get(name, ("", 0, 0))  # 0, too, if targets replace classes
        file = self.file_path(name)
        row_bytes = np.dtype(info.dtype).itemsize * math.prod(info.shape[1:])
        step = max(1, npz.CHUNK_BYTES // max(1, row_bytes))  # in rows; no columns: 0 bytes
        crc32 = 0
        with self.open_file(name) as stream:
            stream.seek(HEADER_BYTES)
            for begin in range(0, info.shape[0], step):
                shape = (min(step, info.shape[0] - begin), *info.shape[1:])
                with naming(file):  # in errors of the disk
                    values = np.fromfile(stream, info.dtype, math.prod(shape))
                if len(values) != math.prod(shape):
                    raise InputError(f"{file}: the file became shorter while it was read")
                if checked:
                    crc32 = zlib.crc32(values.data, crc32)
                if checked and high and (values.min() < low or values.max() >= high):
                    wrong = values[(values < low) | (values >= high)][0]
                    raise self.damaged(
                        name, f"expected {kind} from {low} to {high - 1}, found {wrong}"
                    )
                yield begin, values.reshape(shape)
        if checked and crc32 != info.crc32:
            raise self.damaged(name, f"expected the checksum {info.crc32:08x}, found {crc32:08x}")

    def read(self, name: str, dtype: DTypeLike | None = None) -> Array:
        """Read array `name` into RAM, with one chunk more at the peak: names as text, features as
        floats, in `dtype` if given."""
        # Ids out of range would read foreign memory, so checksums are compared; that of features
        # (56 GB in papers100M), which are only checked to be finite, is left to `verify`.
        info = self.files[name]
        chunks: Iterator[Array] = (part for _, part in self.chunks(name, checked=name != "x"))
        out = np.empty(info.shape, dtype or (np.float32 if info.dtype == "|i1" else info.dtype))
        if name == "x":
            chunks = finite(map(self.decode, chunks), out.dtype, str(self.file_path(name)))
        begin = 0
        for values in chunks:
            out[begin : begin + len(values)] = values
            begin += len(values)
        with naming(self.file_path(name), "text in UTF-8", "convert the original data again"):
            return decoded(out)

    def check_offsets(self) -> None:
        """Refuse a damaged `colptr`, or one that does not ascend from 0 to the number of edges."""
        expected = f"expected ascending offsets from 0 to {self.num_edges} edges, found"
        last = 0  # the last offset of the chunk before
        for begin, offsets in self.chunks("colptr", checked=True):
            falls = np.flatnonzero(offsets < np.append(last, offsets[:-1]))  # below the one before
            if len(falls):
                raise self.damaged("colptr", f"{expected} a lower one at {begin + falls[0]}")
            last = int(offsets[-1])
        if (self.colptr[0], last) != (0, self.num_edges):
            raise self.damaged("colptr", f"{expected} {self.colptr[0]} to {last}")

    def read_edge_index(self) -> Array:
        """Return all edges int64 [2, E], column by column; row 0 has sources, row 1 targets."""
        edge_index = np.empty((2, self.num_edges), np.int64)
        self.check_offsets()
        for begin, sources in self.chunks("row", checked=True):
            edge_index[0, begin : begin + len(sources)] = sources
        step = 2**16  # columns at a time: their arrays are small
        for begin in range(0, self.num_nodes, step):
            offsets = self.colptr[begin : begin + step + 1]
            targets = np.arange(begin, begin + len(offsets) - 1)
            edge_index[1, offsets[0] : offsets[-1]] = np.repeat(targets, np.diff(offsets))
        return edge_index


@clear_errors()
def open_store(path: StrPath) -> Store:
    """Open a store in milliseconds; checks sizes, dtypes and shapes of files, not their content."""
    path = home(path).absolute()
    meta = read_meta(path)
    int8 = Int8Columns(*np.array(meta.int8, np.float32)) if meta.int8 else None
    return Store(
        path=path,
        stamps={name: check_file(path / f"{name}.npy", info) for name, info in meta.files.items()},
        stored="store",
        feature_itemsize=np.dtype(meta.files["x"].dtype).itemsize,
        num_seeds={split: meta.files[split].shape[0] for split in SPLITS},
        **{**vars(meta), "int8": int8},
    )


def _reopen(path: StrPath, crc32: int) -> Store:  # in the process that unpickles
    store = open_store(path)
    if store.crc32 != crc32:
        raise replaced(store.path / META)
    return store


def is_store(path: StrPath) -> bool:
    """Return whether `path` is a store's folder, without reading it."""
    return (home(path) / META).is_file()
