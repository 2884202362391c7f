"""Features propagated over the whole graph, once: a store's features, and what each hop brings to them.

`propagate` makes of a store another one, of the nodes that are kept, without edges: row v of its `x` has node v's own
features, then those that one hop, two hops, ... bring to it, A^k X. SGC (Wu et al. 2019), SIGN (Frasca et al. 2020) and
SAGN (Sun et al. 2021) learn from such rows alone. Columns do not mix: a block of them is held and taken through all
hops, then the next, and nothing else of the graph's size is held, or goes to disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from ..config import TrainConfig
from ..errors import MB, InputError, clear_errors, format_bytes, parse_bytes
from ..files import StrPath, check_new, check_space, home, locked, new_folder, sibling_path
from ..graph.bits import NodeSet
from ..graph.checks import index_dtype
from ..graph.npz import Array
from ..graph.store import Store, is_store, open_store
from ..graph.writer import StoreWriter
from ..memory.cgroup import effective_limit
from ..memory.reading import own_memory
from ..progress import counted
from ..sources.catalog import check_hops, made_once
from ..sources.convert import FeatureDtype, Progress
from .blocks import Blocks
from .columns import Propagation
from .plan import fixed_bytes, plan_hops, propagated_path
from .sweep import THREADS

Norm = Literal["row", "sym", "none"]
Nodes = Literal["labelled", "all"]
# Beyond `fixed_bytes`, where no kernel is in the cache yet: a peak of 717 MB for 643 planned.
_COMPILING_BYTES = 80 * MB


def left_bytes(memory_limit: str | int | None) -> int:
    """What this process may still take: of a limit for all of it, by default of its cgroup's or of what is free."""
    if memory_limit is not None:
        return parse_bytes(memory_limit) - own_memory()[0]
    return int(0.95 * min(effective_limit()[0] - own_memory()[0], psutil.virtual_memory().available))


def _write(made: Propagation, blocks: Blocks, target: Path, origin: dict[str, Any]) -> None:
    """The finished store, whole or not at all."""
    store, kept, num_kept = made.store, made.kept, made.num_kept
    row_shape = ((made.hops + 1) * store.num_features,)
    with new_folder(target) as folder:
        writer = StoreWriter(folder)
        with writer.create("x", made.dtype, row_shape) as x:
            blocks.merge(x, num_kept, made.hops, store.num_features)
        writer.write("row", np.empty(0, index_dtype(num_kept)))
        with writer.create("colptr", "<i8") as colptr:
            for first in range(0, num_kept + 1, 2**20):
                colptr.write(np.zeros(min(2**20, num_kept + 1 - first), np.int64))
        for name in ("y", "node_id", "node_name"):
            if name in store.files:
                _per_node(writer, name, store.files[name].dtype, store.chunks(name, checked=True), made)
        if "node_id" not in store.files and kept is not None:
            writer.write("node_id", kept.members().astype(index_dtype(store.num_nodes)))
        for name, ids in store.splits.items():
            writer.write(name, ids if kept is None else kept.ranks(ids))
        writer.finish(store.name, store.num_classes, undirected=store.undirected, origin=origin, hops=made.hops)


def _per_node(
    writer: StoreWriter, name: str, dtype: str, chunks: Iterator[tuple[int, Array]], made: Propagation
) -> None:
    with writer.create(name, dtype) as out:
        for first, values in chunks:
            out.write(made.pick(made.kept, first, values))


@clear_errors()
def propagate(
    store: Store,
    path: StrPath,
    *,
    hops: int = 2,
    norm: Norm = "sym",
    self_loops: bool = False,
    nodes: Nodes = "labelled",
    feature_dtype: FeatureDtype | None = None,
    memory_limit: str | int | None = None,
    progress: Progress = True,
    check: Callable[[], None] = lambda: None,
    say: Callable[[str], object] = lambda text: None,
) -> Store:
    """Propagate a store's features over its whole graph, in bounded memory; the result appears whole or not at all.

    Returns a store without edges: `x` [kept nodes, (hops + 1) * F] has a node's own features, then A X, A^2 X, ...;
    labels and splits are those of the store, `node_id` says which nodes these are.

    Args:
        path: new or empty.
        norm: "row", the mean over in-neighbors; "sym", 1 / sqrt(degree of the source * degree of the target) with the
            in-degrees of PyG's `gcn_norm`; "none", the sum. Edges that are there twice count twice.
        self_loops: count each node among its own neighbors, once, as `gcn_norm` with `add_self_loops`; else those that
            the graph has.
        nodes: those whose rows are kept: of the splits, or "all".
        feature_dtype: of the result, by default the store's. Sums are float32; with float16 what is between two hops is
            rounded to it too, but for norm "none".
        memory_limit: "4 GB" or bytes for this whole process; by default 95 % of what its limit or the machine has left.
            More of it makes fewer passes over the store.
        progress: True shows a bar; a function is called with a line every 30 s instead.
        check: called between pieces; what it raises ends the propagation.
        say: told the plan before the first block.

    What is done is kept, in blocks of columns, when it is ended or killed: called again, it goes on from there, with
    the same result for any block and any memory.

    Raises:
        InputError: before anything is written, for bad parameters, a target in use, too little memory or disk, a
            damaged store, features that are not finite; later for results beyond what `feature_dtype` can hold, and for
            a disk that refuses.
    """
    check_hops(store, hops, norm, nodes)
    if feature_dtype not in (None, "float16", "float32"):
        raise InputError(f"feature_dtype: expected float16 or float32, got {feature_dtype!r}")
    target, dtype = Path(os.path.realpath(home(path))), np.dtype(feature_dtype or store.feature_dtype)
    check_new(target)
    work, left = sibling_path(target, "blocks"), left_bytes(memory_limit) - fixed_bytes(store.size, hops, THREADS)
    left -= min(_COMPILING_BYTES, left // 2)
    with contextlib.closing(Propagation(store, hops, norm, self_loops, _kept(store, nodes), dtype)) as made:
        # At the least: how many nodes a hop has to make is known once the graph has been read.
        plan_hops(store.size, hops, norm, left_bytes=left, itemsize=dtype.itemsize, kept=0, reached=[0] * hops)
        there = sum(file.stat().st_size for file in work.rglob("*")) if work.is_dir() else 0
        needed = 2 * made.num_kept * (hops + 1) * store.num_features * dtype.itemsize - there
        check_space(target, needed, f"{format_bytes(needed)} of free disk space, half of it until it is done")
        how = {"hops": hops, "norm": norm, "self_loops": self_loops, "nodes": nodes}
        made_of = _made_of(store)
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(sibling_path(target, "hops.lock"), f"{target}: it is being written"):
            check_new(target)
            with counted("reading the graph", made.survey_bytes, progress) as tell:
                made.survey(_counted(tell, check))
            blocks = Blocks(work, {**how, "dtype": dtype.name, "made_of": made_of}, say)
            _fill(blocks, made, left, progress, check, say)
            origin = {"propagated": str(store.path), **how, "made_of": made_of}
            _write(made, blocks, target, {**origin, "num_nodes": store.origin.get("num_nodes", store.num_nodes)})
            shutil.rmtree(work)
    return open_store(target)


@clear_errors()
def propagated(store: Store, config: TrainConfig, **how: Any) -> Store:
    """The features that a run wants, propagated over its store: once, kept beside it or in `data_dir`.

    A store of propagated features is given back as it is. Another process that is at it already is waited for.

    Args:
        how: memory_limit, progress, say and check of `propagate`.

    Raises:
        InputError: as `propagate`; for features that were propagated in another way, or over data that have changed.
    """
    wanted: dict[str, Any] = {"hops": config.hops, "norm": config.norm, "self_loops": config.self_loops}
    target = store.path
    if store.hops is None:
        target = propagated_path(store, config)
        with made_once(target, how.get("check", lambda: None)):
            if not is_store(target):
                how["say"](f"{store.path}: propagating its features, once, to {target}")
                return propagate(store, target, **wanted, **how)
    made = open_store(target)
    for name, value in wanted.items():
        if (found := made.origin.get(name)) != value:
            raise InputError(f"{name}: {target} has features propagated with {name}={found!r}, got {value!r}")
    if store.hops is None and made.origin.get("made_of") != _made_of(store):
        raise InputError(f"{target}: it was propagated over other data than {store.path} has now; move it away")
    return made


def _made_of(store: Store) -> dict[str, int]:
    return {name: info.crc32 for name, info in store.files.items()}


def _kept(store: Store, nodes: Nodes) -> NodeSet | None:
    if nodes == "all":
        return None
    kept = NodeSet(store.num_nodes)
    for ids in store.splits.values():
        kept.add(ids)
    return kept


def _counted(tell: Callable[[int], object], check: Callable[[], None]) -> Callable[[int], None]:
    def done(count: int) -> None:
        check()
        tell(count)

    return done


def _fill(
    blocks: Blocks,
    made: Propagation,
    left: int,
    progress: Progress,
    check: Callable[[], None],
    say: Callable[[str], object],
) -> None:
    """All blocks that are not there yet."""
    store, plan = made.store, made.plan(left)
    todo = list(blocks.todo(store.num_features, plan.width))
    there = store.num_features - sum(columns.stop - columns.start for columns in todo)
    say(f"{store.path}: {plan}" + (f"; {there} columns are done already" if there else ""))
    each = store.files["x"].bytes + made.hops * made.edges.nbytes
    with counted("propagating", each * len(todo), progress) as tell:
        for columns in todo:
            with new_folder(blocks.path(columns)) as folder:
                made.block(columns, folder, _counted(tell, check))
