"""Speed of a machine's processor and disk, for the times of a forecast."""

import contextlib
import io
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..graph.store import GraphSize, Store
from ..io.blocks import BLOCK, block_buffer
from ..launcher import job_cores
from ..memory.cgroup import read_whole

DISK_BYTES_PER_S = 1.2e9  # for times only; measured on a 2-core machine with an NVMe-like disk
_READ_BYTES = 2**26  # of a probe's read, 0.05 s
_PROBE_S = 0.1  # CPU time of a probe of the processor


@dataclass(frozen=True)
class Machine:
    """Speeds of a machine, for the time of a run without a GPU."""

    cores: int
    flops_per_s: float  # of one core, in a float32 product
    disk_bytes_per_s: float
    bf16_flops_per_s: float  # of one core, in a bfloat16 product

    def products_per_s(self, precision: str, threads: int) -> float:
        """Operations per second in the matrix products of a training step."""
        # The second core adds 0.74 of the first: one and two cores trained 1.29 and 2.03 batches/s,
        # in bfloat16 1.97 and 2.96. The products of a step, many of them narrow, reach 0.72 of the
        # speed measured here. An epoch of [15, 10, 5] x 1024 x 256 from RAM took 408 s in fp32 (75
        # GFLOP/s a core), and 131 s in bfloat16 (215).
        of_core = self.flops_per_s if precision == "fp32" else self.bf16_flops_per_s
        return 0.72 * of_core * min(threads, self.cores) ** 0.8  # 1.74 for two cores

    def __str__(self) -> str:
        return (
            f"{self.cores} core{'s' * (self.cores > 1)}, {self.flops_per_s / 1e9:.0f} GFLOP/s a "
            f"core, disk {self.disk_bytes_per_s / 1e9:.1f} GB/s"
        )


# The two cores and the disk on which the guide's figures were measured.
REFERENCE = Machine(2, 75e9, DISK_BYTES_PER_S, 150e9)


def _product() -> float:
    # Operations per second of one core in a float32 matrix product.
    # So small a product runs in one thread of OpenBLAS; a larger one counts threads that wait in a
    # loop. It reached 60 GFLOP/s here, where products of a hidden layer's size reach 57 to 75.
    a = np.ones((64, 64), np.float32)
    out = a @ a
    return 2 * 64**3 * _calls_per_s(lambda: np.matmul(a, a, out=out))  # 2: multiply and add


def _calls_per_s(work: Callable[[], object]) -> float:
    count = 0
    begin = time.thread_time()  # not the clock's time: a login node has other users
    while time.thread_time() - begin < _PROBE_S:
        work()
        count += 1
    return count / (time.thread_time() - begin)


def _bf16_product(flops_per_s: float) -> float:
    """Operations per second of one core in a bfloat16 matrix product.

    With bfloat16 instructions they were 215 GFLOP/s against 98 in float32 on a Zen 4, 84 against
    141 on a Xeon of the same year. A processor without them (AVX2) ran at a 24th of float32, 2.4
    against 57: this ratio is assumed, without importing torch.
    """
    flags = read_whole("/proc/cpuinfo") or b""
    if b"avx512_bf16" not in flags and b"amx_bf16" not in flags:
        return flops_per_s / 24
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a = torch.ones(512, 512, dtype=torch.bfloat16)
    torch.mm(a, a)  # the first call prepares the kernel
    calls_per_s = _calls_per_s(lambda: torch.mm(a, a))
    torch.set_num_threads(threads)
    return 2 * 512**3 * calls_per_s


def _read(path: Path) -> float:
    """Bytes per second of a large read past the page cache; 0.0 for a small file."""
    pieces = path.stat().st_size // _READ_BYTES
    if pieces < 8:  # below 512 MB: too small to time
        return 0.0
    buffer = block_buffer(_READ_BYTES)  # aligned, as O_DIRECT asks
    buffer[::BLOCK] = bytes(_READ_BYTES // BLOCK)  # touches each page: else page faults count
    with io.FileIO(os.open(path, os.O_RDONLY | os.O_DIRECT)) as file:
        begin = time.perf_counter()
        num_bytes = os.preadv(file.fileno(), [buffer], random.randrange(pieces) * _READ_BYTES)
    return num_bytes / (time.perf_counter() - begin)


def probe(size: GraphSize | None = None) -> Machine:
    """Measure this machine's processor, and its disk by a read of a store's features, if large."""
    disk = 0.0  # unknown
    if isinstance(size, Store):
        with contextlib.suppress(OSError):  # a file system without O_DIRECT
            disk = _read(size.file_path("x"))
    flops_per_s = _product()
    bf16_flops_per_s = _bf16_product(flops_per_s)
    return Machine(job_cores(), flops_per_s, disk or DISK_BYTES_PER_S, bf16_flops_per_s)
