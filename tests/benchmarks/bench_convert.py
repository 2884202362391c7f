"""Converting inside a hard memory cgroup, beside OGB's own loader on the same files without a limit.

Run it by hand from the repository root: `python tests/benchmarks/bench_convert.py [--scale 0.05] [--limit "1 GB"]`.
It makes the raw data set if `--raw` names none (about 40 GB times the scale) and needs as much again for the store.
OGB's loader parses raw/ and saves its cache, as a first use does.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from ogbnlib.errors import format_bytes, parse_bytes
from ogbnlib.graph.store import Store, open_store
from ogbnlib.graph.writer import verify_store
from ogbnlib.memory.limits import make_limit
from ogbnlib.runs.supervise import Outcome, supervise
from ogbnlib.sources.ogb import open_raw
from ogbnlib.sources.synth import synthesize

CONVERT = """
import sys
from ogbnlib.sources.convert import convert
convert(sys.argv[1], sys.argv[2], memory_limit=int(sys.argv[3]), undirected=sys.argv[4] == "True", progress=False)
"""
OGB = """
import sys
from ogb.nodeproppred import NodePropPredDataset
sys.path.append(sys.argv[3])
from ogb_layout import meta_dict
meta = meta_dict(sys.argv[1])
graph, labels = NodePropPredDataset(meta["download_name"], root=sys.argv[2], meta_dict=meta)[0]
print(graph["node_feat"].shape, graph["edge_index"].shape, labels.shape)
"""


def measured(code: str, arguments: list[str], limit_bytes: int | None, folder: Path) -> tuple[Outcome, int]:
    """How it ended, and the highest sample of anonymous and shared memory in bytes."""
    limit, refused = make_limit(limit_bytes)
    folder.mkdir()
    if limit_bytes is not None and not limit.name.startswith("cgroup"):
        print(f"no hard limit here ({'; '.join(refused)}): {limit.name} instead")
    outcome = supervise([sys.executable, "-c", code, *arguments], folder, limit, echo=False)
    return outcome, outcome.record.peaks["anon_shmem_bytes"]


def matches_scipy(store: Store, raw: Path) -> bool:
    """`colptr` and, column by column and sorted, `row` against scipy's CSC of the raw edges."""
    with np.load(raw / "raw" / "data.npz") as data:
        edge_index, nodes = data["edge_index"], store.num_nodes
    src, dst = np.hstack([edge_index, edge_index[::-1]]) if store.undirected else edge_index
    matrix = sp.coo_matrix((np.ones(len(src), np.int32), (src, dst)), (nodes, nodes)).tocsc()  # repeats are summed up
    matrix.sort_indices()
    mine = sp.csc_matrix(
        (np.ones(store.num_edges, np.int32), np.array(store.row), np.array(store.colptr)), matrix.shape
    )
    mine.sum_duplicates()
    same = np.array_equal(mine.indptr, matrix.indptr) and np.array_equal(mine.indices, matrix.indices)
    return same and (store.undirected or np.array_equal(mine.data, matrix.data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=0.05)
    parser.add_argument("--limit", default="1 GB")
    parser.add_argument("--undirected", action="store_true")
    parser.add_argument("--raw", type=Path, help="a raw data set that is there already")
    parser.add_argument("--scratch", type=Path, help="where to work; everything made there is deleted")
    options = parser.parse_args()
    limit_bytes = parse_bytes(options.limit)
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        work = Path(name)
        raw = options.raw or synthesize(work / "raw", options.scale, progress=True).path
        data = open_raw(raw)
        total = data.num_nodes * (data.num_features * data.feature_dtype.itemsize + 4) + 16 * data.num_edges
        packed = sum(file.stat().st_size for file in (raw / "raw").iterdir())
        print(f"{raw}: {format_bytes(total)} of arrays in {format_bytes(packed)} of files")

        arguments = [str(raw), str(work / "store"), str(limit_bytes), str(options.undirected)]
        ours, our_anon = measured(CONVERT, arguments, limit_bytes, work / "ours")
        if ours.exit_code != 0:
            sys.exit(f"convert ended with {ours.exit_code}: {ours.tail}")
        rate = total / 2**20 / ours.duration_s
        print(
            f"convert in a hard {options.limit}: {ours.duration_s:.1f} s, {rate:.0f} MB of raw arrays a second, peak "
            f"{format_bytes(our_anon)} anonymous, {format_bytes(ours.peak_bytes)} with page cache (kernel's counter)"
        )
        # OGB saves its cache into the data set's folder: work on links, so that --raw stays as it is.
        linked = work / "linked"
        shutil.copytree(raw, linked, copy_function=lambda src, dst: Path(dst).symlink_to(Path(src).resolve()))
        shutil.rmtree(linked / "processed", ignore_errors=True)
        (linked / "processed").mkdir()
        theirs, their_anon = measured(
            OGB, [str(linked), str(work / "root"), str(Path(__file__).parents[1])], None, work / "theirs"
        )
        print(
            f"OGB's loader without a limit: exit {theirs.exit_code}, {theirs.duration_s:.1f} s, peak "
            f"{format_bytes(their_anon)} anonymous, {format_bytes(theirs.peak_bytes)} with page cache"
        )
        if theirs.exit_code != 0:
            print(theirs.tail[-500:])
        print(
            f"ratios, OGB to ours: anonymous memory {their_anon / our_anon:.1f}, time "
            f"{theirs.duration_s / ours.duration_s:.2f}"
        )
        shutil.rmtree(linked)
        store = open_store(work / "store")
        print(f"verify: {verify_store(store.path) or 'sound'}; CSC equals scipy's: {matches_scipy(store, raw)}")


if __name__ == "__main__":
    main()
