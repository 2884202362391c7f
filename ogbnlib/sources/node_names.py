"""Node numbers of a store, looked up by names from a list or from a user's file.

Import this module only when needed: it imports pyarrow and pandas. Memory use is about 40 bytes for
each name that is looked up. All names in the store are read, 8 MB at a time: 111 million texts take
half a minute.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import InputError, clear_errors, naming
from ..graph.npz import Array
from ..graph.store import Store
from .columns import Table, hashes, name_keys
from .tables import open_table


class _Names(Table):
    def __init__(self, names: Any) -> None:
        super().__init__(Path("names"), ["names"])
        if isinstance(names, str):
            raise InputError(f"names: expected a list of names, got the text {names!r}")
        with naming("names", "text, or whole numbers"):
            self._values = pa.array(names)

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        for begin in range(0, len(self._values), rows):
            yield [self._values.slice(begin, rows)]


@clear_errors()
def ids(store: Store, names: Any) -> Array:
    """Return the node numbers of a store for `names`, int64 [n] in RAM, in the order of `names`.

    A node's number is its row in the store's arrays and its id in `splits`.

    Args:
        names: A list, an array or a pandas column of names as in the original data: text, or whole
            numbers. Whole numbers are node numbers if the store has no names, or if its names are
            text.

    Raises:
        InputError: for names that no node has; the message names the first of them.
    """
    return _find(store, _Names(names), "names")


def read_ids(store: Store, file: Path, id_column: str | None) -> Array:
    """Return the numbers of the nodes whose names are in a file, int64 [n], in the file's order.

    The names are in the file's only column, or in the column `id_column`, by default node_id or id.
    The first line of a text file with one column is also a name if a node has this name.
    """
    table = open_table(file)
    id_names = [id_column] if id_column is not None else ["node_id", "id"]
    is_alone = id_column is None and len(table.names) == 1
    column = table.names[0] if is_alone else next((n for n in id_names if n in table.names), None)
    if column is None:
        raise InputError(
            f"{file}: expected one column, or the column {id_names[0]!r}, found columns "
            f"{table.shown()}; name that of the nodes: --id-column"
        )
    may_be_name = is_alone and table.header and not table.typed and column not in id_names
    return _find(store, table, column, may_be_name)


def _find(store: Store, table: Table, column: str, header_may_be_name: bool = False) -> Array:
    """Return the numbers of the nodes whose names are in `column`, int64 [n].

    With `header_may_be_name` the column's own name comes first if a node has it.
    """
    array = next((name for name in ("node_name", "node_id") if name in store.files), "")
    kind = "string" if (array and store.files[array].dtype.startswith("|S")) else "int64"
    parts = []
    with_header = header_may_be_name and kind == "string"
    if with_header:
        parts.append(hashes(np.array([column])))
    for piece in table.pieces(column):
        if kind == "string" and pa.types.is_integer(piece.values.type):
            kind = "int64"
            array = ""
        expected = f"the name of a node of {store.path}"
        if not array:
            expected = f"the number of a node of {store.path}, 0 to {store.num_nodes - 1}"
        keys = name_keys(piece, kind, expected)
        if not array:
            piece.refuse((keys < 0) | (keys >= store.num_nodes), expected)
        parts.append(keys)
    keys = np.concatenate(parts or [np.empty(0, np.int64)])
    if not array:
        return keys
    numbers = _look_up(store, array, keys)
    if with_header and numbers[0] < 0:
        print(f"{table.file}: the first line, {column!r}, is read as a header", file=sys.stderr)
        with_header = False
        numbers = numbers[1:]
    examples = " and ".join(map(repr, np.asarray(getattr(store, array)[:2]).tolist()))
    for piece in table.pieces(column):
        begin = piece.begin + with_header
        is_unknown = numbers[begin : begin + len(piece.values)] < 0
        piece.refuse(is_unknown, f"names of nodes of {store.path}, such as {examples}")
    return numbers


def _look_up(store: Store, array: str, keys: Array) -> Array:
    """Return the position of each key among a store's names, int64 [n]; -1 for an unknown key."""
    if not len(keys):
        return np.empty(0, np.int64)
    unique_keys, places = np.unique(keys, return_inverse=True)
    positions = np.full(len(unique_keys), -1)
    for begin, names in store.chunks(array, checked=True):
        if names.dtype.kind == "S":
            names = hashes(names)
        at = np.minimum(np.searchsorted(unique_keys, names), len(unique_keys) - 1)
        matches = np.flatnonzero(unique_keys[at] == names)
        positions[at[matches]] = begin + matches
    return positions[places]
