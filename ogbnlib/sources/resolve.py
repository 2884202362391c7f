"""Names of data sets, resolved to a store or to official data that `catalog` converts to one; and
the sizes of data sets."""

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, get_args

import numpy as np

from ..config import TrainConfig
from ..errors import InputError
from ..files import StrPath, check_new, home
from ..graph.store import GraphSize, Store, is_store, open_store
from ..graph.store_format import nearby
from .official import KNOWN, OFFICIAL_DIR, is_official, locate_official, open_official
from .ogb import layout_files, open_raw
from .sizes import PUBLIC
from .source import Source, origin_of, stamped


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
    """An official data set, and the place and options of the store to make from it."""

    folder: Path
    open: Callable[[], Source]  # downloads missing data
    size: GraphSize  # with the `feature_itemsize` that the store will have
    target: Path
    undirected: bool
    dtype: np.dtype[np.generic]  # of the store's features

    def existing(self) -> Store | None:
        """Return the store that was made from these data before, or None.

        Raises an `InputError` if the store at that place is of other or changed data. Once it
        exists, the raw files may be deleted.
        """
        if not is_store(self.target):
            return None
        store = open_store(self.target)
        if self.folder.exists():
            stamps = stamped(layout_files(self.folder))
            if store.origin.get("files") != origin_of(self.folder, stamps)["files"]:
                raise InputError(
                    f"{store.path}: expected the store of {self.folder}, found one of other or "
                    "changed data; delete it to convert the data again, or name it as the data set"
                )
        return store


def resolve(request: DataRequest) -> Store | _Pending:
    """Return the store that a name refers to, or the official data to convert, after all checks of
    `open_dataset`."""
    name = str(home(request.dataset))
    if is_store(name):
        store = open_store(name)
        _check_direction(store, request.undirected)
        return store
    if not is_official(name):
        raise _no_data_set(name)
    pending = _pending(name, request)
    store_of_it = pending.existing()
    if store_of_it is not None:
        return store_of_it
    if not pending.folder.exists() and not request.download:
        raise InputError(
            f"{pending.folder}: {name} is not there; pass download=True, or data_dir, the folder that holds it"
        )
    _check_target(pending.target)
    return pending


def _no_data_set(name: str) -> InputError:
    hint = nearby(Path(name))
    if not Path(name).exists() or "?" in hint:
        return InputError(
            f"dataset: {name}: expected a store or an official name ({', '.join(KNOWN)}), found "
            f"none{hint}"
        )
    store = f"{name.rstrip('/')}.store"
    return InputError(
        f"dataset: {name}: expected a store or an official name; make a store of it once: "
        f"python -m ogbnlib convert {shlex.quote(name)} {shlex.quote(store)}"
    )


def _pending(name: str, request: DataRequest) -> _Pending:
    data_dir = home(request.data_dir or OFFICIAL_DIR)
    official = locate_official(name, data_dir)
    size = KNOWN[name]
    dtype: np.dtype[np.generic] = np.dtype(np.float32)
    if official.present and official.binary:
        raw = open_raw(official.folder, num_classes=official.num_classes)
        size = raw.size
        dtype = raw.feature_dtype
    stem = official.folder.name + "-undirected" * bool(request.undirected)
    if request.feature_dtype not in (None, dtype.name):
        dtype = np.dtype(request.feature_dtype)
        stem += f"-{dtype}"
    return _Pending(
        official.folder,
        lambda: open_official(official),
        replace(size, feature_itemsize=dtype.itemsize),
        data_dir / f"{stem}.store",
        bool(request.undirected),
        dtype,
    )


def _check_target(target: Path) -> None:
    check_new(target)
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        raise InputError(
            f"{target}: the data set's store can't be written here; pass data_dir, a folder of your own"
        )


def _check_direction(store: GraphSize, undirected: bool | None) -> None:
    if undirected in (None, store.undirected):
        return
    path = getattr(store, "path", store.name)
    raw = getattr(store, "origin", {}).get("raw", path)
    flag = "--undirected" if undirected else "--directed"
    raise InputError(
        f"undirected: {path} was made with undirected={store.undirected}, asked for was "
        f"{undirected}; make another: python -m ogbnlib convert {raw} STORE {flag}"
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
    hops = config.policy.hops(config)
    if hops is not None and size.hops not in (None, hops):
        raise InputError(
            f"hops: {size.name} has the features of {size.hops} hops, got {config.hops}; set hops"
        )
    if hops is None and size.hops is not None:
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
