"""Names as text, from the UTF-8 bytes in a store."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .npz import Array


def decoded(values: Array) -> Array:
    """Return UTF-8 bytes as an array of text, other values unchanged."""
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8")
    return values


class Text(Sequence[str]):
    """Names in a file [n], decoded on use: an index gives a `str` or a numpy array of text, `[:]`
    all names (100 million of 20 letters take 8 GB of memory, 2 GB on disk)."""

    def __init__(self, stored: Array) -> None:
        self.stored = stored
        self.dtype = np.dtype(f"U{stored.itemsize}")  # a character has at least one byte

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index: Any) -> Any:
        values = self.stored[index]
        if isinstance(values, bytes):  # a single name
            return values.decode()
        return decoded(np.asarray(values))

    def __repr__(self) -> str:
        first = [*map(repr, self[:3].tolist()), "..."][: len(self)]  # no dots up to three names
        return f"Text([{', '.join(first)}], n={len(self)})"
