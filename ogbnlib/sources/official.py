"""OGB's own data sets, and their download without questions on the terminal."""

import csv
import gzip
import http.client
import importlib.util
import os
import shlex
import stat
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..errors import InputError, format_bytes, naming, unknown_name
from ..files import StrPath, check_own, check_space, home, locked, open_to_write, sibling_path
from ..graph.npz import Array
from ..graph.store_format import SPLITS
from ..progress import counted, doing
from .description import DESCRIPTION
from .ogb import OGB_CSV, OGB_MAG, csv_layout, layout_files, open_raw
from .sizes import known_size
from .source import Source, stamped

# The official data sets that can be converted to a store. Sizes: Open Graph Benchmark (Hu et al.,
# NeurIPS 2020), table 2, and the data sets' web pages. OGB's reader adds the reverse edges of
# ogbn-products.
KNOWN = {
    size.name: size
    for size in (
        known_size(
            *("ogbn-arxiv", 169_343, 1_166_243, 128, 40),
            *(90_941, 29_799, 48_603),
            stored="csv",
        ),
        known_size(
            *("ogbn-products", 2_449_029, 2 * 61_859_140, 100, 47),
            *(196_615, 39_323, 2_213_091),
            undirected=True,
            stored="csv",
        ),
        # only its papers and their citations
        known_size(
            *("ogbn-mag", 736_389, 5_416_271, 128, 349),
            *(629_571, 64_879, 41_939),
            stored="csv",
        ),
        known_size(
            *("ogbn-papers100M", 111_059_956, 1_615_685_872, 128, 172),
            *(1_207_179, 125_265, 214_338),
        ),
    )
}
# The official data sets that can't be converted, with the reason and a way to train on them.
REFUSED = {
    "ogbn-proteins": "it has 112 labels a node and no features; Store.from_arrays makes a store of "
    "it for a loop of your own (notebooks/guide/data.md); else train it with a script of your own "
    "under `python -m ogbnlib watch`",
}
_OTHER_TASKS = {"ogbl-": "is for predicting links", "ogbg-": "is for classifying graphs"}
OFFICIAL_DIR = "dataset"  # the default of data_dir for official data sets


@dataclass(frozen=True)
class Located:
    """Place of an official data set, and its entry in ogb's master.csv (`meta`)."""

    name: str
    meta: Mapping[str, str]
    folder: Path
    binary: bool
    present: bool
    num_classes: int


def fetch(
    name: str, root: StrPath, say: Callable[[str], object] = print, *, progress: bool = True
) -> Path:
    """Return the folder of an official data set under `root`, downloading it if it is missing.

    Unlike ogb's download, this one asks nothing on the terminal. Unlike PyG's, it resumes a broken
    download instead of starting at the first byte. The folder appears whole or not at all.
    """
    located = locate_official(name, home(root))
    if located.present:
        return located.folder
    folder = located.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    archive = sibling_path(folder, "zip.part")  # stays if the connection breaks
    with (
        locked(sibling_path(folder, "lock"), f"{folder}: it is being downloaded"),
        tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside,
        naming(archive),
    ):
        _download(located.meta["url"], archive, say, progress)
        try:
            with (
                naming(located.meta["url"], "a sound .zip file", "download it again"),
                doing("unpack", "auto" if progress else "none"),
                naming(beside),
                zipfile.ZipFile(archive) as packed,
            ):
                packed.extractall(beside)
        except InputError:
            archive.unlink()
            raise
        os.replace(os.path.join(beside, located.meta["download_name"]), folder)
        archive.unlink()
    return folder


def _download(url: str, archive: Path, say: Callable[[str], object], progress: bool) -> None:
    """Download `url` to `archive`; only the bytes that it lacks, if the server allows that."""
    have = archive.stat().st_size if check_own(archive, stat.S_ISREG) else 0
    request = urllib.request.Request(url)
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            if answer.status != 206:  # the server sends the whole file
                have = 0
            size = int(answer.headers.get("Content-Length") or 0)
            # the rest of the archive, and its content, taken to be as large as the archive
            needed = size + have + size
            say(
                f"{url}: {format_bytes(size)} to fetch after {format_bytes(have)}; "
                f"needs {format_bytes(needed)} of disk"
            )
            check_space(
                archive.parent,
                needed,
                f"{format_bytes(needed)} of free disk space to unpack {url}",
            )
            with (
                open(archive, "ab" if have else "wb", opener=open_to_write) as out,
                counted("download", size, progress) as done,
            ):
                while piece := answer.read(2**20):
                    out.write(piece)
                    done(len(piece))
        length = archive.stat().st_size
        if length < have + size:
            raise ConnectionError(f"it ended after {length} of {have + size} bytes")
    except (
        urllib.error.URLError,
        ConnectionError,
        TimeoutError,
        http.client.HTTPException,
    ) as error:
        if have and getattr(error, "code", None) == 416:  # nothing is missing
            return
        raise InputError(
            f"download: {url} could not be fetched ({error}); the next attempt resumes it"
        ) from None


def is_official(name: str) -> bool:
    """Whether a name begins like OGB's names; False if a folder has this name."""
    # `_check_official` refuses all prefixes but the first
    return name.startswith(("ogbn-", "ogbn_", *_OTHER_TASKS)) and not Path(name).is_dir()


def _check_official(name: str) -> None:
    if name in REFUSED:
        raise InputError(f"dataset: {name} can't be converted: {REFUSED[name]}")
    if name[:5] in _OTHER_TASKS:
        raise InputError(
            f"dataset: {name} {_OTHER_TASKS[name[:5]]}, and models here classify nodes: "
            f"{', '.join(KNOWN)}"
        )
    if name not in KNOWN:
        raise InputError(f"dataset: {unknown_name(name, {*KNOWN, *REFUSED}, 'official data set')}")


def locate_official(name: str, root: StrPath) -> Located:
    """Locate an official data set under `root`, and do all checks that `open_official` relies on.

    Reads no data, downloads nothing, and imports neither torch nor ogb.
    """
    _check_official(name)
    master = importlib.util.find_spec("ogb").submodule_search_locations[0]  # type: ignore[union-attr, index]
    with open(os.path.join(master, "nodeproppred", "master.csv"), newline="") as file:
        meta = {row[""]: row[name] for row in csv.DictReader(file)}
    folder = Path(root) / name.replace("-", "_")
    binary = meta["binary"] == "True"
    files = ["raw/data.npz"]
    if not binary:
        layout = OGB_CSV
        splits = f"split/{meta['split']}"
        if name == "ogbn-mag":
            layout = OGB_MAG
            splits += "/paper"
        files = [
            *layout,
            *(f"{splits}/{split}.csv.gz" for split in SPLITS),
            # without this file ogb considers the data set outdated
            f"RELEASE_v{meta['version']}.txt",
        ]
    missing = [file for file in files if not (folder / file).is_file()]
    if folder.exists() and missing:
        raise InputError(
            f"{folder}: expected {', '.join(missing)} in it, found none; "
            f"move it away and download it again, or convert the folder {folder} by its path"
        )
    if (folder / DESCRIPTION).is_file():
        raise InputError(
            f"{folder / DESCRIPTION}: expected none for the official name {name}; "
            f"convert the folder {folder} to use it, or delete the file"
        )
    return Located(name, meta, folder, binary, folder.exists(), int(meta["num classes"]))


def not_there(name: str, folder: Path) -> InputError:
    """Return the error for an official data set that was not downloaded to `folder`."""
    command = f"python -m ogbnlib download {name}"
    if str(folder.parent) != OFFICIAL_DIR:
        command += f" --data-dir {shlex.quote(str(folder.parent))}"
    return InputError(f"{folder}: {name} is not there: {command}")


def open_official(located: Located) -> Source:
    """Open one of OGB's own data sets.

    The data are streamed, because ogb's loader needs more than 128 GB for ogbn-papers100M
    (snap-stanford/ogb#407).
    """
    from .folder import open_described  # imports pyarrow and pandas

    folder = located.folder
    if located.binary:
        return open_raw(folder, num_classes=located.num_classes)
    stamps = stamped(layout_files(folder))
    description = csv_layout(folder)
    assert description is not None  # `locate_official` checks its files
    options = {"num_classes": located.num_classes}
    try:
        source = open_described(replace(description, options=options))
        _check_counts(description.files[0].path.parent, source)
    except InputError as error:
        raise InputError(f"{error}; download the data set again if it is damaged") from None
    source = replace(source, name=located.name, path=folder, stamps=stamps, options={})
    if located.meta["add_inverse_edge"] == "True":
        return _both_ways(source)
    return source


def _check_counts(raw: Path, source: Source) -> None:
    """Refuse numbers of nodes and edges that differ from the data set's own `num-*-list.csv.gz`.

    With several kinds of nodes (ogbn-mag), only the edges have such a file.
    """
    num_rows_of = {"edge": source.num_edges}
    if raw.name == "raw":
        num_rows_of["node"] = source.num_nodes
    for name, num_rows in num_rows_of.items():
        file = raw / f"num-{name}-list.csv.gz"
        with naming(file, "a number"), gzip.open(file, "rt") as lines:
            count = int(lines.read(32))
        if num_rows != count:
            raise InputError(f"{raw}: expected {count} {name}s as in {file.name}, found {num_rows}")


def _both_ways(source: Source) -> Source:
    """Add each edge's reverse directly after the edge, the order of ogb's reader."""

    def edge_chunks(chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        for ends in source.edge_chunks(max(1, chunk_edges // 2)):
            pairs = np.stack(ends, axis=1)
            yield pairs.reshape(-1), pairs[:, ::-1].reshape(-1)

    return replace(source, num_edges=2 * source.num_edges, edge_chunks=edge_chunks)
