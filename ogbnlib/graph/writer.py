"""Writing a store's arrays in pieces, and verifying every byte of a store."""

import contextlib
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError, explained
from ..files import StrPath, write_json
from ..io.blocks import Stream
from ..progress import counted
from .array_checks import finite, is_labelled, split_problems
from .npz import Array
from .store import Store, open_store
from .store_format import (
    FORMAT,
    HEADER_BYTES,
    META,
    TARGETS_VERSION,
    VERSION,
    FileInfo,
    meta_crc32,
    npy_header,
    read_meta,
)


class ArrayWriter:
    """A `.npy` file written in pieces along the first axis, whose length is not known before."""

    def __init__(self, stream: Stream, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.length = 0  # rows written
        self.crc32 = 0  # of their bytes
        self._stream = stream
        self._stream.append(bytes(HEADER_BYTES))  # room for the header, which has the length

    def write(self, values: Array) -> None:
        """Append `values`, n rows."""
        values = np.ascontiguousarray(values, self.dtype)
        self.length += len(values)
        data = values.reshape(-1).view(np.uint8).data
        self.crc32 = zlib.crc32(data, self.crc32)
        self._stream.append(data)


class StoreWriter:
    """A store under construction in an empty `folder`, such as one of `files.new_folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, FileInfo] = {}
        self.entries: dict[str, Any] = {}  # additional entries of store.json

    @contextlib.contextmanager
    def create(
        self, name: str, dtype: DTypeLike, row_shape: tuple[int, ...] = ()
    ) -> Iterator[ArrayWriter]:
        """Open the array `name` [n, *row_shape] for writing; the store gets it when the block ends
        without an error."""
        with Stream(self.folder / f"{name}.npy") as stream:
            writer = ArrayWriter(stream, dtype)
            yield writer
            shape = (writer.length, *row_shape)
            os.pwrite(stream.fileno(), npy_header(writer.dtype, shape), 0)
            stream.drop()  # to disk, and from the page cache
            self._files[name] = FileInfo(writer.dtype.str, shape, stream.size, writer.crc32)

    def write(self, name: str, values: Array) -> None:
        """Write the whole array `name`."""
        with self.create(name, values.dtype, values.shape[1:]) as writer:
            writer.write(values)

    def finish(
        self, name: str, num_classes: int, *, undirected: bool, origin: Mapping[str, Any],
        hops: int | None = None,
    ) -> None:  # fmt: skip
        """Write store.json; call it after all arrays are written."""
        num_nodes, num_features = self._files["x"].shape
        meta: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "name": name,
            "num_nodes": num_nodes,
            "num_edges": self._files["row"].shape[0],
            "num_features": num_features,
            "num_classes": num_classes,
            "undirected": undirected,
            "origin": dict(origin),
            **self.entries,  # may replace the version, for int8
            "files": {name: vars(info) for name, info in sorted(self._files.items())},
            "hops": hops,
        }
        if num_classes == 0:  # targets; a reader of their version, the highest, knows int8, too
            meta["version"] = TARGETS_VERSION
        write_json(self.folder / META, {**meta, "crc32": meta_crc32(meta)})
        read_meta(self.folder)  # refuses what no store has, such as no nodes


def check_for_training(store: Store) -> None:
    """Refuse a store with offsets, splits or labels that training can't use. Ids in `row` are checked
    where they are read: by the kernels, or with the checksum."""
    store.check_offsets()

    def labelled(ids: Array) -> Array:
        labels = store.y[ids]
        return is_labelled(labels) & (store.has_targets or labels < store.num_classes)

    for name, problem in split_problems(store.splits, store.num_nodes, labelled):  # the first
        raise store.damaged(name, problem)


def verify_store(path: StrPath, progress: bool = False) -> list[str]:
    """Read every byte of a store once, in bounded memory; return a list of problems, empty for a
    sound store: checksums, ids, classes, splits, and features that are not finite."""
    problems = []
    try:
        store = open_store(path)  # checks store.json, and the sizes and headers of the files
        with counted("verify", store.nbytes, progress) as done:
            for name, info in store.files.items():
                chunks: Iterator[Array] = (part for _, part in store.chunks(name, checked=True))
                if name == "x":
                    chunks = finite(
                        map(store.decode, chunks), np.float32, str(store.file_path(name))
                    )
                try:
                    for rows in chunks:
                        done(info.bytes * len(rows) // info.shape[0])
                except InputError as error:
                    problems.append(str(error))
        if not problems:  # else a damaged array would be reported twice
            check_for_training(store)
            _ = store.class_names  # decodes them
    except (InputError, OSError) as error:  # ends the check: the store can't be read further
        problems.append(str(explained(error)))
    return problems
