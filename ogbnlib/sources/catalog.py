"""Data sets by name, opened as a store, or converted to one once."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from ..config import TrainConfig
from ..errors import clear_errors, format_bytes
from ..files import StrPath, home, locked, shown, sibling_path
from ..graph.store import Store, is_store, open_store
from ..graph.summary import summarized
from ..progress import Progress
from .convert import FeatureDtype, convert, disk_bytes
from .resolve import DataRequest, resolve
from .synth import synthesize_store


@clear_errors()
def open_dataset(
    dataset: StrPath,
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

    Waits for another process that is converting the same data. A store of other or changed data at
    the place of the new one is refused.

    Args:
        dataset: a store's folder, a folder in OGB's binary layout or of a user's own files
            (`open_tables`), or an official name; a folder of that name comes first.
        data_dir: the folder of official data sets, by default "dataset", and of stores made from
            other data, by default the folder of the data.
        undirected: with reverse edges. If omitted, a store's own setting is used, and other data
            are converted without.
        feature_dtype: of a new store, "float16", "float32" or "int8"; by default the data's own,
            float32 for float64.
        download: fetch a missing official data set.
        say: called with the data, the place and the size of a new store, then with its summary.
        memory_limit, progress, check: those of `convert`; `check` is called while waiting too.
    """
    return _open(
        DataRequest(dataset, data_dir, undirected, feature_dtype, download),
        memory_limit,
        say,
        progress,
        check,
    )


def _open(
    request: DataRequest,
    memory_limit: str | int | None,
    say: Callable[[str], object],
    progress: Progress,
    check: Callable[[], None],
) -> Store:
    pending = resolve(request)
    if isinstance(pending, Store):
        return pending
    with made_once(pending.target, check):
        store = pending.existing()
        if store is not None:
            return store
        source = pending.open()
        about = format_bytes(disk_bytes(source, pending.undirected, pending.dtype)[0])
        say(f"{pending.folder}: converting it, once, to {pending.target}, about {about}")
        store = convert(
            source,
            pending.target,
            undirected=pending.undirected,
            feature_dtype=cast(FeatureDtype, pending.dtype.name),
            memory_limit=memory_limit,
            progress=progress,
            check=check,
        )
        say(summarized(store))
        return store


def made_once(target: Path, check: Callable[[], None]) -> contextlib.AbstractContextManager[int]:
    """Let one process make `target` while the others wait."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return locked(sibling_path(target, "once"), f"{target}: it is being made", wait=check)


def open_for(
    config: TrainConfig,
    *,
    memory_limit: str | int | None = None,
    say: Callable[[str], object] = print,
    progress: Progress = True,
    check: Callable[[], None] = lambda: None,
) -> Store:
    """Open the data set of a run as `open_dataset` does."""
    return _open(DataRequest.of(config), memory_limit, say, progress, check)


@clear_errors()
def prepare_dataset(
    dataset: StrPath,
    data_dir: StrPath,
    scale: float,
    seed: int = 0,
    *,
    undirected: bool | None = None,
) -> str:
    """Return the store's folder for a notebook, made on first use: of `dataset`, or of a synthetic
    one if it is ""."""
    if dataset:
        store = open_dataset(dataset, data_dir=data_dir, undirected=undirected)
    else:
        store = _synthetic_store(home(data_dir), scale, seed, bool(undirected))
    print(
        f"{shown(store.path)}: "
        f"{store.num_nodes:,} nodes, {store.num_edges:,} edges, {store.num_features} features, "
        f"{format_bytes(store.nbytes)}"
    )
    return str(store.path)


def _synthetic_store(data_dir: Path, scale: float, seed: int, undirected: bool) -> Store:
    name = f"synthetic-{scale:g}-seed{seed}"
    if undirected:
        name += "-undirected"
    path = data_dir / f"{name}.store"
    if not is_store(path):
        with made_once(path, lambda: None):
            if not is_store(path):  # another process may have made it meanwhile
                print(f"{path}: generating it, once")
                synthesize_store(path, scale, seed, undirected=undirected)
    return open_store(path)
