"""A folder of a user's own files as a `Source`.

Edges and features are streamed. Memory use is 4 bytes a node for labels, and about 50 for names.
Import this module only when needed: it imports pyarrow.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InputError
from ..graph.npz import CHUNK_BYTES, Array, slices
from ..graph.store_format import SPLITS
from .columns import Piece, Table, numbers
from .description import (
    DESCRIPTION,
    FILE_ROLES,
    LEFT_OUT,
    DataFile,
    Description,
    missing_roles,
    read_description,
)
from .draft import describe, no_data
from .formats import format_of
from .labels import AS_VALUES, clean_targets
from .nodes import Nodes, check_rows, read_labels, read_splits
from .official import KNOWN
from .ogb import csv_layout, open_raw
from .source import Source, aligned, stamped
from .tables import open_table

_CHUNK_NODES = 2**17  # labels in a chunk


def _open_table(file: DataFile) -> Table:
    """Open a table and find the role of each column; refuse a column without a role."""
    table = open_table(file.path, file.header, file.role)
    if file.role:  # an array
        table.roles = dict(zip(table.names, FILE_ROLES[file.role], strict=True))
        return table
    keys_of = {  # for each column of the table, the keys of `file.columns` that match it
        # an exact name comes before patterns, of which the first that matches decides
        name: [name] if name in file.columns else [k for k in file.columns if fnmatchcase(name, k)]
        for name in table.names
    }
    used = {key for keys in keys_of.values() for key in keys}
    unknown = [key for key in file.columns if key not in used]  # match no column
    if unknown:
        near = get_close_matches(unknown[0], table.names) or table.names[:20]
        hint = ""
        if table.header and format_of(file.path) == "text":
            hint = "; a file without a header has `header: none` among its columns"
        raise InputError(
            f"{file.where}: unknown column {unknown[0]!r} of {file.path.name}: it has "
            f"{', '.join(map(repr, near))}{hint}"
        )
    without_role = [repr(name) for name, keys in keys_of.items() if not keys]
    if without_role:
        raise InputError(
            f"{file.where}: expected a role for each column of {file.path.name}, found none for "
            f"{', '.join(without_role[:20])}"
        )
    table.roles = {name: file.columns[keys[0]] for name, keys in keys_of.items()}
    return table


def open_folder(path: Path, description: Path | None = None, **overrides: Any) -> Source:
    """Open a folder for conversion: by its `dataset.yaml` (or `description`), by OGB's layout, or
    by canonical names. The options `overrides` come before those of the folder."""
    if not path.is_dir():
        raise no_data(path)
    folder = Path(os.path.realpath(path))
    if folder.name == "raw" and (folder.parent / "split").is_dir():
        folder = folder.parent  # `path` is the folder raw/ of OGB's layout
    file = description or folder / DESCRIPTION
    declared = Description(folder, [])  # no roles
    if file.is_file():
        declared = read_description(file, folder)
    elif description is not None:
        describe(folder, file)  # writes a draft and raises, unless names decide
        raise InputError(
            f"{file}: expected a description, found no such file; leave it out, since the names of "
            f"the files in {folder} decide"
        )
    options = declared.options.overridden(**overrides)
    if declared.files:  # else it has options only
        return _open_described(replace(declared, options=options))
    if (folder / "raw" / "data.npz").exists():  # OGB's binary layout
        return replace(open_raw(folder, num_classes=options.num_classes), options=options)
    layout = csv_layout(folder) or describe(folder, file)
    return _open_described(replace(layout, options=options))


def open_official(name: str, folder: Path) -> Source:
    """Open one of OGB's own data sets, streamed: ogb's loader needs more than 128 GB for
    ogbn-papers100M (snap-stanford/ogb#407)."""
    size = KNOWN[name]
    # undirected: True for ogbn-products, to which ogb's reader adds the reverse edges; None: no option
    source = open_folder(folder, num_classes=size.num_classes, undirected=size.undirected or None)
    return replace(source, name=name)


def _open_described(description: Description) -> Source:
    """Open a folder's files for conversion, by their roles.

    Labels and splits are read here. A file of text is read once to count its rows.
    """
    tables = [_open_table(file) for file in description.files if file.role != LEFT_OUT]
    for problem in missing_roles([[*table.roles.values()] for table in tables]):
        raise InputError(f"{description.folder}: {problem}")  # the first one
    return _Folder(description, tables).source()


class _Rows:
    """The columns of one role in a table, side by side; a cell has a number or a list of numbers.

    Attributes:
        width: the number of values in a row, of all columns.
        names: the name of each value: that of its column, for a list such as "emb[0]".
        row_shape: the shape of a row; () for a single column of numbers.
        dtype: float16 for an array of float16, else float32.
    """

    def __init__(self, table: Table, role: str) -> None:
        self.table = table
        self._columns = table.all(role)
        filled = (batch for batch in table.batches(self._columns) if len(batch[0].values))
        first = next(filled, None)  # a piece of each column
        if first is None:
            raise InputError(f"{table.file}: expected a row for each node, found none")
        self._widths = [_width(piece) for piece in first]  # of each column; 0 for numbers
        self.names = [
            f"{name}[{i}]" if width else name
            for name, width in zip(self._columns, self._widths, strict=True)
            for i in range(max(1, width))
        ]
        self.width = len(self.names)
        self.row_shape = () if self._widths == [0] else (self.width,)
        value_type = getattr(first[0].values.type, "value_type", None)  # None for no lists
        is_half = len(first) == 1 and value_type == pa.float16()
        self.dtype = np.dtype(np.float16 if is_half else np.float32)

    def chunks(self, nodes: Nodes) -> Iterator[Array]:
        """Yield rows [n, width] in the order of `nodes`; refuse rows in another order."""
        num_rows = max(1, CHUNK_BYTES // (8 * self.width))  # of float64
        ids = self.table.first("id", "name")  # the column; None: row i is node i
        row_of = nodes.of(self.table)
        for pieces in self.table.batches([*self._columns, *filter(None, [ids])], num_rows):
            if ids:
                piece = pieces.pop()  # the ids were read as the last column
                wrong = row_of(piece) != np.arange(piece.begin, piece.begin + len(piece.values))
                piece.refuse(wrong, "the nodes in their order")
            parts = [*map(_to_rows, pieces, self._widths)]  # [n, columns or values] each
            yield parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _width(piece: Piece) -> int:
    if not hasattr(piece.values.type, "value_type"):
        return 0  # numbers, no lists
    values = piece.values[0].as_py()  # the first list, whose length those of all rows must have
    piece.refuse([not values], "a list of numbers")
    return len(values)


def _to_rows(piece: Piece, width: int) -> Array:
    """Return numbers (`width` 0) as float64 rows [n, 1], or lists of `width` numbers as rows
    [n, width] in their own dtype."""
    if not width:
        return numbers(piece.cast("double", "a number"))[:, None]
    lists = piece.values
    lengths = pc.list_value_length(lists).fill_null(-1)  # an empty cell is refused, too
    piece.refuse(pc.not_equal(lengths, width), f"a list of {width} numbers")
    flat = lists.flatten()  # [n * width]
    if not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)):
        flat = replace(piece, values=flat, width=width).cast("double", "a number")
    return numbers(flat).reshape(-1, width)


class _Folder:
    """The tables of a folder by their purpose: the edges, and tables of nodes with features."""

    def __init__(self, description: Description, tables: Sequence[Table]) -> None:
        self.description = description
        self.edges = next(table for table in tables if table.first("source"))
        self.tables = [table for table in tables if table is not self.edges]
        self.features = [_Rows(table, "feature") for table in tables if table.all("feature")]
        # the first table with a column of names defines the nodes' names
        named = [(table, name) for table in self.tables for name in table.all("name")]
        first = self.features[0].table  # has one row a node
        self.nodes = Nodes(first.num_rows, first.file.name, named[0] if named else None)
        for rows in self.features[1:]:
            check_rows(rows.table, self.nodes, self.nodes.num_nodes)
        # if ids 0 to N - 1 are unsorted, row i of a file without ids may be node i or the i-th id
        if not description.is_declared and self.nodes.are_reordered:
            self._refuse_rows()
        if description.options.drop_unknown and self.nodes.names is None:
            raise InputError(
                "drop_unknown: expected a column of names in a table of nodes, found none"
            )

    def _refuse_rows(self) -> None:
        """Refuse rows without ids next to a table of nodes whose ids are row numbers out of order."""
        assert self.nodes.names is not None
        named, column = self.nodes.names  # the table and its column with the names
        for table in self.tables:
            roles = {*table.roles.values()} - {LEFT_OUT}
            splits = roles & {*SPLITS}
            lists_of_ids = {split for split in splits if not self.nodes.is_mask(table, split)}
            # all other roles have a value for each row, and without ids only the row tells its node
            if table is not named and not {"id", "name"} & roles and roles - lists_of_ids:
                raise InputError(
                    f"{named.file}, column {column!r}: 0 to {self.nodes.num_nodes - 1} in another "
                    f"order than the rows, and {table.file} has rows only; its row i may "
                    f"be node {column} = i (then sort {named.file.name} by {column}), or row i of "
                    f"{named.file.name} (then declare `{column}: name` in dataset.yaml)"
                )

    def edge_chunks(self, chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        """Yield sources and targets of edges, int64 rows, at most `chunk_edges` at a time."""
        ends = [*self.edges.all("source"), *self.edges.all("target")]  # one column each
        # for an unknown name `find` returns -1, and calling `nodes` raises an error
        row_of = self.nodes.find if self.description.options.drop_unknown else self.nodes
        for pieces in self.edges.batches(ends):
            src, dst = map(row_of, pieces)
            if self.description.options.drop_unknown:
                are_known = (src >= 0) & (dst >= 0)
                src = src[are_known]
                dst = dst[are_known]
            yield from zip(slices(src, chunk_edges), slices(dst, chunk_edges), strict=True)

    def _x_chunks(self) -> Iterator[Array]:
        """Return an iterator over rows [n, F]: the tables of features side by side."""
        streams = [rows.chunks(self.nodes) for rows in self.features]
        return (np.concatenate(rows, axis=1) for rows in aligned(streams))

    def _labels(self) -> dict[str, Any]:
        # fields of `Source`: about labels or, in a folder without labels, about targets
        label = next((table for table in self.tables if table.first("label")), None)
        num_classes = self.description.options.num_classes
        if label is not None:
            labels, num_classes, names = read_labels(label, self.nodes, num_classes)
            chunks = partial(slices, labels, _CHUNK_NODES)  # each call starts again
            return {"label_chunks": chunks, "num_classes": num_classes, "label_names": names}
        values = _Rows(next(table for table in self.tables if table.all("value")), "value")
        check_rows(values.table, self.nodes, self.nodes.num_nodes)
        if num_classes is not None:
            raise InputError(f"num_classes: expected without values ({AS_VALUES})")

        def target_chunks() -> Iterator[Array]:
            for rows in clean_targets(values.chunks(self.nodes), str(values.table.file)):
                yield rows.reshape(len(rows), *values.row_shape)  # [n, 1] as [n] if not lists

        return {"label_chunks": target_chunks, "num_classes": 0, "target_shape": values.row_shape}

    def source(self) -> Source:
        folder = self.description.folder
        label_fields = self._labels()
        splits = read_splits(self.tables, self.nodes)  # int64 ids of each split
        where = self.features[0].table.file if len(self.features) == 1 else folder
        return Source(
            name=folder.name,
            path=folder,
            origin={"raw": str(folder)},
            stamps=stamped(file.path for file in self.description.files if file.role != LEFT_OUT),
            num_nodes=self.nodes.num_nodes,
            num_edges=self.edges.num_rows,
            num_features=sum(rows.width for rows in self.features),
            feature_dtype=np.result_type(*(rows.dtype for rows in self.features)),  # the widest
            edge_chunks=self.edge_chunks,
            x_chunks=self._x_chunks,
            read_splits=lambda: dict(splits),  # a copy, since the caller may change it
            node_names=self.nodes.chunks,
            features_at=str(where),
            feature_names=[name for rows in self.features for name in rows.names],
            options=self.description.options,
            **label_fields,
        )
