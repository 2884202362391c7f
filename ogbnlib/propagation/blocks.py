"""The blocks of a propagation on disk until all are there: each whole or not at all, with the checksums of its hops."""

from __future__ import annotations

import contextlib
import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..files import write_json
from ..graph.checks import HEADER_BYTES
from ..graph.disk import DiskArray
from ..graph.npz import CHUNK_BYTES, Array
from ..graph.writer import ArrayWriter

_PLAN, BLOCK = "plan.json", "block.json"


def _read(path: Path) -> Any:
    """What a JSON file holds; None where there is none, or something else."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


class Blocks:
    """The blocks of columns that are done: each whole or not at all, so that a killed propagation goes on from them."""

    def __init__(self, folder: Path, plan: dict[str, Any], say: Callable[[str], object]) -> None:
        self.folder = folder
        said = folder / _PLAN
        if folder.exists() and _read(said) != plan:
            say(f"{folder}: left by another propagation to the same place; deleted")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(said, plan)
        for block in folder.glob("[0-9]*-[0-9]*"):
            if _read(block / BLOCK) is None:  # damaged, as it came here whole
                shutil.rmtree(block)

    def done(self) -> dict[int, int]:
        """The last column but one of each block that is there, by its first."""
        names = [path.parent.name.split("-") for path in self.folder.glob(f"[0-9]*-[0-9]*/{BLOCK}")]
        return {int(begin): int(end) for begin, end in names}

    def path(self, columns: slice) -> Path:
        return self.folder / f"{columns.start}-{columns.stop}"

    def todo(self, num_columns: int, width: int) -> Iterator[slice]:
        """The columns that are not done, at most `width` at a time."""
        begin, done = 0, self.done()
        while begin < num_columns:
            if begin in done:
                begin = done[begin]
                continue
            end = min([begin + width, num_columns, *(first for first in done if first > begin)])
            yield slice(begin, end)
            begin = end

    def merge(self, writer: ArrayWriter, num_rows: int, hops: int, num_columns: int) -> None:
        """Append the rows of all blocks side by side, hop by hop.

        Raises:
            InputError: for a block whose checksum is not that of what was written; it is deleted.
        """
        with contextlib.ExitStack() as stack:
            parts = [
                _Part(self.path(slice(*ends)), ends, writer.dtype, num_rows) for ends in sorted(self.done().items())
            ]
            for part in parts:
                stack.callback(part.array.close)
            step = max(1, CHUNK_BYTES // (writer.row_shape[0] * writer.dtype.itemsize))
            for begin in range(0, num_rows, step):
                end = min(begin + step, num_rows)
                out = np.empty((end - begin, hops + 1, num_columns), writer.dtype)
                for part in parts:
                    for hop in range(hops + 1):
                        out[:, hop, part.columns] = part.read(hop, begin, end)
                writer.write(out.reshape(len(out), -1))
            for part in parts:
                part.check()


class _Part:
    """The file of one block, read back for all hops at once."""

    def __init__(self, folder: Path, ends: tuple[int, int], dtype: np.dtype[Any], num_rows: int) -> None:
        self.folder, self.columns, self.dtype, self._num_rows = folder, slice(*ends), dtype, num_rows
        self._expected = _read(folder / BLOCK)["crc32"]
        self._crc32 = [0] * len(self._expected)
        row_bytes = (ends[1] - ends[0]) * dtype.itemsize
        self.array = DiskArray(folder / "x.npy", HEADER_BYTES, row_bytes, num_rows * len(self._crc32), 2**16)

    def read(self, hop: int, begin: int, end: int) -> Array:
        first = hop * self._num_rows
        values = self.array.rows(first + begin, first + end, self.dtype)
        self._crc32[hop] = zlib.crc32(values.data, self._crc32[hop])
        return values.reshape(end - begin, -1)

    def check(self) -> None:
        if self._crc32 != self._expected:
            shutil.rmtree(self.folder)
            raise InputError(
                f"{self.folder}: its checksum is not that of what was written; start again to have it anew"
            )
