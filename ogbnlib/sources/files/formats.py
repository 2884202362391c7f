"""Formats of a user's files, by their endings, and the files behind one path: a file, or the parts in
a folder or of a pattern."""

import glob
import re
from pathlib import Path

from ...errors import InputError
from ...files import whereabouts

_TEXT = (".csv", ".tsv", ".txt", ".edgelist", ".edges", ".el")
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # arrow inflates them in pieces
_PACKED = ("", *COMPRESSIONS)
FORMATS = {
    **{".npy": "array", ".npz": "archive"},
    **{".parquet": "parquet", ".pq": "parquet"},
    **{".feather": "arrow", ".arrow": "arrow", ".ipc": "arrow"},
    **{f".mtx{packed}": "matrix" for packed in _PACKED},
    **{f"{end}{packed}": "text" for end in _TEXT for packed in _PACKED},
}
READABLE = (
    ".npy, .npz, .parquet, .feather, .csv, .tsv or .txt, also .gz, .bz2 or .zst; .mtx of edges"
)


def ending(name: str) -> str:
    """Return the ending of a file's name that tells its format, in lower case, or ""; of several
    the longest."""
    known = [end for end in FORMATS if name.lower().endswith(end)]
    return max(known, key=len, default="")


def format_of(file: Path) -> str | None:
    """Return one of the values of `FORMATS`, or None for a file that can't be read."""
    if file.name.startswith("part-") and not file.suffix:  # Hadoop's text files
        return "text"
    return FORMATS.get(ending(file.name))


def is_parts(path: Path) -> bool:
    """Whether `path` is a folder, or a pattern such as edges/part-*.csv, of at least one part."""
    return not path.is_file() and any(
        part.is_file() and format_of(part) is not None for part in _parts(path)
    )


def files_of(path: Path) -> list[Path]:
    """Return the file, or the parts in order of their names: numbers in names count as numbers.

    Hidden files and those whose names begin with "_", such as Spark's _SUCCESS, are no parts.
    """
    if path.is_file():
        return [path]
    parts = _parts(path)
    if not parts:
        raise InputError(f"{path}: expected a file or a folder of parts, found none{whereabouts()}")
    others = [part.name for part in parts if part.is_dir() or format_of(part) is None]
    if others:
        raise InputError(
            f"{path}: expected parts ({READABLE}), found {others[0]}; "
            f'name the parts by a pattern, such as "{parts[0].parent}/*.csv"'
        )
    return parts


def _parts(path: Path) -> list[Path]:
    pattern = str(path)
    if path.is_dir():
        pattern = f"{glob.escape(pattern)}/*"
    entries = map(Path, glob.glob(pattern))
    return sorted((part for part in entries if part.name[0] not in "._"), key=_natural)


def _natural(path: Path) -> list[tuple[str, int]]:
    # Dask writes part.9.parquet before part.10.parquet
    # each number in the name, with the text before it
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", str(path))]
