"""Writes a store array by array; it appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..files import Stream, StrPath, check_new, locked, write_json
from .npz import Array
from .store import (
    FORMAT,
    HEADER_BYTES,
    META,
    VERSION,
    FileInfo,
    Store,
    _beside,
    _meta_crc32,
    _name,
    npy_header,
    open_store,
)


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
        self.folder = _beside(self.path, "part")
        self._writers: dict[str, ArrayWriter] = {}
        self._files: dict[str, FileInfo] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(_beside(self.path, "lock"), f"{self.path}: it is being written"))
            check_new(self.path)
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self.folder.mkdir()
            self._lock = stack.pop_all()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers.values():
            writer.abandon()
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self._lock.close()

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
        check_new(self.path)
        os.replace(self.folder, self.path)
        parent = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
        return open_store(self.path)
