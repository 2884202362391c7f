"""Data sets by name: a store, or an official data set, which is converted once and found again.

The store of an official data set is `NAME.store` (or `NAME-undirected.store`,
`NAME-float16.store`) in `data_dir`.
"""

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
from .convert import convert
from .description import FeatureDtype
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
    say: Callable[[str], object] = print,
    progress: Progress = True,
    check: Callable[[], None] = lambda: None,
) -> Store:
    """Open a store, or the store of an official data set, which is first converted, once.

    Waits if another process is converting the same data. Other data become a store by `convert`.

    Args:
        dataset: a store's folder, or an official name such as "ogbn-arxiv"; a folder of that name
            takes precedence.
        data_dir: the folder of official data sets and their stores, by default "dataset".
        undirected: add reverse edges. If omitted, an existing store's own setting is used; a new
            store has none.
        feature_dtype: dtype of a new store's features, "float16", "float32" or "int8"; by default
            the data's own, float32 for float64.
        say: called with a line on the data and the place and size of a new store, then with the
            store's summary.
        memory_limit, progress, check: as in `convert`; `check` is also called while waiting.
    """
    return _open(
        DataRequest(dataset, data_dir, undirected, feature_dtype),
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
        from .folder import open_official  # imports pyarrow and pandas

        source = open_official(pending.official)
        say(f"{pending.official.folder}: converting it, once, to {pending.target}")
        store = convert(
            source,
            pending.target,
            undirected=request.undirected,
            feature_dtype=cast(FeatureDtype | None, request.feature_dtype),
            memory_limit=memory_limit,
            progress=progress,
            check=check,
        )
        say(summarized(store))
        return store


def made_once(target: Path, check: Callable[[], None]) -> contextlib.AbstractContextManager[int]:
    """Return a lock under which one process creates `target` while the others wait.

    `check` is called while waiting; its exception ends the wait.
    """
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
    """Open the data set of a run, like `open_dataset`."""
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
    """Return the folder of a data set's store for a notebook, creating the store on first use.

    If `dataset` is "", the data set is synthetic, of this `scale` and `seed`.
    """
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
