"""One file of columns, .csv, .csv.gz or .parquet, and the node ids in it; pyarrow is imported on use."""

from __future__ import annotations

import contextlib
import csv
import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .npz import Array

_BLOCK_BYTES, BATCH_ROWS, LONGEST_NAME = 2**22, 2**17, 256  # the last in bytes
RELABEL = "where ids are names, or leave gaps, give --relabel, and a file nodes with the id of each row of the features"

Batch = list[Any]  # arrow arrays of equal length, one per column that was asked for


def is_int(text: str) -> bool:
    with contextlib.suppress(ValueError):
        int(text)
        return True
    return False


def is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text or "nan")
        return True
    return False


class Table:
    """Columns in a .csv, .csv.gz or .parquet file, read in bounded memory with pyarrow.

    Args:
        is_data: tells from the fields of a csv file's first line whether they are data; else they are column names.
    """

    def __init__(self, file: Path, is_data: Callable[[list[str]], bool]) -> None:
        self.file, self.header, self._parquet = file, False, file.suffix == ".parquet"
        with self._damage():
            if not self._parquet:
                with gzip.open(file, "rt", newline="") if file.suffix == ".gz" else open(file, newline="") as lines:
                    self.first = next(csv.reader(lines), [])
                if not self.first:
                    raise InputError(f"{file}: expected a table, found an empty file or line")
                self.header = not is_data([text.strip().removeprefix("\ufeff") for text in self.first])
            schema = self._parquet_file().schema_arrow if self._parquet else self._csv({}).schema
        self.names, self.types = (
            [str(name) for name in schema.names],
            dict(zip(schema.names, schema.types, strict=True)),
        )

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"{self.file}: expected a sound table, found otherwise: {str(error).strip()}") from None

    def _parquet_file(self) -> Any:
        import pyarrow.parquet

        # A row group is read page by page; without a buffer each of its columns would be held whole.
        return pyarrow.parquet.ParquetFile(self.file, buffer_size=2**20, pre_buffer=False)

    def _csv(self, columns: Mapping[str, Any]) -> Any:
        import pyarrow.csv as read

        return read.open_csv(
            self.file,
            read_options=read.ReadOptions(block_size=_BLOCK_BYTES, autogenerate_column_names=not self.header),
            convert_options=read.ConvertOptions(column_types=columns, include_columns=list(columns)),
        )

    def where(self, row: int) -> str:
        """How a sentence names a row: by its line in a csv file."""
        return f"{self.file}, row {row}" if self._parquet else f"{self.file}, line {row + 1 + self.header}"

    def batches(self, columns: Mapping[str, Any]) -> Iterator[Batch]:
        """`columns`, each cast to an arrow type, in pieces.

        Raises:
            InputError: for a file that can't be read, and naming the row, for a value that is not of its type.
        """
        import pyarrow as pa

        begin = 0
        with self._damage():
            try:
                if not self._parquet:
                    yield from (batch.columns for batch in self._csv(columns))
                    return
                for batch in self._parquet_file().iter_batches(BATCH_ROWS, columns=list(columns)):
                    yield [batch[name].cast(kind) for name, kind in columns.items()]
                    begin += len(batch)
            except pa.ArrowInvalid:
                self._name_culprit(columns)
                raise

    def _name_culprit(self, columns: Mapping[str, Any]) -> None:
        """Look for the value that can't be cast, as text, because arrow does not say its row."""
        import pyarrow as pa

        begin, numbers = 0, {name: kind for name, kind in columns.items() if kind in (pa.int64(), pa.float64())}
        for batch in self.batches(dict.fromkeys(numbers, pa.string())) if numbers else ():
            for kind, column in zip(numbers.values(), batch, strict=True):
                fits = is_int if kind == pa.int64() else is_number
                for row, text in enumerate(column.to_pylist()):
                    if text and not fits(text):
                        what = "a node id" if kind == pa.int64() else "a number"
                        hint = f"; {RELABEL}" if kind == pa.int64() else ""
                        raise InputError(f"{self.where(begin + row)}: expected {what}, found {text!r}{hint}")
            begin += len(batch[0])

    @cached_property
    def num_rows(self) -> int:
        """Of a csv file only a pass over it tells."""
        import pyarrow as pa

        with self._damage():
            if self._parquet:
                return int(self._parquet_file().metadata.num_rows)
        return sum(len(batch[0]) for batch in self.batches({self.names[0]: pa.string()}))

    def one_of(self, names: Sequence[str]) -> str | None:
        """The column with one of these names, in any case."""
        return next((found for name in names for found in self.names if found.strip().lower() == name), None)


def numbers(values: Any) -> Array:
    """An arrow array of numbers as numpy; NaN for nulls."""
    return values.to_numpy(zero_copy_only=False)


def text_bytes(values: Any) -> tuple[Array, Array]:
    """Where each text of an arrow array begins, and ends, in the bytes of all."""
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
    return ends, np.frombuffer(data or b"", np.uint8)


def slices(array: Array, rows: int) -> Iterator[Array]:
    """`array` in pieces of so many rows."""
    return (array[begin : begin + rows] for begin in range(0, len(array), max(1, rows)))


# Ids -----------------------------------------------------------------------------------------------------------------


class Rows:
    """Ids that are numbers of rows: 0 to N - 1."""

    def __init__(self, num_nodes: int, features: Path) -> None:
        import pyarrow as pa

        self.num_nodes, self.type = num_nodes, pa.int64()
        self._expected = f"expected node ids from 0 to {num_nodes - 1}, the rows of {features.name}"

    def known(self, texts: Sequence[str]) -> bool:
        return any(map(is_int, texts))

    def __call__(self, values: Any, where: Callable[[int], str], begin: int) -> Array:
        """int64 ids of an arrow or numpy array whose first is that of row `begin`."""
        ids = np.asarray(values) if isinstance(values, np.ndarray) else numbers(values)
        if ids.dtype.kind in "SU" and len(ids):
            raise self._refusal(where(begin), str(ids[0]))
        wrong = (ids < 0) | (ids >= self.num_nodes) | (ids != np.floor(ids) if ids.dtype.kind == "f" else False)
        if wrong.any():
            at = int(wrong.argmax())
            raise self._refusal(where(begin + at), "none" if np.isnan(ids[at]) else ids[at].item())
        return ids.astype(np.int64, copy=False)

    def _refusal(self, where: str, found: object) -> InputError:
        return InputError(f"{where}: {self._expected}, found {found!r}; {RELABEL}")


class Names:
    """Ids that are names, text or whole numbers, by the list of them in the order of the nodes."""

    def __init__(self, num_nodes: int, source: Array | Table, column: str, file: Path) -> None:
        import pyarrow as pa

        from . import bits  # with numba, which planners do without

        self._bits = bits
        self.num_nodes, self._source, self._column, self._file = num_nodes, source, column, file
        self.type = pa.int64() if self._whole() else pa.string()
        self.width, self._table, begin = 1, bits.NodeNames(num_nodes), 0
        for batch in self._batches():
            if begin + len(batch) > num_nodes:
                raise self._count(source.num_rows if isinstance(source, Table) else len(source))
            at = self._table.add(self._hash(batch, self._where, begin))
            if at >= 0:
                raise InputError(f"{self._where(begin + at)}: expected each node once, found {batch[at]} again")
            begin += len(batch)
            if self.type == pa.string():
                self.width = max(self.width, int(np.diff(text_bytes(batch)[0]).max()))
        if begin != num_nodes:
            raise self._count(begin)
        if self.width > LONGEST_NAME:
            raise InputError(f"{file}: expected names of at most {LONGEST_NAME} bytes, found one of {self.width}")

    def _count(self, found: int) -> InputError:
        hint = "; is its first line a header? then call it node_id" if found == self.num_nodes + 1 else ""
        return InputError(
            f"{self._file}: expected {self.num_nodes} names, one for each row of the features, found {found}{hint}"
        )

    def _whole(self) -> bool:
        import pyarrow as pa

        if not isinstance(self._source, Table):
            return self._source.dtype.kind in "iu"
        if self._file.suffix == ".parquet":
            return bool(pa.types.is_integer(self._source.types[self._column]))
        first: Any = next(self._source.batches({self._column: pa.string()}), [[]])[0]
        return all(is_int(text) and str(int(text)) == text for text in map(str, first[:1000]))

    def _where(self, row: int) -> str:
        return self._source.where(row) if isinstance(self._source, Table) else f"{self._file}, row {row}"

    def _batches(self) -> Iterator[Any]:
        import pyarrow as pa

        if isinstance(self._source, Table):
            yield from (batch[0] for batch in self._source.batches({self._column: self.type}))
        else:
            yield from (pa.array(part).cast(self.type) for part in slices(self._source, BATCH_ROWS))

    def _hash(self, values: Any, where: Callable[[int], str], begin: int) -> Array:
        if values.null_count:
            raise InputError(f"{where(begin + int(np.flatnonzero(values.is_null())[0]))}: expected a node, found none")
        if len(values) == 0:
            return np.empty(0, np.uint64)
        return (
            self._bits.hash_numbers(values.to_numpy())
            if values.type == "int64"
            else self._bits.hash_text(*text_bytes(values))
        )

    def known(self, texts: Sequence[str]) -> bool:
        import pyarrow as pa

        with contextlib.suppress(pa.ArrowInvalid):
            hashes = self._hash(pa.array(list(texts), pa.string()).cast(self.type), str, 0)
            return bool((self._table.ids(hashes) >= 0).any())
        return any(map(is_int, texts)) and self.type == pa.int64()

    def __call__(self, values: Any, where: Callable[[int], str], begin: int) -> Array:
        """int64 ids of an arrow or numpy array whose first is that of row `begin`."""
        import pyarrow as pa

        values = pa.array(values) if isinstance(values, np.ndarray) else values
        values = values if values.type == self.type else values.cast(self.type)
        ids = self._table.ids(self._hash(values, where, begin))
        if len(ids) and ids.min() < 0:
            at = int(ids.argmin())
            raise self._refusal(where(begin + at), values[at].as_py())
        return ids

    def _refusal(self, where: str, found: object) -> InputError:
        return InputError(f"{where}: expected one of the {self.num_nodes} nodes in {self._file.name}, found {found!r}")

    def chunks(self) -> Iterator[Array]:
        """The names in the order of the nodes: int64, or UTF-8 bytes of fixed width."""
        for batch in self._batches():
            if batch.type == "int64":
                yield batch.to_numpy()
            else:
                yield np.array([text.encode() for text in batch.to_pylist()], f"S{self.width}")

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<i8" if self.type == "int64" else f"S{self.width}")
