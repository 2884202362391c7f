"""Features propagated over the whole graph once, for SGC (Wu et al. 2019), SIGN (Frasca et al. 2020) and SAGN (Sun et
al. 2021). Columns are independent: one block of columns at a time is in RAM and goes through all hops.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from ..config import TrainConfig
from ..errors import MB, InputError, clear_errors, format_bytes, parse_bytes
from ..files import StrPath, check_new, check_space, home, locked, new_folder, sibling_path
from ..graph.bits import NodeSet
from ..graph.checks import index_dtype
from ..graph.store import Store, is_store, open_store
from ..graph.writer import StoreWriter
from ..memory.cgroup import effective_limit
from ..memory.reading import own_memory
from ..progress import counted
from ..sources.catalog import check_hops, made_once
from ..sources.convert import FeatureDtype, Progress
from .columns import Blocks, Propagation
from .plan import fixed_bytes, plan_hops, propagated_path
from .sweep import THREADS

Norm = Literal["row", "sym", "none"]
Nodes = Literal["labelled", "all"]
# Beyond `fixed_bytes` if no kernel is in the cache yet: the peak was 717 MB for 643 planned.
_COMPILING_BYTES = 80 * MB


def left_bytes(memory_limit: str | int | None) -> int:
    """Return the bytes that this process may still take: of `memory_limit`, or 95 % of its cgroup or free memory."""
    if memory_limit is not None:
        return parse_bytes(memory_limit) - own_memory()[0]
    return int(0.95 * min(effective_limit()[0] - own_memory()[0], psutil.virtual_memory().available))


def _write(run: Propagation, blocks: Blocks, target: Path, origin: dict[str, Any]) -> None:
    store, members, num_kept = run.store, run.kept, run.num_kept
    with new_folder(target) as folder:
        writer = StoreWriter(folder)
        with writer.create("x", run.dtype, ((run.hops + 1) * store.num_features,)) as x:
            blocks.merge(x, num_kept, run.hops, store.num_features)
        writer.write("row", np.empty(0, index_dtype(num_kept)))
        with writer.create("colptr", "<i8") as colptr:
            for first in range(0, num_kept + 1, 2**20):
                colptr.write(np.zeros(min(2**20, num_kept + 1 - first), np.int64))
        for name in ("y", "node_id", "node_name"):
            if name in store.files:
                with writer.create(name, store.files[name].dtype) as out:
                    for first, values in store.chunks(name, checked=True):
                        out.write(run.pick(members, first, values))
        if "node_id" not in store.files and members is not None:
            writer.write("node_id", members.members().astype(index_dtype(store.num_nodes)))
        for name, ids in store.splits.items():
            writer.write(name, ids if members is None else members.ranks(ids))
        writer.finish(store.name, store.num_classes, undirected=store.undirected, origin=origin, hops=run.hops)


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

    Returns a store without edges: `x` [kept nodes, (hops + 1) * F] has a node's own features, then A X, A^2 X, ...
    `node_id` has the kept nodes' ids in the graph. A call that was ended or killed is continued by the next, with the
    same result for any memory.

    Args:
        path: new or empty.
        norm: "row", the mean over in-neighbors; "sym", 1 / sqrt(degree of the source * degree of the target) with the
            in-degrees of PyG's `gcn_norm`; "none", the sum. Duplicate edges count twice.
        self_loops: count each node among its own neighbors, once, as `gcn_norm` with `add_self_loops`. Otherwise the
            graph's own self-loops count.
        nodes: keep the rows of nodes in splits ("labelled"), or "all".
        feature_dtype: of the result, by default the store's. Sums are float32. With float16, values between hops are
            rounded to it too, except for norm "none".
        memory_limit: "4 GB" or bytes for this whole process; by default 95 % of what its limit or the machine has left.
        progress: True shows a bar; a function is called with a line every 30 s instead.
        check: called between pieces; an exception ends the propagation.
        say: called with the plan before the first block.
    """
    check_hops(store, hops, norm, nodes)
    if feature_dtype not in (None, "float16", "float32"):
        raise InputError(f"feature_dtype: expected float16 or float32, got {feature_dtype!r}")
    target, dtype = Path(os.path.realpath(home(path))), np.dtype(feature_dtype or store.feature_dtype)
    check_new(target)
    members = None
    if nodes == "labelled":
        members = NodeSet(store.num_nodes)
        for ids in store.splits.values():
            members.add(ids)
    work, room = sibling_path(target, "blocks"), left_bytes(memory_limit) - fixed_bytes(store.size, hops, THREADS)
    room -= min(_COMPILING_BYTES, room // 2)
    with contextlib.closing(Propagation(store, hops, norm, self_loops, members, dtype)) as run:
        # A lower bound: how many nodes each hop must compute is known once the graph has been read.
        plan_hops(store.size, hops, norm, left_bytes=room, itemsize=dtype.itemsize, kept=0, reached=[0] * hops)
        finished = sum(file.stat().st_size for file in work.rglob("*")) if work.is_dir() else 0
        needed = 2 * run.num_kept * (hops + 1) * store.num_features * dtype.itemsize - finished
        check_space(target, needed, f"{format_bytes(needed)} of free disk space, half of it until it is done")
        how = {"hops": hops, "norm": norm, "self_loops": self_loops, "nodes": nodes, "made_of": _made_of(store)}
        target.parent.mkdir(parents=True, exist_ok=True)

        def checked(num_bytes: int) -> None:
            check()
            count(num_bytes)

        with locked(sibling_path(target, "hops.lock"), f"{target}: it is being written"):
            check_new(target)
            x_bytes = store.files["x"].bytes
            survey_bytes = x_bytes + max(1, hops - 1) * run.edges.nbytes
            with counted("reading the graph", survey_bytes, progress) as count:
                run.survey(checked)
            blocks, plan = Blocks(work, {**how, "dtype": dtype.name}), run.plan(room)
            todo = list(blocks.todo(store.num_features, plan.width))
            say(f"{store.path}: {plan}")
            with counted("propagating", (x_bytes + hops * run.edges.nbytes) * len(todo), progress) as count:
                for columns in todo:
                    with new_folder(blocks.path(columns)) as folder:
                        run.block(columns, folder, checked)
            num_nodes = store.origin.get("num_nodes", store.num_nodes)
            _write(run, blocks, target, {"propagated": str(store.path), **how, "num_nodes": num_nodes})
            shutil.rmtree(work)
    return open_store(target)


@clear_errors()
def propagated(store: Store, config: TrainConfig, **how: Any) -> Store:
    """Return the propagated features for a run; propagated once, next to its store or in `data_dir`.

    `how` are memory_limit, progress, say and check of `propagate`.
    """
    parameters: dict[str, Any] = {"hops": config.hops, "norm": config.norm, "self_loops": config.self_loops}
    target = store.path
    if store.hops is None:
        target = propagated_path(store, config)
        with made_once(target, how.get("check", lambda: None)):
            if not is_store(target):
                how["say"](f"{store.path}: propagating its features, once, to {target}")
                return propagate(store, target, **parameters, **how)
    result = open_store(target)
    for name, value in parameters.items():
        if (before := result.origin.get(name)) != value:
            raise InputError(f"{name}: {target} has features propagated with {name}={before!r}, got {value!r}")
    if store.hops is None and result.origin.get("made_of") != _made_of(store):
        raise InputError(f"{target}: it was propagated over other data than {store.path} has now; move it away")
    return result


def _made_of(store: Store) -> dict[str, int]:
    return {name: info.crc32 for name, info in store.files.items()}
