"""Arrays of .npy files, memory-mapped, and of compressed .npz files, which numpy can only read
whole, in chunks."""

import contextlib
import math
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, naming

Array = NDArray[Any]
CHUNK_BYTES = 8 * 2**20  # most bytes to read at once


def slices(array: Array, rows: int) -> Iterator[Array]:
    """Return views of `array`, in order, of `rows` rows each, at least 1."""
    rows = max(1, rows)
    return (array[begin : begin + rows] for begin in range(0, len(array), rows))


def load(file: Path) -> Array:
    """Map an .npy file, read-only."""
    with open(file, "rb") as stream:
        magic = stream.read(6)
    if magic != np.lib.format.MAGIC_PREFIX:
        raise InputError(
            f"{file}: expected a file of np.save, found no header, as np.memmap and tofile write; in Python: "
            f"np.save({'new_' + file.name!r}, np.memmap({file.name!r}, 'float32', 'r', shape=(N, "
            "F)))"
        )
    with naming(file, "a numpy array without objects"):
        array: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    return array


class Member:
    """One array of an .npz file, checked by its header; `where` is file and member, for
    messages."""

    # numpy parses a header by ast, which in Python 3.11 is not safe in threads (gh-106905)
    _parser = threading.Lock()

    def __init__(self, file: Path, name: str) -> None:
        self.file = file
        self.name = f"{name}.npy"
        self.where = f"{file}, member {name}"
        with self._opened():  # for the checks, and for `shape`, `fortran_order` and `dtype`
            pass

    @contextlib.contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:  # its stream, at the first value after the header
        with (
            naming(self.where, "a sound .npz file", "copy or download it again"),
            zipfile.ZipFile(self.file) as archive,
        ):
            names = archive.namelist()
            if self.name not in names:
                raise InputError(
                    f"{self.where}: expected such a member, found only: {', '.join(names)}"
                )
            with archive.open(self.name) as stream:
                read = np.lib.format.read_array_header_2_0
                if np.lib.format.read_magic(stream) == (1, 0):  # the version of the format
                    read = np.lib.format.read_array_header_1_0
                with self._parser:
                    self.shape, self.fortran_order, self.dtype = read(stream)
                self._check_size(archive.getinfo(self.name).file_size - stream.tell())
                yield stream

    def _check_size(self, num_bytes: int) -> None:  # of the data behind the header
        if self.dtype.hasobject:
            raise InputError(
                f"{self.where}: expected numbers, found pickled objects, which are never loaded"
            )
        expected = math.prod(self.shape) * self.dtype.itemsize
        if num_bytes != expected:
            raise InputError(
                f"{self.where}: expected {expected} bytes for shape {self.shape} of {self.dtype}, "
                f"found {num_bytes}"
            )

    def pieces(self, step: int, begin: int = 0, end: int | None = None) -> Iterator[Array]:
        """Yield the values from `begin` to `end` (not included) in the order of the file, 1-D,
        `step` at a time."""
        end = math.prod(self.shape) if end is None else end
        with self._opened() as stream:
            # Read up to `begin` instead of seeking: a seek in a stored member stops zipfile from
            # checking the CRC.
            for _ in self._read(stream, CHUNK_BYTES // self.dtype.itemsize, 0, begin):
                pass
            yield from self._read(stream, step, begin, end)
            stream.read(1)  # past the last value of the member, zipfile compares the CRC

    def _read(self, stream: IO[bytes], step: int, begin: int, end: int) -> Iterator[Array]:
        for at in range(begin, end, step):  # `stream` is at value `begin`
            values = np.empty(min(step, end - at), self.dtype)
            view = values.view(np.uint8).data  # the bytes still to fill
            while len(view):  # chunk by chunk, because `readinto` of zipfile copies each of them
                count = stream.readinto(view[:CHUNK_BYTES])  # type: ignore[attr-defined]
                if not count:
                    raise EOFError("it ends early")
                view = view[count:]
            yield values
