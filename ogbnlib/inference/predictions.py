"""Predictions of a run's model: exact, with every neighbor, or sampled as in its evaluations."""

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ..errors import InputError, clear_errors, format_bytes
from ..files import StrPath, check_new, check_space, home, locked, sibling_path, write_atomically
from ..graph.npz import Array
from ..graph.store import Store
from ..graph.store_format import HEADER_BYTES, label_dtype, npy_header
from ..memory.recorder import EventLog
from ..progress import Progress
from ..registry import MODELS
from ..runs.attempt import refuse_foreign_code
from ..sampling.pyg_stores import node_ids
from ..sources.formats import format_of
from ..sources.node_names import read_ids
from ..sources.resolve import find_store
from ..training.checkpoint import SavedModel
from .batches import Rows, propagated_scores, sampled_scores
from .exact import exact_scores
from .tables import best_classes, probabilities, write_table

# Bytes on disk for each byte of a file's rows, by the file's suffix. A table's rows are first in a
# temporary file, and a float32 takes up to 12 bytes as text.
_DISK_SHARES = {".npy": 1, ".parquet": 2, ".csv": 4}
Nodes = StrPath | Array | torch.Tensor | Sequence[int] | Sequence[str]


@clear_errors()
@torch.random.fork_rng(devices=[])  # restores the caller's random state: a new model draws
def predict(
    run_dir: StrPath,
    out: StrPath,
    *,
    nodes: Nodes = "labelled",
    sampled: bool = False,
    scores: bool = False,
    memory_limit: str | int | None = None,
    progress: Progress = True,
    say: Callable[[str], object] = print,
) -> Path:
    """Write a run's predictions to a new file, whole or not at all, in bounded memory; return
    its path.

    A .csv or .parquet file has the columns node_id (the node's name, or its number), class and
    probability, and with `scores` the probability of each class, in a column of the class's name.
    A .npy file has the class of each node, int16 or int64 [n], or with `scores` the scores before
    softmax, float32 [n, classes].

    Args:
        run_dir: Folder with the weights: best.pt if it exists, else checkpoint.pt.
        nodes: "labelled" (all nodes of the splits, by ascending id; a .npy file of them comes with
            `NAME-nodes.npy`, their ids), "all", or in this order a file of names (its only column,
            node_id or id), a list of names as for `Store.ids`, or an integer array or tensor of
            node numbers.
        sampled: Sample neighbors as the run's evaluations did, with the same accuracies. Otherwise
            every neighbor counts: sage and gcn are computed layer by layer over the whole graph.
        memory_limit: As for `propagate`.
    """
    saved = SavedModel.open(run_dir)
    config = saved.config
    refuse_foreign_code(config, saved.path.parent)  # another user's code must not run
    target = _check_target(out)
    graph = find_store(config.dataset)
    log = EventLog(None)  # records nothing
    # with propagated features, if the run trained on them
    store = config.policy.load().trained_store(graph, config, log, say=say, progress=progress)
    saved.check_data(store)
    ids = _wanted(nodes, graph)  # int64 [n], or a range for all nodes
    ids_path = target.with_name(f"{target.stem}-nodes.npy")
    ids_bytes = b""  # content of the file of ids; none is written if it is empty
    if target.suffix == ".npy" and isinstance(nodes, str) and nodes == "labelled":
        listed = np.asarray(ids)
        # not by np.save, which hides the cause of a failed write
        ids_bytes = npy_header(listed.dtype, listed.shape) + listed.tobytes()
        # A call killed between the two files may have left this one, with the same ids.
        if not (ids_path.is_file() and ids_path.read_bytes() == ids_bytes):
            check_new(ids_path)
    has_hops = store.hops is not None  # has propagated features
    if not (has_hops or sampled):
        exact = [name for name, entry in MODELS.items() if entry.load().exact_weights]
        if config.model not in exact:
            raise InputError(
                f"model: every neighbor can be counted for {' and '.join(exact)}, got {config.model}; "
                "add --sampled"
            )
    say(f"{saved.path}: predicting with its weights")
    with locked(sibling_path(target, "lock"), f"{target}: it is being written"):
        if has_hops:
            chunks = propagated_scores(saved, graph, store, ids, progress)
        elif sampled:
            chunks = sampled_scores(saved, graph, ids, memory_limit, progress)
        else:
            work = sibling_path(target, "work")
            chunks = exact_scores(saved, graph, ids, work, memory_limit, progress)

        # called with a temporary file, which replaces `target` at the end
        def write(file: BinaryIO) -> None:
            with contextlib.closing(chunks):
                _write_file(file, target, chunks, graph, ids, scores)
            if ids_bytes:  # last, when nothing else can fail
                write_atomically(ids_path, lambda part: part.write(ids_bytes), alone=True)

        write_atomically(target, write, alone=True)
    return target


def _check_target(out: StrPath) -> Path:
    target = Path(os.path.realpath(home(out)))
    if target.suffix not in (".npy", ".csv", ".parquet"):
        raise InputError(f"out: expected the name of a .npy, .csv or .parquet file, got {out!s}")
    check_new(target)
    return target


def _write_file(
    file: BinaryIO,
    target: Path,
    chunks: Iterable[Rows],
    graph: Store,
    ids: Array | range,
    scores: bool,
) -> None:
    # Writes the predictions of `ids` to `file`, in the format that the suffix of `target` names.
    num_rows = len(ids)
    finite = _finite(chunks, target, graph)
    width = graph.num_classes if scores else 2  # float32 a row: scores, or class and probability
    needed = num_rows * 4 * width * _DISK_SHARES[target.suffix]
    asked = f"{format_bytes(needed)} of free disk space for {num_rows:,} rows and a temporary file"
    check_space(target, needed, asked)
    if target.suffix != ".npy":
        convert = probabilities if scores else best_classes
        converted = ((places, convert(values)) for places, values in finite)
        # Chunks come in any order, and a table's rows are written in the order of `ids`.
        with tempfile.TemporaryFile(dir=target.parent) as rows:
            _write_rows(rows, converted, np.dtype(np.float32), (num_rows, width))
            write_table(file, target, rows, graph, ids, scores)
    elif scores:
        _write_rows(file, finite, np.dtype(np.float32), (num_rows, width))
    else:
        dtype = np.dtype(label_dtype(graph.num_classes))
        classes = ((places, values.argmax(1).astype(dtype)) for places, values in finite)
        _write_rows(file, classes, dtype, (num_rows,))


def _wanted(nodes: Nodes, store: Store) -> Array | range:
    # Returns distinct int64 ids of nodes, or a range for all nodes.
    if isinstance(nodes, str) and nodes == "all":
        return range(store.num_nodes)
    if isinstance(nodes, str) and nodes == "labelled":
        return np.unique(np.concatenate([*store.splits.values()]))
    if isinstance(nodes, str | os.PathLike):  # a file of names
        file = home(nodes)
        if format_of(file) is None:
            raise InputError(f"nodes: expected labelled, all, or a file of nodes, got {nodes!r}")
        return node_ids(read_ids(store, file), store)
    # integers or a mask of all nodes; anything else is a list of names
    if isinstance(nodes, np.ndarray | torch.Tensor) and np.asarray(nodes).dtype.kind in "iub":
        return node_ids(nodes, store)
    return node_ids(store.ids(nodes), store)


def _finite(chunks: Iterable[Rows], path: Path, graph: Store) -> Iterator[Rows]:
    for places, values in chunks:
        if not np.isfinite(values).all():
            raise InputError(
                f"{path}: scores are not finite; run `python -m ogbnlib verify {graph.path}`"
            )
        yield places, values


def _write_rows(
    file: BinaryIO, chunks: Iterable[Rows], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> None:
    # Writes an array of `shape` in .npy format: each row at its place, and none with the place -1.
    row_bytes = dtype.itemsize * math.prod(shape[1:])
    file.write(npy_header(dtype, shape))
    for places, rows in chunks:
        order = np.argsort(places, kind="stable")
        order = order[places[order] >= 0]
        # consecutive places are one write
        ends = np.flatnonzero(np.diff(places[order]) != 1) + 1
        for consecutive in np.split(order, ends):
            if len(consecutive):  # empty if no row of the chunk has a place
                file.seek(HEADER_BYTES + int(places[consecutive[0]]) * row_bytes)
                file.write(np.ascontiguousarray(rows[consecutive]).data)
