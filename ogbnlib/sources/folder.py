"""A folder of a user's own files as a `Source`.

Edges and features are streamed. Memory use is 4 bytes a node for labels, and about 50 for names.
Import this module only when needed: it imports pyarrow.
"""

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import InputError, Problems
from ..graph.array_checks import finite
from ..graph.npz import Array, slices
from ..graph.store_format import SPLITS, Stamp
from .columns import Columns
from .description import FILE_ROLES, LEFT_OUT, DataFile, Description, missing_roles
from .labels import AS_VALUES, check_num_classes, clean_targets
from .names import Nodes
from .node_values import is_mask, read_labels, read_splits
from .rows import Rows, joined
from .source import Source, stamped
from .tables import open_table

_CHUNK_NODES = 2**17


def _open_columns(file: DataFile) -> Columns:
    """Open a table and find the role of each column; refuse a column without a role."""
    table = open_table(file.path, file.header, file.role)
    if file.role:
        return Columns(table, dict(zip(table.names, FILE_ROLES[file.role], strict=True)))
    used = set[str]()
    roles = dict[str, str]()
    for name in table.names:
        keys = [name]  # exact names come before patterns
        if name not in file.columns:
            keys = [key for key in file.columns if fnmatchcase(name, key)]
        used.update(keys)
        if len({file.columns[key] for key in keys}) > 1:
            raise InputError(
                f"{file.where}: expected one role for column {name!r}, found those of "
                f"{' and '.join(keys)}"
            )
        if keys:
            roles[name] = file.columns[keys[0]]
    unknown = [key for key in file.columns if key not in used]
    if unknown:
        hint = "".join(
            f"did you mean {n!r}? " for n in get_close_matches(unknown[0], table.names, 1)
        )
        if table.header and not table.typed:
            hint += "A file without a header has `header: none` among its columns. "
        raise InputError(
            f"{file.where}: unknown column {unknown[0]!r} of {file.path.name}: {hint}It has "
            f"{table.shown()}"
        )
    bare = [repr(name) for name in table.names if name not in roles]
    if bare:
        raise InputError(
            f"{file.where}: expected a role for each column of {file.path.name}, found none for "
            f"{', '.join(bare[:20])}"
        )
    return Columns(table, roles)


def open_described(description: Description) -> Source:
    """Open a folder's files for conversion, by their roles.

    Labels and splits are read here. A file of text is read once to count its rows.
    """
    problems = Problems()
    tables = []
    for file in description.files:
        if file.role != LEFT_OUT:
            with problems.catch():
                tables.append(_open_columns(file))
    problems.refuse()
    for text in missing_roles([[*columns.roles.values()] for columns in tables]):
        problems.add(f"{description.folder}: {text}")
    problems.refuse()
    return _Folder(description, tables).source()


class _Folder:
    def __init__(self, description: Description, tables: Sequence[Columns]) -> None:
        self.description = description
        self.options = description.options
        self.edges = next(columns for columns in tables if columns.first("source"))
        self.tables = [columns for columns in tables if columns is not self.edges]
        self.features = [Rows(columns, "feature") for columns in tables if columns.all("feature")]
        self.nodes = self._nodes()
        if not description.is_declared and self.nodes.are_reordered:
            self._refuse_rows()
        if self.options.get("drop_unknown") and self.nodes.names is None:
            raise InputError(
                "drop_unknown: expected a column of names in a table of nodes, found none"
            )

    def _nodes(self) -> Nodes:
        """Return the map from ids to rows; the first table with a column of names defines them."""
        rows = self.features[0]
        for part in self.features[1:]:
            if part.num_rows != rows.num_rows:
                raise InputError(
                    f"{part.table.file}: expected {rows.num_rows} rows as in {rows.table.file}, "
                    f"found {part.num_rows}"
                )
        named = [columns for columns in self.tables if columns.first("name")]
        names = None
        if named:
            names = (named[0].table, named[0].all("name")[0])
        return Nodes(rows.num_rows, rows.table.file.name, names)

    def _refuse_rows(self) -> None:
        """Refuse rows without ids beside a table of nodes whose ids are row numbers out of order."""
        assert self.nodes.names is not None
        table, column = self.nodes.names
        for columns in self.tables:
            roles = {*columns.roles.values()} - {LEFT_OUT}
            ids = {role for role in roles if role in SPLITS and not is_mask(columns, role)}
            if columns.table is not table and not {"id", "name"} & roles and roles - ids:
                raise InputError(
                    f"{table.file}, column {column!r}: 0 to {self.nodes.num_nodes - 1} in another "
                    f"order than the rows, and {columns.table.file} has rows only; its row i may "
                    f"be node {column} = i (then sort {table.file.name} by {column}), or row i of "
                    f"{table.file.name} (then declare `{column}: name` in dataset.yaml)"
                )

    def edge_chunks(self, chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        """Yield sources and targets of edges, int64, at most `chunk_edges` at a time."""
        ends = [*self.edges.all("source"), *self.edges.all("target")]
        drops = self.options.get("drop_unknown")
        for pieces in self.edges.table.batches(ends):
            if drops:
                pairs = np.stack([*map(self.nodes.find, pieces)])
                pairs = pairs[:, (pairs >= 0).all(axis=0)]
            else:
                pairs = np.stack([*map(self.nodes, pieces)])
            src, dst = pairs
            yield from zip(slices(src, chunk_edges), slices(dst, chunk_edges), strict=True)

    def labels(
        self, problems: Problems
    ) -> tuple[Callable[[], Iterator[Array]], int, Array | None, tuple[int, ...]]:
        """Return chunks of labels, the number of classes, their names and the shape of a row."""
        num_classes = self.options.get("num_classes")
        label = next((columns for columns in self.tables if columns.first("label")), None)
        labels = np.empty(0)
        names = None
        if label is not None:
            with problems.catch():
                check_num_classes(num_classes)
                labels, num_classes, names = read_labels(label, self.nodes, num_classes)
            return (lambda: slices(labels, _CHUNK_NODES)), num_classes or 0, names, ()
        values = Rows(next(columns for columns in self.tables if columns.all("value")), "value")
        if values.num_rows != self.nodes.num_nodes:
            problems.add(
                f"{values.table.file}: expected {self.nodes.num_nodes} rows of values, found "
                f"{values.num_rows}"
            )
        if num_classes is not None:
            problems.add(f"num_classes: expected without values ({AS_VALUES})")

        def chunks() -> Iterator[Array]:
            for rows in clean_targets(values.chunks(self.nodes), str(values.table.file)):
                yield rows.reshape(len(rows), *values.row_shape)

        return chunks, 0, None, values.row_shape

    def source(self) -> Source:
        folder = self.description.folder
        problems = Problems()
        label_chunks, num_classes, class_names, target_shape = self.labels(problems)
        splits: dict[str, Array] = {}
        with problems.catch():
            splits = read_splits(self.tables, self.nodes)
        problems.refuse()
        halves = all(part.dtype == np.float16 for part in self.features)
        dtype = np.dtype(np.float16 if halves else np.float32)
        files = [part.table.file for part in self.features]
        where = str(files[0] if len(files) == 1 else folder)
        return Source(
            name=folder.name,
            path=folder,
            stamps=_stamps(self.description),
            num_nodes=self.nodes.num_nodes,
            num_edges=self.edges.table.num_rows,
            num_features=sum(part.width for part in self.features),
            num_classes=num_classes,
            feature_dtype=dtype,
            edge_chunks=self.edge_chunks,
            x_chunks=partial(self._x_chunks, dtype, where),
            label_chunks=label_chunks,
            target_shape=target_shape,
            read_splits=lambda: dict(splits),
            node_names=self.nodes.chunks,
            label_names=class_names,
            features_at=where,
            feature_names=[name for part in self.features for name in part.names],
            options=self.options,
        )

    def _x_chunks(self, dtype: np.dtype[np.generic], where: str) -> Iterator[Array]:
        return finite(joined(self.features, self.nodes), dtype, where)


def _stamps(description: Description) -> dict[str, tuple[Path, Stamp]]:
    paths = {
        str(file.path).removeprefix(f"{description.folder}/"): file.path
        for file in description.files
        if file.role != LEFT_OUT
    }
    return stamped(paths)
