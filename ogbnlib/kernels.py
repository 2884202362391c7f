"""The decorator of all kernels (compiled functions), and prefetching, which numba lacks."""

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from . import kernel_cache

Array = NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def kernel_with(
    *, fastmath: bool | set[str] = False, inline: str = "never"
) -> Callable[[Function], Function]:
    """Return a decorator that compiles a function on first use, with these options of numba.

    The code is single-threaded, because forked DataLoader workers must not share a thread pool.
    """

    def declare(function: Function) -> Function:
        folder = kernel_cache.folder()  # None: it can't be written
        users_dir = config.CACHE_DIR
        config.CACHE_DIR = str(folder or "")  # read by njit below, once for each function
        try:
            return njit(nogil=True, cache=folder is not None, fastmath=fastmath, inline=inline)(
                function
            )
        finally:
            config.CACHE_DIR = users_dir  # for the user's own numba functions

    return declare


kernel = kernel_with()


@intrinsic
def prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Start to load the cache line of item `index` of an array in C order, for a later read."""

    # Called by numba to write the LLVM code of a call; `arguments` are the values (array, index).
    def fetch(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
        int32 = ir.IntType(32)
        prototype = ir.FunctionType(ir.VoidType(), [pointer.type, int32, int32, int32])
        function = cgutils.get_or_insert_function(builder.module, prototype, "llvm.prefetch.p0")
        # 0: to read, 3: into all cache levels, 1: data
        builder.call(function, [pointer, int32(0), int32(3), int32(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), fetch
