"""Sets of nodes as bits with ranks (21 MB for papers100M), the hash of all draws, 16-bit floats,
and prefetching."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import config, njit, types, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from . import kernel_cache
from .npz import Array

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel_with(**options: Any) -> Callable[[Function], Function]:
    """Return a decorator that compiles a function on first use, with these options of numba.

    The machine code is stored in `kernel_cache.folder`. It is single-threaded, as forked DataLoader
    workers must not share a pool.
    """

    def declare(function: Function) -> Function:
        folder = kernel_cache.folder()
        before = config.CACHE_DIR
        config.CACHE_DIR = str(folder or "")  # which numba reads here, once for each function
        try:
            compiled: Function = njit(nogil=True, cache=folder is not None, **options)(function)
        finally:
            config.CACHE_DIR = before
        return compiled

    return declare


kernel = kernel_with()

# Every constant and shift below is a uint64: numba turns uint64 combined with int64 into float64.
GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, the increment of splitmix64
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_U0, _U1, _U6, _U27, _U30, _U31, _U63 = (np.uint64(n) for n in (0, 1, 6, 27, 30, 31, 63))


@intrinsic
def widened(typing_context, value):  # type: ignore[no-untyped-def]
    """Return a float32, the bits of a float16 (uint16) or of a bfloat16 (int16) as float32. Numba
    has neither."""

    # float16: one instruction for eight values (vcvtph2ps). A bfloat16 is the upper half of a
    # float32.
    def widen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if value == types.float32:
            return arguments[0]
        if value == types.uint16:
            return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())
        word = ir.IntType(32)
        return builder.bitcast(
            builder.shl(builder.zext(arguments[0], word), word(16)), ir.FloatType()
        )

    return types.float32(value), widen


@intrinsic
def narrowed(typing_context, value, like):  # type: ignore[no-untyped-def]
    """Return a float32 as the type of `like`: as it is, or the bits of the nearest bfloat16
    (int16), even on a tie."""

    def narrow(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if like == types.float32:
            return arguments[0]
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        bits = builder.add(bits, builder.add(odd, word(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        # else the sum could make an infinity or a zero of it
        bits = builder.select(is_nan, word(0x7FC00000), bits)
        return builder.trunc(builder.lshr(bits, word(16)), ir.IntType(16))

    return like(types.float32, like), narrow


@intrinsic
def prefetch(typing_context, array, place):  # type: ignore[no-untyped-def]
    """Ask for the cache line of item `place` of an array in C order, and go on: a later read then
    need not wait."""

    def fetch(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer, number = (
            builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t),
            ir.IntType(32),
        )
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # data, to read, into all caches
        builder.call(function, [pointer, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), fetch


@kernel
def mix(x: Any) -> Any:
    """A bijection of 64 bits that spreads every input bit over the output."""
    # The output function of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    # generators", OOPSLA 2014), with the constants of David Stafford's variant 13 as in Sebastiano
    # Vigna's public-domain splitmix64.c.
    x = (x ^ (x >> _U30)) * _MIX_1
    x = (x ^ (x >> _U27)) * _MIX_2
    return x ^ (x >> _U31)


@kernel
def ones(word: Any) -> Any:
    """Bits set in a uint64 (Warren, Hacker's Delight, 2nd edition, figure 5-2)."""
    word = word - ((word >> uint64(1)) & uint64(0x5555555555555555))
    word = (word & uint64(0x3333333333333333)) + ((word >> uint64(2)) & uint64(0x3333333333333333))
    word = (word + (word >> uint64(4))) & uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * uint64(0x0101010101010101)) >> uint64(56))


@kernel
def has(words: Any, node: Any) -> Any:
    bit = uint64(node)
    return (words[bit >> _U6] >> (bit & _U63)) & _U1 != _U0


@kernel
def put(words: Any, node: Any) -> None:
    bit = uint64(node)
    words[bit >> _U6] |= _U1 << (bit & _U63)


@kernel
def rank(words: Any, before: Any, node: Any) -> Any:
    """Return the number of members below `node`; `before` has the members in all words before
    each."""
    bit = uint64(node)
    below = (_U1 << (bit & _U63)) - _U1
    return before[bit >> _U6] + ones(words[bit >> _U6] & below)


@kernel
def _put_all(words: Any, nodes: Any) -> None:
    for node in nodes:
        put(words, node)


@kernel
def _count_before(words: Any, before: Any) -> Any:
    total = 0
    for w in range(len(words)):
        before[w] = total
        total += ones(words[w])
    return total


@kernel
def _ranks(words: Any, before: Any, nodes: Any) -> Any:
    out = np.empty(len(nodes), before.dtype)
    for i in range(len(nodes)):
        out[i] = rank(words, before, nodes[i])
    return out


@kernel
def _members(words: Any, total: Any, before: Any) -> Any:
    ids, at = np.empty(total, before.dtype), 0
    for w in range(len(words)):
        word = words[w]
        while word != _U0:
            others = word & (word - _U1)  # all but the lowest bit
            ids[at] = w * 64 + ones((word ^ others) - _U1)
            word, at = others, at + 1
    return ids


class NodeSet:
    """A set of node ids below `num_nodes`, in num_nodes / 8 bytes, and half as much for the
    ranks."""

    # It finds the distinct ids among 12 million in one second; sorting takes ten.

    def __init__(self, num_nodes: int):
        self.num_nodes = num_nodes
        # at least one bit more: the end has a rank, too
        self.words = np.zeros(num_nodes // 64 + 1, np.uint64)
        # members in all words before each, as of the last `count`
        self.before: Array = np.empty(0, np.int32)

    def add(self, nodes: Array) -> None:
        """Add integer ids, which are not checked."""
        _put_all(self.words, nodes)

    def contains(self, nodes: Array) -> Array:
        """Return which of these int64 ids are members, bool [len(nodes)]."""
        return (self.words[nodes >> 6] >> (nodes & 63).astype(np.uint64)) & _U1 != _U0

    def count(self) -> int:
        """Return the number of members, and compute the ranks, which are valid until the next
        `add`."""
        self.before = np.empty(len(self.words), np.int32 if self.num_nodes < 2**31 else np.int64)
        return int(_count_before(self.words, self.before))

    def members(self) -> Array:
        """Return all ids, ascending, int32 (int64 from 2**31 nodes on), and compute the ranks."""
        return _members(self.words, self.count(), self.before)

    def ranks(self, nodes: Array) -> Array:
        """Return the number of members below each id, which is a member's position in `members`, in
        its dtype."""
        return _ranks(self.words, self.before, nodes)
