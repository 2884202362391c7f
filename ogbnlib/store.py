"""The on-disk graph: a folder of plain `.npy` files and a versioned `store.json`, opened memory-mapped.

| file | dtype | shape | content |
|---|---|---|---|
| `colptr.npy` | int64 | [N + 1] | the in-edges of node v are `row[colptr[v]:colptr[v + 1]]` |
| `row.npy` | int32 (int64 from 2**31 nodes on) | [E] | sources |
| `x.npy` | float16 or float32 | [N, F] | features, C order |
| `y.npy` | int16 (int64 beyond 32,767 classes) | [N] | labels, -1 where there is none |
| `train.npy`, `valid.npy`, `test.npy` | int64 | [n] | node ids of the splits, in their original order |
| `year.npy`, optional | int16 (int64 where a year needs it) | [N] | |
| `node_id.npy`, where nodes were dropped | as `row` | [N] | ids in the original data set, ascending |

Anyone can `np.load(file, mmap_mode="r")` them. The header of each file takes 4 KiB, so that data begin on a page.
`store.json` tells each file's dtype, shape, size and CRC-32 of the data, and carries a CRC-32 of itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import DTypeLike
from tqdm import tqdm

from . import npz
from .config import InputError, TrainConfig, write_json
from .csc import index_dtype
from .npz import Array, StrPath
from .ogb_raw import SPLITS, Dataset, label_dtype

FORMAT, VERSION, META = "ogbnlib-store", 1, "store.json"
HEADER_BYTES = 4096  # a feature row of 256 bytes then never lies on two pages
_BLOCK = 2**20  # columns that are checked at once
DROP_BYTES = 32 * 2**20  # of written pages at most that wait for the disk, per file


@dataclass(frozen=True)
class FileInfo:
    """One array of a store: little-endian dtype, shape, size of the whole file and CRC-32 of the data in it."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    crc32: int


def npy_header(dtype: DTypeLike, shape: tuple[int, ...]) -> bytes:
    """The 4,096 bytes before the data: format 1.0 (numpy.lib.format), C order, padded with spaces."""
    text = repr({"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape})
    magic = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    return magic + text.encode().ljust(HEADER_BYTES - 11) + b"\n"


def _meta_crc32(meta: Mapping[str, Any]) -> int:
    content = {key: value for key, value in meta.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


# Reading -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Store(Dataset):
    """An open store; `open_store` makes one. Pickled, it carries its path only, and is opened anew where it arrives.

    `colptr`, `row`, `x`, `y`, `year` and `node_id` are read-only memory maps, made at first use (`year` and `node_id`
    None where there is none); `splits` are int64 ids in RAM. As a `Dataset` it can also be read into RAM whole.
    """

    undirected: bool  # reverse edges added; columns then sorted and without repeats
    keep_hops: int | None  # only nodes within so many in-hops of a labelled one are there
    origin: Mapping[str, Any] = field(repr=False, compare=False)
    files: Mapping[str, FileInfo] = field(repr=False, compare=False)

    def __reduce__(self) -> tuple[Callable[[StrPath], Store], tuple[Path]]:
        return open_store, (self.path,)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays on disk."""
        return sum(info.bytes for info in self.files.values())

    def file_bytes(self, name: str) -> int:
        """Size of the file of array `name`, header included."""
        return self.files[name].bytes

    def file_path(self, name: str) -> Path:
        return self.path / f"{name}.npy"

    def data_offset(self, name: str) -> int:
        """Where in the file of `name` its data begin, for pread; a multiple of the page size."""
        return HEADER_BYTES

    def _map(self, name: str) -> Array:
        info = self.files[name]
        return np.memmap(self.file_path(name), info.dtype, "r", offset=HEADER_BYTES, shape=info.shape)

    @cached_property
    def colptr(self) -> Array:
        return self._map("colptr")

    @cached_property
    def row(self) -> Array:
        return self._map("row")

    @cached_property
    def x(self) -> Array:
        return self._map("x")

    @cached_property
    def y(self) -> Array:
        return self._map("y")

    @cached_property
    def year(self) -> Array | None:
        return self._map("year") if "year" in self.files else None

    @cached_property
    def node_id(self) -> Array | None:
        return self._map("node_id") if "node_id" in self.files else None

    @cached_property
    def splits(self) -> dict[str, Array]:
        return {name: np.array(self._map(name)) for name in SPLITS}

    def advise_random(self) -> None:
        """Tell the kernel not to read ahead of page faults in this object's maps (madvise(2), MADV_RANDOM)."""
        for array in (self.colptr, self.row, self.x, self.y, *([] if self.node_id is None else [self.node_id])):
            array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]

    def read_x(self, dtype: DTypeLike = "float32", progress: bool = False) -> Array:
        """Features [N, F] in RAM. Values that `dtype` can't hold are an `InputError`."""
        out = np.empty((self.num_nodes, self.num_features), dtype)
        step = max(1, npz.CHUNK_BYTES // (out.itemsize * self.num_features))
        with tqdm(total=out.nbytes, unit="B", unit_scale=True, desc="x.npy", disable=not progress) as bar:
            for begin in range(0, self.num_nodes, step):
                block = out[begin : begin + step]
                with np.errstate(over="ignore"):
                    block[...] = self.x[begin : begin + step]
                finite = np.isfinite(block).all(axis=1)
                if not finite.all():
                    row = begin + int(finite.argmin())
                    raise InputError(f"{self.file_path('x')}: expected values finite as {out.dtype}, row {row} is not")
                bar.update(block.nbytes)
        return out

    def edge_chunks(self, chunk_edges: int = 2**20) -> Iterator[tuple[Array, Array]]:
        """(src, dst) int64 pairs, column by column, `chunk_edges` at a time."""
        for begin in range(0, self.num_edges, chunk_edges):
            end = min(begin + chunk_edges, self.num_edges)
            first, last = np.searchsorted(self.colptr, [begin, end - 1], side="right") - 1
            ends = np.clip(self.colptr[first : last + 2], begin, end)
            yield self.row[begin:end].astype(np.int64), np.repeat(np.arange(first, last + 1), np.diff(ends))

    def read_edge_index(self) -> Array:
        """Edges int64 [2, E] in RAM, column by column; reverse edges are among them where the store has them."""
        edge_index, at = np.empty((2, self.num_edges), np.int64), 0
        for src, dst in self.edge_chunks():
            edge_index[0, at : at + len(src)], edge_index[1, at : at + len(src)] = src, dst
            at += len(src)
        return edge_index

    def read_csc(self, undirected: bool = False) -> tuple[Array, Array]:
        """colptr and row in RAM; `undirected` must be the store's own."""
        if undirected != self.undirected:
            raise InputError(
                f"undirected: {self.path} was converted with undirected={self.undirected}, asked for was {undirected}; "
                f"use undirected={self.undirected} or convert it anew"
            )
        return np.array(self.colptr), np.array(self.row)

    def read_y(self) -> Array:
        """Labels [N] in RAM; -1 where there is none."""
        return np.array(self.y)

    def read_splits(self) -> dict[str, Array]:
        return dict(self.splits)

    def read_year(self) -> Array | None:
        """Years int64 [N] in RAM, or None."""
        return None if self.year is None else self.year.astype(np.int64)


def _expected(meta: Mapping[str, Any]) -> dict[str, tuple[tuple[str, ...], tuple[int | None, ...]]]:
    """The dtypes and shapes (None: any length) that the arrays of a store of these sizes may have."""
    nodes, ids = meta["num_nodes"], (_name(index_dtype(meta["num_nodes"])),)
    return {
        "colptr": (("<i8",), (nodes + 1,)),
        "row": (ids, (meta["num_edges"],)),
        "x": (("<f2", "<f4"), (nodes, meta["num_features"])),
        "y": ((_name(label_dtype(meta["num_classes"])),), (nodes,)),
        **dict.fromkeys(SPLITS, (("<i8",), (None,))),
        "year": (("<i2", "<i8"), (nodes,)),
        "node_id": (("<i4", "<i8"), (nodes,)),
    }


def _name(dtype: DTypeLike) -> str:
    return np.dtype(dtype).newbyteorder("<").str


def _read_meta(path: Path) -> dict[str, Any]:
    file = path / META
    if path.name.endswith(".part"):
        raise InputError(f"{path}: expected a finished store, found the work of a conversion; convert again")
    if not file.is_file():
        hint = ""
        if (path / "raw" / "data.npz").is_file():
            hint = "; this is a raw data set: convert it first"
        elif _beside(path, "part").is_dir():
            hint = f"; a conversion is running or was interrupted ({_beside(path, 'part')}): wait or convert again"
        raise InputError(f"{path}: expected a store ({META} in it), found none{hint}")
    text = file.read_bytes()
    try:
        meta = json.loads(text)
    except ValueError as error:
        raise InputError(f"{file}: expected JSON, found damage ({error}); convert again") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise InputError(f"{file}: expected format {FORMAT!r}, found another or none; this is not a store of ours")
    if meta.get("version") != VERSION:
        raise InputError(
            f"{file}: expected version {VERSION}, found {meta.get('version')!r}; use a newer ogbnlib or convert again"
        )
    if meta.get("crc32") != _meta_crc32(meta) or text != (json.dumps(meta, indent=2) + "\n").encode():
        raise InputError(f"{file}: its checksum is not that of its content: damaged or edited; convert again")
    return meta


def _check_file(file: Path, info: FileInfo) -> None:
    """Size and header of one array's file against what store.json says."""
    if not file.is_file():
        raise InputError(f"{file}: expected this file of the store, found none; convert again")
    if (found := file.stat().st_size) != info.bytes:
        raise InputError(f"{file}: expected {info.bytes} bytes, found {found}; copy the store anew or convert again")
    with open(file, "rb") as stream:
        header = stream.read(HEADER_BYTES)
    if header != npy_header(info.dtype, info.shape):
        raise InputError(
            f"{file}: expected the header of {info.dtype} {list(info.shape)}, found another; convert again"
        )


def open_store(path: StrPath) -> Store:
    """Open a store without reading its arrays: every file's size, dtype and shape is checked, in milliseconds.

    Raises:
        InputError: naming the file that is missing, truncated, of another dtype or shape, or of a newer version.
    """
    path = Path(path).absolute()
    meta = _read_meta(path)
    files = {name: FileInfo(**{**entry, "shape": tuple(entry["shape"])}) for name, entry in meta["files"].items()}
    expected = _expected(meta)
    for name in ("colptr", "row", "x", "y", *SPLITS):
        if name not in files:
            raise InputError(f"{path / META}: expected an entry for {name}, found none; convert again")
    for name, info in files.items():
        dtypes, shape = expected.get(name, ((info.dtype,), info.shape))
        fits = len(info.shape) == len(shape) and all(b in (a, None) for a, b in zip(info.shape, shape, strict=True))
        if info.dtype not in dtypes or not fits:
            raise InputError(
                f"{path / META}: expected {name} as {' or '.join(dtypes)} {list(shape)}, "
                f"found {info.dtype} {list(info.shape)}; convert again"
            )
        _check_file(path / f"{name}.npy", info)
    names = ("name", "num_nodes", "num_edges", "num_features", "num_classes", "undirected", "keep_hops", "origin")
    return Store(path=path, files=files, **{name: meta[name] for name in names})


# Writing -------------------------------------------------------------------------------------------------------------


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


class Stream:
    """A file that is appended to; written pages leave the page cache every `DROP_BYTES`.

    Dirty pages count against a memory cgroup and, unlike clean ones, can't be taken back at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self.size = self._dropped = 0

    def append(self, data: Any) -> None:
        """Append the bytes of an array or a bytes object."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while len(view):
            written = os.write(self.fd, view[:DROP_BYTES])
            view = view[written:]
            self.size += written
            if self.size - self._dropped >= DROP_BYTES:
                self.drop()

    def drop(self) -> None:
        os.fdatasync(self.fd)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._dropped = self.size

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class ArrayWriter:
    """One `.npy` file written from chunks along the first axis; its length is known when it is closed."""

    def __init__(self, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self.dtype, self.row_shape, self.length, self._crc32 = np.dtype(_name(dtype)), row_shape, 0, 0
        self._stream = Stream(path)
        self._stream.append(bytes(HEADER_BYTES))

    def write(self, values: Array) -> None:
        """Append `values` [n, *row_shape]."""
        values = np.ascontiguousarray(values, self.dtype)
        if values.shape[1:] != self.row_shape:
            raise ValueError(f"{self._stream.path}: expected [n, *{self.row_shape}], got {values.shape}")
        self.length += len(values)
        data = values.reshape(-1).view(np.uint8).data
        self._crc32 = zlib.crc32(data, self._crc32)
        self._stream.append(data)

    def close(self) -> FileInfo:
        shape = (self.length, *self.row_shape)
        os.pwrite(self._stream.fd, npy_header(self.dtype, shape), 0)
        os.fsync(self._stream.fd)
        self._stream.drop()
        self._stream.close()
        return FileInfo(self.dtype.str, shape, self._stream.size, self._crc32)

    def abandon(self) -> None:
        self._stream.close()


class _Lock:
    """An exclusive lock in the form of a file with the holder's name in it; it ends with the process at the latest."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path = path
        while True:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(self._fd, 200, 0).decode(errors="replace").strip() or "another process"
                os.close(self._fd)
                if not isinstance(error, BlockingIOError):
                    raise
                raise InputError(
                    f"{target}: {holder} is writing this store; wait for it, end it or name another folder"
                ) from None
            # The last holder may have removed the file between our open and our lock: then it locks nobody out.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._fd), os.stat(path)):
                    break
            os.close(self._fd)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"pid {os.getpid()} on {socket.gethostname()} (since {since})\n".encode(), 0)

    def release(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._fd)


class StoreWriter:
    """Builds a store in the hidden neighbour `.NAME.part`; one rename makes it appear, whole.

    Use it as a context: leaving it without `finish` deletes what was written. What a killed writer left is cleared by
    the next one. A second writer of the same target is refused, and told who holds it.

    Raises:
        InputError: when `path` is there already and not an empty folder, or another process is writing it.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path).resolve()  # of a link, what it points to is replaced
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _Lock(_beside(self.path, "lock"), self.path)
        self.folder = _beside(self.path, "part")
        self._writers: dict[str, ArrayWriter] = {}
        self._files: dict[str, FileInfo] = {}
        try:
            check_target(self.path)
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self.folder.mkdir()
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers.values():
            writer.abandon()
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self._lock.release()

    def create(self, name: str, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> ArrayWriter:
        """Begin the array `name`; close it with `close(name)`."""
        self._writers[name] = ArrayWriter(self.folder / f"{name}.npy", dtype, row_shape)
        return self._writers[name]

    def close(self, name: str) -> None:
        self._files[name] = self._writers.pop(name).close()

    def write(self, name: str, values: Array) -> None:
        """The whole array `name` at once."""
        self.create(name, values.dtype, values.shape[1:]).write(values)
        self.close(name)

    def finish(
        self, name: str, num_classes: int, *, undirected: bool, keep_hops: int | None, origin: Mapping[str, Any]
    ) -> Store:
        """Write store.json, make the store appear and open it."""
        num_nodes, num_features = self._files["x"].shape
        meta: dict[str, Any] = {
            **{"format": FORMAT, "version": VERSION, "name": name, "num_nodes": num_nodes},
            **{"num_edges": self._files["row"].shape[0], "num_features": num_features, "num_classes": num_classes},
            **{"undirected": undirected, "keep_hops": keep_hops, "reordering": None, "origin": dict(origin)},
            "files": {name: {**vars(info), "shape": list(info.shape)} for name, info in sorted(self._files.items())},
        }
        write_json(self.folder / META, {**meta, "crc32": _meta_crc32(meta)})
        check_target(self.path)
        os.replace(self.folder, self.path)
        parent = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
        return open_store(self.path)


def check_target(path: Path) -> None:
    """Refuse a target that is a file or a folder with anything in it."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        what = "a store" if (path / META).is_file() else "other content" if path.is_dir() else "a file"
        raise InputError(f"{path}: expected a new or empty folder, found {what}; name another one or delete it")


# Verifying -----------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _check_columns(row, first, colptr, v, last, num_nodes, unique):  # type: ignore[no-untyped-def]
    """Check one piece of `row`, which begins at edge `first` inside column `v` after the id `last`.

    Returns the number of ids out of range, the first edge that breaks ascending order (-1: none), and `v` and `last`
    for the next piece.
    """
    outside, unsorted = 0, -1
    for i in range(len(row)):
        while v + 1 < len(colptr) and first + i >= colptr[v + 1]:
            v += 1
            last = -1
        value = row[i]
        if value < 0 or value >= num_nodes:
            outside += 1
        if unique and unsorted < 0 and value <= last:
            unsorted = first + i
        last = value
    return outside, unsorted, v, last


class _Verifier:
    def __init__(self, store: Store, bar: Any) -> None:
        self.store, self.bar = store, bar
        self.problems: list[str] = []

    def say(self, name: str, problem: str) -> None:
        self.problems.append(f"{self.store.file_path(name)}: {problem}")

    def chunks(self, name: str) -> Iterator[tuple[int, Array]]:
        """(index of its first row, rows) of one file in order; ends with the comparison of the checksum."""
        info, crc32, at = self.store.files[name], 0, 0
        dtype, row_shape = np.dtype(info.dtype), info.shape[1:]
        row_bytes = dtype.itemsize * math.prod(row_shape)
        step = max(1, npz.CHUNK_BYTES // row_bytes)
        with open(self.store.file_path(name), "rb") as file:
            file.seek(HEADER_BYTES)
            while at < info.shape[0]:
                data = file.read(min(step, info.shape[0] - at) * row_bytes)
                if len(data) % row_bytes or not data:
                    self.say(name, "it became shorter while it was read")
                    return
                crc32 = zlib.crc32(data, crc32)
                yield at, np.frombuffer(data, dtype).reshape(-1, *row_shape)
                at += len(data) // row_bytes
                self.bar.update(len(data))
        if crc32 != info.crc32:
            self.say(name, f"checksum {crc32:08x}, but {META} has {info.crc32:08x}: the file was damaged or changed")

    def ids(self, name: str, high: int) -> None:
        """Ascending unique ids from 0 to high - 1."""
        last, wrong = -1, 0
        for _, ids in self.chunks(name):
            wrong += int((np.diff(ids, prepend=last) <= 0).sum()) + int((ids >= high).sum())
            last = int(ids[-1])
        if wrong:
            self.say(name, f"expected ascending ids from 0 to {high - 1}, found {wrong} that are not")

    def graph(self) -> None:
        store = self.store
        last, wrong, first_wrong = 0, 0, -1
        for at, part in self.chunks("colptr"):
            bad = np.flatnonzero(np.diff(part, prepend=last) < 0)
            if at == 0 and part[0] != 0:
                self.say("colptr", f"expected to begin with 0, found {part[0]}")
            if bad.size and first_wrong < 0:
                first_wrong = at + int(bad[0])
            wrong, last = wrong + bad.size, int(part[-1])
        if wrong:
            self.say("colptr", f"expected ascending offsets, found {wrong} that are not, the first at {first_wrong}")
        if last != store.num_edges:
            self.say("colptr", f"expected to end with {store.num_edges} edges, found {last}")
        sound, outside, unsorted = not wrong, 0, -1
        v, previous = 0, -1
        for at, part in self.chunks("row"):
            done = 0
            while done < len(part) and (v < store.num_nodes or not sound):
                # One block of columns at a time. Without sound offsets only the range of the ids can be checked.
                begin = v // _BLOCK * _BLOCK
                colptr = store.colptr[begin : begin + _BLOCK + 1] if sound else np.array([0, store.num_edges])
                begin = begin if sound else 0
                end = min(len(part), max(int(colptr[-1]) - at, done)) if sound else len(part)
                if end == done and sound:
                    v, previous = begin + _BLOCK, -1
                    continue
                bad, order, local, previous = _check_columns(
                    part[done:end], at + done, np.asarray(colptr), v - begin, previous, store.num_nodes,
                    store.undirected and sound,
                )  # fmt: skip
                outside, unsorted = outside + bad, order if unsorted < 0 else unsorted
                v, done = begin + local, end
        if outside:
            self.say("row", f"expected node ids from 0 to {store.num_nodes - 1}, found {outside} others")
        if unsorted >= 0:
            self.say("row", f"expected sorted columns without repeats (undirected), edge {unsorted} breaks it")

    def nodes(self) -> None:
        store, bad, first = self.store, 0, -1
        for at, part in self.chunks("x"):
            finite = np.isfinite(part)
            if not finite.all():
                first = at + int((~finite.all(axis=1)).argmax()) if first < 0 else first
                bad += int((~finite).sum())
        if bad:
            self.say("x", f"expected finite values, found {bad} NaN or Inf, the first in row {first}")
        wrong = 0
        for _, labels in self.chunks("y"):
            wrong += int(((labels < -1) | (labels >= store.num_classes)).sum())
        if wrong:
            self.say("y", f"expected labels from -1 to {store.num_classes - 1}, found {wrong} others")
        if "year" in store.files:
            for _ in self.chunks("year"):
                pass
        if "node_id" in store.files:
            self.ids("node_id", int(store.origin.get("num_nodes", 2**63 - 1)))

    def splits(self) -> None:
        seen: dict[str, Array] = {}
        for name in SPLITS:
            ids = np.concatenate([np.empty(0, np.int64), *(part for _, part in self.chunks(name))])
            outside = (ids < 0) | (ids >= self.store.num_nodes)
            if outside.any():
                self.say(name, f"expected node ids from 0 to {self.store.num_nodes - 1}, found {outside.sum()} others")
                continue
            if len(np.unique(ids)) != len(ids):
                self.say(name, f"expected each node once, found {len(ids) - len(np.unique(ids))} repeats")
            if unlabelled := int((self.store.y[ids] < 0).sum()):
                self.say(name, f"expected labelled nodes, found {unlabelled} without a label")
            for other, taken in seen.items():
                if shared := np.intersect1d(ids, taken).size:
                    self.say(name, f"expected no node of {other}, found {shared}")
            seen[name] = ids


def verify_store(path: StrPath, progress: bool = False) -> list[str]:
    """Read every byte of a store once, in bounded memory; returns what is wrong, one sentence each, file first.

    Checked: sizes, headers, checksums; offsets ascending from 0 to E; ids in range; with `undirected` columns sorted
    and without repeats; features finite; labels in range; splits in range, labelled and disjoint; node_id ascending.
    An empty list says that the store is sound.
    """
    try:
        store = open_store(path)
    except InputError as error:
        return [str(error)]
    with tqdm(total=store.nbytes, unit="B", unit_scale=True, desc="verify", disable=not progress, mininterval=1) as bar:
        verifier = _Verifier(store, bar)
        verifier.graph()
        verifier.nodes()
        verifier.splits()
    return verifier.problems


def check_store(dataset: Dataset, config: TrainConfig) -> None:
    """Refuse what `config` asks of a data set that does not hold it: a store, reverse edges, as many hops.

    Raises:
        InputError: naming the parameter.
    """
    if not isinstance(dataset, Store):
        if config.loading == "store":
            raise InputError(
                f"dataset: loading='store' needs a store, found {dataset.path} in OGB's layout; make one with "
                f"`python -m ogbnlib convert {dataset.path} STORE_DIR`"
            )
        return
    store = dataset
    if config.undirected and not store.undirected and (config.loading == "store" or store.keep_hops is not None):
        raise InputError(f"undirected: {store.path} has no reverse edges; convert it with --undirected")
    if store.keep_hops is not None and len(config.num_neighbors) > store.keep_hops:
        raise InputError(
            f"num_neighbors: {store.path} keeps {store.keep_hops} hops, got {len(config.num_neighbors)}; "
            "convert it with a larger --keep-hops"
        )
    if config.loading == "store" and config.engine == "pyg":
        raise InputError("engine: loading='store' samples with engine='numba' only, got 'pyg'")


def is_store(path: StrPath) -> bool:
    """Whether `path` is a store's folder, sound or not; nothing is read."""
    return (Path(path) / "store.json").is_file()
