"""16-bit floats in kernels, as their bits, since numba has neither float16 nor bfloat16."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def widened(typing_context, value):  # type: ignore[no-untyped-def]
    """Convert `value` to float32: a float32, the bits of a float16 (uint16) or bfloat16 (int16)."""

    # emits LLVM code for one scalar; `value` is its numba type
    def widen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if value == types.float32:
            return arguments[0]
        if value == types.uint16:  # one instruction for eight values (vcvtph2ps)
            return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())
        word = ir.IntType(32)  # a bfloat16 is the upper half of a float32
        bits = builder.shl(builder.zext(arguments[0], word), word(16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(value), widen


@intrinsic
def narrowed(typing_context, value, like):  # type: ignore[no-untyped-def]
    """Convert a float32 to the type of `like`: float32 as it is, or the bits of the nearest
    bfloat16 (int16), on a tie the even one."""

    # emits LLVM code for one scalar; `value` and `like` are numba types
    def narrow(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if like == types.float32:
            return arguments[0]
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))  # last bit of the upper half
        # carries into that bit if the lower half is over 0x8000, or is 0x8000 and the bit is odd
        bits = builder.add(bits, builder.add(odd, word(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        # else the sum could turn a NaN into an infinity or a zero
        bits = builder.select(is_nan, word(0x7FC00000), bits)  # the usual quiet NaN
        return builder.trunc(builder.lshr(bits, word(16)), ir.IntType(16))  # the upper half

    return like(types.float32, like), narrow
