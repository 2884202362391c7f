"""The longest silence of each notebook in JupyterLab: `python tests/benchmarks/bench_silence.py [03 05 ...]`.

Executes the notebooks at their defaults with a kernel that takes itself for JupyterLab's, and notes when each message
with output arrives. A silence is the time in one cell without one. The imports have a column of their own, if
`begin_notebook` has announced them before.
"""

import ast
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
OUTPUT = {"stream", "display_data", "update_display_data", "execute_result", "error"}
ROW = "{:<24}{:>10}{:>6}  {:<36}{:>22}"


class Listener(NotebookClient):
    """A client that notes, for each code cell, its longest silence in seconds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.silences: dict[int, float] = {}
        self.imports_s = 0.0  # the longest silence in imports that were announced
        self._last_s, self._is_announced = 0.0, False

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        kind, now_s = msg["msg_type"], time.monotonic()
        if kind == "execute_input":
            self.silences[cell_index], self._last_s = 0.0, now_s
        elif cell_index in self.silences and (kind in OUTPUT or msg["content"].get("execution_state") == "idle"):
            silence_s, self._last_s = now_s - self._last_s, now_s
            if self._is_announced and is_imports(cell.source):
                self.imports_s = max(self.imports_s, silence_s)
            else:
                self.silences[cell_index] = max(self.silences[cell_index], silence_s)
            self._is_announced |= "imports below" in msg["content"].get("text", "")
        return super().process_message(msg, cell, cell_index)


def is_imports(source: str) -> bool:
    """Whether a cell has nothing but imports and the call that announces them."""
    lines = [] if source.startswith("%") else ast.parse(source).body
    known = [isinstance(line, ast.Import | ast.ImportFrom) or "begin_notebook" in ast.dump(line) for line in lines]
    return known != [] and all(known)


if __name__ == "__main__":
    print(ROW.format("notebook", "silence s", "cell", "it begins with", "announced imports s"))
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(NOTEBOOKS[0].parent, Path(scratch, "notebooks"))
        for path in NOTEBOOKS:
            if path.name.startswith(tuple(sys.argv[1:]) or ("",)):
                os.environ["JPY_SESSION_NAME"] = path.name
                book, where = nbformat.read(path, as_version=4), {"metadata": {"path": scratch}}
                listener = Listener(book, timeout=None, kernel_name="python3", resources=where)
                listener.execute()
                shutil.rmtree(Path(scratch, "runs"), ignore_errors=True)
                cell, silence_s = max(listener.silences.items(), key=lambda item: item[1])
                first = " ".join(book.cells[cell].source.split())[:34]
                imports = f"{listener.imports_s:.1f}" if listener.imports_s > 0.3 else "not announced"
                print(ROW.format(path.stem, f"{silence_s:.1f}", cell + 1, first, imports), flush=True)
