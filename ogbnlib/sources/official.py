"""OGB's own data sets through OGB's own code, and folders of our making as OGB opens them. Nothing here prompts."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import os
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import InputError, unknown_name
from ..files import StrPath
from .ogb import OfficialDataset, RawDataset, open_raw, read_split_files, split_folder
from .ogb_write import RELEASE

Reader = Literal["auto", "stream", "ogb"]


def meta_dict(path: StrPath) -> dict[str, Any]:
    """The `meta_dict` with which ogb's NodePropPredDataset and PygNodePropPredDataset open a folder of this layout.

    Raises:
        InputError: as `open_raw`, and when the RELEASE file is missing, without which ogb would ask on the terminal.
    """
    dataset = open_raw(path)
    if not (dataset.path / RELEASE).is_file():
        raise InputError(
            f"{dataset.path / RELEASE}: expected this file; ogb takes the data set for outdated without it"
        )
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
        "additional node files": "node_year" if "node_year" in dataset.members() else "None",
        "additional edge files": "None",
        "is hetero": "False",
        "binary": "True",
    }


def _through_ogb(name: str, root: Path, folder: Path, meta: Mapping[str, Any], own: bool) -> OfficialDataset:
    """Read `folder` with ogb's own class and raw readers, past its cache.

    ogb 1.3.6 saves processed/data_processed as a pickle of protocol 4, which torch.load(weights_only=True), the default
    since torch 2.6, cannot read (snap-stanford/ogb#497). So neither that file is read nor a second one written.
    """
    nodeprop = importlib.import_module("ogb.nodeproppred.dataset")

    class PastCache(nodeprop.NodePropPredDataset):  # type: ignore[misc, name-defined]
        def pre_process(self) -> None:
            raw = os.path.join(self.root, "raw")
            if self.binary:
                self.graph = nodeprop.read_binary_graph_raw(raw)[0]
                with np.load(os.path.join(raw, "node-label.npz"), allow_pickle=False) as file:
                    self.labels = file["node_label"]
            else:
                extra = [file for file in self.meta_info["additional node files"].split(",") if file != "None"]
                inverse = self.meta_info["add_inverse_edge"] == "True"
                self.graph = nodeprop.read_csv_graph_raw(raw, add_inverse_edge=inverse, additional_node_files=extra)[0]
                label = nodeprop.pd.read_csv(os.path.join(raw, "node-label.csv.gz"), compression="gzip", header=None)
                self.labels = label.values

    with contextlib.redirect_stdout(sys.stderr):  # ogb prints; standard output belongs to the caller
        graph, labels = PastCache(name, root=str(root), meta_dict=dict(meta) if own else None)[0]
    if graph["node_feat"] is None:
        raise InputError(f"{folder}: expected node features, found none")
    num_nodes = int(graph["num_nodes"])
    arrays = {
        "x": graph["node_feat"],
        "edge_index": graph["edge_index"].astype(np.int64, copy=False),
        "y": labels,
        "splits": read_split_files(folder / "split" / str(meta["split"]), num_nodes),
        "year": graph.get("node_year"),
    }
    return OfficialDataset(
        path=folder,
        name=name,
        num_nodes=num_nodes,
        num_edges=arrays["edge_index"].shape[1],
        num_features=arrays["x"].shape[1],
        num_classes=int(meta["num classes"]),
        arrays=arrays,
    )


def read_with_ogb(path: StrPath) -> OfficialDataset:
    """Open a folder in OGB's binary layout the way OGB does: every array in RAM, through its own class."""
    meta = meta_dict(path)
    return _through_ogb(str(meta["download_name"]), Path(path), Path(path), meta, own=True)


def _download(meta: Mapping[str, Any], root: Path, folder: Path) -> None:
    """Fetch and unpack with ogb's own functions, without its prompt; `folder` appears whole or not at all."""
    url = importlib.import_module("ogb.utils.url")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=root) as beside:
        try:
            archive = url.download_url(meta["url"], beside)
            url.extract_zip(archive, beside)
        except (OSError, RuntimeError, zipfile.BadZipFile) as error:
            raise InputError(f"download: {meta['url']} could not be fetched and unpacked ({error})") from None
        os.replace(os.path.join(beside, meta["download_name"]), folder)


@dataclass(frozen=True)
class Located:
    """Where an official data set lies, and what ogb's master.csv says of it."""

    meta: Mapping[str, str]
    folder: Path
    binary: bool
    present: bool


def locate_official(name: str, root: StrPath, download: bool = False, reader: Reader = "auto") -> Located:
    """All checks of `read_official`, without reading or downloading anything; imports neither torch nor ogb."""
    if reader not in ("auto", "stream", "ogb"):
        raise InputError(f"reader: expected auto, stream or ogb, got {reader!r}")
    master = importlib.util.find_spec("ogb").submodule_search_locations[0]  # type: ignore[union-attr, index]
    with open(os.path.join(master, "nodeproppred", "master.csv"), newline="") as file:
        head, *lines = csv.reader(file)
    table = {column: {line[0]: line[i] for line in lines} for i, column in enumerate(head) if i}
    if name not in table:
        raise InputError(f"dataset: {unknown_name(name, table, 'official data set')}")
    meta, root = table[name], Path(root)
    if meta["is hetero"] == "True" or meta["eval metric"] != "acc":
        raise InputError(f"dataset: expected one kind of node and accuracy as the metric, which {name} has not")
    folder, binary = root / name.replace("-", "_"), meta["binary"] == "True"
    if reader == "stream" and not binary:
        raise InputError(f"reader: {name} comes as csv files, which cannot be streamed; use reader='auto' or 'ogb'")
    expected = folder / "raw" / ("data.npz" if binary else "edge.csv.gz")
    if not expected.is_file():
        if folder.exists():
            raise InputError(f"{expected}: expected this file, found none; move {folder} away or complete it")
        if not download:
            raise InputError(f"{folder}: {name} is not there; pass download=True, or root= the folder that holds it")
    release = folder / f"RELEASE_v{meta['version']}.txt"
    if expected.is_file() and not (binary and reader != "ogb") and not release.is_file():
        raise InputError(f"{release}: expected this file; ogb takes the data set for outdated, so download it again")
    return Located(meta, folder, binary, expected.is_file())


def read_official(
    name: str, root: StrPath, download: bool = False, reader: Reader = "auto"
) -> RawDataset | OfficialDataset:
    """Open one of OGB's own data sets, such as ogbn-arxiv, ogbn-products or ogbn-papers100M, by its official name.

    Sizes, address and layout come from ogb's master.csv. ogbn-papers100M (binary layout) is streamed, since ogb's
    loader needs more than 128 GB for it (snap-stanford/ogb#407); the others are read into RAM by ogb.

    Args:
        root: the folder that holds, say, ogbn_arxiv.
        download: consent to fetch the data set when it is not there; nothing is ever asked on the terminal.
        reader: "stream" or "ogb" to insist on one of the two ways.

    Raises:
        InputError: for an unknown or unfit name, absent data without consent, or a failed download.
    """
    found = locate_official(name, root, download, reader)
    if not found.present:
        _download(found.meta, Path(root), found.folder)
        found = locate_official(name, root, download, reader)
    if found.binary and reader != "ogb":
        return open_raw(found.folder, num_classes=int(found.meta["num classes"]))
    return _through_ogb(name, Path(root), found.folder, found.meta, own=False)
