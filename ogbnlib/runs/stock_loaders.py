"""PyG's own loaders in the code of a killed command, each of which builds its own graph."""

import ast
import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

# Code inside these nodes runs more than once, or may.
_REPEATED = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def read_script(command: Sequence[str]) -> list[str]:
    """Return the text of the Python script that a command runs, as a list; [] without one."""
    scripts = [Path(argument) for argument in command if argument.endswith(".py")]
    return [script.read_text(errors="replace") for script in scripts[:1] if script.is_file()]


def share_the_graph(codes: Iterable[str]) -> str:
    """Return a remedy in words if the code makes several `NeighborLoader`s and they share no
    sampler; else ""."""
    nodes: list[ast.AST] = []
    for code in codes:
        with contextlib.suppress(SyntaxError, ValueError):
            nodes += ast.walk(ast.parse(code))
    repeated = [each for node in nodes if isinstance(node, _REPEATED) for each in ast.walk(node)]
    if sum(map(_is_loader, [*nodes, *repeated])) < 2:
        return ""
    names = [
        ast.unparse(node.targets[0])
        for node in nodes
        if isinstance(node, ast.Assign) and _is_loader(node.value)
    ]
    first = [*filter(re.compile(r"[\w.]+").fullmatch, names), "first_loader"][0]
    return (
        f"one graph for all loaders, by neighbor_sampler={first}.node_sampler in each NeighborLoader "
        "after the first (it then keeps no 16 bytes an edge of its own; "
    )


def _is_loader(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    shares = any(keyword.arg == "neighbor_sampler" for keyword in node.keywords)
    return name == "NeighborLoader" and not shares
