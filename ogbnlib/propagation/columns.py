"""Blocks of feature columns taken through all hops, each hop's rows in RAM only while the next hop needs them.

Norm "sym" multiplies by S A S with S = degree^-1/2. As (S A S)^k X = S^-1 (S^2 A)^k S X, each hop is computed as a
mean, like norm "row", and no value between hops is larger than the largest feature.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_json
from ..graph.bits import NodeSet
from ..graph.checks import finite
from ..graph.disk import disk_array
from ..graph.npz import CHUNK_BYTES, Array
from ..graph.store import Store
from ..graph.writer import StoreWriter
from .blocks import BLOCK
from .plan import HopPlan, plan_hops
from .sweep import Edges, in_order

Done = Callable[[int], object]
Chunks = Generator[Array, None, None]


class Propagation:
    """One propagation over a store. `kept` are the nodes whose rows the result has; None for all."""

    def __init__(
        self, store: Store, hops: int, norm: str, self_loops: bool, kept: NodeSet | None, dtype: np.dtype[Any]
    ) -> None:
        self.store, self.hops, self.norm, self.loops, self.kept, self.dtype = store, hops, norm, self_loops, kept, dtype
        # Sums can outgrow float16; means can't.
        self.held_dtype = np.dtype(np.float32) if norm == "none" else dtype
        self.num_kept = store.num_nodes if kept is None else kept.count()
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

    def _load(self, columns: slice, rows: Array, done: Done) -> Chunks:
        """Fill `rows` with scaled features; yield the kept nodes' own features, float32 in order."""
        store, scale = self.store, self.scale[columns]
        step = max(1, CHUNK_BYTES // 2 // (store.num_features * store.feature_itemsize))

        def load(first: int) -> Array:
            end = min(first + step, store.num_nodes)
            chunk = self.x.rows(first, end, store.feature_dtype).reshape(end - first, -1)
            values = chunk[:, columns].astype(np.float32)
            scaled = values * scale
            if self.norm == "sym":
                degrees = self.edges.degrees(first, end, self.loops)
                scaled *= np.where(degrees, 1 / np.sqrt(np.maximum(degrees, 1)), 0).astype(np.float32)[:, None]
            rows[first:end] = scaled
            return self.pick(self.kept, first, values)

        firsts = range(0, store.num_nodes, step)
        with contextlib.closing(in_order(firsts, load)) as loaded:
            for first, values in zip(firsts, loaded, strict=True):
                yield values
                done(min(step, store.num_nodes - first) * store.num_features * store.feature_itemsize)

    def block(self, columns: slice, folder: Path, done: Done) -> None:
        """Write the columns of all kept nodes, hop 0 first, then hop 1, ..., and a checksum for each hop."""
        where, crc32 = f"{self.store.path}, columns {columns.start} to {columns.stop - 1} propagated", []
        width, scale, members = columns.stop - columns.start, 1 / self.scale[columns], None
        rows = np.empty((self.store.num_nodes, width), self.held_dtype)

        def hop(wanted: NodeSet | None, following: Array | None) -> Chunks:
            """Fill `following` with the next hop of `rows`; yield the kept nodes' rows, float32 in order."""
            filled = 0
            how: dict[str, Any] = {"loops": self.loops, "mean": self.norm != "none", "done": done}
            with contextlib.closing(self.edges.sweep(rows, members, wanted, **how)) as slices:
                for first, out, degrees in slices:
                    if following is not None:
                        values = self.pick(wanted, first, out)
                        following[filled : filled + len(values)] = values
                        filled += len(values)
                    result = self.pick(self.kept, first, out) * scale
                    if self.norm == "sym":
                        result *= np.sqrt(self.pick(self.kept, first, degrees), dtype=np.float32)[:, None]
                    yield result

        def write(chunks: Chunks) -> None:
            crc32.append(0)
            with contextlib.closing(chunks):
                for values in finite(chunks, self.dtype, where):
                    writer.write(values)
                    crc32[-1] = zlib.crc32(np.ascontiguousarray(values).data, crc32[-1])

        with StoreWriter(folder).create("x", self.dtype, (width,)) as writer:
            write(self._load(columns, rows, done))
            for wanted in self.reached[:-1]:
                following = np.empty((self._size(wanted), width), self.held_dtype)
                write(hop(wanted, following))
                rows, members = following, wanted
            write(hop(self.reached[-1], None))  # nothing needs the rows of the last one
        write_json(folder / BLOCK, {"crc32": crc32})
