"""Predictions as a table, .csv or .parquet, in the names of the data set. Import it on use: it
imports pyarrow."""

from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from ..errors import InputError
from ..graph.npz import Array
from ..graph.store import Store
from ..graph.store_format import HEADER_BYTES

_PIECE_BYTES = 2**25  # of scores in memory at a time, and in a row group of parquet
_COLUMNS = ("node_id", "class", "probability")


def class_names(store: Store) -> list[str]:
    """Return the name of each class: its number if the store has none."""
    names = [] if store.label_name is None else store.label_name.tolist()
    names += [str(number) for number in range(len(names), store.num_classes)]
    both = {*names} & {*_COLUMNS}
    if both:
        raise InputError(
            f"{store.path}: expected other names of classes than {', '.join(_COLUMNS)}, "
            f"found {both.pop()!r}; write a .npy file"
        )
    return names


def probabilities(scores: Array) -> Array:
    """Return the softmax of scores [n, C], float32."""
    values = np.exp(scores - scores.max(1, keepdims=True), dtype=np.float32)
    values /= values.sum(1, keepdims=True)
    return values


def write_table(
    file: BinaryIO, path: Path, rows: BinaryIO, graph: Store, ids: Array | None, has_scores: bool
) -> None:
    """Write the probabilities float32 [n, C] in the .npy file `rows` as a table, in pieces.

    Its columns are node_id, class and probability, and with `has_scores` the probability of each
    class.
    """
    names = class_names(graph)
    num_rows = graph.num_nodes if ids is None else len(ids)
    step = max(1, _PIECE_BYTES // (4 * len(names)))
    text = pa.array(names)
    writer = None
    rows.flush()
    rows.seek(HEADER_BYTES)
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        values = np.fromfile(rows, np.float32, (end - begin) * len(names))
        values = values.reshape(end - begin, len(names))
        nodes = np.arange(begin, end) if ids is None else ids[begin:end]
        classes = values.argmax(1)
        columns = {
            "node_id": pa.array(nodes if graph.node_name is None else graph.node_name[nodes]),
            "class": pa.array(classes) if graph.label_name is None else text.take(classes),
            "probability": pa.array(values.max(1)),
        }
        if has_scores:
            columns |= {name: pa.array(values[:, c]) for c, name in enumerate(names)}
        table = pa.table(columns)
        if writer is None:
            kind = pa.csv.CSVWriter if path.suffix == ".csv" else pa.parquet.ParquetWriter
            writer = kind(file, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()
