"""Features stored in one byte per value."""

from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np

from ..errors import InputError
from .npz import Array


class Int8Columns(NamedTuple):
    """Features in one byte: code q of column f has the value `q * scale[f] + offset[f]`; both are
    float32 [F]."""

    scale: Array
    offset: Array

    @classmethod
    def covering(cls, chunks: Iterable[Array], num_features: int, where: str) -> Self:
        """Spread the codes -127 to 127 evenly from each column's smallest value to its largest; all
        values must be finite. `where` names them in the error for a column that would overflow."""
        low = np.full(num_features, np.inf)
        high = np.full(num_features, -np.inf)
        for values in chunks:  # [n, F]; `initial` allows a chunk without rows
            np.minimum(low, values.min(axis=0, initial=np.inf), out=low)
            np.maximum(high, values.max(axis=0, initial=-np.inf), out=high)
        scale = np.where(high > low, (high - low) / 254, 1.0)  # a constant column is its offset
        columns = cls(scale.astype(np.float32), ((low + high) / 2).astype(np.float32))
        ends = columns.decode(np.full((2, num_features), [[-127], [127]], np.int8))
        wide = np.flatnonzero(~np.isfinite(ends).all(axis=0))  # columns
        if len(wide):
            raise InputError(
                f"{where}: column {wide[0]} with values from {low[wide[0]]:g} to {high[wide[0]]:g} is "
                "infinite once decoded from int8; replace its largest values, or scale it down"
            )
        return columns

    def encode(self, values: Array) -> Array:
        """Return the nearest codes, int8, of float values [n, F]."""
        return np.clip(np.rint((values - self.offset) / self.scale), -127, 127).astype(np.int8)

    def decode(self, codes: Array, columns: slice = slice(None)) -> Array:
        """Return the values, float32, of some columns of int8 codes [n, F]."""
        values = codes[:, columns].astype(np.float32)  # changed in place, to need one copy only
        with np.errstate(over="ignore", invalid="ignore"):  # `finite` refuses such values
            values *= self.scale[columns]
            values += self.offset[columns]
        return values
