"""Checks of features, labels and splits from any source, and the format of a store's files."""

import difflib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError, naming
from ..files import Stamp, stamp, whereabouts
from .npz import Array, slices

SPLITS = ("train", "valid", "test")
MAX_CLASSES = 2**24  # OGB's layout has float32 labels, exact up to this number


NOT_CLASSES = "; labels are classes: make classes of numbers with numpy.digitize(values, bounds)"


def index_dtype(num_nodes: int) -> type[np.signedinteger[Any]]:
    """Return the dtype of node ids in `row`: int32, or int64 from 2**31 nodes on."""
    return np.int32 if num_nodes < 2**31 else np.int64


def label_dtype(num_classes: int) -> type[np.signedinteger[Any]]:
    """Return the dtype of cleaned labels: int16, or int64 beyond 32,767 classes."""
    return np.int16 if num_classes <= 32767 else np.int64


def check_num_classes(value: Any) -> None:
    """Refuse a number of classes that is no whole number from 1 to `MAX_CLASSES`; None is
    allowed."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if value is not None and not (whole and 1 <= value <= MAX_CLASSES):
        raise InputError(
            f"num_classes: expected a whole number from 1 to {MAX_CLASSES}, found {value!r}"
        )


def from_one(values: Array, count: int) -> str:
    """Return the question to ask about ids or classes from 1 to `count`, where 0 to count - 1 are
    expected; "" for others."""
    if values.size and values.min() >= 1 and values.max() == count:
        return "; do they begin at 1? Then subtract 1"
    return ""


def refuse_several_labels(
    values: Array, where: str, name: str = "labels", choose: str = ""
) -> NoReturn:
    """Refuse labels [N, C] with the way out: how to make one label a node, or to choose a
    column."""
    found = f"{where}: expected one label a node, found {values.shape[1]}"
    what = "several values"
    if values.dtype.kind in "fiub" and np.isin(values, (0, 1)).all():
        if (values.sum(axis=1) == 1).all():
            raise InputError(f"{found} columns of one-hot labels; use {name}.argmax(axis=1)")
        what = "several labels (multi-label)"
    raise InputError(
        f"{found} columns; {what} a node are not supported: "
        f"use one, such as {choose or f'{name}[:, 0]'}, and train a model for each"
    )


_MOST_VALUES = 2**23  # values of classes x columns in memory at a time: 64 MB
_CHANCE = math.log(0.05)


class LabelColumns(NamedTuple):
    """Columns of features [N, F] that hold nothing but the labels."""

    columns: list[int]
    equal: bool  # one column, the labels' own numbers
    by_chance: bool  # so few labels that other columns could be the same


def _values_of_classes(
    chunks: Iterable[Array], labels: Array, columns: Array, num_classes: int
) -> tuple[Array, Array]:
    """Return the columns that have one value in each class, and the values [C, columns], NaN for
    classes without labels.

    It stops reading when no column is left, mostly in the first chunk.
    """
    values, begin = np.full((num_classes, len(columns)), np.nan), 0
    for chunk in chunks:
        own = labels[begin : begin + len(chunk)]
        begin += len(chunk)
        known = np.flatnonzero(own >= 0)
        used, first, place = np.unique(own[known], return_index=True, return_inverse=True)
        rows = chunk[known][:, columns]
        before = values[used]
        same = (rows == rows[first][place]).all(axis=0)
        same &= (np.isnan(before) | (before == rows[first])).all(axis=0)
        columns, values = columns[same], values[:, same]
        values[used] = rows[first][:, same]
        if not len(columns):
            break
    return columns, values


def find_labels(
    open_chunks: Callable[[], Iterable[Array]], labels: Array, num_features: int
) -> LabelColumns | None:
    """Return the columns of features that are the labels of all labelled nodes in the same or in
    other numbers.

    That is a column with one value for each class and another one for each other class, or several
    such as one-hot ones, which are so together. A column that several classes share is an
    attribute and stays.
    """
    classes = np.unique(labels[labels >= 0])
    num_classes = int(labels.max(initial=-1)) + 1
    step = max(1, _MOST_VALUES // max(1, num_classes))
    kept: list[int] = []
    parts = [np.empty((len(classes), 0))]
    for part in slices(np.arange(num_features), step):
        columns, values = _values_of_classes(open_chunks(), labels, part, num_classes)
        varies = (values[classes] != values[classes[:1]]).any(axis=0)
        kept += columns[varies].tolist()
        parts.append(values[classes][:, varies])
    values = np.concatenate(parts, axis=1)
    alone = [i for i in range(len(kept)) if len(np.unique(values[:, i])) == len(classes)]
    if not alone and (not kept or len(np.unique(values, axis=0)) < len(classes)):
        return None
    equal = [i for i in alone if (values[:, i] == classes).all()]
    chosen = equal[:1] or alone[:1] or range(len(kept))
    chance = _log_chance(labels, len(chosen), num_features, bool(equal))
    return LabelColumns([kept[i] for i in chosen], bool(equal), chance > _CHANCE)


def _log_chance(labels: Array, count: int, num_features: int, equal: bool) -> float:
    """Return the logarithm of a bound of the chance that any `count` of the columns split the
    nodes as the classes do, if their values were shuffled."""
    sizes = np.unique(labels[labels >= 0], return_counts=True)[1]
    arrangements = math.lgamma(sizes.sum() + 1) - sum(math.lgamma(size + 1) for size in sizes)
    namings = 0.0 if equal else math.lgamma(len(sizes) + 1)
    return count * math.log(num_features) + namings - arrangements


def clean_labels(values: Array, num_classes: int, where: str, start: int = 0) -> Array:
    """Convert labels of any numeric dtype to `label_dtype`, -1 for none."""
    values = values.reshape(-1)
    known = ~np.isnan(values) if values.dtype.kind == "f" else values != -1
    wrong = known & ((values != np.floor(values)) | (values < 0) | (values >= num_classes))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        hint = NOT_CLASSES if values[at] != np.floor(values[at]) else ""
        raise InputError(
            f"{where}: expected whole labels from 0 to {num_classes - 1}, or NaN (-1 in whole numbers) for none; "
            f"found {values[at]} at node {start + at}{hint or from_one(values[known], num_classes)}"
        )
    labels = np.full(len(values), -1, label_dtype(num_classes))
    labels[known] = values[known].astype(labels.dtype)
    return labels


def count_classes(chunks: Iterable[Array], dtype: np.dtype[Any], where: str) -> int:
    """Return the largest of cleaned labels plus one; `dtype` is that of the labels before they were
    cleaned."""
    seen = np.zeros(MAX_CLASSES, bool)
    for chunk in chunks:
        seen[chunk[chunk >= 0]] = True
    used, largest = int(seen.sum()), int(np.flatnonzero(seen)[-1]) if seen.any() else -1
    if largest < 0:
        raise InputError(f"{where}: expected at least one label, found none")
    # The dtype's largest number, such as 255 in uint8, often means "none"; a stray 15,000,000 would
    # make a model of 15 million classes.
    ends = dtype.kind in "iu" and largest == np.iinfo(dtype).max and not seen[largest - 1]
    if ends or largest + 1 > 2 * used + 100:
        raise InputError(
            f"{where}: expected labels that leave few classes out, found {used} classes and the label {largest}; "
            "write -1 or NaN for no label, or convert with --num-classes (in Python num_classes)"
        )
    return largest + 1


def split_problems(
    splits: Mapping[str, Array], num_nodes: int, labelled: Callable[[Array], Array]
) -> Iterator[tuple[str, str]]:
    """Yield (split, problem) for int64 ids of splits; `labelled` returns which of some nodes have a
    label."""
    checked: dict[str, Array] = {}
    for name, ids in splits.items():
        if (outside := ids[(ids < 0) | (ids >= num_nodes)]).size:
            yield (
                name,
                f"expected node ids from 0 to {num_nodes - 1}, found {outside.size} others such as "
                f"{outside[0]}{from_one(ids, num_nodes)}",
            )
            continue
        if repeats := len(ids) - len(np.unique(ids)):
            yield name, f"expected each node once, found {repeats} repeats"
        if (bare := ids[~labelled(ids)]).size:
            yield (
                name,
                f"expected labelled nodes, found {bare.size} without a label such as {bare[0]}",
            )
        for other, before in checked.items():
            if (shared := np.intersect1d(ids, before)).size:
                yield name, f"expected no node of {other}, found {shared.size} such as {shared[0]}"
        checked[name] = ids


def finite(chunks: Iterable[Array], dtype: DTypeLike, where: str) -> Iterator[Array]:
    """Yield chunks of features [n, F], cast to `dtype`; refuse values that are not finite before or
    after the cast."""
    dtype, begin = np.dtype(dtype), 0
    most = float(np.finfo(dtype).max)
    for values in chunks:
        with np.errstate(over="ignore"):
            out = values.astype(dtype, order="C", copy=False)
        # NaN makes both comparisons false.
        if not (values.size == 0 or (float(values.max()) <= most and float(values.min()) >= -most)):
            if (wrong := ~np.isfinite(values)).any():
                row = begin + int(wrong.any(axis=1).argmax())
                raise InputError(
                    f"{where}: expected finite values, found NaN or Inf, the first in row {row}"
                )
            if (wrong := ~np.isfinite(out)).any():
                row = begin + int(wrong.any(axis=1).argmax())
                remedy = (
                    "use feature_dtype='float32'"
                    if dtype == np.float16
                    else "scale the features down"
                )
                raise InputError(
                    f"{where}: found a value beyond {most:g}, the largest {dtype}, in row {row}; {remedy}"
                )
        begin += len(values)
        yield out


class Int8Columns(NamedTuple):
    """Features in one byte: code q of column f has the value `q * scale[f] + offset[f]`; both are
    float32 [F]."""

    scale: Array
    offset: Array

    @classmethod
    def covering(cls, chunks: Iterable[Array], num_features: int) -> Self:
        """Spread the codes -127 to 127 evenly from each column's smallest value to its largest;
        values are finite."""
        low, high = np.full(num_features, np.inf), np.full(num_features, -np.inf)
        for values in chunks:
            np.minimum(low, values.min(axis=0, initial=np.inf), out=low)
            np.maximum(high, values.max(axis=0, initial=-np.inf), out=high)
        scale = np.where(high > low, (high - low) / 254, 1.0)  # a constant column is its offset
        return cls(scale.astype(np.float32), ((low + high) / 2).astype(np.float32))

    def entries(self) -> dict[str, Any]:
        """Return the entries of store.json."""
        return {"version": INT8_VERSION, "int8": [part.tolist() for part in self]}

    def encode(self, values: Array) -> Array:
        """Return the nearest codes, int8, of float values [n, F]."""
        return np.clip(np.rint((values - self.offset) / self.scale), -127, 127).astype(np.int8)

    def decode(self, codes: Array, columns: slice = slice(None)) -> Array:
        """Return the values, float32, of some columns of int8 codes [n, F]."""
        codes, scale, offset = codes[:, columns], self.scale[columns], self.offset[columns]
        out = np.empty(codes.shape, np.float32)
        # rows that stay in a core's cache for the second step
        for begin in range(0, len(codes), 512):
            part = out[begin : begin + 512]
            np.multiply(codes[begin : begin + 512], scale, out=part)
            part += offset
        return out


# The files of a store: | file | dtype | shape | content | | colptr | int64 | [N + 1] | the in-edges
# of node v are row[colptr[v]:colptr[v + 1]] | | row | int32 (int64 from 2**31 nodes on) | [E] |
# sources | | x | float16, float32, or int8 (`Int8Columns`) | [N, F] | features, C order | | y |
# int16 (int64 beyond 32,767 classes) | [N] | labels, -1 for none | | train, valid, test | int64 |
# [n] | node ids of the splits, in their original order | | node_id, of propagated features of some
# nodes | as row | [N] | ids in the graph, ascending | | label_name, if labels were text | UTF-8
# bytes | [C] | class names | | node_name, if nodes had names | int64 or UTF-8 bytes | [N] | node
# names in the original data set |
FORMAT, META = "ogbnlib-store", "store.json"
# a reader of version 1 would take the codes of int8 features for values
VERSION, INT8_VERSION = 1, 2
HEADER_BYTES = 4096  # a feature row of 256 bytes then never spans two pages


@dataclass(frozen=True)
class FileInfo:
    """One array of a store: little-endian dtype, shape, size of the whole file and CRC-32 of the
    data in it."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    crc32: int


def npy_header(dtype: DTypeLike, shape: tuple[int, ...]) -> bytes:
    """Return the 4,096 bytes before the data: format 1.0 (numpy.lib.format), C order, padded with
    spaces."""
    text = repr(
        {
            "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
            "fortran_order": False,
            "shape": shape,
        }
    )
    magic = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    return magic + text.encode().ljust(HEADER_BYTES - 11) + b"\n"


def meta_crc32(meta: Mapping[str, Any]) -> int:
    content = {key: value for key, value in meta.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def nearby(path: Path) -> str:
    """Return the end of the message on a missing store: stores near it, else the working folder."""
    path = path.absolute()  # "." has no name
    folders = [*path.parents[:2], path.parent / f"{path.name}.store"]
    if path.is_dir():
        folders += sorted(path.iterdir())
    elif path.parent.is_dir():
        names = [entry.name for entry in path.parent.iterdir()]
        folders += [path.with_name(name) for name in difflib.get_close_matches(path.name, names)]
    stores = [str(folder) for folder in folders if (folder / META).is_file()]
    if stores:
        return f"; did you mean the store {' or '.join(stores[:3])}?"
    return "" if path.exists() else whereabouts()


def read_meta(path: Path) -> dict[str, Any]:
    """Return the content of a store's store.json."""
    file = path / META
    if not file.is_file():
        hint = nearby(path)
        if "?" not in hint:
            hint = f"; `python -m ogbnlib convert` makes one of other data{hint}"
        raise InputError(f"{path}: expected a store ({META} in it), found none{hint}")
    text = file.read_bytes()
    with naming(file, "JSON", "convert again"):
        meta = json.loads(text)
    known = (
        isinstance(meta, dict)
        and meta.get("format") == FORMAT
        and meta.get("version") in (VERSION, INT8_VERSION)
    )
    if not known:
        problem = f"expected {FORMAT}, version {VERSION} or {INT8_VERSION}"
        raise InputError(f"{file}: {problem}; use a newer ogbnlib or convert again")
    if (
        meta.get("crc32") != meta_crc32(meta)
        or text != (json.dumps(meta, indent=2) + "\n").encode()
    ):
        raise InputError(
            f"{file}: checksum mismatch: the file was damaged or edited; convert again"
        )
    return meta


def check_file(file: Path, info: FileInfo) -> Stamp:
    """Check the size and header of an array's file against store.json; return its stamp."""
    with open(file, "rb") as stream:
        stamped, header = stamp(stream.fileno()), stream.read(HEADER_BYTES)
    if stamped[0] != info.bytes:
        raise InputError(
            f"{file}: expected {info.bytes} bytes, found {stamped[0]}; copy the store or convert again"
        )
    if header != npy_header(info.dtype, info.shape):
        raise InputError(
            f"{file}: expected the header of {info.dtype} {info.shape}, found another; convert again"
        )
    return stamped
