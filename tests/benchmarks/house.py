"""Size and structure of the package: `python tests/benchmarks/house.py [FOLDER of a checkout]`.

Statements measure size, since packing two into one line does not lower them. The other figures say
how hard a line is to read at first sight: long lines, several names assigned at once, conditional
expressions, assignment expressions, functions that do several things. Imports between modules count
wherever they stand; floors are the longest chain of imports. tests/test_packaging.py pins these
figures.
"""

import ast
import functools
import graphlib
import json
import sys
from collections import Counter
from pathlib import Path

BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.BoolOp, ast.ExceptHandler, ast.comprehension)
LONG_LINE = 100  # columns
LONG_FUNCTION = 60  # lines
MANY_BRANCHES = 20


def imported(path: Path, package: Path, modules: set[str]) -> set[str]:
    """The modules of the package that a file imports, by their names below it."""
    inside = path.relative_to(package).with_suffix("").parts[:-1]
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*inside[: len(inside) - node.level + 1], *(node.module or "").split(".")]
            elif (node.module or "").split(".")[0] == package.name:
                base = (node.module or "").split(".")[1:]
            else:
                continue
            names = [".".join(filter(None, [*base, alias.name])) for alias in node.names]
            used |= {name if name in modules else ".".join(filter(None, base)) for name in names}
        elif isinstance(node, ast.Import):
            used |= {alias.name.removeprefix(f"{package.name}.") for alias in node.names}
    return used & modules


@functools.cache
def imports(package: Path) -> dict[str, set[str]]:
    """The modules of a package, and those of its modules that each imports."""
    modules = {}
    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(package).with_suffix("").parts)
        if name == "__init__" or not name.endswith("__init__"):
            modules[name] = path
    graph = {}
    for name, path in modules.items():
        graph[name] = imported(path, package, set(modules)) - {name}
    return graph


def floors(package: Path) -> int:
    """Return the longest chain of imports between modules; `CycleError` if they go in a circle."""
    graph = imports(package)
    floor: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        floor[name] = 1 + max((floor[other] for other in graph[name]), default=0)
    return max(floor.values())


def count_nodes(tree: ast.Module) -> Counter[str]:
    """Count what the figures of a file are made of."""
    count: Counter[str] = Counter()
    for node in ast.walk(tree):
        count["statements"] += isinstance(node, ast.stmt)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            count["several names"] += isinstance(node.targets[0], ast.Tuple)
        count["conditional expressions"] += isinstance(node, ast.IfExp)
        count["walrus"] += isinstance(node, ast.NamedExpr)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            branches = sum(isinstance(inner, BRANCHES) for inner in ast.walk(node))
            count["long functions"] += node.end_lineno - node.lineno + 1 > LONG_FUNCTION
            count["branched functions"] += branches > MANY_BRANCHES
    count["public names"] = sum(
        isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        for node in tree.body
    )
    return count


def measure(package: Path) -> dict[str, float]:
    """The figures by name; lines are counted without blank ones."""
    count: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        lines = [line for line in text.splitlines() if line.strip()]
        count += count_nodes(ast.parse(text))
        count["lines"] += len(lines)
        count["long lines"] += sum(len(line) >= LONG_LINE for line in lines)
    thousands = count["lines"] / 1000
    return {
        "statements": count["statements"],
        "statements a line": round(count["statements"] / count["lines"], 3),
        "percent of long lines": round(count["long lines"] / thousands / 10, 2),
        "several names at once per 1,000 lines": round(count["several names"] / thousands, 1),
        "if-expressions per 1,000 lines": round(count["conditional expressions"] / thousands, 1),
        "walrus per 1,000 lines": round(count["walrus"] / thousands, 1),
        "functions over 60 lines": count["long functions"],
        "functions with over 20 branches": count["branched functions"],
        "public names": count["public names"],
        "floors": floors(package),
    }


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]
    print(json.dumps(measure(root / "ogbnlib"), indent=2))
