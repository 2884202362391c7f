"""Promises of the remedies for killed scripts and cells: the first one, followed to the letter,
finishes under the same limit; where there is none of one line, the fact names line and amount.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MB

from ogbnlib.memory.limits import Limit
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import watch

EDGES = 6_000_000  # 96 MB; a loader keeps as much, and needs 192 MB while it is built
LARGE_BYTES = 300 * MB
GRAPH = f"""
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
data = Data(edge_index=torch.randint(0, 10**6, (2, {EDGES})), num_nodes=10**6)
masks = [torch.arange(100), torch.arange(100, 200), torch.arange(200, 300)]
"""
ENDS = "\nassert all(len(loader) == 10 for loader in loaders)\nprint('finished')\n"
LOADERS = {  # code that makes three loaders
    "three lines": """
        first = NeighborLoader(data, num_neighbors=[2], batch_size=10, input_nodes=masks[0])
        second = NeighborLoader(data, num_neighbors=[2], batch_size=10, input_nodes=masks[1])
        third = NeighborLoader(data, num_neighbors=[2], batch_size=10, input_nodes=masks[2])
        loaders = [first, second, third]
    """,
    "a loop": """
        loaders = []
        for mask in masks:
            loaders.append(NeighborLoader(data, num_neighbors=[2], batch_size=10, input_nodes=mask))
    """,
    "another file": """
        from my_loaders import make
        loaders = [make(data, mask) for mask in masks]
    """,
}
MODULE = """
import torch_geometric.loader as pyg
def make(data, mask):
    return pyg.NeighborLoader(data, num_neighbors=[2], batch_size=10, input_nodes=mask)
"""
READS = {  # code that reads a large file, without PyG
    "torch.load in a phase": """
        import torch, ogbnlib
        from pathlib import Path
        with ogbnlib.phase("read"):
            x = torch.load(Path('x.pt'), map_location='cpu')
    """,
    "numpy.load": "import numpy\nx = numpy.load('x.npy', allow_pickle=False)\nprint(x[:3])",
}


class _Follow(ast.NodeTransformer):
    """Edit of the calls that a remedy names, and of the same function's calls in other lines."""

    def __init__(self, remedy: str, file: Path):
        self.tree = ast.parse(file.read_text())
        self.sorts = re.search(r"data\.edge_index = [^(]*\.argsort\(\)\]", remedy)
        self.mapped = re.search(r"\w+\.load\(\.\.\., (\w+)=([\w']+)\)", remedy)
        found = re.findall(rf"line (\d+) of {re.escape(file.name)}\b", remedy)
        lines = {int(line) for line in found}
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        named = [ast.unparse(call.func) for call in calls if call.lineno in lines]
        suffix = "load" if self.mapped else "NeighborLoader"
        self.names = {name for name in named if name.endswith(suffix)}

    def visit_Call(self, call: ast.Call) -> ast.Call:
        self.generic_visit(call)
        if ast.unparse(call.func) not in self.names:
            return call
        name, text = self.mapped.groups() if self.mapped else ("is_sorted", "True")
        value = ast.parse(text, mode="eval").body
        return ast.Call(call.func, call.args, [*call.keywords, ast.keyword(name, value)])

    def visit_Assign(self, assign: ast.Assign) -> ast.AST | list[ast.stmt]:
        self.generic_visit(assign)
        if not self.sorts or ast.unparse(assign.targets[0]) != "data":
            return assign
        return [assign, *ast.parse(self.sorts[0]).body]


def follow(remedy: str, file: Path) -> bool:
    """Edit a script as the remedy says; return whether it named a line of it."""
    edit = _Follow(remedy, file)
    file.write_text(ast.unparse(ast.fix_missing_locations(edit.visit(edit.tree))))
    return bool(edit.names)


@pytest.fixture(autouse=True)
def _in_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_limit: Callable[[int], Limit]
) -> None:
    kernel_limit(2**30).close()  # skips where the kernel enforces none
    monkeypatch.chdir(tmp_path)


def python(code: str, limit_bytes: int | None = None) -> Run:
    Path("script.py").write_text(textwrap.dedent(code))
    return watch([sys.executable, "script.py"], limit_bytes, echo=False)


@pytest.fixture(scope="module")
def imports_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Memory of Python with PyG, without data."""
    folder = tmp_path_factory.mktemp("imports")
    imports = "import torch, torch_geometric.loader, torch_geometric.data"
    done = watch([sys.executable, "-c", imports], run_dir=folder / "run", echo=False)
    return done.held_peak_bytes


def killed(code: str, limit_bytes: int) -> Run:
    done = python(code, limit_bytes)
    assert (done.exit_code, done.diagnosis.cause) == (137, "out of memory"), done.diagnosis
    assert len(done.diagnosis.remedy.split()) <= 60
    return done


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_loaders_of_sorted_edges_finish_as_the_remedy_says(name: str, imports_bytes: int) -> None:
    module = Path("my_loaders.py")
    module.write_text(MODULE)
    limit_bytes = imports_bytes + 336 * MB  # one graph as it is built takes 288 MB, two 384
    code = GRAPH + textwrap.dedent(LOADERS[name]) + ENDS
    done = killed(code, limit_bytes)
    assert len(done.record.graphs) == 1
    files = (Path("script.py"), module)
    followed = [follow(done.diagnosis.remedy, file) for file in files]
    assert any(followed), done.diagnosis.remedy
    again = python(Path("script.py").read_text(), limit_bytes)
    assert again.exit_code == 0, again.diagnosis
    assert not again.record.graphs


@pytest.mark.slow
@pytest.mark.parametrize("name", READS)
def test_a_file_that_is_mapped_as_the_remedy_says_finishes(name: str, imports_bytes: int) -> None:
    import torch

    if "numpy" in name:
        np.save("x.npy", np.zeros(LARGE_BYTES // 8))
    else:
        torch.save(torch.zeros(LARGE_BYTES // 4), "x.pt")
    limit_bytes = LARGE_BYTES if "numpy" in name else imports_bytes + LARGE_BYTES // 2
    done = killed(READS[name], limit_bytes)
    assert follow(done.diagnosis.remedy, Path("script.py")), done.diagnosis.remedy
    again = python(Path("script.py").read_text(), limit_bytes)
    assert again.exit_code == 0, again.diagnosis


FACTS: dict[str, tuple[str, dict[str, Any]]] = {  # code -> what the remedy names
    "a list": (
        "import ogbnlib\nkept = []\nfor i in range(90):\n"
        "    kept.append(bytearray(10 * 2**20))\n    ogbnlib.mark('epoch')",
        {"slope_bytes": round(10 * MB, -6)},
    ),
    "a phase, as the inner one ended": (
        "import ogbnlib\nwith ogbnlib.phase('outer'):\n    with ogbnlib.phase('inner'):\n        pass\n"
        "    x = bytearray(10**9)",
        {"phase": "outer"},
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_elsewhere_the_action_says_where_memory_grew(name: str) -> None:
    code, expected = FACTS[name]
    done = killed(code, 140 * MB).diagnosis
    action, raised = done.actions
    arguments = {**action.arguments}
    assert "notebooks/guide/memory.md#" in done.remedy
    assert action.id == ("find leak" if "slope_bytes" in expected else "hold less")
    assert raised.id == "raise limit"
    assert arguments.pop("held_bytes", 140 * MB) == 140 * MB
    assert 20 * MB <= arguments.pop("grown_bytes", 20 * MB) <= 140 * MB
    arguments["slope_bytes"] = round(arguments.get("slope_bytes", 0), -6)
    assert arguments == {"slope_bytes": 0, **expected}


OPTIONS = "num_neighbors=[2], input_nodes=masks[0]"
ONE_GRAPH = f"""
loader = NeighborLoader(data, {OPTIONS})
other = NeighborLoader(data, {OPTIONS}, is_sorted=True)  # as if they were, for its memory
"""
FREED = f"""
import gc
for mask in masks:
    loader = NeighborLoader(data, {OPTIONS})
    del loader
    gc.collect()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("code", "sizes"), [(ONE_GRAPH, [EDGES * 16]), (FREED, [])])
def test_one_graph_or_none_brings_no_advice_on_loaders(
    code: str, sizes: list[int], imports_bytes: int
) -> None:
    code = f"{GRAPH}{code}print('rows')\nx = bytearray(10**9)\n"
    done = killed(code, imports_bytes + 336 * MB)
    assert [*done.record.graphs.values()] == sizes
    assert sizes or len(done.record.largest_parts) == 3
    assert done.diagnosis.actions[0].id == "hold less"


def test_watching_changes_no_start_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text("import builtins; builtins.mine = 1\n")
    monkeypatch.setenv("PYTHONPATH", "site")
    code = "import sys, sitecustomize; print(mine, sys.path, sitecustomize.__file__)"
    Path("script.py").write_text(code)
    command = f"{sys.executable} script.py; {sys.executable} -I -c 'print(1)'; echo end"
    watched = watch(["sh", "-c", command], echo=False)
    first, *others = (watched.run_dir / "output.log").read_text().splitlines()
    assert others == ["1", "end"]
    assert re.fullmatch(r"1 \[.*site/sitecustomize.py", first)
    assert "memory/hook" not in first
