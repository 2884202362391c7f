"""Node numbers of a store, looked up by names from a list or from a user's file.

Import this module only when needed: it imports pyarrow and pandas. All names in the store are read,
8 MB at a time (111 million texts in half a minute); memory use is 40 bytes for a name in the list.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import InputError, clear_errors, naming
from ..graph.npz import Array
from ..graph.store import Store
from .columns import Piece, Table, hashes
from .tables import open_table


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
    if isinstance(names, str):
        raise InputError(f"names: expected a list of names, got the text {names!r}")
    with naming("names", "text, or whole numbers"):
        values = pa.array(names)
    # messages call the list a table, "names", with a column "names"
    return _find(store, [Piece(Table(Path("names"), ["names"]), "names", values, 0).decoded()])


def read_ids(store: Store, file: Path) -> Array:
    """Return the numbers of the nodes whose names are in a file, int64 [n], in the file's order.

    The names are in the file's only column, or in its column node_id or id.
    The first line of a text file with one column is a name, too, if a node has this name.
    """
    table = open_table(file)
    column: str | None = next((name for name in ("node_id", "id") if name in table.names), None)
    if column is None and len(table.names) == 1:
        column = table.names[0]
        with contextlib.suppress(InputError):  # a first line that is no node's name is a header
            return _find(store, [*open_table(file, header=False).pieces("1")])
    if column is None:
        raise InputError(
            f"{file}: expected one column, or a column node_id, found columns "
            f"{', '.join(map(repr, table.names[:20]))}; write a file of the names alone"
        )
    return _find(store, [*table.pieces(column)])


def _find(store: Store, pieces: Sequence[Piece]) -> Array:
    """Return the node number of each name in the pieces of one column, int64 [n]."""
    # the store's array of names, node_id if features were propagated; "": names are node numbers
    array = next((name for name in ("node_name", "node_id") if name in store.files), "")
    kind = "string" if array and store.files[array].dtype.startswith("|S") else "int64"
    if kind == "string" and any(pa.types.is_integer(piece.values.type) for piece in pieces):
        kind = "int64"
        array = ""  # whole numbers are node numbers where names are text
    expected = f"the number of a node of {store.path}, 0 to {store.num_nodes - 1}"
    if array:
        examples = " and ".join(map(repr, np.asarray(getattr(store, array)[:2]).tolist()))
        expected = f"names of nodes of {store.path}, such as {examples}"
    keys = [piece.keys(kind, expected) for piece in pieces]  # whole numbers, or hashes of texts
    numbers = np.concatenate(keys or [np.empty(0, np.int64)])
    if array:
        numbers = _look_up(store, array, numbers)
    for piece in pieces:
        of_piece = numbers[piece.begin : piece.begin + len(piece.values)]
        piece.refuse((of_piece < 0) | (of_piece >= store.num_nodes), expected)
    return numbers


def _look_up(store: Store, array: str, keys: Array) -> Array:
    """Return the position of each key among a store's names, int64 [n]; -1 for an unknown key."""
    if not len(keys):
        return np.empty(0, np.int64)
    # sorted keys, each once, and for each of `keys` its place among them
    unique_keys, places = np.unique(keys, return_inverse=True)
    positions = np.full(len(unique_keys), -1)
    for begin, names in store.chunks(array, checked=True):  # `begin`: the first name's node
        if names.dtype.kind == "S":
            names = hashes(names)
        # for each name the first key that is not smaller, or the last key
        at = np.minimum(np.searchsorted(unique_keys, names), len(unique_keys) - 1)
        matches = np.flatnonzero(unique_keys[at] == names)
        positions[at[matches]] = begin + matches
    return positions[places]
