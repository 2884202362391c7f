"""OGB's on-disk layout of ogbn-papers100M: read in chunks, and written from any `Source`.

OGB's own loader has the 82.8 GB of ogbn-papers100M several times in memory; this module never has a
whole array of the .npz files in memory.
"""

import functools
import gzip
import itertools
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError, naming
from ..files import StrPath, home, write_json
from ..graph import npz
from ..graph.npz import Array, Member
from ..graph.store_format import SPLITS
from .files.layouts import OPTIONS, not_a_data_set, split_folder
from .labels import MAX_CLASSES, check_num_classes, clean_labels, count_classes
from .source import Source, stamped

_LONGEST_ID = 64  # bytes read of a line at a time


def layout_files(folder: Path) -> dict[str, Path]:
    """Return the files of a data set in one of OGB's layouts, by their path in `folder`."""
    files = [
        *sorted((folder / "raw").rglob("*")),
        *sorted((folder / "split").rglob("*")),
        folder / "meta.json",
        folder / OPTIONS,
    ]
    return {str(file.relative_to(folder)): file for file in files if file.is_file()}


def _read_split_files(folder: Path, num_nodes: int) -> dict[str, Array]:
    """Return the int64 ids in the three files of the split folder; only their number is checked.

    Lines are read in pieces of at most 64 bytes, and at most `num_nodes` + 1 ids, because a small
    compressed file may have billions of lines.
    """
    splits = {}
    for name in SPLITS:
        file = folder / f"{name}.csv.gz"
        with (
            naming(file, f"at most {num_nodes} lines of a node id each, gzipped"),
            gzip.open(file) as stream,
        ):
            if not file.stat().st_size:
                raise EOFError("it is empty")
            lines = iter(functools.partial(stream.readline, _LONGEST_ID), b"")
            numbers = map(int, filter(bytes.strip, lines))
            splits[name] = np.fromiter(itertools.islice(numbers, num_nodes + 1), np.int64)
            if len(splits[name]) > num_nodes:
                raise ValueError("more lines")
    return splits


def open_raw(path: StrPath, *, num_classes: int | None = None) -> Source:
    """Open a folder in OGB's binary layout, without reading edges or features.

    `num_classes` defaults to the number in meta.json. Without one, the labels are read, and it is
    the largest label plus one.
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
        num_classes = count_classes(
            layout.label_chunks(MAX_CLASSES), layout.labels.dtype, layout.labels.where
        )
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
    """The large arrays of a folder in OGB's binary layout; each pass opens its file anew."""

    edges: Member
    labels: Member
    x: Member

    @classmethod
    def open(cls, path: Path) -> Self:
        """Check the headers of all members, and that each split has its file."""
        data = path / "raw" / "data.npz"
        layout = cls(
            _header(data, "edge_index", "iu"),
            _header(path / "raw" / "node-label.npz", "node_label", "fiu"),
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
        begin = 0
        for values in self.labels.pieces(npz.CHUNK_BYTES // self.labels.dtype.itemsize):
            yield clean_labels(values, num_classes, self.labels.where, begin)
            begin += len(values)

    def edge_chunks(self, chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        begin = 0
        for src, dst in self._ends(chunk_edges):
            src = np.ascontiguousarray(src, np.int64)
            dst = np.ascontiguousarray(dst, np.int64)
            self._check_ids(src, dst, begin)
            yield src, dst
            begin += len(src)

    def _ends(self, chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        if self.edges.fortran_order:
            for pairs in self.edges.pieces(2 * chunk_edges):
                yield pairs[::2], pairs[1::2]
            return
        # In C order, row 1 of a [2, E] array starts halfway through the file. A second stream skips
        # to that place, and both are read in step.
        num_edges = self.edges.shape[1]
        yield from zip(
            self.edges.pieces(chunk_edges, 0, num_edges),
            self.edges.pieces(chunk_edges, num_edges),
            strict=True,
        )

    def _check_ids(self, src: Array, dst: Array, begin: int) -> None:
        low = np.minimum(src, dst)
        high = np.maximum(src, dst)
        if low.min() >= 0 and high.max() < self.x.shape[0]:
            return
        bad = np.flatnonzero((low < 0) | (high >= self.x.shape[0]))[0]
        raise InputError(
            f"{self.edges.where}: expected node ids from 0 to {self.x.shape[0] - 1}, "
            f"found edge {begin + bad} is ({src[bad]}, {dst[bad]})"
        )

    def x_chunks(self) -> Iterator[Array]:
        width = self.x.shape[1]
        rows = max(1, npz.CHUNK_BYTES // (self.x.dtype.itemsize * width))
        return (values.reshape(-1, width) for values in self.x.pieces(rows * width))


def _header(file: Path, name: str, kinds: str) -> Member:
    """Open member `name` of an .npz file; refuse a dtype that is not of numpy's `kinds`."""
    member = Member(file, name)
    if member.dtype.kind not in kinds:
        raise InputError(
            f"{member.where}: expected numpy's kind {' or '.join(kinds)}, found {member.dtype}"
        )
    return member


def _write_npz(
    path: StrPath, members: Mapping[str, tuple[Sequence[int], DTypeLike, Iterable[Array]]]
) -> None:
    """Write a compressed .npz file.

    Each member is given by its shape, its dtype, and its values in C order, in chunks.
    """
    # Level 1, because features are close to noise: level 6 takes twice the time to save 1 %.
    with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, (shape, kind, chunks) in members.items():
            dtype = np.dtype(kind)
            header = {
                "descr": np.lib.format.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": tuple(shape),
            }
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                for chunk in chunks:
                    member.write(np.ascontiguousarray(chunk, dtype).reshape(-1).view(np.uint8).data)


def write_layout(
    folder: Path, source: Source, done: Callable[[int], object] = lambda count: None
) -> None:
    """Write any `Source` in OGB's binary layout, without checks.

    `done` is called with the bytes of each chunk of edges, features and years.
    """
    for part in ("raw", "split/time", "processed"):  # ogb does not create processed/
        (folder / part).mkdir(parents=True)
    num_nodes = source.num_nodes
    rows = (chunk[way] for way in (0, 1) for chunk in source.edge_chunks(2**20))

    def counted(chunks: Iterable[Array]) -> Iterator[Array]:
        for chunk in chunks:
            yield chunk
            done(chunk.nbytes)

    data: dict[str, tuple[Sequence[int], DTypeLike, Iterable[Array]]] = {
        "edge_index": ((2, source.num_edges), np.int64, counted(rows)),
        "node_feat": ((num_nodes, source.num_features), np.float32, counted(source.x_chunks())),
        "num_nodes_list": ((1,), np.int64, [np.array([num_nodes])]),
        "num_edges_list": ((1,), np.int64, [np.array([source.num_edges])]),
    }
    if source.year_chunks is not None:
        data["node_year"] = ((num_nodes, 1), np.int64, counted(source.year_chunks()))
    _write_npz(folder / "raw" / "data.npz", data)
    labels = (
        np.where(chunk < 0, np.float32("nan"), chunk.astype(np.float32))
        for chunk in source.label_chunks()
    )
    _write_npz(
        folder / "raw" / "node-label.npz", {"node_label": ((num_nodes, 1), np.float32, labels)}
    )
    for split, ids in source.read_splits().items():
        with (
            open(folder / "split" / "time" / f"{split}.csv.gz", "wb") as file,
            # no file name and no time in the header: the same ids give the same bytes
            gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
        ):
            packed.write("".join(f"{node}\n" for node in ids.tolist()).encode())
    # without this file ogb asks on the terminal whether to update
    (folder / "RELEASE_v1.txt").touch()
    write_json(folder / "meta.json", source.facts())
