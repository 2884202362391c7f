"""Names of data sets: each means a store, or data that `catalog` converts to one once; and their
sizes.

The store is `NAME.store` (`NAME-undirected.store`, `-float16`) next to the data, or in `data_dir`.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ..config import TrainConfig
from ..errors import InputError
from ..files import StrPath, check_new, home
from ..graph.store import GraphSize, Store, is_store, open_store
from .files.layouts import find_files, is_tables, layout_of
from .official import KNOWN, OFFICIAL_DIR, is_official, locate_official, open_official
from .ogb import layout_files, open_raw
from .source import Source, origin_of, stamped, stored_dtype


@dataclass(frozen=True)
class Pending:
    """A data set that is not a store, and the store to make of it."""

    folder: Path
    find: Callable[[Path], Mapping[str, Path]]  # its files
    size: GraphSize | None  # None for own files, and an official data set of unknown size
    source: Callable[[], Source]  # downloads missing data
    target: Path
    undirected: bool
    dtype: np.dtype[Any]  # of the store's features


def resolve(
    dataset: StrPath,
    *,
    data_dir: StrPath | None = None,
    undirected: bool | None = None,
    feature_dtype: str | None = None,
    download: bool = False,
) -> Store | Pending:
    """Return the store that a name means, or the data to convert, after all checks of
    `open_dataset`."""
    dataset = str(home(dataset))
    data_dir = None if data_dir is None else home(data_dir)
    if is_store(dataset):
        store = open_store(dataset)
        _check_direction(store, undirected)
        return store
    folder = layout_of(Path(os.path.abspath(dataset)))[1]
    own, size, missing = np.dtype(np.float32), None, ""
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
        from .files.own_files import (
            open_tables,  # imports pyarrow and pandas, and most runs have a store
        )

        return open_tables(folder)

    dtype = own if feature_dtype is None else np.dtype(feature_dtype)
    name = (
        folder.name + ("-undirected" if undirected else "") + (f"-{dtype}" if dtype != own else "")
    )
    target = (folder.parent if data_dir is None else data_dir) / f"{name}.store"
    pending = Pending(folder, find, size, source, target, bool(undirected), dtype)
    if (store_of_it := existing(pending)) is not None:
        return store_of_it
    if missing:
        raise InputError(missing)
    check_new(target)
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        raise InputError(
            f"{target}: the data set's store can't be written here; pass data_dir, a folder of your own"
        )
    return pending


def existing(pending: Pending) -> Store | None:
    """The store that was made of a data set before, whose raw files may be deleted if it is
    official; or None."""
    if not is_store(pending.target):
        return None
    store = open_store(pending.target)
    raw, files = store.origin.get("raw"), store.origin.get("files")
    now = (
        origin_of(pending.folder, stamped(pending.find(pending.folder)))
        if pending.folder.exists()
        else store.origin
    )
    if files != now.get("files"):
        if raw != now["raw"]:
            raise InputError(
                f"{store.path}: expected the store of {pending.folder}, found one of {raw}; move it away"
            )
        hint = "delete the store to convert the data again, or name the store as the data set to keep the old data"
        raise InputError(f"{pending.folder}: it changed since {store.path} was made of it; {hint}")
    if (store.undirected, store.feature_dtype) != (pending.undirected, pending.dtype):
        expected = (
            f"expected a store with undirected={pending.undirected}, {pending.dtype} features"
        )
        raise InputError(
            f"{store.path}: {expected}, found another; move it away, or name it as the data set"
        )
    return store


def _check_direction(store: GraphSize, undirected: bool | None) -> None:
    if undirected in (None, store.undirected):
        return
    origin = getattr(store, "origin", {})
    remedy = f"make the store again with undirected={undirected}"
    if "raw" in origin:
        remedy = f"name the data it was made of, {origin['raw']}"
    raise InputError(
        f"undirected: {getattr(store, 'path', store.name)} was made with "
        f"undirected={store.undirected}, asked for was {undirected}; {remedy}"
    )


def locate(dataset: str, **options: Any) -> GraphSize:
    """Check a data set and return its sizes; nothing is written or downloaded.

    Before the store exists, sizes are those of the data, with the `feature_itemsize` of the store.
    `options` are data_dir, undirected, feature_dtype and download of `open_dataset`.
    """
    if isinstance(data := resolve(dataset, **options), Store):
        return data.size
    return dataclasses.replace(
        data.size or data.source().size, feature_itemsize=data.dtype.itemsize
    )


def size_of(dataset: str, **options: Any) -> GraphSize:
    """Return the sizes of a data set for planning: those of `locate`, or the known ones of an
    official data set."""
    known = KNOWN.get(dataset) if is_official(dataset) else None
    try:
        size = locate(dataset, **options)
    except (InputError, OSError):
        if known is None:
            raise
        return known
    return size if size.stored == "store" else known or size


def options_of(config: TrainConfig) -> dict[str, Any]:
    # in RAM it is rounded on reading
    rounded = config.on_disk and config.feature_dtype != "float32"
    values = {name: getattr(config, name) for name in ("data_dir", "undirected", "download")}
    return values | {"feature_dtype": config.feature_dtype if rounded else None}


def graph_for(config: TrainConfig) -> GraphSize:
    """Open the store of a run's data set; before it exists, return its sizes (`size_of`)."""
    with contextlib.suppress(InputError, OSError):  # a missing official data set too
        if isinstance(store := resolve(config.dataset, **options_of(config)), Store):
            return store
    return size_of(config.dataset, **options_of(config))


def check_store(size: GraphSize, config: TrainConfig) -> None:
    """Refuse a data set without the direction or the hops that `config` needs."""
    if size.stored == "store":
        _check_direction(size, config.undirected)
    if config.propagated and size.hops not in (None, config.hops):
        raise InputError(
            f"hops: {size.name} has the features of {size.hops} hops, got {config.hops}; set hops"
        )
    if not config.propagated and size.hops is not None:
        raise InputError(
            f"loading: {size.name} has propagated features and no edges: set loading=propagated"
        )


def check_hops(size: GraphSize, hops: int, norm: str, nodes: str) -> None:
    """Refuse wrong parameters of a propagation, and a data set without edges."""
    if isinstance(hops, bool) or not isinstance(hops, int) or hops < 1:
        raise InputError(f"hops: expected a number of hops, at least 1, got {hops!r}")
    for name, value, known in (
        ("norm", norm, get_args(TrainConfig.model_fields["norm"].annotation)),
        ("nodes", nodes, ("labelled", "all")),
    ):
        if value not in known:
            raise InputError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    if size.hops is not None:
        raise InputError(
            f"{size.name}: expected a graph, found the features of {size.hops} hops, without edges"
        )
