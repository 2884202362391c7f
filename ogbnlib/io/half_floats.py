"""16-bit floats in kernels, as their bits, since numba has neither float16 nor bfloat16."""

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.extending import intrinsic


@intrinsic
def widened(typing_context, value):  # type: ignore[no-untyped-def]
    """Convert `value` to float32: a float32, the bits of a float16 (uint16) or bfloat16 (int16)."""

    # float16: one instruction for eight values (vcvtph2ps). A bfloat16 is the upper half of a
    # float32.
    def widen(
        context: BaseContext,
        builder: ir.IRBuilder,
        signature: Signature,
        arguments: Sequence[ir.Value],
    ) -> ir.Value:
        if value == types.float32:
            return arguments[0]
        if value == types.uint16:
            return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())
        word = ir.IntType(32)
        bits = builder.shl(builder.zext(arguments[0], word), word(16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(value), widen


@intrinsic
def narrowed(typing_context, value, like):  # type: ignore[no-untyped-def]
    """Convert a float32 to the type of `like`: float32 as it is, or the bits of the nearest
    bfloat16 (int16), on a tie the even one."""

    def narrow(
        context: BaseContext,
        builder: ir.IRBuilder,
        signature: Signature,
        arguments: Sequence[ir.Value],
    ) -> ir.Value:
        if like == types.float32:
            return arguments[0]
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        bits = builder.add(bits, builder.add(odd, word(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        # else the sum could turn a NaN into an infinity or a zero
        bits = builder.select(is_nan, word(0x7FC00000), bits)
        return builder.trunc(builder.lshr(bits, word(16)), ir.IntType(16))

    return like(types.float32, like), narrow
