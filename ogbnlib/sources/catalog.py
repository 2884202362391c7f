"""What a data set's name means, in one place."""

from __future__ import annotations

from pathlib import Path

from ..config import TrainConfig
from ..errors import InputError, format_bytes
from ..files import StrPath
from ..graph.store import Dataset, Store, is_store, open_store
from . import official
from .convert import convert
from .ogb import open_raw
from .synth import synthesize, synthesize_store


def check_store(dataset: Dataset, config: TrainConfig) -> None:
    """Refuse what `config` asks of a data set that does not hold it: a store, reverse edges, as many hops.

    Raises:
        InputError: naming the parameter.
    """
    if not isinstance(dataset, Store):
        if config.loading == "store":
            raise InputError(
                f"dataset: loading='store' needs a store, found {dataset.path} in OGB's layout; make one with "
                f"`python -m ogbnlib convert {dataset.path} STORE_DIR`"
            )
        return
    store = dataset
    if config.undirected and not store.undirected and (config.loading == "store" or store.keep_hops is not None):
        raise InputError(f"undirected: {store.path} has no reverse edges; convert it with --undirected")
    if store.keep_hops is not None and len(config.num_neighbors) > store.keep_hops:
        raise InputError(
            f"num_neighbors: {store.path} keeps {store.keep_hops} hops, got {len(config.num_neighbors)}; "
            "convert it with a larger --keep-hops"
        )
    if config.loading == "store" and config.engine == "pyg":
        raise InputError("engine: loading='store' samples with engine='numba' only, got 'pyg'")


def prepare_dataset(dataset: str, data_dir: StrPath, scale: float, seed: int = 0) -> str:
    """`dataset` itself where one is named, else the generated one of this scale and seed, made on first use.

    Raises:
        InputError: as `synthesize` and `open_raw` do.
    """
    if dataset:
        return dataset
    path = Path(data_dir) / f"synthetic-{scale:g}-seed{seed}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        synthesize(path, scale=scale, seed=seed, progress=False)
    facts = open_raw(path)
    print(f"{path}: {facts.num_nodes:,} nodes, {facts.num_edges:,} edges, {facts.num_features} features")
    return str(path)


def prepare_store(dataset: str, data_dir: StrPath, scale: float, seed: int = 0, *, undirected: bool = True) -> str:
    """The store of a data set in OGB's layout, or without one of the generated data set, made on first use.

    Args:
        dataset: A folder in OGB's layout, which is converted into `data_dir`; a store, which is taken as it is; or "".

    Raises:
        InputError: for a store of the other direction or of another folder, and as `convert` and `synthesize_store` do.
    """
    direction = "undirected" if undirected else "directed"
    raw = Path(dataset).resolve()
    if dataset and is_store(dataset):
        path = Path(dataset)
    else:
        name = raw.name if dataset else f"synthetic-{scale:g}-seed{seed}"
        path = Path(data_dir) / f"{name}-{direction}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            if dataset:
                convert(dataset, path, undirected=undirected, progress=False)
            else:
                synthesize_store(path, scale=scale, seed=seed, undirected=undirected, progress=False)
    store = open_store(path)
    if store.undirected != undirected:
        raise InputError(
            f"undirected: expected {path} to be {direction}, found it converted with undirected={store.undirected}; "
            "name the folder in OGB's layout that it was made from"
        )
    if dataset and path != Path(dataset) and store.origin.get("raw") != str(raw):
        raise InputError(
            f"{path}: expected the store of {raw}, found one of {store.origin.get('raw', 'other data')}; "
            "use another data_dir, or move it away"
        )
    print(f"{path}: {store.num_nodes:,} nodes, {store.num_edges:,} edges, {format_bytes(store.nbytes)} on disk")
    return str(path)


def open_dataset(config: TrainConfig) -> Dataset:
    """The data set that `config.dataset` names: an official OGB name or a folder in OGB's raw layout."""
    if config.dataset.startswith("ogbn-"):
        return official.read_official(config.dataset, config.root, download=config.download, reader=config.reader)
    if is_store(config.dataset):
        return open_store(config.dataset)
    if config.reader == "ogb":
        return official.read_with_ogb(config.dataset)
    return open_raw(config.dataset)
