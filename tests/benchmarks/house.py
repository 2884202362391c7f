"""How large is the package, and how is it built? `python tests/benchmarks/house.py [FOLDER of a checkout]`.

Lines with docstrings, files over 350 lines, classes over 150, the longest function, and the imports between modules:
how many, and how many floors they make (the longest chain of imports). Imports inside functions count too.
"""

from __future__ import annotations

import ast
import graphlib
import json
import statistics
import sys
from pathlib import Path


def imported(path: Path, package: Path, modules: set[str]) -> set[str]:
    """The modules of the package that a file imports, by their names below it."""
    inside = path.relative_to(package).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*inside[: len(inside) - node.level + 1], *(node.module or "").split(".")]
            elif (node.module or "").split(".")[0] == package.name:
                base = (node.module or "").split(".")[1:]
            else:
                continue
            names = [".".join(filter(None, [*base, alias.name])) for alias in node.names]
            found |= {name if name in modules else ".".join(filter(None, base)) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix(f"{package.name}.") for alias in node.names}
    return found & modules


def measure(package: Path) -> dict[str, object]:
    files = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    lines = {str(path.relative_to(package)): len(text.splitlines()) for path, text in files.items()}
    sizes: dict[type, dict[str, int]] = {ast.ClassDef: {}, ast.FunctionDef: {}}
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if type(node) in sizes:
                where = f"{path.relative_to(package)}:{node.name}"  # type: ignore[attr-defined]
                sizes[type(node)][where] = node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]
    classes, functions = sizes[ast.ClassDef], sizes[ast.FunctionDef]
    named = {".".join(path.relative_to(package).with_suffix("").parts): path for path in files}
    modules = {name: path for name, path in named.items() if not name.endswith("__init__") or name == "__init__"}
    graph = {name: imported(path, package, set(modules)) - {name} for name, path in modules.items()}
    floors: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        floors[name] = 1 + max((floors[other] for other in graph[name]), default=0)
    longest = max(functions, key=functions.__getitem__)
    return {
        "lines": sum(lines.values()),
        "files": sum(count > 0 for count in lines.values()),
        "files over 350 lines": {name: count for name, count in lines.items() if count > 350},
        "classes over 150 lines": {name: count for name, count in classes.items() if count > 150},
        "longest function": {longest: functions[longest]},
        "functions": len(functions),
        "median lines of a function": statistics.median(functions.values()),
        "import arrows": sum(map(len, graph.values())),
        "floors": max(floors.values()),
        "arrows between rooms": len({(a.split(".")[0], b.split(".")[0]) for a in graph for b in graph[a] if "." in a}),
    }


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]
    print(json.dumps(measure(root / "ogbnlib"), indent=2))
