"""The one place that decides what a data set's name means: a store, or data that are converted to a store once.

The store is `NAME.store` (`NAME-undirected.store`, `-float16`) beside the data, or in `data_dir`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import TrainConfig
from ..errors import InputError, clear_errors, format_bytes
from ..files import StrPath, check_new, home, locked, sibling_path
from ..graph.store import GraphSize, Store, is_store, open_store
from .data import Source, find_files, is_tables, origin_of, stamped, stored_dtype
from .official import KNOWN, OFFICIAL_DIR, is_official, locate_official, open_official
from .ogb import layout_files, open_raw

if TYPE_CHECKING:
    from .convert import FeatureDtype, Progress

# `convert` and `synth` compile kernels, and planners only ask for sizes: both are imported on use.


@dataclass(frozen=True)
class _Pending:
    """A data set that is not a store, and the store to make of it."""

    folder: Path
    files: Callable[[], Mapping[str, Path]]
    size: GraphSize | None  # None for own files, and an official data set of unknown size
    source: Callable[[], Source]  # downloads missing data
    target: Path
    undirected: bool
    dtype: np.dtype[Any]  # of the store's features


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
    folder, own, size, missing = Path(os.path.abspath(dataset)), np.dtype(np.float32), None, ""
    find: Callable[..., Mapping[str, Path]] = layout_files
    official = raw = None
    if is_official(dataset):
        official = locate_official(dataset, data_dir or OFFICIAL_DIR)
        folder, size = official.folder, KNOWN.get(dataset)
        if official.present and official.binary:
            raw = open_raw(folder, num_classes=official.num_classes)
        elif not official.present and not download:
            missing = f"{folder}: {dataset} is not there; pass download=True, or data_dir, the folder that holds it"
    elif is_tables(dataset):
        find, own = find_files, stored_dtype(find_files(folder)["features"])
    else:
        raw = open_raw(folder)
    if raw is not None:
        own, size = raw.feature_dtype, raw.size

    def source() -> Source:
        if raw is not None:
            return raw
        if official is not None:
            return open_official(official)
        from .tables import open_tables  # imports pyarrow and pandas, and most runs have a store

        return open_tables(folder)

    dtype = own if feature_dtype is None else np.dtype(feature_dtype)
    name = folder.name + ("-undirected" if undirected else "") + (f"-{dtype}" if dtype != own else "")
    target = (folder.parent if data_dir is None else data_dir) / f"{name}.store"
    pending = _Pending(folder, functools.partial(find, folder), size, source, target, bool(undirected), dtype)
    if (store_of_it := _existing(pending)) is not None:
        return store_of_it
    if missing:
        raise InputError(missing)
    check_new(target)
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        raise InputError(f"{target}: the data set's store can't be written here; pass data_dir, a folder of your own")
    return pending


def _existing(pending: _Pending) -> Store | None:
    """The store that was made of a data set before, whose raw files may be deleted if it is official; or None."""
    if not is_store(pending.target):
        return None
    store = open_store(pending.target)
    raw, files = store.origin.get("raw"), store.origin.get("files")
    exists = pending.folder.exists()
    now = origin_of(pending.folder, stamped(pending.files()) if exists else {})
    if exists and files != now["files"]:
        if raw != now["raw"]:
            raise InputError(f"{store.path}: expected the store of {pending.folder}, found one of {raw}; move it away")
        hint = "delete the store to convert the data again, or name the store as the data set to keep the old data"
        raise InputError(f"{pending.folder}: it changed since {store.path} was made of it; {hint}")
    if (store.undirected, store.feature_dtype) != (pending.undirected, pending.dtype):
        expected = f"expected a store with undirected={pending.undirected}, {pending.dtype} features"
        raise InputError(f"{store.path}: {expected}, found another; move it away, or name it as the data set")
    return store


def _check_direction(store: GraphSize, undirected: bool | None) -> None:
    if undirected not in (None, store.undirected):
        store_has = f"{getattr(store, 'path', store.name)} was made with undirected={store.undirected}"
        raise InputError(f"undirected: {store_has}, asked for was {undirected}; name the store's original data")


@clear_errors()
def locate(dataset: str, **options: Any) -> GraphSize:
    """Check a data set and return its sizes; nothing is written or downloaded.

    Before the store exists, sizes are those of the data, with the `feature_itemsize` of the store. `options` are
    data_dir, undirected, feature_dtype and download of `open_dataset`.
    """
    data = _resolve(dataset, **options)
    if isinstance(data, Store):
        return data.size
    return dataclasses.replace(data.size or data.source().size, feature_itemsize=data.dtype.itemsize)


def size_of(dataset: str, **options: Any) -> GraphSize:
    """Return the sizes of a data set for planning: those of `locate`, or the known ones of an official data set."""
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

    Waits for another process that is converting the same data. A store of other or changed data at the place of the new
    one is refused.

    Args:
        dataset: a store's folder, a folder in OGB's binary layout or of a user's own files (`open_tables`), or an
            official name; a folder of that name comes first.
        data_dir: the folder of official data sets, by default "dataset", and of stores made from other data, by default
            the folder of the data.
        undirected: with reverse edges. If omitted, a store's own setting is used, and other data are converted without.
        feature_dtype: of a new store, "float16" or "float32"; by default the data's own, float32 for float64.
        download: fetch a missing official data set.
        say: called with the data, the place and the size of a new store.
        memory_limit, progress, check: those of `convert`; `check` is called while waiting too.
    """
    options = {"data_dir": data_dir, "undirected": undirected, "feature_dtype": feature_dtype, "download": download}
    pending = _resolve(dataset, **options)  # type: ignore[arg-type]
    if isinstance(pending, Store):
        return pending
    with made_once(pending.target, check):
        if (store := _existing(pending)) is not None:
            return store
        from .convert import convert, disk_bytes

        source = pending.source()
        about = format_bytes(disk_bytes(source, pending.undirected, pending.dtype)[0])
        say(f"{pending.folder}: converting it, once, to {pending.target}, about {about}")
        how: dict[str, Any] = {"undirected": pending.undirected, "feature_dtype": pending.dtype.name}
        return convert(source, pending.target, memory_limit=memory_limit, progress=progress, check=check, **how)


@contextlib.contextmanager
def made_once(target: Path, check: Callable[[], None]) -> Iterator[None]:
    """Let one process make `target` while the others wait."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(sibling_path(target, "once"), f"{target}: it is being made", wait=check):
        yield


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
    if config.propagated and size.hops not in (None, config.hops):
        raise InputError(f"hops: {size.name} has the features of {size.hops} hops, got {config.hops}; set hops")
    if not config.propagated and size.hops is not None:
        raise InputError(f"loading: {size.name} has propagated features and no edges: set loading=propagated")


def check_hops(size: GraphSize, hops: int, norm: str, nodes: str) -> None:
    """Refuse wrong parameters of a propagation, and a data set without edges."""
    if isinstance(hops, bool) or not isinstance(hops, int) or hops < 1:
        raise InputError(f"hops: expected a number of hops, at least 1, got {hops!r}")
    for name, value, known in (("norm", norm, ("row", "sym", "none")), ("nodes", nodes, ("labelled", "all"))):
        if value not in known:
            raise InputError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    if size.hops is not None:
        raise InputError(f"{size.name}: expected a graph, found the features of {size.hops} hops, without edges")


@clear_errors()
def prepare_dataset(
    dataset: str, data_dir: StrPath, scale: float, seed: int = 0, *, undirected: bool | None = None
) -> str:
    """Return the store's folder for a notebook, made on first use: of `dataset`, or of a synthetic one if it is ""."""
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
