"""OGB's own data sets, and their download without questions on the terminal."""

import http.client
import os
import stat
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError

from ..errors import InputError, format_bytes, naming, unknown_name
from ..files import StrPath, check_own, check_space, home, locked, open_to_write, sibling_path
from ..progress import counted, doing
from .sizes import KNOWN as KNOWN

# Why data sets whose names begin so can't be converted, and a way to train on them.
REFUSED = {
    "ogbn-proteins": "it has 112 labels a node and no features; Store.from_arrays makes a store of "
    "it for a loop of your own (notebooks/guide/data.md); else train it with a script of your own "
    "under `python -m ogbnlib watch`",
    "ogbn-mag": "it has several kinds of nodes; Store.from_arrays makes a store of one kind",
    "ogbl-": "it is for predicting links, and models here classify nodes",
    "ogbg-": "it is for classifying graphs, and models here classify nodes",
}
OFFICIAL_DIR = "dataset"  # the default of data_dir for official data sets
# as in ogb's master.csv; each archive has a folder of its own name
_SERVER = "http://snap.stanford.edu/ogb/data/nodeproppred"
_ARCHIVES = {
    "ogbn-arxiv": "arxiv",
    "ogbn-products": "products",
    "ogbn-papers100M": "papers100M-bin",
}


def fetch(
    name: str, root: StrPath, say: Callable[[str], object] = print, *, progress: bool = True
) -> Path:
    """Return the folder of an official data set under `root`, downloading it if it is missing.

    A broken download is resumed. The folder appears whole or not at all. `say` gets a line on it.
    """
    folder = official_folder(name, home(root))
    url = f"{_SERVER}/{_ARCHIVES[name]}.zip"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    archive = sibling_path(folder, "zip.part")  # stays if the connection breaks
    with (
        # one process downloads; another one fails at once with this message
        locked(sibling_path(folder, "lock"), f"{folder}: it is being downloaded"),
        # on the disk of `folder`, so that a rename can put it in place
        tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as unpacked,
        naming(archive),  # in errors without a path, such as of a full disk
    ):
        _download(url, archive, say, progress)
        try:
            with (
                naming(url, "a sound .zip file", "download it again"),
                doing("unpack", "auto" if progress else "none"),
                naming(unpacked),
                zipfile.ZipFile(archive) as packed,
            ):
                packed.extractall(unpacked)
        except InputError:
            archive.unlink()  # damaged: the next attempt must not resume it
            raise
        os.replace(os.path.join(unpacked, _ARCHIVES[name]), folder)
        archive.unlink()
    return folder


def _download(url: str, archive: Path, say: Callable[[str], object], progress: bool) -> None:
    """Download `url` to `archive`; only the bytes that it lacks, if the server allows that."""
    have = archive.stat().st_size if check_own(archive, stat.S_ISREG) else 0  # bytes so far
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            if answer.status != 206:  # not Partial Content: the server sends the whole file
                have = 0
            size = int(answer.headers.get("Content-Length") or 0)  # bytes to come; 0 if not known
            # the rest of the archive, and its content, taken to be as large as the archive
            needed = size + (have + size)
            say(
                f"{url}: {format_bytes(size)} to fetch after {format_bytes(have)}; "
                f"needs {format_bytes(needed)} of disk"
            )
            check_space(
                archive.parent, needed, f"{format_bytes(needed)} of free disk space to unpack {url}"
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
    except (http.client.HTTPException, URLError, ConnectionError, TimeoutError) as error:
        if have and getattr(error, "code", None) == 416:  # Range Not Satisfiable: it is complete
            return
        raise InputError(
            f"download: {url} could not be fetched ({error}); the next attempt resumes it"
        ) from None


def is_official(name: str) -> bool:
    """Whether a name begins like OGB's names; False if a folder has this name."""
    # names with other prefixes than the first count, too: `official_folder` says why it refuses them
    return name.startswith(("ogbn-", "ogbn_", *REFUSED)) and not Path(name).is_dir()


def official_folder(name: str, root: StrPath) -> Path:
    """Return the folder of an official data set under `root`; refuse any other name."""
    for prefix, reason in REFUSED.items():
        if name.startswith(prefix):
            raise InputError(f"dataset: {name} can't be converted: {reason}")
    if name not in KNOWN:
        raise InputError(f"dataset: {unknown_name(name, KNOWN, 'official data set')}")
    return Path(root) / name.replace("-", "_")
