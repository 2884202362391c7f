"""Reads every byte of a store once and says what is wrong with it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from ..errors import InputError
from ..files import StrPath
from .checks import SPLITS, split_problems
from .npz import Array
from .store import META, Store, open_store

# Of the index of a chunk's first row, its rows and the step to each from the one before (to the first from -1): which
# are wrong, bool, shaped as the rows.
Test = Callable[[int, Array, Array], Array]


def _rules(store: Store, name: str) -> Iterator[tuple[str, Test]]:
    """What is expected of the rows of array `name`, and the test for what breaks it."""
    num_nodes, num_classes = store.num_nodes, store.num_classes

    def unsorted(begin: int, rows: Array, steps: Array) -> Array:
        wrong = steps <= 0
        falls = begin + np.flatnonzero(wrong)
        # A new column may begin with any id.
        starts = np.minimum(np.searchsorted(store.colptr, falls), num_nodes)
        wrong[falls[store.colptr[starts] == falls] - begin] = False
        return wrong

    if name == "colptr":
        yield "ascending offsets", lambda begin, rows, steps: steps < 0
    elif name == "row":
        yield f"node ids from 0 to {num_nodes - 1}", lambda begin, rows, steps: (rows < 0) | (rows >= num_nodes)
        if store.undirected:
            yield "sorted columns without repeats (undirected)", unsorted
    elif name == "x":
        yield "finite values", lambda begin, rows, steps: ~np.isfinite(rows)
    elif name == "y":
        yield f"labels from -1 to {num_classes - 1}", lambda begin, rows, steps: (rows < -1) | (rows >= num_classes)
    elif name == "node_id":
        high = int(store.origin.get("num_nodes", 2**63 - 1))
        yield f"ascending ids from 0 to {high - 1}", lambda begin, rows, steps: (steps <= 0) | (rows >= high)


def _problems(store: Store, name: str, bar: Any) -> Iterator[str]:
    """What is wrong with one array by itself, in one pass over its file."""
    rules, crc32, last = list(_rules(store, name)), 0, -1
    found = [[0, -1] for _ in rules]  # how many, and the row of the first
    for begin, rows in store.chunks(name):
        crc32 = zlib.crc32(rows.data, crc32)
        steps = np.diff(rows, axis=0, prepend=rows.dtype.type(last)) if rules and rows.ndim == 1 else rows
        for (_, test), seen in zip(rules, found, strict=True):
            wrong = test(begin, rows, steps)
            if wrong.any():
                seen[1] = seen[1] if seen[0] else begin + int(np.flatnonzero(wrong)[0]) // max(1, wrong[0].size)
                seen[0] += int(wrong.sum())
        last = rows[-1] if rows.ndim == 1 else last
        bar.update(rows.nbytes)
    for (expected, _), (count, first) in zip(rules, found, strict=True):
        if count:
            yield f"expected {expected}, found {count} others, the first at {first}"
    if name == "colptr" and (store.colptr[0], store.colptr[-1]) != (0, store.num_edges):
        ends = f"{store.colptr[0]} and {store.colptr[-1]}"
        yield f"expected to begin with 0 and to end with {store.num_edges} edges, found {ends}"
    if crc32 != (said := store.files[name].crc32):
        yield f"checksum {crc32:08x}, but {META} has {said:08x}: the file was damaged or changed"


def wrong_splits(store: Store) -> Iterator[tuple[str, str]]:
    """(split, what is wrong with it) for all that keeps the splits of a store from being trained on."""

    def labelled(ids: Array) -> Array:
        labels = store.y[ids]
        return (labels >= 0) & (labels < store.num_classes)

    return split_problems(store.splits, store.num_nodes, labelled)


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
    found: list[tuple[str, str]] = []
    with tqdm(total=store.nbytes, unit="B", unit_scale=True, desc="verify", disable=not progress, mininterval=1) as bar:
        for name in store.files:
            try:
                found += [(name, problem) for problem in _problems(store, name, bar)]
            except InputError as error:
                return [str(error)]
    if not {name for name, _ in found} & {"y", *SPLITS}:
        found += wrong_splits(store)
    return [f"{store.file_path(name)}: {problem}" for name, problem in found]
