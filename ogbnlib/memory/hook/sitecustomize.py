"""Start of each Python in a watched command: `watch` puts this folder on its PYTHONPATH.

Python imports `sitecustomize` before a script. This one has `memory.calls` record what the script
does, and then runs the `sitecustomize` that it hides. Without this package, as in a Python of
another environment, it does only the latter.
"""

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
with contextlib.suppress(ImportError):
    from ogbnlib.memory import calls

    calls.install()
_hidden = PathFinder.find_spec("sitecustomize")  # in the rest of the path
if _hidden is not None and _hidden.loader is not None:
    sys.modules["sitecustomize"] = module_from_spec(_hidden)
    _hidden.loader.exec_module(sys.modules["sitecustomize"])
