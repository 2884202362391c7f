"""What a data set's name means, in one place: a store, or what is converted to one once and kept.

A name is a store's folder, a folder in OGB's binary layout or of files of one's own, or an official name. What is not a
store yet is converted into a store beside it, `NAME.store` (`NAME-undirected.store`, `-float16`), or in `data_dir`, and
found there by every later run, notebook and policy. `locate` and `size_of` look at headers alone (and at csv files).
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

# `convert` and `synth` are imported where they are used: they compile kernels, and planners ask for sizes alone.


@dataclass(frozen=True)
class _Named:
    """A data set that is no store itself: where it lies and where its store does."""

    official: str | None  # its name among OGB's
    folder: Path
    raw: RawDataset | None  # None for other files, and for what is still to be downloaded
    source: Callable[[], Source]  # what the store is made of, downloaded where it is not there yet
    target: Path
    undirected: bool
    dtype: np.dtype[Any]  # of the store's features

    @property
    def size(self) -> GraphSize:
        """As it is before it is converted, but for the features."""
        raw = self.raw or (None if self.official in KNOWN else self.source())
        assert raw is None or isinstance(raw, RawDataset | TableSource)
        size = KNOWN[self.official or ""] if raw is None else raw.size
        return dataclasses.replace(size, feature_itemsize=self.dtype.itemsize)


def _resolve(
    dataset: str, data_dir: StrPath | None, undirected: bool | None, feature_dtype: FeatureDtype | None, download: bool
) -> Store | _Named:
    """The store that a name means, or what is still to be made into one, and can be.

    Raises:
        InputError: as `open_dataset` before it reads or writes anything.
    """
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
        folder, source = official.folder, functools.partial(open_official, official)
        if official.present and official.binary:
            raw = open_raw(folder, num_classes=official.num_classes)
    else:
        folder = Path(os.path.abspath(dataset))
        tables = is_tables(folder)
        raw = None if tables else open_raw(folder)
        source = functools.partial(open_tables if tables else open_raw, folder)
    own = np.dtype(np.float32) if raw is None else raw.feature_dtype
    own = stored_dtype(folder) if official is None and raw is None else own
    dtype = own if feature_dtype is None else np.dtype(feature_dtype)
    name = folder.name + ("-undirected" if undirected else "") + (f"-{dtype}" if dtype != own else "")
    beside = folder.parent if data_dir is None else Path(data_dir)
    of_ogb = None if official is None else dataset
    named = _Named(of_ogb, folder, raw, source, beside / f"{name}.store", bool(undirected), dtype)
    if (made := _existing(named)) is not None:
        return made
    if official is not None and not official.present and not download:
        raise InputError(f"{folder}: {dataset} is not there; pass download=True, or data_dir, the folder that holds it")
    check_new(named.target)
    there = next(folder for folder in named.target.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        reason = "no permission" if there.is_dir() else f"{there} is a file"
        raise InputError(
            f"{named.target}: the data set is to be converted to a store there, which can't be written ({reason})"
            "; pass data_dir, a folder of your own (for an official name with a link in it to the data set's folder)"
        )
    return named


def _existing(named: _Named) -> Store | None:
    """The store that was made of a data set before; None where there is none.

    That of an official data set serves without it too: the raw files may be deleted.

    Raises:
        InputError: when what lies in its place is of other data, of data that changed since, or made in another way.
    """
    if not is_store(named.target):
        return None
    from .convert import origin_of

    store, now = open_store(named.target), origin_of(named.folder)
    made_of = {key: store.origin.get(key) for key in now}
    if named.folder.exists() and made_of["files"] != now["files"]:
        if made_of["raw"] != now["raw"]:
            raise InputError(
                f"{store.path}: expected the store of {named.folder}, found one of {made_of['raw'] or 'other data'}; "
                "use another data_dir, or move it away"
            )
        raise InputError(
            f"{named.folder}: it changed since {store.path} was made of it; delete the store to have it converted "
            "again, or name the store as the data set to go on with it as it was"
        )
    if (store.undirected, store.feature_dtype) != (named.undirected, named.dtype):
        raise InputError(
            f"{store.path}: expected a store with undirected={named.undirected}, {named.dtype} features, "
            f"found undirected={store.undirected}, {store.feature_dtype}; "
            "move it away, or name it as the data set"
        )
    return store


def _check_direction(store: GraphSize, undirected: bool | None) -> None:
    """Refuse `undirected` where it contradicts what a store has."""
    if undirected not in (None, store.undirected):
        raise InputError(
            f"undirected: {getattr(store, 'path', store.name)} was made with undirected={store.undirected}, asked for "
            f"was {undirected}; leave it out, or name the data that the store was made from"
        )


@clear_errors()
def locate(
    dataset: str,
    *,
    data_dir: StrPath | None = None,
    undirected: bool | None = None,
    feature_dtype: FeatureDtype | None = None,
    download: bool = False,
) -> GraphSize:
    """The checks of `open_dataset` and the sizes of what it opens, from headers alone; nothing is made or downloaded.

    Sizes are those of the store, or, while that is still to be made (`stored` is "raw" or "csv"), of what it will be
    made of, with `feature_itemsize` of the store.

    Raises:
        InputError: as `open_dataset` before it reads or writes anything.
    """
    return _resolve(dataset, data_dir, undirected, feature_dtype, download).size


def size_of(
    dataset: str,
    *,
    data_dir: StrPath | None = None,
    undirected: bool | None = None,
    feature_dtype: FeatureDtype | None = None,
    download: bool = False,
) -> GraphSize:
    """`locate` for planning: an official data set that is not there has its known size.

    Raises:
        InputError: for an OGB name that is not known, and as `locate` for a folder.
    """
    try:
        size = locate(dataset, data_dir=data_dir, undirected=undirected, feature_dtype=feature_dtype, download=download)
    except InputError:
        if dataset not in KNOWN or not is_official(dataset):
            raise
        return KNOWN[dataset]
    return size if size.stored == "store" or not is_official(dataset) else KNOWN.get(dataset, size)


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
    """Open a data set as a store, which is made first where there is none: once, in bounded memory.

    Another process that is converting it already is waited for.

    Args:
        dataset: a store's folder, a folder in OGB's binary layout or of one's own files (`open_tables`), or an official
            name, which a folder of that name here comes before.
        data_dir: where official data sets are looked for, by default "dataset", and where stores made from other data
            are kept, by default beside them.
        undirected: with reverse edges; None takes a store as it is and converts other data without.
        feature_dtype: to convert to, "float16" or "float32"; by default the data's own, float32 for float64. A store
            that is named has its own.
        memory_limit: as in `convert`.
        download: consent to fetch an official data set that is not there.
        say: told what is converted, to where and how large.
        progress: as in `convert`.
        check: called between chunks and while waiting; what it raises ends the conversion, and nothing is left behind.

    Raises:
        InputError: for a name that means nothing; for `undirected` that contradicts a store; for a store of other data,
            or of data that changed since, in the place of the one that is to be made; for a place that can't be written
            to; and as `convert`.
    """
    named = _resolve(dataset, data_dir, undirected, feature_dtype, download)
    if isinstance(named, Store):
        return named
    with made_once(named.target, check):
        if (made := _existing(named)) is not None:
            return made
        from .convert import convert, disk_bytes, origin_of

        source = named.raw or named.source()
        about = format_bytes(disk_bytes(source, named.undirected, named.dtype)[0])
        own = source.file_dtype if isinstance(source, RawDataset | TableSource) else np.dtype(np.float32)
        if own.itemsize > named.dtype.itemsize:
            about += f", features rounded from {own} to {named.dtype}"
        say(f"{named.folder}: converting it, once, to {named.target}, about {about}")
        return convert(
            source, named.target, origin=origin_of(named.folder),
            undirected=named.undirected, feature_dtype=named.dtype.name,  # type: ignore[arg-type]  # float16 or float32
            memory_limit=memory_limit, progress=progress, check=check,
        )  # fmt: skip


@contextlib.contextmanager
def made_once(target: Path, check: Callable[[], None]) -> Iterator[None]:
    """Only one process makes what is to be at `target`; others wait, and look again."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(sibling_path(target, "once"), f"{target}: it is being made", wait=check):
        yield


# For a run ------------------------------------------------------------------------------------------------------------


def _asked(config: TrainConfig) -> dict[str, Any]:
    rounded = config.on_disk and config.feature_dtype == "float16"  # in RAM it is rounded on reading
    names = ("data_dir", "undirected", "download")
    return {name: getattr(config, name) for name in names} | {"feature_dtype": "float16" if rounded else None}


def locate_for(config: TrainConfig) -> GraphSize:
    """`locate` the data set of a run, and `check_store`."""
    size = locate(config.dataset, **_asked(config))
    check_store(size, config)
    return size


def graph_for(config: TrainConfig) -> GraphSize:
    """The store of a run's data set, opened; while there is none, its sizes as `size_of` has them."""
    with contextlib.suppress(InputError):  # of an official data set that is not there, too
        if isinstance(found := _resolve(config.dataset, **_asked(config)), Store):
            return found
    return size_of(config.dataset, **_asked(config))


def open_for(config: TrainConfig, **how: Any) -> Store:
    """`open_dataset` of a run; `how` as there."""
    return open_dataset(config.dataset, **_asked(config), **how)


def check_store(size: GraphSize, config: TrainConfig) -> None:
    """Refuse what `config` asks of a data set that does not hold it: a direction, hops.

    Raises:
        InputError: naming the parameter.
    """
    if size.stored == "store":
        _check_direction(size, config.undirected)
    if size.hops is not None and not config.propagated:
        raise InputError(
            f"loading: {size.name} has propagated features and no edges: set loading=propagated, got {config.loading!r}"
        )
    if config.propagated:
        if size.hops is None:
            check_hops(size, config.hops, config.norm, "labelled")
        elif size.hops != config.hops:
            raise InputError(f"hops: {size.name} has the features of {size.hops} hops, got {config.hops}; set hops")


def check_hops(size: GraphSize, hops: int, norm: str, nodes: str) -> None:
    """Refuse what can't be propagated, or not as over the whole graph.

    Raises:
        InputError: naming the parameter.
    """
    if isinstance(hops, bool) or not isinstance(hops, int) or hops < 1:
        raise InputError(f"hops: expected a number of hops, at least 1, got {hops!r}")
    for name, given, known in (("norm", norm, ("row", "sym", "none")), ("nodes", nodes, ("labelled", "all"))):
        if given not in known:
            raise InputError(f"{name}: expected one of {', '.join(known)}, got {given!r}")
    if size.hops is not None:
        raise InputError(
            f"{size.name}: expected a graph to propagate over, found the features of {size.hops} hops, without edges; "
            "name the store that it was made from"
        )


# For a notebook -------------------------------------------------------------------------------------------------------


@clear_errors()
def prepare_dataset(
    dataset: str, data_dir: StrPath, scale: float, seed: int = 0, *, undirected: bool | None = None
) -> str:
    """The folder of a store for a notebook: that of `dataset`, or without one of the generated data set.

    Made on first use in `data_dir`, where every notebook and run finds it.

    Raises:
        InputError: as `open_dataset` and `synthesize_store`.
    """
    if dataset:
        store = open_dataset(dataset, data_dir=data_dir, undirected=undirected)
    else:
        name = f"synthetic-{scale:g}-seed{seed}" + ("-undirected" if undirected else "")
        path = home(data_dir) / f"{name}.store"
        with contextlib.nullcontext() if is_store(path) else made_once(path, lambda: None):
            if not is_store(path):
                from .synth import synthesize_store

                print(f"{path}: generating it, once")
                synthesize_store(path, scale, seed, undirected=bool(undirected))
        store = open_store(path)
    here = Path.cwd()
    shown = store.path.relative_to(here) if store.path.is_relative_to(here) else store.path
    print(
        f"{shown}: {store.num_nodes:,} nodes, {store.num_edges:,} edges, {store.num_features} features, "
        f"{format_bytes(store.nbytes)}"
    )
    return str(store.path)
