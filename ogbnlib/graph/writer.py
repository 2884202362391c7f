"""Writing a store's arrays in pieces, and verifying every byte of a store."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError
from ..files import Stream, StrPath, write_json
from ..progress import counted
from .checks import (
    FORMAT,
    HEADER_BYTES,
    META,
    SPLITS,
    VERSION,
    FileInfo,
    dtype_name,
    meta_crc32,
    npy_header,
    split_problems,
)
from .npz import Array
from .store import Store, open_store


class ArrayWriter:
    """A `.npy` file written in pieces along the first axis, of a length not known before."""

    def __init__(self, stream: Stream, dtype: DTypeLike, row_shape: tuple[int, ...]) -> None:
        self.dtype, self.row_shape, self.length, self._crc32 = np.dtype(dtype_name(dtype)), row_shape, 0, 0
        self._stream = stream
        self._stream.append(bytes(HEADER_BYTES))

    def write(self, values: Array) -> None:
        """Append `values` [n, *row_shape]."""
        values = np.ascontiguousarray(values, self.dtype)
        if values.shape[1:] != self.row_shape:
            raise ValueError(f"{self._stream.name}: expected [n, *{self.row_shape}], got {values.shape}")
        self.length += len(values)
        data = values.reshape(-1).view(np.uint8).data
        self._crc32 = zlib.crc32(data, self._crc32)
        self._stream.append(data)

    def finish(self) -> FileInfo:
        shape = (self.length, *self.row_shape)
        os.pwrite(self._stream.fileno(), npy_header(self.dtype, shape), 0)
        self._stream.drop()
        return FileInfo(self.dtype.str, shape, self._stream.size, self._crc32)


class StoreWriter:
    """A store under construction in an empty `folder` such as that of `files.new_folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, FileInfo] = {}

    @contextlib.contextmanager
    def create(self, name: str, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> Iterator[ArrayWriter]:
        """Open the array `name` for writing; it is complete when the block ends."""
        with Stream(self.folder / f"{name}.npy") as stream:
            writer = ArrayWriter(stream, dtype, row_shape)
            yield writer
            self._files[name] = writer.finish()

    def write(self, name: str, values: Array) -> None:
        """Write the whole array `name`."""
        with self.create(name, values.dtype, values.shape[1:]) as writer:
            writer.write(values)

    def finish(
        self,
        name: str,
        num_classes: int,
        *,
        undirected: bool,
        origin: Mapping[str, Any],
        hops: int | None = None,
    ) -> None:
        """Write store.json; call it after all arrays are written."""
        num_nodes, num_features = self._files["x"].shape
        meta: dict[str, Any] = {
            **{"format": FORMAT, "version": VERSION, "name": name, "num_nodes": num_nodes},
            **{"num_edges": self._files["row"].shape[0], "num_features": num_features, "num_classes": num_classes},
            **{"undirected": undirected, "origin": dict(origin)},
            **({} if hops is None else {"hops": hops}),
            "files": {name: {**vars(info), "shape": list(info.shape)} for name, info in sorted(self._files.items())},
        }
        write_json(self.folder / META, {**meta, "crc32": meta_crc32(meta)})


# Verification -------------------------------------------------------------------------------------------------------

# Maps a chunk's first index, its rows and their differences (from -1 for the first) to the wrong rows, as bool.
Test = Callable[[int, Array, Array], Array]


def _rules(store: Store, name: str) -> Iterator[tuple[str, Test]]:
    """Yield each expectation on the rows of array `name`, and the test for rows that violate it."""
    num_nodes, num_classes = store.num_nodes, store.num_classes

    def unsorted(begin: int, rows: Array, steps: Array) -> Array:
        wrong = steps <= 0
        falls = begin + np.flatnonzero(wrong)
        # A column may begin with any id.
        starts = np.minimum(np.searchsorted(store.colptr, falls), num_nodes)
        wrong[falls[store.colptr[starts] == falls] - begin] = False
        return wrong

    if name == "colptr":
        yield "ascending offsets", lambda begin, rows, steps: steps < 0
    elif name == "row":
        yield f"node ids from 0 to {num_nodes - 1}", lambda begin, rows, steps: (rows < 0) | (rows >= num_nodes)
        if store.undirected:
            yield "sorted columns without repeats (undirected)", unsorted
    elif name == "x":
        yield "finite values", lambda begin, rows, steps: ~np.isfinite(rows)
    elif name == "y":
        yield f"labels from -1 to {num_classes - 1}", lambda begin, rows, steps: (rows < -1) | (rows >= num_classes)
    elif name == "node_id":
        high = int(store.origin.get("num_nodes", 2**63 - 1))
        yield f"ascending ids from 0 to {high - 1}", lambda begin, rows, steps: (steps <= 0) | (rows >= high)


def _problems(store: Store, name: str, done: Callable[[int], None]) -> Iterator[str]:
    """Yield the problems of one array by itself, in one pass over its file."""
    rules, crc32, last = list(_rules(store, name)), 0, -1
    counts = [[0, -1] for _ in rules]  # how many rows are wrong, and the first
    for begin, rows in store.chunks(name):
        crc32 = zlib.crc32(rows.data, crc32)
        steps = np.diff(rows, axis=0, prepend=rows.dtype.type(last)) if rules and rows.ndim == 1 else rows
        for (_, test), seen in zip(rules, counts, strict=True):
            wrong = test(begin, rows, steps)
            if wrong.any():
                seen[1] = seen[1] if seen[0] else begin + int(np.flatnonzero(wrong)[0]) // max(1, wrong[0].size)
                seen[0] += int(wrong.sum())
        last = rows[-1] if rows.ndim == 1 else last
        done(rows.nbytes)
    for (expected, _), (count, first) in zip(rules, counts, strict=True):
        if count:
            yield f"expected {expected}, found {count} others, the first at {first}"
    if name == "colptr" and (store.colptr[0], store.colptr[-1]) != (0, store.num_edges):
        ends = f"{store.colptr[0]} and {store.colptr[-1]}"
        yield f"expected to begin with 0 and to end with {store.num_edges} edges, found {ends}"
    if crc32 != (expected_crc32 := store.files[name].crc32):
        yield f"checksum {crc32:08x}, but {META} has {expected_crc32:08x}: the file was damaged or changed"


def wrong_splits(store: Store) -> Iterator[tuple[str, str]]:
    """Yield (split, problem) for everything in a store's splits that training can't use."""

    def labelled(ids: Array) -> Array:
        labels = store.y[ids]
        return (labels >= 0) & (labels < store.num_classes)

    return split_problems(store.splits, store.num_nodes, labelled)


def verify_store(path: StrPath, progress: bool = False) -> list[str]:
    """Read every byte of a store once, in bounded memory; return a list of problems, empty for a sound store.

    Checked: sizes, headers, checksums; offsets ascending from 0 to E; ids in range; with `undirected` columns sorted
    and without repeats; features finite; labels in range; splits in range, labelled and disjoint; node_id ascending.
    """
    try:
        store = open_store(path)
    except InputError as error:
        return [str(error)]
    problems: list[tuple[str, str]] = []
    with counted("verify", store.nbytes, progress) as done:
        for name in store.files:
            try:
                problems += [(name, problem) for problem in _problems(store, name, done)]
            except InputError as error:
                return [str(error)]
    if not {name for name, _ in problems} & {"y", *SPLITS}:
        problems += wrong_splits(store)
    return [f"{store.file_path(name)}: {problem}" for name, problem in problems]
