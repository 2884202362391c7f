"""Predictions of a run's model: exact, with every neighbor, or sampled as in its evaluations."""

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from .config import TrainConfig
from .errors import InputError, clear_errors, no_exit
from .files import StrPath, check_new, check_own, home, locked, sibling_path, write_atomically
from .graph.bits import NodeSet
from .graph.npz import Array, load
from .graph.store import Store
from .graph.store_format import HEADER_BYTES, label_dtype, npy_header
from .memory.cuda import resolve_device
from .progress import Progress, counted
from .propagation.hops import left_bytes, propagated
from .propagation.layers import Layer, layer_scores
from .propagation.loader import HopLoader
from .propagation.plan import fixed_bytes
from .registry import MODELS
from .runs.attempt import announce_code
from .sampling.loading import loader, node_ids
from .sampling.policies import STREAM
from .sources.catalog import open_for
from .training.call import Call
from .training.checkpoint import check_data, fingerprint, load_state, read_model
from .training.custom_model import make_model
from .training.train import kept_random_state

Rows: TypeAlias = tuple[Array, Array]  # positions of rows in the file, int64, and their scores
_STEP_BYTES = 256 * 2**20  # buffers between the layers, and the products' own memory


def _exact(
    store: Store, config: TrainConfig, weights: dict[str, Any], ids: Array | None, work: Path,
    memory_limit: str | int | None, progress: Progress,
) -> Iterator[Rows]:  # fmt: skip
    """Yield scores with every neighbor counted, in ascending order of the nodes."""
    layers = []
    targets = None
    order = None
    begin = 0
    for i in range(len(config.num_neighbors)):
        names = [f"convs.{i}.{name}" for name in MODELS[config.model].load().exact_weights]
        layers.append(Layer(*(weights[name].float().cpu().numpy().T for name in names)))
    if ids is not None:
        targets, order = NodeSet(store.num_nodes), np.argsort(ids)
        targets.add(ids)
    room = left_bytes(memory_limit) - fixed_bytes(store.size, len(layers)) - _STEP_BYTES
    if check_own(work):  # from a killed process
        shutil.rmtree(work)
    work.mkdir()
    try:
        with contextlib.closing(
            layer_scores(store, layers, targets, room, work, progress)
        ) as chunks:
            for values in chunks:
                places = np.arange(begin, begin + len(values))
                yield places if order is None else order[places], values
                begin += len(values)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _by_model(
    config: TrainConfig, weights: dict[str, Any], path: Path, store: Store, batches: Iterable[Any], total: int,
    progress: Progress,
) -> Iterator[Rows]:  # fmt: skip
    """Yield scores of the seeds of `total` batches; `input_id` of a batch is their position in the
    file."""
    model = make_model(config, store.num_features, store.num_classes, path.parent, store=store)
    load_state(model, weights, path)
    device, call = resolve_device(config.device), Call.of(model, config.precision)
    model.to(device).eval()
    with torch.no_grad(), counted("predicting", total, progress, "batches") as done:
        for batch in batches:
            if config.feature_dtype == "float16" and not config.on_disk:
                batch.x = batch.x.half()  # the run rounded features in memory
            yield batch.input_id.numpy(), call(model, batch, device).cpu().numpy()
            done(1)


def _by_split(store: Store, ids: Array | None, size: int) -> list[tuple[int, Array, Array]]:
    """For each split, and the nodes in none: number added to the seed, nodes in whole batches,
    positions in `ids`."""
    # Batches have `size` nodes, as the run's evaluations; a node outside `ids` has position -1.
    # If fan-outs differ by hop, or with gcn, a score also depends on the other seeds of its batch.
    others = np.ones(store.num_nodes if ids is None else len(ids), np.bool_)
    order = None if ids is None else np.argsort(ids)
    parts = []
    for split, nodes in store.splits.items():
        places = np.asarray(nodes)
        if ids is not None and order is not None:
            at = np.minimum(np.searchsorted(ids, nodes, sorter=order), len(ids) - 1)
            places = np.where(ids[order[at]] == nodes, order[at], -1)
        others[places[places >= 0]] = False
        batch = np.arange(len(nodes)) // size
        whole = np.isin(batch, batch[places >= 0])
        parts.append((STREAM[split], nodes[whole], places[whole]))
    rest = np.flatnonzero(others)
    parts.append((0, rest if ids is None else ids[rest], rest))
    return [part for part in parts if len(part[1])]


def _sampled(
    store: Store,
    config: TrainConfig,
    parts: list[tuple[int, Array, Array]],
    size: int,
    memory_limit: str | int | None,
) -> Iterator[Any]:
    """Yield batches of the nodes of `_by_split`; `input_id` is each seed's position, -1 for nodes
    outside."""
    for stream, nodes, places in parts:
        batches_of_nodes = loader(
            store,
            nodes,
            num_neighbors=config.fan_out(training=False),
            batch_size=size,
            memory_limit=memory_limit,
            shuffle=False,
            seed=config.seed + stream,
        )
        with contextlib.closing(batches_of_nodes) as batches:
            for batch in batches:
                batch.input_id = torch.from_numpy(places)[batch.input_id]
                yield batch


@clear_errors()
@no_exit()
@kept_random_state()
def predict(
    run_dir: StrPath,
    out: StrPath,
    *,
    nodes: str | Any = "labelled",
    sampled: bool = False,
    scores: bool = False,
    memory_limit: str | int | None = None,
    progress: Progress = True,
    say: Callable[[str], object] = print,
    trust: bool = False,
) -> Path:
    """Write a run's predictions to a new .npy file, whole or not at all, in bounded memory; return
    its path.

    The file has the class of each node, int16 or int64 [n], or its scores, float32 [n, classes].
    Its rows are all nodes, the given ids in their order, or the labelled nodes by ascending id;
    then `NAME-nodes.npy` has the ids.

    Args:
        run_dir: Folder of the weights: best.pt if it exists, else checkpoint.pt.
        nodes: "labelled" (in any split), "all", a .npy file of ids, or ids.
        sampled: Sample neighbors as the run's evaluations did, with the same accuracies. Otherwise
            all neighbors count, for sage and gcn layer by layer over the whole graph.
        memory_limit: As for `propagate`.
        trust: Allow the code of a model (model.py) in a run's folder of another user.
    """
    config, weights, data, path = read_model(run_dir)
    announce_code(config, path.parent, trust, say)
    target = Path(os.path.realpath(home(out)))
    if target.suffix != ".npy":
        raise InputError(f"out: expected the name of a .npy file, got {out!s}")
    beside = target.with_name(f"{target.stem}-nodes.npy")
    for file in (target, beside):
        check_new(file)
    store = open_for(config, memory_limit=memory_limit, say=say, progress=progress is True)
    if not config.propagated or store.hops is not None:
        check_data(path, data, fingerprint(store, config))
    if isinstance(nodes, str) and nodes in ("labelled", "all"):
        ids = None if nodes == "all" else np.unique(np.concatenate([*store.splits.values()]))
    elif isinstance(nodes, str | os.PathLike):
        if (file := home(nodes)).suffix != ".npy":
            raise InputError(
                f"nodes: expected labelled, all or a .npy file of node ids, got {nodes!r}"
            )
        ids = node_ids(load(file), store)
    else:
        ids = node_ids(nodes, store)
    whole, size = config.propagated, config.eval_batch_size or config.batch_size
    exact = [name for name, entry in MODELS.items() if entry.load().exact_weights]
    if not (whole or sampled or config.model in exact):
        raise InputError(
            f"model: every neighbor can be counted for {' and '.join(exact)}, got {config.model}; "
            "add --sampled"
        )
    say(f"{path}: predicting with its weights")
    with locked(sibling_path(target, "lock"), f"{target}: it is being written"):
        if whole:
            hop_store = (
                store
                if store.hops is not None
                else propagated(store, config, progress=progress, say=say)
            )
            check_data(path, data, fingerprint(hop_store, config))
            targets = np.arange(store.num_nodes) if ids is None else ids
            targets = (
                targets if store.node_id is None or hop_store is store else store.node_id[targets]
            )
            own = hop_store.node_id
            own = (
                np.arange(hop_store.num_nodes)
                if own is None or hop_store is store
                else np.asarray(own)
            )
            places = np.minimum(np.searchsorted(own, targets), len(own) - 1)
            if missing := int((own[places] != targets).sum()):
                raise InputError(
                    f"nodes: {hop_store.path} has no features of {missing} of these nodes; propagate for all nodes "
                    "(python -m ogbnlib propagate --nodes all) and train from that store"
                )
            labels = torch.zeros(len(places), dtype=torch.int64)
            batches = HopLoader(hop_store, torch.from_numpy(places), labels, batch_size=size)
            chunks = _by_model(config, weights, path, hop_store, batches, len(batches), progress)
        elif sampled:
            parts = _by_split(store, ids, size)
            total = sum(-(-len(nodes) // size) for _, nodes, _ in parts)
            sampled_batches = _sampled(store, config, parts, size, memory_limit)
            chunks = _by_model(config, weights, path, store, sampled_batches, total, progress)
        else:
            chunks = _exact(
                store, config, weights, ids, sibling_path(target, "work"), memory_limit, progress
            )
        dtype = np.dtype(np.float32 if scores else label_dtype(store.num_classes))
        shape = (
            store.num_nodes if ids is None else len(ids),
            *([store.num_classes] if scores else []),
        )

        def write(file: Any) -> None:
            file.write(npy_header(dtype, shape))
            for places, values in chunks:
                if not np.isfinite(values).all():
                    raise InputError(
                        f"{target}: scores are not finite; run `python -m ogbnlib verify {store.path}`"
                    )
                rows = values if scores else values.argmax(1).astype(dtype)
                order = np.argsort(places, kind="stable")
                order = order[places[order] >= 0]
                # consecutive rows
                for run in np.split(order, np.flatnonzero(np.diff(places[order]) != 1) + 1):
                    if len(run):
                        file.seek(
                            HEADER_BYTES
                            + int(places[run[0]]) * dtype.itemsize * math.prod(shape[1:])
                        )
                        file.write(np.ascontiguousarray(rows[run]).data)
            if isinstance(nodes, str) and nodes == "labelled":  # last, when nothing else can fail
                own = np.asarray(ids)  # written here, as np.save hides the cause of a failed write
                write_atomically(
                    beside,
                    lambda other: other.write(npy_header(own.dtype, own.shape) + own.tobytes()),
                )

        write_atomically(target, write)
    return target
