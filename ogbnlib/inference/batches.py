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

    nodes: Array  # int64 [n], ids
    places: Array  # int64 [n], row numbers in the result
    stream: int  # added to the run's random seed, so that each split has its own neighbors


def loaded_model(saved: SavedModel, store: Store) -> torch.nn.Module:
    """Create a run's model and load its weights; refuse weights of other shapes."""
    folder = saved.path.parent  # has the code of a custom model
    model = make_model(saved.config, store.num_features, store.num_classes, folder)
    load_state(model, dict(saved.weights), saved.path)
    return model


def _model_scores(
    saved: SavedModel, store: Store, batches: Iterable[Data], num_batches: int, progress: Progress
) -> Generator[Rows, None, None]:
    # `input_id` of a batch has the row numbers of its seeds in the result.
    config = saved.config
    model = loaded_model(saved, store)
    device = resolve_device(config.device)
    call = Call.of(model, config.precision)
    model.to(device).eval()
    with torch.no_grad(), counted("predicting", num_batches, progress, "batches") as done:
        for batch in batches:
            if config.rounds_in_ram:
                batch.x = batch.x.half()  # rounded as in the run's own batches
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
    batch_size = saved.config.seeds_per_batch(training=False)
    seeds_by_split = _by_split(store, ids, batch_size)
    num_batches = sum(-(-len(seeds.nodes) // batch_size) for seeds in seeds_by_split)
    batches = _sampled_batches(store, saved, seeds_by_split, memory_limit)
    return _model_scores(saved, store, batches, num_batches, progress)


def _by_split(store: Store, ids: Array | range, batch_size: int) -> list[_Seeds]:
    # Returns the seeds of each split, and last those of `ids` that are in no split.
    # With gcn, or if fan-outs differ by hop, a score also depends on the other seeds of its batch.
    # So the batches are those of the run's evaluations. They include nodes outside `ids`, with the
    # row -1.
    is_unsplit = np.ones(len(ids), np.bool_)  # by position in `ids`
    seeds = []
    for split, nodes in store.splits.items():
        places = _positions(ids, nodes)
        is_wanted = places >= 0
        is_unsplit[places[is_wanted]] = False
        batch = np.arange(len(nodes)) // batch_size  # number of each node's batch in an evaluation
        is_sampled = np.isin(batch, batch[is_wanted])  # all nodes of batches with a wanted node
        seeds.append(_Seeds(nodes[is_sampled], places[is_sampled], STREAM[split]))
    unsplit = np.flatnonzero(is_unsplit)
    nodes = unsplit if isinstance(ids, range) else ids[unsplit]
    seeds.append(_Seeds(nodes, unsplit, stream=0))  # any stream: no evaluation has these nodes
    return [each for each in seeds if len(each.nodes)]


def _positions(ids: Array | range, wanted: Array) -> Array:
    """Return the position of each node of `wanted` among the distinct `ids`, int64, or -1."""
    if isinstance(ids, range):  # of all nodes
        return wanted
    order = np.argsort(ids, kind="stable")
    rank = np.searchsorted(ids, wanted, sorter=order)
    at = order[np.minimum(rank, len(ids) - 1)]  # an id above all of `ids` has the rank len(ids)
    return np.where(ids[at] == wanted, at, -1)


def _sampled_batches(
    store: Store, saved: SavedModel, seeds_by_split: list[_Seeds], memory_limit: str | int | None
) -> Iterator[Data]:
    for seeds in seeds_by_split:
        loader = store.loader(
            seeds.nodes,
            num_neighbors=saved.config.fan_out(training=False),
            batch_size=saved.config.seeds_per_batch(training=False),
            memory_limit=memory_limit,
            shuffle=False,
            seed=saved.config.seed + seeds.stream,
        )
        with contextlib.closing(loader):
            for batch in loader:
                # from positions among the seeds to rows in the result
                batch.input_id = torch.from_numpy(seeds.places)[batch.input_id]
                yield batch


def propagated_scores(
    saved: SavedModel, graph: Store, store: Store, ids: Array | range, progress: Progress
) -> Generator[Rows, None, None]:
    """Yield scores of the nodes `ids` of `graph` from the propagated features in `store`, which may
    be `graph` itself."""
    nodes = np.asarray(ids)
    # `node_id` has the id of each row; in a store without it, the row of a node is its id
    wanted = nodes if graph.node_id is None else graph.node_id[nodes]
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
        labels=torch.zeros(len(places), dtype=torch.int64),  # not used
        batch_size=saved.config.seeds_per_batch(training=False),
    )
    return _model_scores(saved, store, batches, len(batches), progress)
