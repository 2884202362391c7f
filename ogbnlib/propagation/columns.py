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
from .sweep import Edges, Rows, in_order

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

    @property
    def survey_bytes(self) -> int:
        return self.store.files["x"].bytes + max(1, self.hops - 1) * self.edges.nbytes

    def survey(self, done: Done) -> None:
        """Read everything once, with checksums; find the nodes that each hop must compute, and the columns' scales.

        Raises:
            InputError: for damaged data and for features that are not finite.
        """
        self.reached = self.edges.needed(self.kept, self.hops, done)
        exponents = np.frexp(self._largest(done).astype(np.float32))[1]
        # Scaling by powers of two is exact; it moves each column into the range where float16 is most precise.
        half = self.held_dtype == np.float16
        self.scale = np.ldexp(np.float32(1), np.where(half, np.clip(14 - exponents, -100, 100), 0)).astype(np.float32)
        for members in self.reached:
            if members is not None:
                members.count()

    def _largest(self, done: Done) -> Array:
        """Return the largest magnitude of each column, [F]."""
        dtype = self.store.feature_dtype
        # The bits of magnitudes, as whole numbers, have the same order. Comparing them is ten times faster.
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
        return largest.view(dtype)

    def _size(self, members: NodeSet | None) -> int:
        return self.store.num_nodes if members is None else members.count()

    def plan(self, left: int) -> HopPlan:
        """Plan the blocks for `left` bytes of memory. Call `survey` first."""
        reached, item = [self._size(members) for members in self.reached], self.dtype.itemsize
        how: dict[str, Any] = {"left_bytes": left, "itemsize": item, "kept": self.num_kept, "reached": reached}
        return plan_hops(self.store.size, self.hops, self.norm, **how)

    def pick(self, members: NodeSet | None, first: int, values: Array) -> Array:
        """Return the members' rows among consecutive rows, the first of which is that of node `first`."""
        return values if members is None else values[members.contains(np.arange(first, first + len(values)))]

    # One block of columns ---------------------------------------------------------------------------------------------

    def _load(self, columns: slice, rows: Rows, done: Done) -> Chunks:
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
            rows.values[first:end] = scaled
            return self.pick(self.kept, first, values)

        firsts = range(0, store.num_nodes, step)
        with contextlib.closing(in_order(firsts, load)) as loaded:
            for first, values in zip(firsts, loaded, strict=True):
                yield values
                done(min(step, store.num_nodes - first) * store.num_features * store.feature_itemsize)

    def _hop(self, number: int, columns: slice, rows: Rows, following: Rows | None, done: Done) -> Chunks:
        """Fill `following` with hop `number` of `rows`; yield the kept nodes' rows, float32 in order."""
        members, filled, scale = self.reached[number], 0, 1 / self.scale[columns]
        sweep = self.edges.sweep(rows, members, loops=self.loops, mean=self.norm != "none", done=done)
        with contextlib.closing(sweep) as slices:
            for first, out, degrees in slices:
                if following is not None:
                    values = self.pick(members, first, out)
                    following.values[filled : filled + len(values)] = values
                    filled += len(values)
                result = self.pick(self.kept, first, out) * scale
                if self.norm == "sym":
                    result *= np.sqrt(self.pick(self.kept, first, degrees), dtype=np.float32)[:, None]
                yield result

    def block(self, columns: slice, folder: Path, done: Done) -> None:
        """Write the columns of all kept nodes, hop 0 first, then hop 1, ..., and a checksum for each hop."""
        where, crc32 = f"{self.store.path}, columns {columns.start} to {columns.stop - 1} propagated", []
        width, last = columns.stop - columns.start, self.hops - 1
        rows = Rows(np.empty((self.store.num_nodes, width), self.held_dtype))
        with StoreWriter(folder).create("x", self.dtype, (width,)) as writer:
            for number in range(-1, self.hops):
                following = None
                if number < 0:
                    chunks = self._load(columns, rows, done)
                else:
                    if number < last:  # no hop needs the rows of the last one
                        members = self.reached[number]
                        following = Rows(np.empty((self._size(members), width), self.held_dtype), members)
                    chunks = self._hop(number, columns, rows, following, done)
                crc32.append(0)
                with contextlib.closing(chunks):
                    for values in finite(chunks, self.dtype, where):
                        writer.write(values)
                        crc32[-1] = zlib.crc32(np.ascontiguousarray(values).data, crc32[-1])
                rows = following or rows
        write_json(folder / BLOCK, {"crc32": crc32})
