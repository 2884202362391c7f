"""Arrays of a compressed .npz file as streams, both ways, in memory bounded by a chunk.

numpy can neither map a compressed archive, which `raw/data.npz` of ogbn-papers100M is, nor read a part of a member.
"""

from __future__ import annotations

import contextlib
import math
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import InputError
from ..files import StrPath

Array = NDArray[Any]
CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class MemberInfo:
    """The header of one array in an .npz file; `nbytes` is its size once uncompressed."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    nbytes: int


class NpzWriter:
    """A compressed .npz file written from chunks; memory is bounded by a chunk.

    Level 1 because features are close to noise: level 6 takes twice the time for 1 % less.
    """

    def __init__(self, path: StrPath) -> None:
        self._zip = zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED, compresslevel=1)

    def __enter__(self) -> NpzWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    def write(self, name: str, shape: Sequence[int], dtype: DTypeLike, chunks: Iterable[Array]) -> None:
        """Append the member `name`, C order; `chunks` are its values in that order, cut anywhere, of any shape."""
        dtype, written = np.dtype(dtype), 0
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(shape)}
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(member, header)
            for chunk in chunks:
                member.write(np.ascontiguousarray(chunk, dtype).reshape(-1).view(np.uint8).data)
                written += chunk.size
        if written != math.prod(shape):
            raise ValueError(f"{name}: shape {tuple(shape)} was announced, but its chunks held {written} values")


class Member:
    """One array of an .npz file as a stream of values; damage of any kind becomes an `InputError`."""

    def __init__(self, file: Path, name: str) -> None:
        self.where = f"{file}, member {name}"
        with self._damage():
            self._zip = zipfile.ZipFile(file)
            if f"{name}.npy" not in self._zip.namelist():
                found = ", ".join(entry.removesuffix(".npy") for entry in self._zip.namelist())
                raise InputError(f"{self.where}: expected such a member, found only: {found or 'none'}")
            self._stream = self._zip.open(f"{name}.npy")
            version = np.lib.format.read_magic(self._stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran_order, dtype = read(self._stream)
            left = self._zip.getinfo(f"{name}.npy").file_size - self._stream.tell()
        self.info = MemberInfo(shape, dtype, fortran_order, math.prod(shape) * dtype.itemsize)
        if dtype.hasobject:
            raise InputError(f"{self.where}: expected numbers, found pickled objects, which are never loaded")
        if left != self.info.nbytes:
            raise InputError(
                f"{self.where}: expected {self.info.nbytes} bytes for shape {shape} of {dtype}, found {left}"
            )

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, struct.error) as error:
            raise InputError(f"{self.where}: expected a sound file, found damage ({error}); copy it anew") from None

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()
        self._zip.close()

    def read(self, count: int) -> Array:
        """The next `count` values, in the member's own dtype."""
        values = np.empty(count, self.info.dtype)
        view, filled = values.view(np.uint8).data, 0
        with self._damage():
            while filled < len(view):
                got = self._stream.readinto(view[filled : filled + CHUNK_BYTES])  # type: ignore[attr-defined]
                if not got:
                    raise EOFError("it ends early")
                filled += got
        return values

    def skip(self, count: int) -> None:
        # Read on rather than seek: a seek in a stored member stops zipfile from checking the CRC.
        step = max(1, CHUNK_BYTES // self.info.dtype.itemsize)
        for begin in range(0, count, step):
            self.read(min(step, count - begin))

    def finish(self) -> None:
        """zipfile compares the CRC only when it sees the end, which is one read past the last value."""
        with self._damage():
            if self._stream.read(1):
                raise EOFError("it holds more than its header announces")
