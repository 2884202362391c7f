"""OGB's on-disk layout of ogbn-papers100M: read in pieces, and written from any `Source`.

OGB's own loader holds the 82.8 GB of ogbn-papers100M several times over; nothing here holds a
member.
"""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError, naming
from ..files import StrPath, home, write_json
from ..graph import npz
from ..graph.npz import Array, Member
from ..graph.store_format import SPLITS
from .files.layouts import not_a_data_set, split_folder
from .labels import MAX_CLASSES, check_num_classes, clean_labels, count_classes
from .source import Source, stamped

_LONGEST_ID = 64  # bytes of a line


def layout_files(folder: Path) -> dict[str, Path]:
    """Return the files of a data set in one of OGB's layouts, by their path in it."""
    files = [
        *sorted((folder / "raw").rglob("*")),
        *sorted((folder / "split").rglob("*")),
        folder / "meta.json",
    ]
    return {str(file.relative_to(folder)): file for file in files if file.is_file()}


def _read_split_files(folder: Path, num_nodes: int) -> dict[str, Array]:
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
    ids = [np.empty(0, np.int64)]
    rest = b""
    count = 0
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
                raise InputError(
                    f"{file}: expected at most {num_nodes} lines of a node id each, "
                    "found more lines, or longer ones"
                )
    return np.concatenate(ids)


def open_raw(path: StrPath, *, num_classes: int | None = None) -> Source:
    """Open a folder in OGB's binary layout; no large member is read.

    `num_classes` is by default that of meta.json and, without one, the largest label plus one.
    """
    path = home(path)
    stamps = stamped(layout_files(path))
    check_num_classes(num_classes)
    if not (path / "raw" / "data.npz").is_file():
        raise not_a_data_set(path)
    layout = _Layout.open(path)
    file = path / "meta.json"
    with naming(file, "a JSON object"):
        meta: dict[str, Any] = dict(json.loads(file.read_text() if file.is_file() else "{}"))
    if num_classes is None:
        num_classes = meta.get("num_classes")
    if num_classes is None:
        chunks = layout.label_chunks(MAX_CLASSES)
        num_classes = count_classes(chunks, layout.labels.dtype, layout.labels.where)
    if not isinstance(num_classes, int) or not 1 <= num_classes <= MAX_CLASSES:
        raise InputError(
            f"{file}: expected num_classes from 1 to {MAX_CLASSES}, found {num_classes}"
        )
    return Source(
        path=path, name=str(meta.get("name", path.resolve().name)), num_nodes=layout.x.shape[0],
        num_edges=layout.edges.shape[1], num_features=layout.x.shape[1], num_classes=num_classes,
        stamps=stamps, features_at=layout.x.where, edge_chunks=layout.edge_chunks, x_chunks=layout.x_chunks,
        label_chunks=lambda: layout.label_chunks(num_classes),
        read_splits=lambda: _read_split_files(split_folder(path), layout.x.shape[0]),
        feature_dtype=np.dtype(np.float16 if layout.x.dtype.itemsize == 2 else np.float32),
    )  # fmt: skip


class _Layout(NamedTuple):
    """The members of a folder in OGB's binary layout, closed; each pass opens them again."""

    edges: Member
    labels: Member
    x: Member

    @classmethod
    def open(cls, path: Path) -> Self:
        """Check the headers of all members, and that each split has its file."""
        data = path / "raw" / "data.npz"
        labels = path / "raw" / "node-label.npz"
        layout = cls(
            _header(data, "edge_index", "iu"),
            _header(labels, "node_label", "fiu"),
            _header(data, "node_feat", "f"),
        )
        edges, label, x = (member.shape for member in layout)
        if len(x) != 2 or 0 in x:
            raise InputError(
                f"{layout.x.where}: expected [N, F] of at least one node and one feature, found shape {x}"
            )
        if layout.x.fortran_order and 1 not in x:
            raise InputError(
                f"{layout.x.where}: expected rows (C order), found columns (Fortran order); "
                "save np.ascontiguousarray"
            )
        if edges != (2, edges[-1]) or label not in {(x[0],), (x[0], 1)}:
            shapes = {"edge_index": edges, "node_label": label, "node_feat": x}
            raise InputError(
                f"{path / 'raw'}: expected arrays of {x[0]} nodes, found shapes {shapes}"
            )
        folder = split_folder(path)
        for name in SPLITS:
            if not (folder / f"{name}.csv.gz").is_file():
                raise InputError(f"{folder}: expected {name}.csv.gz, found none")
        return layout

    def label_chunks(self, num_classes: int) -> Iterator[Array]:
        with self.labels.again() as member:
            step = npz.CHUNK_BYTES // member.dtype.itemsize
            for begin in range(0, self.x.shape[0], step):
                values = member.read(min(step, self.x.shape[0] - begin))
                yield clean_labels(values, num_classes, member.where, begin)
            member.finish()

    def edge_chunks(self, chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        num_edges = self.edges.shape[1]
        # Row 1 of a [2, E] array starts halfway: a second stream, wound forward, follows the first.
        with self.edges.again() as first, self.edges.again() as second:
            paired = first.fortran_order
            if not paired:
                second.skip(num_edges)
            for begin in range(0, num_edges, chunk_edges):
                count = min(chunk_edges, num_edges - begin)
                if paired:
                    src, dst = first.read(2 * count).reshape(count, 2).T
                else:
                    src = first.read(count)
                    dst = second.read(count)
                src = np.ascontiguousarray(src, np.int64)
                dst = np.ascontiguousarray(dst, np.int64)
                self._check_ids(src, dst, begin, first.where)
                yield src, dst
            (first if paired else second).finish()

    def _check_ids(self, src: Array, dst: Array, begin: int, where: str) -> None:
        low = np.minimum(src, dst)
        high = np.maximum(src, dst)
        if low.min() >= 0 and high.max() < self.x.shape[0]:
            return
        bad = np.flatnonzero((low < 0) | (high >= self.x.shape[0]))[0]
        raise InputError(
            f"{where}: expected node ids from 0 to {self.x.shape[0] - 1}, "
            f"found edge {begin + bad} is ({src[bad]}, {dst[bad]})"
        )

    def x_chunks(self) -> Iterator[Array]:
        num_nodes, width = self.x.shape
        with self.x.again() as member:
            rows = max(1, npz.CHUNK_BYTES // (member.dtype.itemsize * width))
            for begin in range(0, num_nodes, rows):
                count = min(rows, num_nodes - begin)
                yield member.read(count * width).reshape(-1, width)
            member.finish()


def _header(file: Path, name: str, kinds: str) -> Member:
    """Return a member, closed after its header was read."""
    with Member(file, name) as member:
        if member.dtype.kind not in kinds:
            raise InputError(
                f"{member.where}: expected numpy's kind {' or '.join(kinds)}, found {member.dtype}"
            )
    return member


def write_layout(
    folder: Path, source: Source, done: Callable[[int], object] = lambda count: None
) -> None:
    """Write any `Source` as OGB's binary layout, unchecked; `done` is called with the bytes of each
    chunk."""
    for part in ("raw", "split/time", "processed"):  # ogb saves into processed/ without making it
        (folder / part).mkdir(parents=True)
    num_nodes = source.num_nodes
    num_edges = source.num_edges
    rows = (chunk[way] for way in (0, 1) for chunk in source.edge_chunks(2**20))

    def counted(chunks: Iterable[Array]) -> Iterator[Array]:
        for chunk in chunks:
            yield chunk
            done(chunk.nbytes)

    data: dict[str, tuple[Sequence[int], DTypeLike, Iterable[Array]]] = {
        "edge_index": ((2, num_edges), np.int64, counted(rows)),
        "node_feat": ((num_nodes, source.num_features), np.float32, counted(source.x_chunks())),
        "num_nodes_list": ((1,), np.int64, [np.array([num_nodes])]),
        "num_edges_list": ((1,), np.int64, [np.array([num_edges])]),
    }
    if source.year_chunks is not None:
        data["node_year"] = ((num_nodes, 1), np.int64, counted(source.year_chunks()))
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
