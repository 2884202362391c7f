"""Graphs in OGB's binary layout, and how OGB's own classes are told to open them."""

from pathlib import Path
from typing import Any

from ogbnlib.files import new_folder
from ogbnlib.sources.arrays import from_arrays
from ogbnlib.sources.ogb import open_raw, split_folder, write_layout
from ogbnlib.sources.source import Source


def write_raw(path: Path, **arrays: Any) -> Source:
    """Write the arrays of `from_arrays` in OGB's binary layout."""
    source = from_arrays(path.name, **arrays)
    with new_folder(path) as folder:
        write_layout(folder, source)
    return open_raw(path, num_classes=source.num_classes)


def meta_dict(path: Path) -> dict[str, Any]:
    """The `meta_dict` with which ogb's NodePropPredDataset and PygNodePropPredDataset open a folder
    of this layout."""
    dataset = open_raw(path)
    return {
        "dir_path": str(dataset.path.absolute()),
        "version": 1,
        "download_name": dataset.name,
        "url": "",
        "num tasks": 1,
        "num classes": dataset.num_classes,
        "eval metric": "acc",
        "task type": "multiclass classification",
        "add_inverse_edge": "False",
        "has_node_attr": "True",
        "has_edge_attr": "False",
        "split": split_folder(dataset.path).name,
        "additional node files": "None",
        "additional edge files": "None",
        "is hetero": "False",
        "binary": "True",
    }
