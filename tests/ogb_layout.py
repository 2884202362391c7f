"""How OGB's own classes are told to open a folder in its binary layout."""

from pathlib import Path
from typing import Any

from ogbnlib.sources.ogb import open_raw, split_folder


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
