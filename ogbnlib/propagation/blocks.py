"""Finished blocks of columns on disk, from which a killed propagation goes on."""

from __future__ import annotations

import contextlib
import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..files import write_json
from ..graph.checks import HEADER_BYTES
from ..graph.disk import DiskArray
from ..graph.npz import CHUNK_BYTES
from ..graph.writer import ArrayWriter

BLOCK = "block.json"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


class Blocks:
    """Folders `FIRST-END`, one per block of columns: x.npy, hop after hop, and block.json with a CRC-32 per hop.

    Each folder appears whole or not at all. Blocks left by a propagation with another `plan` are deleted.
    """

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self.folder = folder
        if folder.exists() and _read(folder / "plan.json") != plan:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "plan.json", plan)
        for block in folder.glob("[0-9]*-[0-9]*"):
            if _read(block / BLOCK) is None:  # damaged, as a block is renamed to its name once it is whole
                shutil.rmtree(block)

    def _done(self) -> dict[int, int]:
        """Return the end of each finished block by its first column."""
        names = [path.parent.name.split("-") for path in self.folder.glob(f"[0-9]*-[0-9]*/{BLOCK}")]
        return {int(first): int(end) for first, end in names}

    def path(self, columns: slice) -> Path:
        return self.folder / f"{columns.start}-{columns.stop}"

    def todo(self, num_columns: int, width: int) -> Iterator[slice]:
        """Yield the missing columns, at most `width` at a time."""
        begin, done = 0, self._done()
        while begin < num_columns:
            if begin in done:
                begin = done[begin]
                continue
            end = min([begin + width, num_columns, *(first for first in done if first > begin)])
            yield slice(begin, end)
            begin = end

    def merge(self, writer: ArrayWriter, num_rows: int, hops: int, num_columns: int) -> None:
        """Append the rows of all blocks side by side, hop by hop; a damaged block is deleted and refused."""
        with contextlib.ExitStack() as stack:
            blocks = []
            for ends in sorted(self._done().items()):
                columns, row_bytes = slice(*ends), (ends[1] - ends[0]) * writer.dtype.itemsize
                file = DiskArray(self.path(columns) / "x.npy", HEADER_BYTES, row_bytes, num_rows * (hops + 1), 2**16)
                stack.callback(file.close)
                blocks.append((columns, file, [0] * (hops + 1)))
            step = max(1, CHUNK_BYTES // (writer.row_shape[0] * writer.dtype.itemsize))
            for begin in range(0, num_rows, step):
                end = min(begin + step, num_rows)
                out = np.empty((end - begin, hops + 1, num_columns), writer.dtype)
                for columns, file, crc32 in blocks:
                    for hop in range(hops + 1):
                        values = file.rows(hop * num_rows + begin, hop * num_rows + end, writer.dtype)
                        crc32[hop] = zlib.crc32(values.data, crc32[hop])
                        out[:, hop, columns] = values.reshape(end - begin, -1)
                writer.write(out.reshape(len(out), -1))
            for columns, _, crc32 in blocks:
                if crc32 != _read(self.path(columns) / BLOCK)["crc32"]:
                    shutil.rmtree(self.path(columns))
                    raise InputError(f"{self.path(columns)}: checksum mismatch, the block was deleted; propagate again")
