"""Scores of a run's model batch by batch: with sampled neighbors as in its evaluations, or from
propagated features."""

import contextlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch_geometric.data import Data

from ..errors import InputError
from ..graph.npz import Array
from ..graph.store import Store
from ..launcher import resolve_device
from ..progress import Progress, counted
from ..propagation.hop_loader import HopLoader
from ..sampling.policies import STREAM
from ..training.call import Call
from ..training.checkpoint import SavedModel, load_state
from ..training.custom_model import make_model

Rows: TypeAlias = tuple[Array, Array]  # row numbers in the result, int64, and the rows' scores


@dataclass(frozen=True)
class _Seeds:
    """Seed nodes in whole batches, and the row of each in the result; -1 for seeds without one."""

    nodes: Array
    places: Array
    stream: int  # added to the run's random seed


def loaded_model(saved: SavedModel, store: Store) -> torch.nn.Module:
    """Create a run's model and load its weights; refuse weights of other shapes."""
    folder = saved.path.parent
    model = make_model(saved.config, store.num_features, store.num_classes, folder)
    load_state(model, dict(saved.weights), saved.path)
    return model


def _model_scores(
    saved: SavedModel, store: Store, batches: Iterable[Data], num_batches: int, progress: Progress
) -> Generator[Rows, None, None]:
    config = saved.config
    model = loaded_model(saved, store)
    device = resolve_device(config.device)
    call = Call.of(model, config.precision)
    model.to(device).eval()
    with torch.no_grad(), counted("predicting", num_batches, progress, "batches") as done:
        for batch in batches:
            if config.rounds_in_ram:
                batch.x = batch.x.half()
            yield batch.input_id.numpy(), call(model, batch, device).cpu().numpy()
            done(1)


def sampled_scores(
    saved: SavedModel,
    store: Store,
    ids: Array | range,
    memory_limit: str | int | None,
    progress: Progress,
) -> Generator[Rows, None, None]:
    """Yield scores of the nodes `ids`, with neighbors sampled as in the run's evaluations."""
    size = saved.config.seeds_per_batch(training=False)
    parts = _by_split(store, ids, size)
    num_batches = sum(-(-len(part.nodes) // size) for part in parts)
    batches = _sampled_batches(store, saved, parts, memory_limit)
    return _model_scores(saved, store, batches, num_batches, progress)


def _by_split(store: Store, ids: Array | range, size: int) -> list[_Seeds]:
    # With gcn, or if fan-outs differ by hop, a score also depends on the other seeds of its batch.
    # So the batches are those of the run's evaluations, `size` nodes each. They include nodes
    # outside `ids`, with the row -1.
    is_unsplit = np.ones(len(ids), np.bool_)
    parts = []
    for split, nodes in store.splits.items():
        places = _positions(ids, nodes)
        is_wanted = places >= 0
        is_unsplit[places[is_wanted]] = False
        batch = np.arange(len(nodes)) // size
        whole = np.isin(batch, batch[is_wanted])
        parts.append(_Seeds(nodes[whole], places[whole], STREAM[split]))
    unsplit = np.flatnonzero(is_unsplit)
    nodes = unsplit if isinstance(ids, range) else ids[unsplit]
    parts.append(_Seeds(nodes, unsplit, 0))
    return [part for part in parts if len(part.nodes)]


def _positions(ids: Array | range, wanted: Array) -> Array:
    """Return the position of each of `wanted` in `ids`, a range for all nodes; -1 for those that
    are not there."""
    if isinstance(ids, range):
        return wanted
    order = np.argsort(ids, kind="stable")
    at = order[np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)]
    return np.where(ids[at] == wanted, at, -1)


def _sampled_batches(
    store: Store, saved: SavedModel, parts: list[_Seeds], memory_limit: str | int | None
) -> Iterator[Data]:
    for part in parts:
        batches_of_nodes = store.loader(
            part.nodes,
            num_neighbors=saved.config.fan_out(training=False),
            batch_size=saved.config.seeds_per_batch(training=False),
            memory_limit=memory_limit,
            shuffle=False,
            seed=saved.config.seed + part.stream,
        )
        with contextlib.closing(batches_of_nodes) as batches:
            for batch in batches:
                batch.input_id = torch.from_numpy(part.places)[batch.input_id]
                yield batch


def propagated_scores(
    saved: SavedModel, graph: Store, store: Store, ids: Array | range, progress: Progress
) -> Generator[Rows, None, None]:
    """Yield scores of the nodes `ids` of `graph` from the propagated features in `store`, which may
    be `graph` itself."""
    nodes = np.asarray(ids)
    wanted = nodes if graph.node_id is None else graph.node_id[nodes]
    # in a store without `node_id`, the row of a node is its id
    node_ids = range(store.num_nodes) if store.node_id is None else np.asarray(store.node_id)
    places = _positions(node_ids, wanted)
    missing = int((places < 0).sum())
    if missing:
        raise InputError(
            f"nodes: {store.path} has no features of {missing} of these nodes; propagate for all nodes "
            '(ogbnlib.propagate(store, path, nodes="all")) and train from that store'
        )
    batches = HopLoader(
        store,
        torch.from_numpy(places),
        labels=torch.zeros(len(places), dtype=torch.int64),
        batch_size=saved.config.seeds_per_batch(training=False),
    )
    return _model_scores(saved, store, batches, len(batches), progress)
