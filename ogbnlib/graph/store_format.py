"""The format of a store: its files, their headers, and store.json."""

import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, create_model

from ..errors import InputError, naming
from ..files import StrPath, parse_json, read_whole, whereabouts

SPLITS = ("train", "valid", "test")


class Stamp(NamedTuple):
    """The state of a file, by which a later change is noticed."""

    size: int
    modified_ns: int
    inode: int
    changed_ns: int  # of content, mode or links; unlike `modified_ns`, no program can set it back


def index_dtype(num_nodes: int) -> type[np.signedinteger[Any]]:
    """Return the dtype of node ids in `row`: int32, or int64 from 2**31 nodes on."""
    return np.int32 if num_nodes < 2**31 else np.int64


def label_dtype(num_classes: int) -> type[np.number[Any]]:
    """Return the dtype of labels: int16, int64 beyond 32,767 classes, float32 without classes."""
    if num_classes == 0:
        return np.float32
    return np.int16 if num_classes <= 32767 else np.int64


# The files of a store, with N nodes, E edges, F features, C classes and T targets:
#
# colptr: int64 [N + 1]; the in-edges of node v are row[colptr[v]:colptr[v + 1]]
# row: int32 (int64 from 2**31 nodes on) [E]; sources
# x: float16, float32, or int8 (`Int8Columns`) [N, F]; features, C order
# y: int16 (int64 beyond 32,767 classes) [N]; labels, -1 for none;
#    or float32 [N] or [N, T]; targets, NaN for none; num_classes is then 0
# train, valid, test: int64 [n]; node ids of the splits, in their original order
# node_id, of propagated features of some nodes: as row [N]; ids in the graph, ascending
# label_name, if labels were text: UTF-8 bytes [C]; class names
# node_name, if nodes had names: int64 or UTF-8 bytes [N]; node names in the original data set
FORMAT = "ogbnlib-store"
META = "store.json"
VERSION = 1
INT8_VERSION = 2  # a reader of version 1 would take the codes of int8 features for values
TARGETS_VERSION = 3  # a reader of version 2 would take targets for classes
HEADER_BYTES = 4096  # a feature row of 256 bytes then never spans two pages


@dataclass(frozen=True)
class FileInfo:
    """One array of a store: little-endian dtype, shape, size of the file, CRC-32 of its data."""

    dtype: Annotated[str, Field(pattern=r"^(<[fi][248]|\|i1|\|S[1-9][0-9]{0,8})$")]
    shape: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    bytes: int
    crc32: int


_ArrayName = Annotated[str, Field(pattern="^[a-z0-9_]+$")]  # no path out of the folder
# The entries of store.json, but for its format and version; those of later versions are ignored.
_Meta = create_model(
    "_Meta",
    name=(str, ...),
    num_nodes=(PositiveInt, ...),
    num_edges=(int, ...),
    num_features=(PositiveInt, ...),
    num_classes=(Annotated[int, Field(ge=0, le=2**24)], ...),  # the most that is converted
    undirected=(bool, ...),
    origin=(dict[str, Any], ...),
    files=(dict[_ArrayName, FileInfo], ...),
    crc32=(int, ...),
    hops=(PositiveInt | None, None),
    int8=(tuple[list[float], list[float]] | None, None),  # scale and offset of each feature
    summary=(dict[str, Any], {}),
)


def npy_header(dtype: DTypeLike, shape: tuple[int, ...]) -> bytes:
    """Return the 4,096 bytes before the data: numpy's format 1.0, C order, padded with spaces."""
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    text = repr({"descr": descr, "fortran_order": False, "shape": shape})
    magic = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")  # 10 bytes
    return magic + text.encode().ljust(HEADER_BYTES - 11) + b"\n"


def _check_layout(meta: Any) -> None:
    """Refuse arrays of other types or shapes than store.json's numbers ask for."""
    if meta.int8:
        scale, offset = np.abs(np.reshape(meta.int8, (2, meta.num_features)))
        if (127 * scale + offset).max() >= 2.0**128:
            raise ValueError("int8: expected columns whose values are finite in float32")
    shapes = dict.fromkeys(("y", "node_id", "node_name"), (meta.num_nodes,)) | {
        **{"colptr": (meta.num_nodes + 1,), "row": (meta.num_edges,)},
        "x": (meta.num_nodes, meta.num_features),
    }
    if meta.num_classes == 0:  # targets are [N] or [N, T]
        shapes["y"] += meta.files["y"].shape[1:2]
    dtypes_of = {  # without the byte order, texts without their width
        **{"colptr": "i8", "row": "i4 i8", "node_id": "i4 i8", "node_name": "i8 S"},
        **{"label_name": "S", **dict.fromkeys(SPLITS, "i8")},
        "x": "i1" if meta.int8 else "f2 f4",
        "y": "i2 i8" if meta.num_classes else "f4",
    }
    for name in {"colptr", "row", "x", "y", *SPLITS, *meta.files}:  # missing: KeyError
        shape = meta.files[name].shape
        dtype = meta.files[name].dtype[1:]
        dtypes = dtypes_of.get(name, dtype)
        expected = shapes.get(name, shape[:1])  # others: any length
        if not dtype.startswith(tuple(dtypes.split())) or shape != expected:
            raise ValueError(f"expected {name}.npy of {dtypes} {expected}, found {dtype} {shape}")


def meta_crc32(meta: Mapping[str, Any]) -> int:
    """Return the checksum of store.json's content, without its entry `crc32`."""
    content = {key: value for key, value in meta.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def read_meta(path: Path) -> Any:
    """Return the entries of a store's store.json, checked, as attributes: those of `_Meta`."""
    file = path / META
    if not file.is_file():
        raise InputError(
            f"{path}: expected a store ({META} in it), found none; `python -m ogbnlib convert` makes "
            f"one of other data{whereabouts()}"
        )
    text = read_whole(file)
    meta = parse_json(text, file, "a JSON object", "convert again")
    if meta.get("format") != FORMAT or meta.get("version") not in range(1, TARGETS_VERSION + 1):
        raise InputError(
            f"{file}: expected {FORMAT}, version {VERSION} to {TARGETS_VERSION}; "
            "use a newer ogbnlib or convert again"
        )
    if (  # in the values, or in the text, such as in its last bytes
        meta.get("crc32") != meta_crc32(meta)
        or text != (json.dumps(meta, indent=2) + "\n").encode()
    ):
        raise InputError(
            f"{file}: checksum mismatch: the file was damaged or edited; convert again"
        )
    with naming(file, "the entries of a store", "convert again"):
        try:
            entries = _Meta.model_validate_json(text, strict=True)
        except ValidationError as error:  # all problems, in several lines each
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"{place}: {first['msg']}, got {first['input']!r:.40}") from None
        _check_layout(entries)
    return entries


def check_file(file: Path, info: FileInfo) -> Stamp:
    """Check the size and header of an array's file against store.json; return its stamp."""
    if file.exists() and not file.is_file():  # to read a pipe would take for ever
        raise InputError(f"{file}: expected a regular file, found a pipe, folder or device")
    with open(file, "rb") as stream:
        stamped = stamp(stream.fileno())
        header = stream.read(HEADER_BYTES)
    expected = HEADER_BYTES + math.prod(info.shape) * np.dtype(info.dtype).itemsize
    if not expected == info.bytes == stamped.size:
        raise InputError(
            f"{file}: expected {expected} bytes, found {stamped.size}, and {info.bytes} in {META}; "
            "copy the store or convert again"
        )
    if header != npy_header(info.dtype, info.shape):
        raise InputError(
            f"{file}: expected the header of {info.dtype} {info.shape}, found another; convert again"
        )
    return stamped


def stamp(file: StrPath | int) -> Stamp:
    """Return the stamp of a file, or of an open descriptor."""
    status = os.stat(file)
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def replaced(path: StrPath) -> InputError:
    """Return the error for a file that changed while this process used it."""
    return InputError(
        f"{path}: expected the file that this process opened first, found it replaced, changed or "
        "gone; put the old data back to go on (--resume), or write new data to a new folder and "
        "start a new run on them"
    )
