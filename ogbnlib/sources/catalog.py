"""The one place that decides what a data set's name means: a store, or data that are converted to a store once.

A name is a store's folder, a folder in OGB's binary layout or of a user's own files, or an official name. Any other
data set is converted to a store in the same folder, `NAME.store` (`NAME-undirected.store`, `-float16`), or in
`data_dir`, where every later run, notebook and policy finds it. `locate` and `size_of` read headers (and csv files).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import TrainConfig
from ..errors import InputError, clear_errors, format_bytes
from ..files import StrPath, check_new, home, locked, sibling_path
from ..graph.store import GraphSize, Store, is_store, open_store
from .official import KNOWN, OFFICIAL_DIR, is_official, locate_official, open_official
from .ogb import RawDataset, open_raw
from .tables import TableSource, is_tables, open_tables, stored_dtype

if TYPE_CHECKING:
    from .convert import FeatureDtype, Progress
    from .data import Source

# `convert` and `synth` compile kernels, and planners only ask for sizes: both are imported on use.


@dataclass(frozen=True)
class _Pending:
    """A data set that is not a store, and the store to make of it."""

    official: str | None  # its name among OGB's
    folder: Path
    raw: RawDataset | None  # None for own files, csv files, and data that are not downloaded yet
    source: Callable[[], Source]  # downloads missing data
    target: Path
    undirected: bool
    dtype: np.dtype[Any]  # of the store's features

    @property
    def size(self) -> GraphSize:
        """The sizes before conversion, with the itemsize of the store's features."""
        size = KNOWN.get(self.official or "") if self.raw is None else self.raw.size
        return dataclasses.replace(size or self.source().size, feature_itemsize=self.dtype.itemsize)


def _resolve(
    dataset: str,
    *,
    data_dir: StrPath | None = None,
    undirected: bool | None = None,
    feature_dtype: FeatureDtype | None = None,
    download: bool = False,
) -> Store | _Pending:
    """Return the store that a name means, or the data to convert, after all checks of `open_dataset`."""
    dataset = str(home(dataset))
    data_dir = None if data_dir is None else home(data_dir)
    if is_store(dataset):
        store = open_store(dataset)
        _check_direction(store, undirected)
        return store
    official = raw = None
    source: Callable[[], Source]
    if is_official(dataset):
        official = locate_official(dataset, data_dir or OFFICIAL_DIR)
        folder, source, own = official.folder, functools.partial(open_official, official), np.dtype(np.float32)
        raw = open_raw(folder, num_classes=official.num_classes) if official.present and official.binary else None
    elif is_tables(dataset):
        folder = Path(os.path.abspath(dataset))
        source, own = functools.partial(open_tables, folder), stored_dtype(folder)
    else:
        folder = Path(os.path.abspath(dataset))
        source = functools.partial(open_raw, folder)
        raw = open_raw(folder)
    own = own if raw is None else raw.feature_dtype
    dtype = own if feature_dtype is None else np.dtype(feature_dtype)
    name = folder.name + ("-undirected" if undirected else "") + (f"-{dtype}" if dtype != own else "")
    target = (folder.parent if data_dir is None else data_dir) / f"{name}.store"
    pending = _Pending(official.name if official else None, folder, raw, source, target, bool(undirected), dtype)
    if (store_of_it := _existing(pending)) is not None:
        return store_of_it
    if official is not None and not official.present and not download:
        raise InputError(f"{folder}: {dataset} is not there; pass download=True, or data_dir, the folder that holds it")
    check_new(target)
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        hint = "pass data_dir, a folder of your own (for an official name with a link in it to the data set's folder)"
        raise InputError(f"{target}: the data set's store can't be written here; {hint}")
    return pending


def _existing(pending: _Pending) -> Store | None:
    """The store that was made of a data set before, whose raw files may be deleted if it is official; or None."""
    if not is_store(pending.target):
        return None
    from .convert import origin_of

    store, now = open_store(pending.target), origin_of(pending.folder)
    raw, files = store.origin.get("raw"), store.origin.get("files")
    if pending.folder.exists() and files != now["files"]:
        if raw != now["raw"]:
            problem = f"expected the store of {pending.folder}, found one of {raw or 'other data'}"
            raise InputError(f"{store.path}: {problem}; use another data_dir, or move it away")
        hint = "delete the store to convert the data again, or name the store as the data set to keep the old data"
        raise InputError(f"{pending.folder}: it changed since {store.path} was made of it; {hint}")
    if (store.undirected, store.feature_dtype) != (pending.undirected, pending.dtype):
        expected = f"expected a store with undirected={pending.undirected}, {pending.dtype} features"
        problem = f"found undirected={store.undirected}, {store.feature_dtype}"
        raise InputError(f"{store.path}: {expected}, {problem}; move it away, or name it as the data set")
    return store


def _check_direction(store: GraphSize, undirected: bool | None) -> None:
    if undirected not in (None, store.undirected):
        store_has = f"{getattr(store, 'path', store.name)} was made with undirected={store.undirected}"
        hint = "omit it, or name the store's original data"
        raise InputError(f"undirected: {store_has}, asked for was {undirected}; {hint}")


@clear_errors()
def locate(dataset: str, **options: Any) -> GraphSize:
    """Check a data set and return its sizes, from headers alone; nothing is written or downloaded.

    Before the store exists (`stored` is "raw" or "csv"), sizes are those of the data, with the `feature_itemsize` of
    the store.

    Args:
        options: data_dir, undirected, feature_dtype and download of `open_dataset`.

    Raises:
        InputError: for all that `open_dataset` refuses before it reads or writes anything.
    """
    return _resolve(dataset, **options).size


def size_of(dataset: str, **options: Any) -> GraphSize:
    """Return the sizes of a data set for planning: those of `locate`, or the known ones of an official data set.

    Raises:
        InputError: for an unknown OGB name; for a folder see `locate`.
    """
    known = KNOWN.get(dataset) if is_official(dataset) else None
    try:
        size = locate(dataset, **options)
    except InputError:
        if known is None:
            raise
        return known
    return size if size.stored == "store" else known or size


@clear_errors()
def open_dataset(
    dataset: str,
    *,
    data_dir: StrPath | None = None,
    undirected: bool | None = None,
    feature_dtype: FeatureDtype | None = None,
    memory_limit: str | int | None = None,
    download: bool = False,
    say: Callable[[str], object] = print,
    progress: Progress = True,
    check: Callable[[], None] = lambda: None,
) -> Store:
    """Open a data set as a store; other data are converted first: once, in bounded memory.

    Waits for another process that is converting the same data.

    Args:
        dataset: a store's folder, a folder in OGB's binary layout or of a user's own files (`open_tables`), or an
            official name; a folder of that name comes first.
        data_dir: the folder of official data sets, by default "dataset", and of stores made from other data, by default
            the folder of the data.
        undirected: with reverse edges. If omitted, a store's own setting is used, and other data are converted without.
        feature_dtype: of a new store, "float16" or "float32"; by default the data's own, float32 for float64.
        memory_limit: that of `convert`.
        download: fetch a missing official data set.
        say: called with the data, the place and the size of a new store.
        progress: that of `convert`.
        check: called between chunks and while waiting; its exception ends the conversion, and nothing is left behind.

    Raises:
        InputError: for an unknown name; for `undirected` that contradicts a store; for a store of other or changed data
            at the place of the new one; for a place that can't be written; see also `convert`.
    """
    pending = _resolve(
        dataset, data_dir=data_dir, undirected=undirected, feature_dtype=feature_dtype, download=download
    )
    if isinstance(pending, Store):
        return pending
    with made_once(pending.target, check):
        if (store := _existing(pending)) is not None:
            return store
        from .convert import convert, disk_bytes, origin_of

        source = pending.raw or pending.source()
        about = format_bytes(disk_bytes(source, pending.undirected, pending.dtype)[0])
        own = source.file_dtype if isinstance(source, RawDataset | TableSource) else np.dtype(np.float32)
        if own.itemsize > pending.dtype.itemsize:
            about += f", features rounded from {own} to {pending.dtype}"
        say(f"{pending.folder}: converting it, once, to {pending.target}, about {about}")
        return convert(
            source, pending.target, origin=origin_of(pending.folder),
            undirected=pending.undirected, feature_dtype=pending.dtype.name,  # type: ignore[arg-type]
            memory_limit=memory_limit, progress=progress, check=check,
        )  # fmt: skip


@contextlib.contextmanager
def made_once(target: Path, check: Callable[[], None]) -> Iterator[None]:
    """Let one process make `target` while the others wait; each then looks whether it exists."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(sibling_path(target, "once"), f"{target}: it is being made", wait=check):
        yield


# For a run ------------------------------------------------------------------------------------------------------------


def _options(config: TrainConfig) -> dict[str, Any]:
    rounded = config.on_disk and config.feature_dtype == "float16"  # in RAM it is rounded on reading
    names = ("data_dir", "undirected", "download")
    return {name: getattr(config, name) for name in names} | {"feature_dtype": "float16" if rounded else None}


def locate_for(config: TrainConfig) -> GraphSize:
    """`locate` the data set of a run, and `check_store`."""
    size = locate(config.dataset, **_options(config))
    check_store(size, config)
    return size


def graph_for(config: TrainConfig) -> GraphSize:
    """Open the store of a run's data set; before it exists, return its sizes (`size_of`)."""
    with contextlib.suppress(InputError):  # a missing official data set too
        if isinstance(store := _resolve(config.dataset, **_options(config)), Store):
            return store
    return size_of(config.dataset, **_options(config))


def open_for(config: TrainConfig, **how: Any) -> Store:
    """`open_dataset` for a run, with more of its options in `how`."""
    return open_dataset(config.dataset, **_options(config), **how)


def check_store(size: GraphSize, config: TrainConfig) -> None:
    """Refuse a data set without the direction or the hops that `config` needs."""
    if size.stored == "store":
        _check_direction(size, config.undirected)
    if config.propagated and size.hops is None:
        check_hops(size, config.hops, config.norm, "labelled")
    elif config.propagated and size.hops != config.hops:
        raise InputError(f"hops: {size.name} has the features of {size.hops} hops, got {config.hops}; set hops")
    elif not config.propagated and size.hops is not None:
        problem = f"{size.name} has propagated features and no edges"
        raise InputError(f"loading: {problem}: set loading=propagated, got {config.loading!r}")


def check_hops(size: GraphSize, hops: int, norm: str, nodes: str) -> None:
    """Refuse wrong parameters of a propagation, and a data set without edges."""
    if isinstance(hops, bool) or not isinstance(hops, int) or hops < 1:
        raise InputError(f"hops: expected a number of hops, at least 1, got {hops!r}")
    for name, value, known in (("norm", norm, ("row", "sym", "none")), ("nodes", nodes, ("labelled", "all"))):
        if value not in known:
            raise InputError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    if size.hops is not None:
        problem = f"expected a graph, found the features of {size.hops} hops, without edges"
        raise InputError(f"{size.name}: {problem}; name the store that it was made from")


# For a notebook -------------------------------------------------------------------------------------------------------


@clear_errors()
def prepare_dataset(
    dataset: str, data_dir: StrPath, scale: float, seed: int = 0, *, undirected: bool | None = None
) -> str:
    """Return the folder of a store for a notebook: that of `dataset`, or of the synthetic data set if it is "".

    The store is made on first use in `data_dir`, where every notebook and run finds it.

    Raises:
        InputError: see `open_dataset` and `synthesize_store`.
    """
    if dataset:
        store = open_dataset(dataset, data_dir=data_dir, undirected=undirected)
    else:
        path = home(data_dir) / f"synthetic-{scale:g}-seed{seed}{'-undirected' if undirected else ''}.store"
        with contextlib.nullcontext() if is_store(path) else made_once(path, lambda: None):
            if not is_store(path):
                from .synth import synthesize_store

                print(f"{path}: generating it, once")
                synthesize_store(path, scale, seed, undirected=bool(undirected))
        store = open_store(path)
    shown = store.path.relative_to(Path.cwd()) if store.path.is_relative_to(Path.cwd()) else store.path
    sizes = f"{store.num_nodes:,} nodes, {store.num_edges:,} edges, {store.num_features} features"
    print(f"{shown}: {sizes}, {format_bytes(store.nbytes)}")
    return str(store.path)
