"""Formats of a user's files by their endings, and the files that a path stands for.

A path is a file, a folder of parts, or a pattern that the parts match.
"""

import glob
import re
from pathlib import Path

from ..errors import InputError
from ..files import whereabouts

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # arrow decompresses them in pieces
# the format of each ending; ".csv.gz" and the like are text, too
FORMATS = {
    **{".npy": "array", ".parquet": "parquet", ".feather": "feather"},
    **{
        f"{end}{packed}": "text"
        for end in (".csv", ".tsv", ".txt")
        for packed in ("", *COMPRESSIONS)
    },
}
READABLE = ".npy, .parquet, .feather, .csv, .tsv or .txt, also .gz, .bz2 or .zst"


def ending(name: str) -> str:
    """Return the longest ending of a file name in `FORMATS`, in lower case; "" for none."""
    matches = [end for end in FORMATS if name.lower().endswith(end)]
    return max(matches, key=len, default="")


def format_of(file: Path) -> str | None:
    """Return one of the values of `FORMATS`, or None for a file that can't be read."""
    return FORMATS.get(ending(file.name))


def is_parts(path: Path) -> bool:
    """Whether `path` is a folder or a pattern with a part in a known format."""
    return not path.is_file() and any(part.is_file() and format_of(part) for part in _parts(path))


def files_of(path: Path) -> list[Path]:
    """Return the file itself, or the parts sorted by name. Numbers in names count as numbers.

    Hidden files and files whose names begin with "_", such as Spark's _SUCCESS, are not parts.
    """
    if path.is_file():
        return [path]
    parts = _parts(path)
    folders = [part.name for part in parts if not part.is_file()]
    if folders or not parts:
        raise InputError(
            f"{path}: expected a file, or files as its parts, found "
            f"{(folders or ['none'])[0]}{whereabouts()}"
        )
    return parts


def _parts(path: Path) -> list[Path]:
    pattern = str(path)
    if path.is_dir():
        pattern = f"{glob.escape(pattern)}/*"  # the folder's own name is no pattern
    entries = map(Path, glob.glob(pattern))
    return sorted((part for part in entries if part.name[0] not in "._"), key=_natural_key)


def _natural_key(path: Path) -> list[tuple[str, int]]:
    # Each number in the path and the text before it, 0 for none: Dask's part.9.parquet comes before
    # its part.10.parquet.
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", str(path))]
