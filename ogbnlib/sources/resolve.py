"""Names of data sets, resolved to a store or to data that `catalog` converts to one; and the sizes
of data sets.

The new store is `NAME.store` (or `NAME-undirected.store`, `NAME-float16.store`) next to the data,
or in `data_dir`.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np

from ..config import TrainConfig
from ..errors import InputError
from ..files import StrPath, check_new, home
from ..graph.store import GraphSize, Store, is_store, open_store
from .files.layouts import ROLE_NAMES, find_files, is_tables, layout_of
from .official import KNOWN, OFFICIAL_DIR, Located, is_official, locate_official, open_official
from .ogb import layout_files, open_raw
from .options import open_folder, options_file, read_options
from .sizes import PUBLIC
from .source import Source, origin_of, stamped, stored_dtype


@dataclass(frozen=True)
class DataRequest:
    """A data set's name and the options of `open_dataset` that select its store."""

    dataset: StrPath
    data_dir: StrPath | None = None
    undirected: bool | None = None
    feature_dtype: str | None = None
    download: bool = False

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        """Return the request of a run with this configuration."""
        # If the policy loads features into RAM, they are rounded while they are read, and the
        # store's own dtype does not matter.
        is_stored = config.policy.reads_disk and config.feature_dtype != "float32"
        dtype = config.feature_dtype if is_stored else None
        return cls(config.dataset, config.data_dir, config.undirected, dtype, config.download)


@dataclass(frozen=True)
class _Pending:
    """A data set that is not a store, and the place and options of the store to make from it."""

    folder: Path
    find: Callable[[Path], Mapping[str, Path]]  # returns the files in `folder`, by name
    open: Callable[[], Source]  # downloads missing data
    own_size: GraphSize | None  # None for a user's own files, whose size `open` finds
    target: Path
    undirected: bool
    dtype: np.dtype[np.generic]  # of the store's features

    @property
    def size(self) -> GraphSize:
        """Sizes of the data, with the `feature_itemsize` that the store will have."""
        return replace(self.own_size or self.open().size, feature_itemsize=self.dtype.itemsize)

    def existing(self) -> Store | None:
        """Return the store that was made from these data before, or None.

        Raises an `InputError` if the store at that place is of other or changed data, or has other
        options. Once it exists, an official data set's raw files may be deleted.
        """
        if not is_store(self.target):
            return None
        store = open_store(self.target)
        has_data = self.folder.exists()
        now = origin_of(self.folder, stamped(self.find(self.folder))) if has_data else store.origin
        if store.origin.get("files") != now.get("files"):
            raw = store.origin.get("raw")
            if raw != now["raw"]:
                raise InputError(
                    f"{store.path}: expected the store of {self.folder}, found one of {raw}; move it away"
                )
            raise InputError(
                f"{self.folder}: it changed since {store.path} was made of it; delete the store to "
                "convert the data again, or name the store as the data set to keep the old data"
            )
        if (store.undirected, store.feature_dtype) != (self.undirected, self.dtype):
            raise InputError(
                f"{store.path}: expected a store with undirected={self.undirected}, {self.dtype} "
                "features, found another; move it away, or name it as the data set"
            )
        return store


def resolve(request: DataRequest) -> Store | _Pending:
    """Return the store that a name refers to, or the data to convert, after all checks of
    `open_dataset`.

    A name is tried as a store's folder, as a folder of a user's own files, as a folder in OGB's
    binary layout, and, if there is no folder of that name, as an official name.
    """
    name = str(home(request.dataset))
    if is_store(name):
        store = open_store(name)
        _check_direction(store, request.undirected)
        return store
    is_missing = False
    folder = layout_of(Path(os.path.abspath(name)))[1]
    options = {
        option: getattr(request, option)
        for option in ("undirected", "feature_dtype")
        if getattr(request, option) is not None
    }
    if is_official(name):
        official = locate_official(name, home(request.data_dir or OFFICIAL_DIR))
        is_missing = not official.present and not request.download
        pending = _pending_official(official, request)
    else:
        pending = _pending_folder(folder, request, options)
    store_of_it = pending.existing()
    if store_of_it is not None:
        return store_of_it
    if is_missing:
        raise InputError(
            f"{pending.folder}: {name} is not there; pass download=True, or data_dir, the folder that holds it"
        )
    _check_target(pending.target)
    return pending


def _pending_folder(folder: Path, request: DataRequest, requested: Mapping[str, Any]) -> _Pending:
    """Return a folder's data and the store to make from them.

    The options in `requested` override those in the folder's `dataset.yaml`.
    """
    options = read_options(folder)
    if request.undirected is None:
        request = replace(request, undirected=options.get("undirected"))

    def find(folder: Path) -> Mapping[str, Path]:
        return {
            **find_files(folder, {role: options.get(role) for role in ROLE_NAMES}),
            **options_file(folder),
        }

    if not is_tables(folder):
        raw = open_folder(folder, requested)
        dtype = np.dtype(options.get("feature_dtype", raw.feature_dtype))
        return _pending(folder, layout_files, lambda: raw, raw.size, dtype, request)
    dtype = np.dtype(options.get("feature_dtype", stored_dtype(find(folder).get("features"))))
    return _pending(folder, find, lambda: open_folder(folder, requested), None, dtype, request)


def _pending_official(official: Located, request: DataRequest) -> _Pending:
    if official.present and official.binary:
        raw = open_raw(official.folder, num_classes=official.num_classes)
        return _pending(
            official.folder, layout_files, lambda: raw, raw.size, raw.feature_dtype, request
        )
    return _pending(
        official.folder,
        layout_files,
        lambda: open_official(official),
        KNOWN[official.name],
        np.dtype(np.float32),
        request,
    )


def _pending(
    folder: Path,
    find: Callable[[Path], Mapping[str, Path]],
    open_source: Callable[[], Source],
    size: GraphSize | None,
    own: np.dtype[np.generic],
    request: DataRequest,
) -> _Pending:
    """Return a folder's data, whose features have dtype `own`, and the store to make from them."""
    dtype = np.dtype(request.feature_dtype or own)
    name = folder.name
    if request.undirected:
        name += "-undirected"
    if dtype != own:
        name += f"-{dtype}"
    place = folder.parent if request.data_dir is None else home(request.data_dir)
    return _Pending(
        folder, find, open_source, size, place / f"{name}.store", bool(request.undirected), dtype
    )


def _check_target(target: Path) -> None:
    """Refuse a place where no store can be written."""
    check_new(target)
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        raise InputError(
            f"{target}: the data set's store can't be written here; pass data_dir, a folder of your own"
        )


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


def size_of(dataset: str, data_dir: StrPath | None = None) -> GraphSize:
    """Return the sizes of a data set for planning.

    They are those of its store if there is one, else the known sizes of an official or public data
    set, else those of the data. Nothing is written or downloaded.
    """
    graph = _graph_of(DataRequest(dataset, data_dir))
    return graph.size if isinstance(graph, Store) else graph


def graph_for(config: TrainConfig) -> GraphSize:
    """Return the store of a run's data set, or the sizes of the data set if it has no store yet."""
    return _graph_of(DataRequest.of(config))


def _graph_of(request: DataRequest) -> GraphSize:
    name = str(request.dataset)
    known = KNOWN.get(name) if is_official(name) else PUBLIC.get(name)
    try:
        data = resolve(request)
    except (InputError, OSError):
        if known is None:
            raise
        return known
    if isinstance(data, Store):
        return data
    return known or data.size


def check_store(size: GraphSize, config: TrainConfig) -> None:
    """Refuse a data set whose direction or propagated hops are not those that `config` needs."""
    if size.stored == "store":
        _check_direction(size, config.undirected)
    if config.policy.uses_hops and size.hops not in (None, config.hops):
        raise InputError(
            f"hops: {size.name} has the features of {size.hops} hops, got {config.hops}; set hops"
        )
    if not config.policy.uses_hops and size.hops is not None:
        raise InputError(
            f"loading: {size.name} has propagated features and no edges: set loading=propagated"
        )


def check_trainable(size: GraphSize, config: TrainConfig) -> None:
    """Refuse a data set that our trainer can't train with `config`."""
    check_store(size, config)
    refuse_targets(size)
    if not size.num_seeds["train"]:
        raise InputError(
            f"{config.dataset}: expected nodes in the train split to train on, found none"
        )
    if (config.early_stopping or config.keep == "best") and not size.num_seeds["valid"]:
        name = "early_stopping" if config.early_stopping else "keep=best"
        raise InputError(
            f"{name}: expected nodes in the valid split, found none in {config.dataset}; leave it out"
        )


def refuse_targets(size: GraphSize) -> None:
    """Refuse a data set with targets, which have no classes to train on."""
    if size.has_targets:
        raise InputError(
            f"{size.name}: expected a class for each node, found targets, which our trainer can't "
            "learn; train with store.loader in a loop of your own"
        )


def check_hops(size: GraphSize, hops: int, norm: str, nodes: str) -> None:
    """Refuse invalid parameters of a propagation, and a data set with targets or without edges."""
    if isinstance(hops, bool) or not isinstance(hops, int) or hops < 1:
        raise InputError(f"hops: expected a number of hops, at least 1, got {hops!r}")
    for name, value, known in (
        ("norm", norm, get_args(TrainConfig.model_fields["norm"].annotation)),
        ("nodes", nodes, ("labelled", "all")),
    ):
        if value not in known:
            raise InputError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    refuse_targets(size)
    if size.hops is not None:
        raise InputError(
            f"{size.name}: expected a graph, found the features of {size.hops} hops, without edges"
        )
