"""Blocks of columns taken through all hops: held for all nodes, and only while they are needed for others.

With norm "sym", S A S X of scales S = degree^-1/2, a hop is a mean like that of "row", as (S A S)^k X = S^-1 (S^2 A)^k
S X: what is held between hops never outgrows what was there before.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_json
from ..graph.bits import NodeSet
from ..graph.checks import finite
from ..graph.disk import disk_array
from ..graph.npz import CHUNK_BYTES, Array
from ..graph.store import Store
from ..graph.writer import ArrayWriter, StoreWriter
from .blocks import BLOCK
from .plan import HopPlan, plan_hops
from .sweep import Edges, Rows, in_order

Done = Callable[[int], object]
Chunks = Generator[Array, None, None]


class Propagation:
    """One run over a store; `kept` None stands for all nodes."""

    def __init__(
        self, store: Store, hops: int, norm: str, self_loops: bool, kept: NodeSet | None, dtype: np.dtype[Any]
    ) -> None:
        self.store, self.hops, self.norm, self.loops, self.kept, self.dtype = store, hops, norm, self_loops, kept, dtype
        self.held_dtype = np.dtype(np.float32) if norm == "none" else dtype
        self.num_kept = store.num_nodes if kept is None else kept.count()
        self.edges, self.x = Edges(store), disk_array(store, "x")

    def close(self) -> None:
        self.edges.close()
        self.x.close()

    # Before -----------------------------------------------------------------------------------------------------------

    @property
    def survey_bytes(self) -> int:
        return self.store.files["x"].bytes + max(1, self.hops - 1) * self.edges.nbytes

    def survey(self, done: Done) -> None:
        """Read everything once, against its checksums; find the nodes that each hop has to make, and the scales.

        Raises:
            InputError: for what is damaged, or not finite.
        """
        self.reached = [self.kept]
        for _ in range(max(1, self.hops - 1)):
            self.reached.insert(0, self.edges.survey(self.reached[0], done))
        self.reached = self.reached[-self.hops :]
        exponents = np.frexp(self._largest(done).astype(np.float32))[1]
        # Powers of two, which lose nothing, bring each column into the middle of what float16 counts evenly.
        half = self.held_dtype == np.float16
        self.scale = np.ldexp(np.float32(1), np.where(half, np.clip(14 - exponents, -100, 100), 0)).astype(np.float32)
        for members in self.reached:
            if members is not None:
                members.count()

    def _largest(self, done: Done) -> Array:
        """The largest magnitude in each column, [F]; from bits, whose order is that of magnitudes: ten times faster."""
        dtype = self.store.feature_dtype
        bits = np.dtype(f"u{dtype.itemsize}")
        unsigned, infinite = bits.type(np.iinfo(bits).max // 2), np.array(np.inf, dtype).view(bits)
        largest = np.zeros(self.store.num_features, bits)
        for first, values in self.store.chunks("x", checked=True):
            magnitudes = values.view(bits) & unsigned
            np.maximum(largest, magnitudes.max(axis=0, initial=0), out=largest)
            if (largest >= infinite).any():
                row = first + int((magnitudes >= infinite).any(axis=1).argmax())
                raise self.store.damaged("x", f"expected finite values, found others, the first in row {row}")
            done(values.nbytes)
        return largest.view(dtype)

    def plan(self, left: int) -> HopPlan:
        """For so many bytes beside what is held anyway, now that the graph is known."""
        reached = [self.store.num_nodes if members is None else members.count() for members in self.reached]
        size, item = self.store.size, self.dtype.itemsize
        return plan_hops(
            size, self.hops, self.norm, left_bytes=left, itemsize=item, kept=self.num_kept, reached=reached
        )

    # A block of columns -----------------------------------------------------------------------------------------------

    def pick(self, members: NodeSet | None, first: int, values: Array) -> Array:
        return values if members is None else values[members.contains(np.arange(first, first + len(values)))]

    def load(self, columns: slice, done: Done) -> tuple[Rows, Chunks]:
        """The rows to begin with, filled while the features of the kept nodes are taken, float32 in order."""
        store, scale = self.store, self.scale[columns]
        rows = Rows(np.empty((store.num_nodes, columns.stop - columns.start), self.held_dtype))
        step = max(1, CHUNK_BYTES // 2 // (store.num_features * store.feature_itemsize))

        def one(first: int) -> Array:
            end = min(first + step, store.num_nodes)
            chunk = self.x.rows(first, end, store.feature_dtype).reshape(end - first, -1)
            values = chunk[:, columns].astype(np.float32)
            scaled = values * scale
            if self.norm == "sym":
                degrees = self.edges.degrees(first, end, self.loops)
                scaled *= np.where(degrees, 1 / np.sqrt(np.maximum(degrees, 1)), 0).astype(np.float32)[:, None]
            rows.values[first:end] = scaled
            return self.pick(self.kept, first, values)

        def kept() -> Chunks:
            firsts = range(0, store.num_nodes, step)
            with contextlib.closing(in_order(firsts, one)) as made:
                for first, values in zip(firsts, made, strict=True):
                    yield values
                    done(min(step, store.num_nodes - first) * store.num_features * store.feature_itemsize)

        return rows, kept()

    def hop(self, rows: Rows, number: int, columns: slice, done: Done) -> tuple[Rows | None, Chunks]:
        """What hop `number`, from 0, makes of `rows`, filled while the kept nodes' rows are taken, float32 in order."""
        members = self.reached[number]
        size = self.store.num_nodes if members is None else members.count()
        made = None
        if number < self.hops - 1:
            made = Rows(np.empty((size, rows.values.shape[1]), self.held_dtype), members)
        scale, mean = 1 / self.scale[columns], self.norm != "none"

        def kept() -> Chunks:
            filled, sweep = 0, self.edges.sweep(rows, members, loops=self.loops, mean=mean, done=done)
            with contextlib.closing(sweep) as slices:
                for first, out, degrees in slices:
                    if made is not None:
                        values = self.pick(members, first, out)
                        made.values[filled : filled + len(values)] = values
                        filled += len(values)
                    wanted = self.pick(self.kept, first, out) * scale
                    if self.norm == "sym":
                        wanted *= np.sqrt(self.pick(self.kept, first, degrees), dtype=np.float32)[:, None]
                    yield wanted

        return made, kept()

    def block(self, columns: slice, folder: Path, done: Done) -> None:
        """Write a block's columns, those of hop 0 for all kept nodes, then those of hop 1, ..., and their checksums."""
        where, crc32 = f"{self.store.path}, columns {columns.start} to {columns.stop - 1} propagated", []
        with StoreWriter(folder).create("x", self.dtype, (columns.stop - columns.start,)) as writer:
            rows, chunks = self.load(columns, done)
            for number in range(self.hops + 1):
                with contextlib.closing(chunks):
                    crc32.append(_append(writer, finite(chunks, self.dtype, where)))
                if number < self.hops:
                    following, chunks = self.hop(rows, number, columns, done)
                    rows = following if following is not None else rows
        write_json(folder / BLOCK, {"crc32": crc32})


def _append(writer: ArrayWriter, chunks: Iterator[Array]) -> int:
    crc32 = 0
    for values in chunks:
        writer.write(values)
        crc32 = zlib.crc32(np.ascontiguousarray(values).data, crc32)
    return crc32
