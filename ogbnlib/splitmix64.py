"""The hash behind all random draws: splitmix64."""

import numpy as np
from numba import uint64

from .kernels import kernel

GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, the increment of splitmix64


@kernel
def mix(x: np.uint64) -> np.uint64:
    """A bijection of 64 bits that spreads every input bit over the output."""
    # The output function of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    # generators", OOPSLA 2014), with the constants of David Stafford's variant 13 as in Sebastiano
    # Vigna's public-domain splitmix64.c. Each constant and shift is a uint64: numba turns uint64
    # combined with int64 into float64.
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))
