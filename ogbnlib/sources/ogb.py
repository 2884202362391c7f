"""OGB's on-disk layout of ogbn-papers100M: read in pieces, and written from any `Source`.

OGB's own loader holds the 82.8 GB of ogbn-papers100M several times over; nothing here holds a
member.
"""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, clear_errors, naming
from ..files import StrPath, home, new_folder, write_json
from ..graph import npz
from ..graph.checks import (
    MAX_CLASSES,
    SPLITS,
    check_num_classes,
    clean_labels,
    count_classes,
)
from ..graph.npz import Array, Member
from .data import Source, from_arrays, stamped
from .layouts import not_a_data_set, split_folder

_LONGEST_ID = 64  # bytes of a line


def layout_files(folder: Path) -> dict[str, Path]:
    """Return the files of a data set in one of OGB's layouts, by their path in it."""
    files = [
        *sorted((folder / "raw").rglob("*")),
        *sorted((folder / "split").rglob("*")),
        folder / "meta.json",
    ]
    return {str(file.relative_to(folder)): file for file in files if file.is_file()}


def read_split_files(folder: Path, num_nodes: int) -> dict[str, Array]:
    """Return the int64 ids in the three files of a split's folder, unchecked but for their number."""
    splits = {}
    for name in SPLITS:
        file = folder / f"{name}.csv.gz"
        with naming(file, "one node id a line, gzipped"):
            splits[name] = _read_ids(file, num_nodes)
    return splits


def _read_ids(file: Path, num_nodes: int) -> Array:
    """Return the ids in a file, read in pieces: a small compressed file may have billions of
    lines."""
    ids, rest, count = [np.empty(0, np.int64)], b"", 0
    if not file.stat().st_size:
        raise EOFError("it is empty")
    with gzip.open(file, "rb") as stream:
        block = b" "
        while block:
            block = stream.read(2**20)
            *whole, rest = (rest + block).split(b"\n")
            if not block:
                whole.append(rest)
            ids.append(np.array([line for line in whole if line.strip()], dtype=np.int64))
            count += len(ids[-1])
            if count > num_nodes or len(rest) > _LONGEST_ID:
                expected = f"expected at most {num_nodes} lines of a node id each"
                raise InputError(f"{file}: {expected}, found more lines, or longer ones")
    return np.concatenate(ids)


def open_raw(path: StrPath, *, num_classes: int | None = None) -> Source:
    """Open a folder in OGB's binary layout; no large member is read.

    `num_classes` is by default that of meta.json and, without one, the largest label plus one.
    """
    path = home(path)
    data, labels, stamps = (
        path / "raw" / "data.npz",
        path / "raw" / "node-label.npz",
        stamped(layout_files(path)),
    )
    check_num_classes(num_classes)
    if not data.is_file():
        raise not_a_data_set(path)
    shapes, dtypes = dict[str, tuple[int, ...]](), dict[str, np.dtype[Any]]()
    for name, kinds in {"edge_index": "iu", "node_label": "fiu", "node_feat": "f"}.items():
        with Member(labels if name == "node_label" else data, name) as member:
            shapes[name], dtypes[name] = member.shape, member.dtype
        if member.dtype.kind not in kinds:
            raise InputError(
                f"{member.where}: expected numpy's kind {' or '.join(kinds)}, found {member.dtype}"
            )
    shape, dtype = shapes["node_feat"], dtypes["node_feat"]
    if len(shape) != 2 or 0 in shape:
        raise InputError(
            f"{member.where}: expected [N, F] of at least one node and one feature, found shape {shape}"
        )
    if member.fortran_order and 1 not in shape:
        expected_order = (
            "expected rows (C order), found columns (Fortran order); save np.ascontiguousarray"
        )
        raise InputError(f"{member.where}: {expected_order}")
    num_nodes, num_edges = shape[0], shapes["edge_index"][-1]
    if shapes["edge_index"] != (2, num_edges) or shapes["node_label"] not in {
        (num_nodes,),
        (num_nodes, 1),
    }:
        raise InputError(
            f"{path / 'raw'}: expected arrays of {num_nodes} nodes, found shapes {shapes}"
        )
    if missing := [
        name for name in SPLITS if not (split_folder(path) / f"{name}.csv.gz").is_file()
    ]:
        raise InputError(f"{split_folder(path)}: expected {missing[0]}.csv.gz, found none")
    file = path / "meta.json"
    with naming(file, "a JSON object"):
        meta: dict[str, Any] = dict(json.loads(file.read_text() if file.is_file() else "{}"))
    num_classes = meta.get("num_classes") if num_classes is None else num_classes

    def label_chunks(num_classes: int) -> Iterator[Array]:
        with Member(labels, "node_label") as member:
            step = npz.CHUNK_BYTES // member.dtype.itemsize
            for begin in range(0, num_nodes, step):
                yield clean_labels(
                    member.read(min(step, num_nodes - begin)), num_classes, member.where, begin
                )
            member.finish()

    if num_classes is None:
        num_classes = count_classes(
            label_chunks(MAX_CLASSES), dtypes["node_label"], f"{labels}, member node_label"
        )
    if not isinstance(num_classes, int) or not 1 <= num_classes <= MAX_CLASSES:
        raise InputError(
            f"{file}: expected num_classes from 1 to {MAX_CLASSES}, found {num_classes}"
        )

    def edge_chunks(chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        # Row 1 of a [2, E] array starts halfway: a second stream, wound forward, follows the first.
        with Member(data, "edge_index") as first, Member(data, "edge_index") as second:
            paired = first.fortran_order
            if not paired:
                second.skip(num_edges)
            for begin in range(0, num_edges, chunk_edges):
                count = min(chunk_edges, num_edges - begin)
                if paired:
                    src, dst = first.read(2 * count).reshape(count, 2).T
                else:
                    src, dst = first.read(count), second.read(count)
                src, dst = np.ascontiguousarray(src, np.int64), np.ascontiguousarray(dst, np.int64)
                if min(src.min(), dst.min()) < 0 or max(src.max(), dst.max()) >= num_nodes:
                    bad = np.flatnonzero(
                        (np.minimum(src, dst) < 0) | (np.maximum(src, dst) >= num_nodes)
                    )[0]
                    edge = f"edge {begin + bad} is ({src[bad]}, {dst[bad]})"
                    raise InputError(
                        f"{first.where}: expected node ids from 0 to {num_nodes - 1}, found {edge}"
                    )
                yield src, dst
            (first if paired else second).finish()

    def x_chunks() -> Iterator[Array]:
        with Member(data, "node_feat") as member:
            rows = max(1, npz.CHUNK_BYTES // (member.dtype.itemsize * shape[1]))
            for begin in range(0, num_nodes, rows):
                yield member.read(min(rows, num_nodes - begin) * shape[1]).reshape(-1, shape[1])
            member.finish()

    return Source(
        path=path, name=str(meta.get("name", path.resolve().name)), num_nodes=num_nodes, num_edges=num_edges,
        num_features=shape[1], num_classes=num_classes, stamps=stamps, edge_chunks=edge_chunks, x_chunks=x_chunks,
        label_chunks=lambda: label_chunks(num_classes),
        read_splits=lambda: read_split_files(split_folder(path), num_nodes),
        feature_dtype=np.dtype(np.float16 if dtype.itemsize == 2 else np.float32),
    )  # fmt: skip


def write_layout(
    folder: Path, source: Source, done: Callable[[int], object] = lambda count: None
) -> None:
    """Write any `Source` as OGB's binary layout, unchecked; `done` is called with the bytes of each
    chunk."""
    for part in ("raw", "split/time", "processed"):  # ogb saves into processed/ without making it
        (folder / part).mkdir(parents=True)
    num_nodes, num_edges = source.num_nodes, source.num_edges
    rows = (chunk[way] for way in (0, 1) for chunk in source.edge_chunks(2**20))

    def counted(chunks: Iterable[Array]) -> Iterator[Array]:
        for chunk in chunks:
            yield chunk
            done(chunk.nbytes)

    data = {
        "edge_index": ((2, num_edges), np.int64, counted(rows)),
        "node_feat": ((num_nodes, source.num_features), np.float32, counted(source.x_chunks())),
        "num_nodes_list": ((1,), np.int64, [np.array([num_nodes])]),
        "num_edges_list": ((1,), np.int64, [np.array([num_edges])]),
    }
    npz.write_npz(folder / "raw" / "data.npz", data)
    labels = (
        np.where(chunk < 0, np.float32("nan"), chunk.astype(np.float32))
        for chunk in source.label_chunks()
    )
    npz.write_npz(
        folder / "raw" / "node-label.npz", {"node_label": ((num_nodes, 1), np.float32, labels)}
    )
    for split, ids in source.read_splits().items():
        with (
            open(folder / "split" / "time" / f"{split}.csv.gz", "wb") as file,
            # no name, no time: same ids, same bytes
            gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
        ):
            packed.write("".join(f"{node}\n" for node in ids.tolist()).encode())
    # ogb asks on the terminal whether to update when it is missing
    (folder / "RELEASE_v1.txt").touch()
    write_json(folder / "meta.json", source.facts())


@clear_errors()
def write_raw(
    path: StrPath,
    *,
    edge_index: Any,
    x: Any,
    y: Any,
    splits: Mapping[str, Any],
    num_classes: int | None = None,
    name: str | None = None,
) -> Source:
    """Write any graph in OGB's binary layout, that of ogbn-papers100M, so that OGB's own classes
    open it too.

    Everything is checked before anything is written, and the folder appears whole or not at all.

    Args:
        edge_index: whole numbers [2, E], source above destination; a numpy array or a torch tensor,
            as the others.
        x: features [N, F], finite; stored as float32.
        y: labels [N] or [N, 1]: -1 or NaN where there is none.
        splits: node ids, or boolean masks over all nodes, of train, valid and test.
    """
    source = from_arrays(name or Path(path).absolute().name, edge_index, x, y, splits, num_classes)
    with new_folder(path) as folder:
        write_layout(folder, source)
    return open_raw(path)
