"""Propagation of features over the whole graph, once, for SGC, SIGN and SAGN.

SGC: Wu et al. 2019; SIGN: Frasca et al. 2020; SAGN: Sun et al. 2021. Each hop is written to disk
before the next one is computed, as many columns (features of all nodes) at a time as fit in RAM.

Norm "sym" multiplies by S A S with S = degree^-1/2. As (S A S)^k X = S^-1 (S^2 A)^k S X, each hop
is computed as a mean, as with norm "row". So no value between hops exceeds the largest feature.
"""

import contextlib
import functools
import shutil
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import psutil

from ..config import TrainConfig
from ..errors import InputError, clear_errors, format_bytes, parse_bytes
from ..files import StrPath, check_space, home, new_folder
from ..graph.array_checks import finite
from ..graph.node_set import NodeSet
from ..graph.npz import CHUNK_BYTES, Array
from ..graph.store import Store, is_store, open_store
from ..graph.store_format import index_dtype
from ..graph.writer import StoreWriter, check_for_training
from ..memory.cgroup import effective_limit
from ..memory.reading import own_memory
from ..progress import Progress, counted
from ..sources.convert import FeatureDtype
from ..sources.resolve import check_hops, made_once
from .columns import Columns, Done, pick
from .plan import (
    NORMS,
    OWN_SHARE,
    check_parameters,
    columns_room,
    fixed_bytes,
    plan_hops,
    propagated_path,
)
from .sweep import SLICE_NODES, Edges, in_order

Norm = Literal["row", "sym", "gcn"]
Nodes = Literal["labelled", "all"]
Shown = Callable[[str, int], contextlib.AbstractContextManager[Done]]  # shows progress in bytes


def left_bytes(memory_limit: str | int | None) -> int:
    """Return the bytes that this process may still use under `memory_limit`.

    By default, 95 % of the memory left under its `effective_limit`, or of the machine's free memory
    if that is less.
    """
    own_bytes = own_memory()[0]  # anonymous + shared
    if memory_limit is not None:
        return parse_bytes(memory_limit) - own_bytes
    free_bytes = psutil.virtual_memory().available
    return int(OWN_SHARE * min(effective_limit()[0] - own_bytes, free_bytes))


class _Propagation:
    """A propagation over a store, with the result of the nodes in `output_nodes` (None: all).

    The folder of each hop has files `outputs-FIRST.npy`, its result, and, but for the last hop,
    `rows-FIRST.npy`, the input of the next hop. FIRST is a file's first column.
    """

    def __init__(
        self,
        store: Store,
        hops: int,
        norm: Norm,
        output_nodes: NodeSet | None,
        dtype: np.dtype[np.generic],  # of the result, and of columns in RAM and between hops
    ) -> None:
        self.store = store
        self.hops = hops
        self.norm, self.loops = NORMS[norm]
        self.output_nodes = output_nodes
        self.dtype = dtype
        self.edges = Edges(store)

    def survey(self, shown: Shown) -> None:
        """Find the nodes that each hop must compute, and the columns' scales; verify checksums.

        This reads the features once, and the graph once per hop; only once if all nodes are wanted.
        """
        num_reads = 1 if self.output_nodes is None else self.hops  # of the graph
        total = self.store.files["x"].bytes + num_reads * self.edges.nbytes
        with shown("reading the graph", total) as done:
            self.reached = self.edges.needed(self.output_nodes, self.hops, done)  # per hop
            self.scale = self._scales(done)
        # `count` also computes the ranks, which the threads of a sweep only read.
        self.num_reached = [
            self.store.num_nodes if members is None else members.count() for members in self.reached
        ]

    def _scales(self, done: Done) -> Array:
        """Return a factor for each column, float32 [F], a power of two: 1 unless results are
        float16. Every feature is read, and must be finite."""
        store = self.store
        largest = np.zeros(store.num_features, np.float32)  # magnitude in each column
        step = max(1, CHUNK_BYTES // 4 // (4 * store.num_features))  # rows: 2 MB of float32
        pieces = (
            store.decode(chunk[begin : begin + step])
            for _, chunk in store.chunks("x", checked=True)
            for begin in range(0, len(chunk), step)
        )
        for values in finite(pieces, np.float32, str(store.file_path("x"))):
            np.maximum(largest, np.abs(values).max(axis=0, initial=0), out=largest)
            done(store.files["x"].bytes * len(values) // store.num_nodes)
        if self.dtype != np.float16:
            return np.ones(store.num_features, np.float32)
        # Powers of two are exact. They take a column's largest value to between 2**13 and 2**14,
        # below float16's 65,504.
        _, exponents = np.frexp(largest)  # 0 for a column of zeros
        powers = np.clip(14 - exponents, -100, 100)  # within float32's exponents
        return np.ldexp(np.float32(1), powers).astype(np.float32)

    def write_hop(self, number: int, folder: Path, width: int, shown: Shown) -> None:
        """Write the files of hop `number`, counted from 1, `width` columns at a time, into a new
        folder."""
        folder.mkdir(parents=True)
        if number == 1:
            source = Columns.features(self.store)
        else:  # of the nodes that the hop before, `number - 1`, has computed
            before = folder.with_name(str(number - 1))
            source = Columns.open(before, "rows", self.store.num_nodes, self.reached[number - 2])
        firsts = range(0, self.store.num_features, width)
        total = len(firsts) * (source.nbytes + self.edges.nbytes)  # bytes to read
        with (
            contextlib.closing(source),
            shown(f"propagating, hop {number} of {self.hops}", total) as done,
        ):
            for first in firsts:
                columns = slice(first, min(first + width, self.store.num_features))
                self._write_columns(number, source, columns, folder, done)

    def _write_columns(
        self, number: int, source: Columns, columns: slice, folder: Path, done: Done
    ) -> None:  # writes the files of these columns
        width = columns.stop - columns.start
        scale = self.scale[columns]
        targets = self.reached[number - 1]  # nodes to compute

        def prepare(first: int, end: int) -> Array:
            values = source.rows(first, end, columns)  # float32 [nodes, width]
            if number == 1:  # later hops read values with both factors
                values *= scale
                if self.norm == "sym":  # S X, see the module's text; 0 for a degree of 0
                    degrees = self.edges.degrees(first, end, self.loops)
                    roots = np.where(degrees, 1 / np.sqrt(np.maximum(degrees, 1)), 0)
                    values *= roots.astype(np.float32)[:, None]
            return values

        hop = source.hop(
            self.edges, targets, width, self.dtype, prepare, loops=self.loops, done=done
        )
        names = ("outputs",) if number == self.hops else ("outputs", "rows")
        where = f"{self.store.path}, columns {columns.start} to {columns.stop - 1} propagated"
        with contextlib.ExitStack() as stack:
            create = StoreWriter(folder).create
            writers = {
                name: stack.enter_context(create(f"{name}-{columns.start}", self.dtype, (width,)))
                for name in names
            }
            slices = stack.enter_context(contextlib.closing(hop))

            def results() -> Iterator[Array]:
                # the output nodes' rows, float32 in order, without the factors of `prepare`
                for first, means, degrees in slices:
                    if "rows" in writers:  # the next hop's input
                        writers["rows"].write(pick(targets, first, means))
                    values = pick(self.output_nodes, first, means) / scale
                    if self.norm == "sym":
                        output_degrees = pick(self.output_nodes, first, degrees)
                        values *= np.sqrt(output_degrees, dtype=np.float32)[:, None]
                    yield values

            for values in finite(results(), self.dtype, where):
                writers["outputs"].write(values)

    def rows(self, work: Path) -> Generator[Array, None, None]:
        """Yield chunks of the result: each output node's own features, then those of each hop."""
        features = Columns.features(self.store)
        hops = [
            Columns.open(work / str(k), "outputs", self.store.num_nodes, self.output_nodes)
            for k in range(1, self.hops + 1)
        ]
        # 2 MB of rows, which are in memory as read, as float32 and side by side
        step = max(1, CHUNK_BYTES // 4 // (4 * features.width * (self.hops + 1)))

        def read(first: int) -> Array:
            end = min(first + step, self.store.num_nodes)
            own = features.rows(first, end, targets=self.output_nodes)
            return np.concatenate([own, *(columns.rows(first, end) for columns in hops)], 1)

        with contextlib.closing(in_order(range(0, self.store.num_nodes, step), read)) as chunks:
            yield from finite(chunks, self.dtype, str(self.store.path))
        for columns in (features, *hops):
            columns.close()


def _write(run: _Propagation, work: Path, folder: Path, origin: Mapping[str, object]) -> None:
    # the store of the result into `folder`, from the folders of all hops in `work`
    store = run.store
    writer = StoreWriter(folder)
    width = (run.hops + 1) * store.num_features
    with writer.create("x", run.dtype, (width,)) as x, contextlib.closing(run.rows(work)) as rows:
        for values in rows:
            x.write(values)
    writer.write("row", np.empty(0, index_dtype(x.length)))  # no edges
    writer.write("colptr", np.zeros(x.length + 1, "<i8"))  # zeros that take no memory until written
    for name in ("y", "node_id", "node_name", "label_name"):
        if name in store.files:
            nodes = None if name == "label_name" else run.output_nodes  # of all classes
            with writer.create(name, store.files[name].dtype) as out:
                for first, values in store.chunks(name, checked=True):
                    # few rows at a time: `pick` takes several int64 arrays of as many nodes
                    for begin in range(0, len(values), SLICE_NODES):
                        out.write(pick(nodes, first + begin, values[begin : begin + SLICE_NODES]))
    if "node_id" not in store.files and run.output_nodes is not None:
        writer.write("node_id", run.output_nodes.members())
    for name, ids in store.splits.items():
        rows_of = ids if run.output_nodes is None else run.output_nodes.ranks(ids)
        writer.write(name, rows_of.astype(np.int64))
    writer.finish(
        store.name, store.num_classes, undirected=store.undirected, origin=origin, hops=run.hops
    )


@clear_errors()
def propagate(
    store: Store | StrPath,
    path: StrPath,
    *,
    hops: int = 2,
    norm: Norm = "sym",
    nodes: Nodes = "labelled",
    feature_dtype: FeatureDtype | None = None,
    memory_limit: str | int | None = None,
    progress: Progress = True,
    check: Callable[[], None] = lambda: None,
    say: Callable[[str], object] = lambda text: None,
) -> Store:
    """Propagate a store's features over its whole graph, in bounded memory.

    Returns a store without edges, written whole or not at all: `x` [n, (hops + 1) * F] has a node's
    own features, then A X, A^2 X, ... `node_id` has the n nodes' ids in the graph. The result does
    not depend on the memory limit.

    Args:
        store: an open store, or its folder.
        path: folder of the result, new or empty.
        norm: "row" is the mean over in-neighbors. "sym" weighs an edge by 1 / sqrt(degree of the
            source * degree of the target), with in-degrees as in PyG's `gcn_norm`. "gcn" is "sym"
            with each node once among its own neighbors, as in `gcn_norm` with `add_self_loops`.
            With the other norms, the graph's own self-loops count. Duplicate edges count twice.
        nodes: keep the rows of nodes in splits ("labelled"), or "all".
        feature_dtype: dtype of the result; by default the store's, but float32 for int8. Sums are
            float32. With float16, values between hops are also rounded to float16.
        memory_limit: "4 GB" or bytes for this whole process; by default 95 % of the memory that is
            left to it.
        progress: True shows a bar; a function is called instead, with the count after each piece.
        check: called between pieces of work.
        say: called with the plan before the first hop.
    """
    if not isinstance(store, Store):
        store = open_store(store)
    check_hops(store, hops, norm, nodes)
    if feature_dtype not in (None, "float16", "float32"):
        raise InputError(f"feature_dtype: expected float16 or float32, got {feature_dtype!r}")
    # not float16 for int8: it can be coarser than the codes
    dtype = np.dtype(feature_dtype or (store.feature_dtype if store.int8 is None else np.float32))
    check_for_training(store)
    members = NodeSet(store.num_nodes, *store.splits.values()) if nodes == "labelled" else None
    room = columns_room(left_bytes(memory_limit), fixed_bytes(store.size, hops))
    run = _Propagation(store, hops, norm, members, dtype)
    with contextlib.closing(run.edges):
        planned = functools.partial(
            plan_hops, store.size, hops, left_bytes=room, itemsize=dtype.itemsize
        )
        # Refuses too little memory before the graph is read, by a lower bound: no nodes to compute.
        planned(num_outputs=0, reached=[0] * hops)
        shown = functools.partial(counted, progress=progress, check=check)
        with new_folder(path) as folder:  # renamed to `path` once it is complete
            run.survey(shown)
            plan = planned(num_outputs=run.num_reached[-1], reached=run.num_reached)
            disk = f"{format_bytes(plan.disk_bytes)} of disk, most of it until it is done"
            check_space(home(path), plan.disk_bytes, disk)
            say(f"{store.path}: {plan}")
            work = folder / "hops"  # a folder for each hop, removed in the end
            for number, width in enumerate(plan.widths, 1):
                run.write_hop(number, work / str(number), width, shown)
            origin = {  # in store.json; compared when a run finds the result
                "propagated": str(store.path),
                "hops": hops,
                "norm": run.norm,
                "self_loops": run.loops,
                "nodes": nodes,
                "made_of": _made_of(store),
                "num_nodes": store.origin.get("num_nodes", store.num_nodes),
            }
            _write(run, work, folder, origin)
            shutil.rmtree(work)
    return open_store(home(path))


def propagated(
    store: Store,
    config: TrainConfig,
    *,
    progress: Progress,
    say: Callable[[str], object],
    check: Callable[[], None] = lambda: None,
) -> Store:
    """Return a run's store of propagated features, made once, next to the graph's store.

    `progress`, `say` and `check` are those of `propagate`.
    """
    if store.hops is not None:  # its features are propagated already
        check_parameters(store, config)
        return store
    target = propagated_path(store, config)
    with made_once(target, check):  # a lock: other processes wait, then find the result
        if not is_store(target):
            say(f"{store.path}: propagating its features, once, to {target}")
            return propagate(
                store,
                target,
                hops=config.hops,
                norm=config.norm,
                progress=progress,
                check=check,
                say=say,
            )
    result = open_store(target)
    check_parameters(result, config)
    if result.origin.get("made_of") != _made_of(store):
        raise InputError(
            f"{target}: it was propagated over other data than {store.path} has now; move it away"
        )
    return result


def _made_of(store: Store) -> dict[str, int]:  # checksums of graph and features, by file
    crc32 = {name: info.crc32 for name, info in store.files.items()}
    # Equal codes may stand for different values: 2 * x has the same codes as x.
    if store.int8 is not None:
        crc32["int8"] = zlib.crc32(np.concatenate(store.int8).data)
    return crc32
