"""Names of data sets, resolved to a store or to official data that `catalog` converts to one; and
the sizes of data sets."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Self, get_args

from ..config import TrainConfig
from ..errors import InputError
from ..files import StrPath, check_new, home, whereabouts
from ..graph.store import GraphSize, Store, is_store, open_store
from ..graph.store_format import stamp
from .official import KNOWN, OFFICIAL_DIR, Located, is_official, locate_official, not_there
from .sizes import PUBLIC


@dataclass(frozen=True)
class DataRequest:
    """A data set's name and the options of `open_dataset` that select its store."""

    dataset: StrPath
    data_dir: StrPath | None = None
    undirected: bool | None = None
    feature_dtype: str | None = None

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        """Return the request of a run with this configuration."""
        # If the policy loads features into RAM, they are rounded while they are read, and the
        # store's own dtype does not matter.
        is_stored = config.policy.reads_disk and config.feature_dtype != "float32"
        dtype = config.feature_dtype if is_stored else None
        return cls(config.dataset, None, config.undirected, dtype)


@dataclass(frozen=True)
class _Pending:
    """An official data set, and the place of the store to make from it."""

    official: Located
    target: Path

    @property
    def size(self) -> GraphSize:
        return KNOWN[self.official.name]

    def existing(self) -> Store | None:
        """Return the store that was made from these data before, or None.

        Raises an `InputError` if the store at that place is of other or changed data. Once it
        exists, the raw files may be deleted.
        """
        if not is_store(self.target):
            return None
        store = open_store(self.target)
        folder = self.official.folder
        files: dict[str, list[int]] = store.origin.get("files", {})
        sizes = {name: [*stamp(folder / name)[:2]] for name in files if (folder / name).is_file()}
        if folder.exists() and files != sizes:
            raise InputError(
                f"{store.path}: expected the store of {folder}, found one of other or changed "
                "data; delete it to convert the data again, or name it as the data set"
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
    data_dir = home(request.data_dir or OFFICIAL_DIR)
    official = locate_official(name, data_dir)
    stem = official.folder.name + "-undirected" * bool(request.undirected)
    if request.feature_dtype not in (None, "float32"):
        stem += f"-{request.feature_dtype}"
    pending = _Pending(official, data_dir / f"{stem}.store")
    store_of_it = pending.existing()
    if store_of_it is not None:
        return store_of_it
    if not official.folder.exists():
        raise not_there(official)
    check_new(pending.target)
    return pending


def _no_data_set(name: str) -> InputError:
    if not Path(name).exists():
        return InputError(
            f"dataset: {name}: expected a store or an official name ({', '.join(KNOWN)}), found "
            f"none{whereabouts()}"
        )
    store = f"{name.rstrip('/')}.store"
    return InputError(
        f"dataset: {name}: expected a store or an official name; make a store of it once: "
        f"python -m ogbnlib convert {shlex.quote(name)} {shlex.quote(store)}"
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
    return data if isinstance(data, Store) else data.size


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
    _refuse_targets(size)
    if not size.num_seeds["train"]:
        raise InputError(
            f"{config.dataset}: expected nodes in the train split to train on, found none"
        )
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
