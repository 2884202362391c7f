"""Writes the arrays of a store one by one, each in pieces."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..files import Stream, write_json
from .npz import Array
from .store import FORMAT, HEADER_BYTES, META, VERSION, FileInfo, _meta_crc32, _name, npy_header


class ArrayWriter:
    """One `.npy` file written from chunks along the first axis; its length is known when it is finished."""

    def __init__(self, stream: Stream, dtype: DTypeLike, row_shape: tuple[int, ...]) -> None:
        self.dtype, self.row_shape, self.length, self._crc32 = np.dtype(_name(dtype)), row_shape, 0, 0
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
    """Builds a store in an empty `folder`, such as `files.new_folder` gives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, FileInfo] = {}

    @contextlib.contextmanager
    def create(self, name: str, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> Iterator[ArrayWriter]:
        """The array `name`, which is whole where the block ends."""
        with Stream(self.folder / f"{name}.npy") as stream:
            writer = ArrayWriter(stream, dtype, row_shape)
            yield writer
            self._files[name] = writer.finish()

    def write(self, name: str, values: Array) -> None:
        """The whole array `name` at once."""
        with self.create(name, values.dtype, values.shape[1:]) as writer:
            writer.write(values)

    def finish(
        self, name: str, num_classes: int, *, undirected: bool, keep_hops: int | None, origin: Mapping[str, Any]
    ) -> None:
        """Write store.json, once all arrays are there."""
        num_nodes, num_features = self._files["x"].shape
        meta: dict[str, Any] = {
            **{"format": FORMAT, "version": VERSION, "name": name, "num_nodes": num_nodes},
            **{"num_edges": self._files["row"].shape[0], "num_features": num_features, "num_classes": num_classes},
            **{"undirected": undirected, "keep_hops": keep_hops, "reordering": None, "origin": dict(origin)},
            "files": {name: {**vars(info), "shape": list(info.shape)} for name, info in sorted(self._files.items())},
        }
        write_json(self.folder / META, {**meta, "crc32": _meta_crc32(meta)})
