"""Streams of the arrays in a compressed .npz file, both ways, in memory bounded by a chunk.

numpy can neither map a compressed archive, such as `raw/data.npz` of ogbn-papers100M, nor read a
part of a member.
"""

import math
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import InputError, naming
from ..files import StrPath

Array = NDArray[Any]
CHUNK_BYTES = 8 * 2**20
# Columns of float32 arrays without a header: np.memmap wrote the large sizes of IGB
# (IllinoisGraphBenchmark/IGB-Datasets, igb/dataloader.py).
_HEADERLESS: dict[tuple[str, ...], int] = {
    ("processed", "paper", "node_feat.npy"): 1024,
    ("processed", "paper", "node_label_19.npy"): 1,
    ("processed", "paper", "node_label_2K.npy"): 1,
}


def slices(array: Array, rows: int) -> Iterator[Array]:
    """Return `array` in pieces of `rows` rows."""
    return (array[begin : begin + rows] for begin in range(0, len(array), max(1, rows)))


def load(file: Path) -> Array:
    """Map an .npy file."""
    with open(file, "rb") as stream:
        magic = stream.read(6)
    if magic and magic != np.lib.format.MAGIC_PREFIX and not magic.startswith(b"PK"):
        columns = _HEADERLESS.get(file.absolute().parts[-3:])
        if columns is not None and file.stat().st_size % (4 * columns) == 0:
            return np.memmap(file, "<f4", "r").reshape(-1, columns)
        array = f"np.memmap({file.name!r}, 'float32', 'r', shape=(N, F))"
        raise InputError(
            f"{file}: expected a file of np.save, found no header, as np.memmap and tofile write; in Python: "
            f"np.save({'new_' + file.name!r}, {array})"
        )
    with naming(file, "a numpy array without objects"):
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise InputError(f"{file}: expected one numpy array, found an .npz archive")
    return array


def write_npz(
    path: StrPath, members: Mapping[str, tuple[Sequence[int], DTypeLike, Iterable[Array]]]
) -> None:
    """Write a compressed .npz file. A member is its shape, its dtype and, in C order, its values in
    chunks."""
    # Level 1, because features are close to noise: level 6 takes twice the time for 1 % less.
    with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, (shape, kind, chunks) in members.items():
            dtype = np.dtype(kind)
            header = {
                "descr": np.lib.format.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": tuple(shape),
            }
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                for chunk in chunks:
                    member.write(np.ascontiguousarray(chunk, dtype).reshape(-1).view(np.uint8).data)


class Mapped:
    """The array of an .npy file, mapped, with the methods of a `Member`: values in order of memory."""

    def __init__(self, file: Path) -> None:
        array = load(file)
        self.where = str(file)
        self.shape = array.shape
        self.dtype = array.dtype
        self.fortran_order = not array.flags.c_contiguous
        self._values = array.reshape(-1, order="A")
        self._at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def read(self, count: int) -> Array:
        """Return the next `count` values."""
        self._at += count
        return self._values[self._at - count : self._at]

    def skip(self, count: int) -> None:
        self._at += count

    def finish(self) -> None:
        """Do nothing: the size of the file is checked on opening."""


def member_names(file: Path) -> list[str]:
    """Return the names of the arrays in an .npz file."""
    with naming(file, "a sound .npz file"), zipfile.ZipFile(file) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


class Member:
    """One array of an .npz file as a stream of values; `where` is file and member, for messages."""

    # numpy parses it by ast, which in Python 3.11 is not safe in threads (gh-106905)
    _header = threading.Lock()

    def __init__(self, file: Path, name: str) -> None:
        self.file = file
        self.name = name
        self.where = f"{file}, member {name}"
        with naming(self.where, "a sound .npz file", "copy or download it again"):
            self._zip = zipfile.ZipFile(file)
            if f"{name}.npy" not in self._zip.namelist():
                raise InputError(
                    f"{self.where}: expected such a member, found only: {', '.join(self._zip.namelist())}"
                )
            self._stream = self._zip.open(f"{name}.npy")
            version = np.lib.format.read_magic(self._stream)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            with self._header:
                self.shape, self.fortran_order, self.dtype = read(self._stream)
            size = self._zip.getinfo(f"{name}.npy").file_size - self._stream.tell()
        if self.dtype.hasobject:
            raise InputError(
                f"{self.where}: expected numbers, found pickled objects, which are never loaded"
            )
        expected = math.prod(self.shape) * self.dtype.itemsize
        if size != expected:
            raise InputError(
                f"{self.where}: expected {expected} bytes for shape {self.shape} of {self.dtype}, "
                f"found {size}"
            )

    def again(self) -> "Member":
        """Open the same member from its first value on."""
        return Member(self.file, self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()
        self._zip.close()

    def read(self, count: int) -> Array:
        """Return the next `count` values, in the member's own dtype."""
        values = np.empty(count, self.dtype)
        view = values.view(np.uint8).data
        filled = 0
        with naming(self.where, "a sound .npz file", "copy or download it again"):
            while filled < len(view):
                part = view[filled : filled + CHUNK_BYTES]
                got = self._stream.readinto(part)  # type: ignore[attr-defined]
                if not got:
                    raise EOFError("it ends early")
                filled += got
        return values

    def skip(self, count: int) -> None:
        # Read on rather than seek: a seek in a stored member stops zipfile from checking the CRC.
        step = max(1, CHUNK_BYTES // self.dtype.itemsize)
        for begin in range(0, count, step):
            self.read(min(step, count - begin))

    def finish(self) -> None:
        """Check the CRC, which zipfile does when it reads past the last value."""
        with naming(self.where, "a sound .npz file", "copy or download it again"):
            if self._stream.read(1):
                raise EOFError("it holds more than its header announces")
