"""Stock loaders in the code of a killed command, each of which builds a graph of its own."""

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path

# Code below these runs more than once, or may.
_REPEATED = (
    ast.For,
    ast.While,
    ast.ListComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.FunctionDef,
)


def read_script(command: Sequence[str]) -> list[str]:
    """Return the text of the Python script that a command runs, as a list; [] without one."""
    for argument in command:
        if argument.endswith(".py"):
            try:
                return [Path(argument).read_text()]
            except (OSError, ValueError):  # moved since, or no text
                return []
    return []


def first_of_several(codes: Iterable[str]) -> str:
    """Return the name of the first `NeighborLoader` if the code makes several and they share no
    sampler; else ""."""
    number = 0
    names = []
    for code in codes:
        try:
            nodes = list(ast.walk(ast.parse(code)))
        except (SyntaxError, ValueError):
            continue
        number += sum(map(_is_loader, nodes))
        repeated = [node for node in nodes if isinstance(node, _REPEATED)]
        number += sum(any(map(_is_loader, ast.walk(node))) for node in repeated)
        assigned = [node for node in nodes if isinstance(node, ast.Assign)]
        names += [ast.unparse(node.targets[0]) for node in assigned if _is_loader(node.value)]
    return [*names, "first_loader"][0] if number > 1 else ""


def _is_loader(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    shares = any(keyword.arg == "neighbor_sampler" for keyword in node.keywords)
    return not shares and ast.unparse(node.func).rpartition(".")[2] == "NeighborLoader"
