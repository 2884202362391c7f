"""Reads every byte of a store once and says what is wrong with it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit
from tqdm import tqdm

from ..errors import InputError
from ..files import StrPath
from . import npz
from .npz import Array
from .store import HEADER_BYTES, META, SPLITS, Store, open_store

_BLOCK = 2**20  # columns that are checked at once


# Verifying -----------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _check_columns(row, first, colptr, v, last, num_nodes, unique):  # type: ignore[no-untyped-def]
    """Check one piece of `row`, which begins at edge `first` inside column `v` after the id `last`.

    Returns the number of ids out of range, the first edge that breaks ascending order (-1: none), and `v` and `last`
    for the next piece.
    """
    outside, unsorted = 0, -1
    for i in range(len(row)):
        while v + 1 < len(colptr) and first + i >= colptr[v + 1]:
            v += 1
            last = -1
        value = row[i]
        if value < 0 or value >= num_nodes:
            outside += 1
        if unique and unsorted < 0 and value <= last:
            unsorted = first + i
        last = value
    return outside, unsorted, v, last


class _Verifier:
    def __init__(self, store: Store, bar: Any) -> None:
        self.store, self.bar = store, bar
        self.problems: list[str] = []

    def say(self, name: str, problem: str) -> None:
        self.problems.append(f"{self.store.file_path(name)}: {problem}")

    def chunks(self, name: str) -> Iterator[tuple[int, Array]]:
        """(index of its first row, rows) of one file in order; ends with the comparison of the checksum."""
        info, crc32, at = self.store.files[name], 0, 0
        dtype, row_shape = np.dtype(info.dtype), info.shape[1:]
        row_bytes = dtype.itemsize * math.prod(row_shape)
        step = max(1, npz.CHUNK_BYTES // row_bytes)
        with open(self.store.file_path(name), "rb") as file:
            file.seek(HEADER_BYTES)
            while at < info.shape[0]:
                data = file.read(min(step, info.shape[0] - at) * row_bytes)
                if len(data) % row_bytes or not data:
                    self.say(name, "it became shorter while it was read")
                    return
                crc32 = zlib.crc32(data, crc32)
                yield at, np.frombuffer(data, dtype).reshape(-1, *row_shape)
                at += len(data) // row_bytes
                self.bar.update(len(data))
        if crc32 != info.crc32:
            self.say(name, f"checksum {crc32:08x}, but {META} has {info.crc32:08x}: the file was damaged or changed")

    def ids(self, name: str, high: int) -> None:
        """Ascending unique ids from 0 to high - 1."""
        last, wrong = -1, 0
        for _, ids in self.chunks(name):
            wrong += int((np.diff(ids, prepend=last) <= 0).sum()) + int((ids >= high).sum())
            last = int(ids[-1])
        if wrong:
            self.say(name, f"expected ascending ids from 0 to {high - 1}, found {wrong} that are not")

    def graph(self) -> None:
        store = self.store
        last, wrong, first_wrong = 0, 0, -1
        for at, part in self.chunks("colptr"):
            bad = np.flatnonzero(np.diff(part, prepend=last) < 0)
            if at == 0 and part[0] != 0:
                self.say("colptr", f"expected to begin with 0, found {part[0]}")
            if bad.size and first_wrong < 0:
                first_wrong = at + int(bad[0])
            wrong, last = wrong + bad.size, int(part[-1])
        if wrong:
            self.say("colptr", f"expected ascending offsets, found {wrong} that are not, the first at {first_wrong}")
        if last != store.num_edges:
            self.say("colptr", f"expected to end with {store.num_edges} edges, found {last}")
        sound, outside, unsorted = not wrong, 0, -1
        v, previous = 0, -1
        for at, part in self.chunks("row"):
            done = 0
            while done < len(part) and (v < store.num_nodes or not sound):
                # One block of columns at a time. Without sound offsets only the range of the ids can be checked.
                begin = v // _BLOCK * _BLOCK
                colptr = store.colptr[begin : begin + _BLOCK + 1] if sound else np.array([0, store.num_edges])
                begin = begin if sound else 0
                end = min(len(part), max(int(colptr[-1]) - at, done)) if sound else len(part)
                if end == done and sound:
                    v, previous = begin + _BLOCK, -1
                    continue
                bad, order, local, previous = _check_columns(
                    part[done:end], at + done, np.asarray(colptr), v - begin, previous, store.num_nodes,
                    store.undirected and sound,
                )  # fmt: skip
                outside, unsorted = outside + bad, order if unsorted < 0 else unsorted
                v, done = begin + local, end
        if outside:
            self.say("row", f"expected node ids from 0 to {store.num_nodes - 1}, found {outside} others")
        if unsorted >= 0:
            self.say("row", f"expected sorted columns without repeats (undirected), edge {unsorted} breaks it")

    def nodes(self) -> None:
        store, bad, first = self.store, 0, -1
        for at, part in self.chunks("x"):
            finite = np.isfinite(part)
            if not finite.all():
                first = at + int((~finite.all(axis=1)).argmax()) if first < 0 else first
                bad += int((~finite).sum())
        if bad:
            self.say("x", f"expected finite values, found {bad} NaN or Inf, the first in row {first}")
        wrong = 0
        for _, labels in self.chunks("y"):
            wrong += int(((labels < -1) | (labels >= store.num_classes)).sum())
        if wrong:
            self.say("y", f"expected labels from -1 to {store.num_classes - 1}, found {wrong} others")
        if "year" in store.files:
            for _ in self.chunks("year"):
                pass
        if "node_id" in store.files:
            self.ids("node_id", int(store.origin.get("num_nodes", 2**63 - 1)))

    def splits(self) -> None:
        seen: dict[str, Array] = {}
        for name in SPLITS:
            ids = np.concatenate([np.empty(0, np.int64), *(part for _, part in self.chunks(name))])
            outside = (ids < 0) | (ids >= self.store.num_nodes)
            if outside.any():
                self.say(name, f"expected node ids from 0 to {self.store.num_nodes - 1}, found {outside.sum()} others")
                continue
            if len(np.unique(ids)) != len(ids):
                self.say(name, f"expected each node once, found {len(ids) - len(np.unique(ids))} repeats")
            if unlabelled := int((self.store.y[ids] < 0).sum()):
                self.say(name, f"expected labelled nodes, found {unlabelled} without a label")
            for other, taken in seen.items():
                if shared := np.intersect1d(ids, taken).size:
                    self.say(name, f"expected no node of {other}, found {shared}")
            seen[name] = ids


def verify_store(path: StrPath, progress: bool = False) -> list[str]:
    """Read every byte of a store once, in bounded memory; returns what is wrong, one sentence each, file first.

    Checked: sizes, headers, checksums; offsets ascending from 0 to E; ids in range; with `undirected` columns sorted
    and without repeats; features finite; labels in range; splits in range, labelled and disjoint; node_id ascending.
    An empty list says that the store is sound.
    """
    try:
        store = open_store(path)
    except InputError as error:
        return [str(error)]
    with tqdm(total=store.nbytes, unit="B", unit_scale=True, desc="verify", disable=not progress, mininterval=1) as bar:
        verifier = _Verifier(store, bar)
        verifier.graph()
        verifier.nodes()
        verifier.splits()
    return verifier.problems
