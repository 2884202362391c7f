"""Damage to a store whose checksums are right, as by a hand or a wrong program."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ogbnlib.graph.store_format import HEADER_BYTES, META, FileInfo, meta_crc32, npy_header


def rewrite(path: Path, name: str, change: Callable[[np.ndarray], object]) -> None:
    """Change an array and its checksum, so that only the values show the damage."""
    values = np.load(path / f"{name}.npy")
    change(values)
    put(path, name, values)


def put(path: Path, name: str, values: np.ndarray) -> None:
    """Put an array of any type and shape in place of another one."""
    data = values.tobytes()
    (path / f"{name}.npy").write_bytes(npy_header(values.dtype, values.shape) + data)
    meta = json.loads((path / META).read_text())
    info = FileInfo(values.dtype.str, values.shape, HEADER_BYTES + len(data), zlib.crc32(data))
    meta["files"][name] = vars(info)
    change_meta(path, json.loads(json.dumps(meta)))


def change_meta(path: Path, meta: dict[str, Any]) -> None:
    """Write store.json with a right checksum."""
    meta.pop("crc32", None)
    (path / META).write_text(json.dumps({**meta, "crc32": meta_crc32(meta)}, indent=2) + "\n")
