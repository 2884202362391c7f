"""OGB's layouts on disk: the binary one of ogbn-papers100M, read in chunks and written from any
`Source`, and the csv one, as a description of its files.

OGB's own loader has the 82.8 GB of ogbn-papers100M several times in memory; this module reads chunks.
"""

import gzip
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError, naming
from ..files import StrPath, home
from ..graph import npz
from ..graph.node_set import NodeSet
from ..graph.npz import Array, Member
from ..graph.store_format import SPLITS
from .description import DESCRIPTION, DataFile, Description
from .labels import MAX_CLASSES, by_node, clean_labels, count_classes
from .source import Source, checked_edges, stamped

_YEARS = 2**20  # nodes per chunk of their years
_SPLIT_DICT = "split_dict.pt"  # the splits of a data set that OGB's DatasetSaver wrote
# Roles of columns, numbered from 1, by the path of the file, as ogbn-arxiv has them
# (snap-stanford/ogb, docs of read_graph_pyg).
_CSV: Mapping[str, Mapping[str, str]] = {
    "raw/edge.csv.gz": {"1": "source", "2": "target"},
    "raw/node-feat.csv.gz": {"*": "feature"},
    "raw/node-label.csv.gz": {"*": "label"},
}
# arrays to write to an .npz file: their names, each with shape, dtype and chunks
_Members = Mapping[str, tuple[Sequence[int], DTypeLike, Iterable[Array]]]


def split_folder(path: Path) -> Path:
    """Return the folder with the files of the splits: split/time, else the only one in split/."""
    folders = {entry.name: entry for entry in (path / "split").glob("*") if entry.is_dir()}
    if "time" not in folders and len(folders) != 1:
        raise InputError(
            f"{path / 'split'}: expected a folder named time, or just one, found {sorted(folders)}"
        )
    return folders["time"] if "time" in folders else next(iter(folders.values()))


def csv_layout(folder: Path) -> Description | None:
    """Return the description of a folder in OGB's csv layout; None for any other folder."""
    if not (folder / min(_CSV)).is_file():  # raw/edge.csv.gz
        return None
    splits = split_folder(folder)
    columns = {folder / name: roles for name, roles in _CSV.items()}
    columns |= {splits / f"{split}.csv.gz": {"1": split} for split in SPLITS}
    files = [
        DataFile(path, str(path), columns=roles, header=False) for path, roles in columns.items()
    ]
    return Description(folder, files)


def read_split_dict(file: Path) -> dict[str, Array]:
    """Return int64 ids of the splits in a split_dict.pt, without running code in it; a missing test
    split, as in MAG240M, is empty."""
    import torch
    from torch.serialization import safe_globals

    # what torch needs to load numpy's integer arrays: (function, its name), in numpy 1 and numpy 2
    reconstruct = np.empty(0).__reduce__()[0]
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
    safe: list[Any] = [(reconstruct, name) for name in names]
    safe += [np.ndarray, np.dtype, type(np.dtype("i8"))]
    with naming(file, "a dict of train and valid, int64 ids, saved by torch"), safe_globals(safe):
        content = torch.load(file, weights_only=True)
        content.setdefault("test", np.empty(0, np.int64))
        return {split: np.asarray(content[split], np.int64) for split in SPLITS}


def _read_splits(folder: Path, num_nodes: int) -> dict[str, Array]:
    """Return the int64 ids of the splits in the files of the split folder."""
    from .nodes import Nodes, read_splits  # imports pyarrow and pandas
    from .tables import open_table

    if (folder / _SPLIT_DICT).is_file():
        return read_split_dict(folder / _SPLIT_DICT)
    tables = [open_table(folder / f"{split}.csv.gz", header=False) for split in SPLITS]
    for table, split in zip(tables, SPLITS, strict=True):
        table.roles = {"1": split}  # the only column has the ids
    return read_splits(tables, Nodes(num_nodes, "node_feat"))


def open_raw(path: StrPath, *, num_classes: int | None = None) -> Source:
    """Open a folder in OGB's binary layout, without reading edges or features.

    Without `num_classes`, the labels are read, and it is the largest label plus one.
    """
    path = home(path)
    # a change of these files until the end of the conversion is refused
    files = [*(path / "raw").rglob("*"), *(path / "split").rglob("*"), path / DESCRIPTION]
    data = path / "raw" / "data.npz"
    edges = _header(data, "edge_index", "iu")
    labels = _header(path / "raw" / "node-label.npz", "node_label", "fiu")
    x = _header(data, "node_feat", "f")
    _check_shapes(edges, labels, x)

    def label_chunks(num_classes: int) -> Iterator[Array]:
        begin = 0  # first node of the chunk
        for values in labels.pieces(npz.CHUNK_BYTES // labels.dtype.itemsize):
            yield clean_labels(values, num_classes, by_node(labels.where, values, begin))
            begin += len(values)

    if num_classes is None:
        num_classes = count_classes(label_chunks(MAX_CLASSES), labels.where)
    num_nodes, width = x.shape
    piece = width * max(1, npz.CHUNK_BYTES // (x.dtype.itemsize * width))  # values of whole rows
    return Source(
        path=path,
        name=path.resolve().name,
        num_nodes=num_nodes,
        num_edges=edges.shape[1],
        num_features=width,
        num_classes=num_classes,
        origin={"raw": str(path.resolve())},
        stamps=stamped(filter(Path.is_file, files)),
        features_at=x.where,
        edge_chunks=lambda count: checked_edges(_ends(edges, count), num_nodes, edges.where),
        x_chunks=lambda: (values.reshape(-1, width) for values in x.pieces(piece)),
        label_chunks=lambda: label_chunks(num_classes),
        read_splits=lambda: _read_splits(split_folder(path), num_nodes),
        feature_dtype=np.dtype(np.float16 if x.dtype.itemsize == 2 else np.float32),  # not float64
    )


def _check_shapes(edges: Member, labels: Member, x: Member) -> None:
    # expected are edges [2, E], labels [N] or [N, 1], and x [N, F] in C order
    if len(x.shape) != 2 or 0 in x.shape:
        raise InputError(
            f"{x.where}: expected [N, F] of at least one node and one feature, found shape {x.shape}"
        )
    if x.fortran_order and 1 not in x.shape:  # with a single row or column both orders agree
        raise InputError(
            f"{x.where}: expected rows (C order), found columns (Fortran order); save "
            "np.ascontiguousarray"
        )
    num_nodes = x.shape[0]
    if edges.shape[:-1] != (2,) or labels.shape not in {(num_nodes,), (num_nodes, 1)}:
        raise InputError(
            f"{labels.file.parent}: expected arrays of {num_nodes} nodes, found shapes "
            f"{edges.shape}, {labels.shape} and {x.shape}"
        )


def _ends(edges: Member, chunk_edges: int) -> Iterator[tuple[Array, Array]]:
    # yields (sources, destinations) of edges [2, E], at most `chunk_edges` at a time
    if edges.fortran_order:  # the two ends of an edge lie side by side
        for pairs in edges.pieces(2 * chunk_edges):
            yield pairs[::2], pairs[1::2]
        return
    # In C order, row 1 of a [2, E] array starts halfway through the file. A second stream skips
    # to that place, and both are read in step.
    sources = edges.pieces(chunk_edges, 0, edges.shape[1])
    yield from zip(sources, edges.pieces(chunk_edges, edges.shape[1]), strict=True)


def _header(file: Path, name: str, kinds: str) -> Member:
    """Open member `name` of an .npz file by its header; refuse a dtype of another of numpy's kinds,
    such as "iu" for whole numbers."""
    member = Member(file, name)
    if member.dtype.kind not in kinds:
        raise InputError(
            f"{member.where}: expected numpy's kind {' or '.join(kinds)}, found {member.dtype}"
        )
    return member


def _write_npz(path: StrPath, members: _Members) -> None:
    # Level 1, because features are close to noise: level 6 takes twice the time to save 1 %.
    with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, (shape, kind, chunks) in members.items():
            dtype = np.dtype(kind)
            header = {"descr": dtype.str, "fortran_order": False, "shape": tuple(shape)}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:  # may exceed 2 GB
                np.lib.format.write_array_header_1_0(member, header)
                for chunk in chunks:
                    member.write(np.ascontiguousarray(chunk, dtype).reshape(-1).view(np.uint8).data)


def _years(source: Source) -> Iterator[Array]:
    """Yield the years of the nodes, int64 [n], which OGB's own class for ogbn-papers100M expects.

    As there, nodes of valid are of 2018 and nodes of test of 2019; all others are of 2017 here.
    """
    splits = source.read_splits()
    valid = NodeSet(source.num_nodes, splits["valid"])
    test = NodeSet(source.num_nodes, splits["test"])
    for begin in range(0, source.num_nodes, _YEARS):
        ids = np.arange(begin, min(begin + _YEARS, source.num_nodes))
        yield 2017 + valid.contains(ids) + 2 * test.contains(ids)


def write_layout(folder: Path, source: Source) -> None:
    """Write any `Source` in OGB's binary layout, without checks."""
    for part in ("raw", "split/time", "processed"):  # ogb does not create processed/
        (folder / part).mkdir(parents=True)
    num_nodes = source.num_nodes
    # row 0 of edge_index has all sources, row 1 all destinations: two passes over the edges
    rows = (chunk[row] for row in (0, 1) for chunk in source.edge_chunks(2**20))
    data: _Members = {
        "edge_index": ((2, source.num_edges), np.int64, rows),
        "node_feat": ((num_nodes, source.num_features), np.float32, source.x_chunks()),
        "node_year": ((num_nodes, 1), np.int64, _years(source)),
        "num_nodes_list": ((1,), np.int64, [np.array([num_nodes])]),
        "num_edges_list": ((1,), np.int64, [np.array([source.num_edges])]),
    }
    _write_npz(folder / "raw" / "data.npz", data)
    labels = (
        np.where(chunk < 0, np.float32("nan"), chunk.astype(np.float32))  # OGB's: NaN for none
        for chunk in source.label_chunks()
    )
    _write_npz(
        folder / "raw" / "node-label.npz", {"node_label": ((num_nodes, 1), np.float32, labels)}
    )
    for split, ids in source.read_splits().items():
        # without a time in the header, the same ids give the same bytes
        packed = gzip.compress("".join(f"{node}\n" for node in ids.tolist()).encode(), mtime=0)
        (folder / "split" / "time" / f"{split}.csv.gz").write_bytes(packed)
    # without this file ogb asks on the terminal whether to update
    (folder / "RELEASE_v1.txt").touch()
    # the last classes may have no labelled node
    (folder / DESCRIPTION).write_text(f"num_classes: {source.num_classes}\n")
