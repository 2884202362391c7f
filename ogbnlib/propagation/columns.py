"""Blocks of feature columns taken through all hops, each hop's rows in RAM only while the next hop needs them.

Norm "sym" multiplies by S A S with S = degree^-1/2. As (S A S)^k X = S^-1 (S^2 A)^k S X, each hop is computed as a
mean, like norm "row", and no value between hops is larger than the largest feature.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..files import write_json
from ..graph.bits import NodeSet
from ..graph.checks import HEADER_BYTES, finite
from ..graph.disk import DiskArray, disk_array
from ..graph.npz import CHUNK_BYTES, Array
from ..graph.store import Store
from ..graph.writer import ArrayWriter, StoreWriter
from .plan import HopPlan, plan_hops
from .sweep import Edges, in_order

Done = Callable[[int], object]
Chunks = Generator[Array, None, None]
_BLOCK = "block.json"


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

    def _done(self) -> dict[int, int]:
        """Return the end of each finished block by its first column."""
        names = [path.parent.name.split("-") for path in self.folder.glob(f"[0-9]*-[0-9]*/{_BLOCK}")]
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
                if _read(self.path(columns) / _BLOCK) != {"crc32": crc32}:
                    shutil.rmtree(self.path(columns))
                    raise InputError(f"{self.path(columns)}: checksum mismatch, the block was deleted; propagate again")


class Propagation:
    """One propagation over a store. `kept` are the nodes whose rows the result has; None for all."""

    def __init__(
        self, store: Store, hops: int, norm: str, self_loops: bool, kept: NodeSet | None, dtype: np.dtype[Any]
    ) -> None:
        self.store, self.hops, self.norm, self.loops, self.kept, self.dtype = store, hops, norm, self_loops, kept, dtype
        # Sums can outgrow float16; means can't.
        self.held_dtype = np.dtype(np.float32) if norm == "none" else dtype
        self.num_kept = self._size(kept)
        self.edges, self.x = Edges(store), disk_array(store, "x")

    def close(self) -> None:
        self.edges.close()
        self.x.close()

    def survey(self, done: Done) -> None:
        """Read everything once, with checksums; find the nodes that each hop must compute, and the columns' scales."""
        self.reached = self.edges.needed(self.kept, self.hops, done)
        # The bits of magnitudes, as whole numbers, have the same order. Comparing them is ten times faster.
        dtype = self.store.feature_dtype
        bits = np.dtype(f"u{dtype.itemsize}")
        unsigned, infinite = bits.type(np.iinfo(bits).max // 2), np.array(np.inf, dtype).view(bits)
        largest = np.zeros(self.store.num_features, bits)
        for first, values in self.store.chunks("x", checked=True):
            magnitudes = values.view(bits) & unsigned
            np.maximum(largest, magnitudes.max(axis=0, initial=0), out=largest)
            if (largest >= infinite).any():
                row = first + int((magnitudes >= infinite).any(axis=1).argmax())
                raise self.store.damaged("x", f"expected finite values, found NaN or Inf, the first in row {row}")
            done(values.nbytes)
        # Scaling by powers of two is exact; it moves each column into the range where float16 is most precise.
        exponents, half = np.frexp(largest.view(dtype).astype(np.float32))[1], self.held_dtype == np.float16
        self.scale = np.ldexp(np.float32(1), np.where(half, np.clip(14 - exponents, -100, 100), 0)).astype(np.float32)
        for members in self.reached:
            if members is not None:
                members.count()

    def _size(self, members: NodeSet | None) -> int:
        return self.store.num_nodes if members is None else members.count()

    def plan(self, left: int) -> HopPlan:
        """Plan the blocks for `left` bytes of memory. Call `survey` first."""
        return plan_hops(
            self.store.size, self.hops, self.norm, left_bytes=left, itemsize=self.dtype.itemsize, kept=self.num_kept,
            reached=[self._size(members) for members in self.reached],
        )  # fmt: skip

    def pick(self, members: NodeSet | None, first: int, values: Array) -> Array:
        """Return the members' rows among consecutive rows, the first of which is that of node `first`."""
        return values if members is None else values[members.contains(np.arange(first, first + len(values)))]

    def block(self, columns: slice, folder: Path, done: Done) -> None:
        """Write the columns of all kept nodes, hop 0 first, then hop 1, ..., and a checksum for each hop."""
        where, crc32 = f"{self.store.path}, columns {columns.start} to {columns.stop - 1} propagated", []
        store, width, scale, members = self.store, columns.stop - columns.start, self.scale[columns], None
        rows = np.empty((store.num_nodes, width), self.held_dtype)
        step = max(1, CHUNK_BYTES // 2 // (store.num_features * store.feature_itemsize))

        def load(first: int) -> Array:
            """Fill `rows` with scaled features; return the kept nodes' own features, float32."""
            end = min(first + step, store.num_nodes)
            chunk = self.x.rows(first, end, store.feature_dtype).reshape(end - first, -1)
            values = chunk[:, columns].astype(np.float32)
            scaled = values * scale
            if self.norm == "sym":
                degrees = self.edges.degrees(first, end, self.loops)
                scaled *= np.where(degrees, 1 / np.sqrt(np.maximum(degrees, 1)), 0).astype(np.float32)[:, None]
            rows[first:end] = scaled
            return self.pick(self.kept, first, values)

        def hop(targets: NodeSet | None, following: Array | None) -> Chunks:
            """Fill `following` with the next hop of `rows`; yield the kept nodes' rows, float32 in order."""
            filled = 0
            how: dict[str, Any] = {"loops": self.loops, "mean": self.norm != "none", "done": done}
            with contextlib.closing(self.edges.sweep(rows, members, targets, **how)) as slices:
                for first, out, degrees in slices:
                    if following is not None:
                        values = self.pick(targets, first, out)
                        following[filled : filled + len(values)] = values
                        filled += len(values)
                    result = self.pick(self.kept, first, out) / scale
                    if self.norm == "sym":
                        result *= np.sqrt(self.pick(self.kept, first, degrees), dtype=np.float32)[:, None]
                    yield result

        def write(chunks: Chunks, count: int = 0) -> None:
            crc32.append(0)
            with contextlib.closing(chunks):
                for values in finite(chunks, self.dtype, where):
                    writer.write(values)
                    crc32[-1] = zlib.crc32(np.ascontiguousarray(values).data, crc32[-1])
                    if count:
                        done(count)

        with StoreWriter(folder).create("x", self.dtype, (width,)) as writer:
            firsts = range(0, store.num_nodes, step)
            write(in_order(firsts, load), store.files["x"].bytes // len(firsts))
            for targets in self.reached[:-1]:
                following = np.empty((self._size(targets), width), self.held_dtype)
                write(hop(targets, following))
                rows, members = following, targets
            write(hop(self.reached[-1], None))  # nothing needs the rows of the last one
        write_json(folder / _BLOCK, {"crc32": crc32})
