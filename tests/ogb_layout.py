"""Graphs in OGB's binary layout."""

from pathlib import Path
from typing import Any

from ogbnlib.files import new_folder
from ogbnlib.sources.arrays import from_arrays
from ogbnlib.sources.ogb import open_raw, write_layout
from ogbnlib.sources.source import Source


def write_raw(path: Path, **arrays: Any) -> Source:
    """Write the arrays of `from_arrays` in OGB's binary layout."""
    source = from_arrays(path.name, **arrays)
    with new_folder(path) as folder:
        write_layout(folder, source)
    return open_raw(path, num_classes=source.num_classes)
