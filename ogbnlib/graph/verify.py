"""Reads every byte of a store once and says what is wrong with it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from ..errors import InputError
from ..files import StrPath
from .checks import FiniteCheck, split_problems
from .npz import Array
from .store import META, Store, open_store

Chunks = Iterator[tuple[int, Array]]  # (index of the first row, rows)


def _chunks(store: Store, name: str, bar: Any, damage: list[str]) -> Chunks:
    """The rows of one file in order; ends with the comparison of the checksum."""
    crc32, expected = 0, store.files[name].crc32
    for begin, rows in store.chunks(name):
        crc32 = zlib.crc32(rows.data, crc32)
        yield begin, rows
        bar.update(rows.nbytes)
    if crc32 != expected:
        damage.append(f"checksum {crc32:08x}, but {META} has {expected:08x}: the file was damaged or changed")


def _ascending(rows: Array, last: int, strictly: bool) -> Array:
    """bool [n]: which values are not above the one before them, or below it unless `strictly`."""
    steps = np.diff(rows, prepend=rows.dtype.type(last))
    return steps <= 0 if strictly else steps < 0


def _offsets(store: Store, chunks: Chunks) -> Iterator[str]:
    last, wrong, first_wrong = 0, 0, -1
    for begin, rows in chunks:
        if begin == 0 and rows[0] != 0:
            yield f"expected to begin with 0, found {rows[0]}"
        bad = np.flatnonzero(_ascending(rows, last, False))
        first_wrong = begin + int(bad[0]) if bad.size and not wrong else first_wrong
        wrong, last = wrong + bad.size, int(rows[-1])
    if wrong:
        yield f"expected ascending offsets, found {wrong} that are not, the first at {first_wrong}"
    if last != store.num_edges:
        yield f"expected to end with {store.num_edges} edges, found {last}"


def _sources(store: Store, chunks: Chunks) -> Iterator[str]:
    last, outside, unsorted = -1, 0, -1
    for begin, rows in chunks:
        outside += int(((rows < 0) | (rows >= store.num_nodes)).sum())
        if store.undirected and unsorted < 0:
            falls = begin + np.flatnonzero(_ascending(rows, last, True))
            # A new column may begin with any id.
            starts = np.minimum(np.searchsorted(store.colptr, falls), store.num_nodes)
            inside = falls[store.colptr[starts] != falls]
            unsorted = int(inside[0]) if inside.size else -1
        last = int(rows[-1])
    if outside:
        yield f"expected node ids from 0 to {store.num_nodes - 1}, found {outside} others"
    if unsorted >= 0:
        yield f"expected sorted columns without repeats (undirected), edge {unsorted} breaks it"


def _features(store: Store, chunks: Chunks) -> Iterator[str]:
    check = FiniteCheck(store.files["x"].dtype)
    for begin, rows in chunks:
        check(rows, begin)
    if problem := check.problem():
        yield problem


def _labels(store: Store, chunks: Chunks) -> Iterator[str]:
    wrong = sum(int(((rows < -1) | (rows >= store.num_classes)).sum()) for _, rows in chunks)
    if wrong:
        yield f"expected labels from -1 to {store.num_classes - 1}, found {wrong} others"


def _original_ids(store: Store, chunks: Chunks) -> Iterator[str]:
    last, wrong, high = -1, 0, int(store.origin.get("num_nodes", 2**63 - 1))
    for _, rows in chunks:
        wrong += int((_ascending(rows, last, True) | (rows >= high)).sum())
        last = int(rows[-1])
    if wrong:
        yield f"expected ascending ids from 0 to {high - 1}, found {wrong} that are not"


def _bytes_alone(store: Store, chunks: Chunks) -> Iterator[str]:
    for _ in chunks:
        pass
    yield from ()


_RULES: dict[str, Callable[[Store, Chunks], Iterator[str]]] = {
    **{"colptr": _offsets, "row": _sources, "x": _features, "y": _labels, "node_id": _original_ids}
}


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
            damage: list[str] = []
            try:
                broken = list(_RULES.get(name, _bytes_alone)(store, _chunks(store, name, bar, damage)))
            except InputError as error:
                return [str(error)]
            found += [(name, problem) for problem in broken + damage]
    found += split_problems(store.splits, store.num_nodes, lambda ids: store.y[ids] >= 0)
    return [f"{store.file_path(name)}: {problem}" for name, problem in found]
