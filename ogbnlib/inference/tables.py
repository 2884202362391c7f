"""Predictions as a .csv or .parquet table, with the data set's own names of nodes and classes."""

import contextlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import scipy.special

from ..graph.npz import Array
from ..graph.store import Store
from ..graph.store_format import HEADER_BYTES

_PIECE_BYTES = 2**25  # of scores: in memory at a time, and in a parquet row group


def probabilities(scores: Array) -> Array:
    """Return the softmax of scores [n, C], float32."""
    return scipy.special.softmax(scores.astype(np.float32, copy=False), axis=1)


def best_classes(scores: Array) -> Array:
    """Return the best class (exact below 2**24) and its probability, float32 [n, 2]."""
    values = probabilities(scores)
    return np.column_stack([values.argmax(1).astype(np.float32), values.max(1)])


def write_table(
    file: BinaryIO, path: Path, rows: BinaryIO, graph: Store, ids: Array | range, has_scores: bool
) -> None:
    """Write the .npy file `rows` as a table, in pieces: probabilities, float32 [n, C], with
    `has_scores`, else the result of `best_classes`."""
    names = graph.class_names if has_scores else []
    width = len(names) or 2  # float32 numbers in a row of `rows`
    step = max(1, _PIECE_BYTES // (4 * width))  # rows of a piece
    writer_type = {".csv": pa.csv.CSVWriter, ".parquet": pa.parquet.ParquetWriter}[path.suffix]
    rows.flush()  # `np.fromfile` reads the file itself, past Python's buffer
    rows.seek(HEADER_BYTES)
    with contextlib.ExitStack() as stack:
        writer = None  # made with the schema of the first piece
        for begin in range(0, len(ids), step):
            nodes = np.asarray(ids[begin : begin + step])
            values = np.fromfile(rows, np.float32, len(nodes) * width).reshape(-1, width)
            if graph.node_name is not None:
                nodes = graph.node_name[nodes]
            table = _table(pa.array(nodes), values, graph, names)
            if writer is None:
                writer = stack.enter_context(writer_type(file, table.schema))
            writer.write_table(table)


def _table(node_id: pa.Array, values: Array, graph: Store, columns: list[str]) -> pa.Table:
    # `values` has a probability for each class of `columns`; without these, class and probability.
    if columns:
        classes = values.argmax(1)
        probability = values.max(1)
    else:
        classes = values[:, 0].astype(np.int64)
        probability = values[:, 1]
    labels = pa.array(classes)
    if graph.label_name is not None:  # classes have names
        labels = pa.array(graph.class_names).take(labels)
    scores = [pa.array(column) for column in values.T[: len(columns)]]
    return pa.table(  # from a list, as a class may have the name of another column
        [node_id, labels, pa.array(probability), *scores],
        ["node_id", "class", "probability", *columns],
    )
