"""The longest silence of each notebook in JupyterLab: `python tests/benchmarks/bench_silence.py [03 05 ...]`.

Executes the notebooks at their defaults with a kernel that takes itself for JupyterLab's, and notes when each message
with output arrives. A silence is the time in one cell without one. Cells of imports alone are in a column of their own
if `begin_notebook` has announced them before.
"""

import ast
import os
import re
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
        self.announced: set[int] = set()  # cells of imports that an earlier message has announced
        self._last_s, self._text = 0.0, ""

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        kind, now_s = msg["msg_type"], time.monotonic()
        if kind == "execute_input":
            self.silences[cell_index], self._last_s = 0.0, now_s
            if "imports below" in self._text and is_imports(cell.source):
                self.announced.add(cell_index)
        elif cell_index in self.silences and (kind in OUTPUT or msg["content"].get("execution_state") == "idle"):
            self.silences[cell_index] = max(self.silences[cell_index], now_s - self._last_s)
            self._last_s, self._text = now_s, self._text + msg["content"].get("text", "")
        return super().process_message(msg, cell, cell_index)


def is_imports(source: str) -> bool:
    return not source.startswith("%") and all(
        isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(source).body
    )


def measure(path: Path, folder: Path) -> None:
    shutil.rmtree(folder / "runs", ignore_errors=True)
    os.environ["JPY_SESSION_NAME"] = str(folder / "notebooks" / path.name)
    book = nbformat.read(path, as_version=4)
    listener = Listener(book, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    listener.execute()
    silences = {at: silence for at, silence in listener.silences.items() if at not in listener.announced}
    longest = max(silences, key=silences.__getitem__)
    imports = "".join(f"{listener.silences[at]:.1f}" for at in listener.announced) or "not announced"
    first = re.sub(r"\s+", " ", book.cells[longest].source)[:34]
    print(ROW.format(path.stem, f"{silences[longest]:.1f}", longest + 1, first, imports), flush=True)


if __name__ == "__main__":
    chosen = [path for path in NOTEBOOKS if path.name.startswith(tuple(sys.argv[1:]) or ("",))]
    print(ROW.format("notebook", "silence s", "cell", "it begins with", "announced imports s"))
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(NOTEBOOKS[0].parent, Path(scratch, "notebooks"))
        for each in chosen:
            measure(each, Path(scratch))
