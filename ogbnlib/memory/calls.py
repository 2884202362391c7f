"""Calls of a watched script whose memory has a known remedy: files that are read whole, and the
graphs that PyG's loaders build, one each.

`install` wraps `torch.load`, `numpy.load` and PyG's `to_csc` when a script imports their modules,
and imports nothing itself. Events say which call is open, in which line of the script, and which
graphs are alive. A read of less than 16 MB takes 5 us longer and is not recorded, any other 0.4 ms.
"""

import contextlib
import functools
import itertools
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

from .. import marks
from ..environment import RUN_VARIABLE, WATCHED_VARIABLE

# The argument with which a call maps a file in place of reading it.
_MAPPED = {"torch.load": "mmap=True", "numpy.load": "mmap_mode='r'"}
# file names of code that the user did not write: Python itself and installed packages
LIBRARY = re.compile(
    rf"<frozen|{re.escape(os.path.dirname(os.__file__))}/|.*/(site|dist)-packages/"
)
_numbers = itertools.count(1)  # of the loaders' graphs


def install() -> None:
    """Record the calls of this process from now on, if it belongs to a watched command."""
    # Each names a run's folder, of the watched command and of the innermost run. They differ in a
    # trainer that the command started, which records itself.
    if os.environ.get(WATCHED_VARIABLE, "") == os.environ.get(RUN_VARIABLE):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finder of the modules with functions to record; other finders find all else."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in _FUNCTIONS else None
        if spec is None or spec.loader is None:
            return None  # the next finder is asked
        execute = spec.loader.exec_module  # runs the module's code at its import

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            for function, wrap in _FUNCTIONS[name].items():
                if hasattr(module, function):  # other releases may lack it
                    setattr(module, function, wrap(getattr(module, function)))

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def _record_load(load: Any) -> Any:  # wraps `torch.load` or `numpy.load`
    import inspect  # torch and numpy have imported it

    name = f"{load.__module__.partition('.')[0]}.load"  # a key of `_MAPPED`
    argument = _MAPPED[name].partition("=")[0]  # the name alone, "mmap" or "mmap_mode"
    signature = inspect.signature(load)

    @functools.wraps(load)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        size = 0
        is_mapped = False
        with contextlib.suppress(OSError, TypeError, ValueError):  # not a path, or a wrong call
            arguments = signature.bind(*args, **kwargs).arguments
            is_mapped = bool(arguments.get(argument))
            size = os.path.getsize(next(iter(arguments.values())))  # the first one is the file
        if size < 2**24 or is_mapped:  # a read below 16 MB is not worth a record
            return load(*args, **kwargs)
        with _open(name, bytes=size, argument=_MAPPED[name]):
            return load(*args, **kwargs)

    return recorded


def _record_graph(build: Any) -> Any:  # wraps PyG's `to_csc` or `to_hetero_csc`
    @functools.wraps(build)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with _open("NeighborLoader") as line:
            graph = build(*args, **kwargs)
        # The result is (colptr, row, perm). `perm`, the permutation that sorted the edges, is None
        # if nothing was sorted. A graph with several types of edges has a dict of each.
        perms = [*graph[2].values()] if isinstance(graph[2], Mapping) else [graph[2]]
        perms = [perm for perm in perms if perm is not None]
        if perms:  # else the loader samples from the edges of the data themselves
            name = f"graph of loader {next(_numbers)} from {line}"
            # `row`, the sorted sources, has as many bytes again
            marks.note("graph", name=name, bytes=2 * sum(perm.nbytes for perm in perms))
            forget = functools.partial(marks.note, "graph", name=name, bytes=0)
            weakref.finalize(perms[0], forget).atexit = False  # when the loader ends, not at exit
        return graph

    return recorded


# module -> name of a function in it -> what wraps the function to record its calls
_FUNCTIONS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "torch.serialization": {"load": _record_load},
    "numpy.lib._npyio_impl": {"load": _record_load},
    "numpy.lib.npyio": {"load": _record_load},  # before numpy 2
    "torch_geometric.sampler.neighbor_sampler": {
        "to_csc": _record_graph,
        "to_hetero_csc": _record_graph,
    },
}


@contextlib.contextmanager
def _open(call: str, **facts: object) -> Iterator[str]:
    """Record a call while the block runs; yields the line that made it."""
    line = _line()
    from .reading import own_memory  # 50 ms, which each start of Python would take

    marks.note("call", call=call, line=line, held_bytes=own_memory()[0], **facts)
    try:
        yield line
    finally:
        marks.note("returned")


def _line() -> str:  # the innermost one of the user's own code, such as "line 12 of train.py"
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame):
        frame = frame.f_back  # the caller's
    name = os.path.basename(frame.f_code.co_filename)
    if name.startswith("<ipython"):  # code of a %%memory_limit cell
        name = "the cell"
    return f"line {frame.f_lineno} of {name}"


def _is_library(frame: FrameType) -> bool:  # of Python, of an installed package or of ogbnlib
    module = str(frame.f_globals.get("__name__"))
    return bool(LIBRARY.match(frame.f_code.co_filename)) or module.startswith("ogbnlib.")
