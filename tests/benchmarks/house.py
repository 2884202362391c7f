"""Size and structure of the package: `python tests/benchmarks/house.py [FOLDER of a checkout]`.

Prints lines (docstrings included), files over 350 lines, classes over 150, comments per 100 lines of code, and the
imports between modules: how many, and how many floors they make (the longest chain of imports). Imports inside
functions count too. tests/test_packaging.py pins these numbers.
"""

import ast
import graphlib
import io
import json
import statistics
import sys
import tokenize
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


def comments_and_code(text: str) -> tuple[int, int]:
    """Count the comments and the lines with code, docstrings aside."""
    tree, docstring = ast.parse(text), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstring |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    skipped = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    code = {line for token in tokens if token.type not in skipped for line in range(token.start[0], token.end[0] + 1)}
    return sum(token.type == tokenize.COMMENT for token in tokens), len(code - docstring)


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
    comments, code = (sum(column) for column in zip(*map(comments_and_code, files.values()), strict=True))
    return {
        "lines": sum(lines.values()),
        "lines of tests": sum(len(path.read_text().splitlines()) for path in package.parent.glob("tests/**/*.py")),
        "comments per 100 lines of code": round(100 * comments / code, 1),
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
