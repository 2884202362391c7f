"""Compiling the kernels of loading policies ahead of their use."""

import tempfile
from collections.abc import Sequence

import numpy as np

from ..files import BLOCK
from ..graph.edge_sort import restore_input_order
from ..io.disk_array import DiskArray
from ..sampling.sampler import CSCSampler
from .window import Seeds, Window, sample_windows, take_rows


def compile_kernels(num_neighbors: Sequence[int]) -> None:
    """Compile the policies' kernels, or load them from disk: a few seconds once, 60 MB of LLVM in
    every process.

    Done on an empty graph before data is loaded, so that the figures of later phases are the data's
    alone.
    """
    empty = np.empty(0, np.int64)
    offsets = np.zeros(2, np.int64)
    one = np.zeros(1, np.int64)
    restore_input_order(offsets, empty, empty)
    for dtype in (np.int32, np.int64):
        take_rows(np.empty((1, 1), np.uint8), one[:0].astype(dtype), np.empty((1, 1), np.uint8))
        sampler = CSCSampler(offsets, np.empty(0, dtype), num_neighbors)
    with tempfile.NamedTemporaryFile() as file:  # a graph of one node on disk
        file.write(bytes(BLOCK))
        file.flush()
        colptr, row, x = (DiskArray(file.name, 0, size, 2) for size in (8, 4, 8))
        for dtype in (np.int32, np.int64):
            row.read(one, np.empty((1, 1), dtype))
        seeds = Seeds(sampler, 0, [one], [one])
        window = Window.pack(seeds, sample_windows([seeds], colptr, row)[0])
        x.read(window.ids, np.empty((1, 4), np.float16))
        x.sweep(window.ids, np.array([0, 1]), 2**20, lambda *_: None)
        for array in (colptr, row, x):
            array.close()
