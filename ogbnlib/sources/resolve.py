"""Names of data sets, resolved to stores; the sizes of data sets; and stores that are made once."""

import contextlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from ..config import TrainConfig
from ..errors import InputError
from ..files import StrPath, home, locked, sibling_path, whereabouts
from ..graph.store import GraphSize, Store, is_store, open_store
from .official import KNOWN, OFFICIAL_DIR, is_official, official_folder


def find_store(dataset: StrPath) -> Store:
    """Open the store that a name refers to: its folder, or the official name of its data."""
    path = home(dataset)
    if is_store(path):
        return open_store(path)
    name = str(path)
    if not is_official(name):
        problem = f"dataset: {name}: expected a store or an official name ({', '.join(KNOWN)})"
        if not path.exists():
            raise InputError(f"{problem}, found none{whereabouts()}")
        raise InputError(
            f"{problem}; make a store of it once: python -m ogbnlib convert "
            f"{shlex.quote(name)} {shlex.quote(name.rstrip('/') + '.store')}"
        )
    store = official_folder(name, OFFICIAL_DIR).with_suffix(".store")
    if is_store(store):
        return open_store(store)
    raise InputError(
        f"dataset: {store}: expected the store of {name}, found none; make it once: python -m ogbnlib "
        f"download {name}; python -m ogbnlib convert {name} {store}"
    )


def check_direction(store: GraphSize, undirected: bool | None) -> None:
    """Refuse a store made without the reverse edges asked for, or with unwanted ones; None is any."""
    if undirected in (None, store.undirected):
        return
    path = getattr(store, "path", store.name)  # sizes of a store alone have no path
    flag = "--undirected" if undirected else "--directed"
    raise InputError(
        f"undirected: {path} was made with undirected={store.undirected}, asked for was "
        f"{undirected}; convert its data again with {flag}, to a store of another name"
    )


def size_of(dataset: str) -> GraphSize:
    """Return the store of a data set, or the sizes of an official one without a store."""
    try:
        return find_store(dataset)
    except InputError:
        if dataset not in KNOWN or not is_official(dataset):  # a folder may have such a name, too
            raise
        return KNOWN[dataset]


def check_store(size: GraphSize, config: TrainConfig) -> None:
    """Refuse a data set whose direction or propagated hops are not those that `config` needs."""
    if size.stored == "store":  # a conversion still to come can add reverse edges
        check_direction(size, config.undirected)
    hops = config.policy.hops(config)  # None: the policy samples edges
    if hops is not None and size.hops not in (None, hops):  # None: a graph, propagated first
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
    _refuse_targets(size)
    if not size.num_seeds["train"]:
        raise InputError(f"{config.dataset}: expected nodes in the train split, found none")
    if (config.early_stopping or config.keep == "best") and not size.num_seeds["valid"]:
        name = "early_stopping" if config.early_stopping else "keep=best"
        raise InputError(
            f"{name}: expected nodes in the valid split, found none in {config.dataset}; leave it out"
        )


def _refuse_targets(size: GraphSize) -> None:
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
    _refuse_targets(size)
    if size.hops is not None:
        raise InputError(
            f"{size.name}: expected a graph, found the features of {size.hops} hops, without edges"
        )


def made_once(target: Path, check: Callable[[], None]) -> contextlib.AbstractContextManager[int]:
    """Return a lock under which one process creates `target` while the others wait, then find it.

    `check` is called while waiting; its exception ends the wait.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    return locked(sibling_path(target, "once"), f"{target}: it is being made", wait=check)
