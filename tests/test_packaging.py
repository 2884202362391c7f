"""Promises of the package as a whole: one list of requirements, imports only downwards, torch only where it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ogbnlib

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ogbnlib"

# The design's floors; a module imports from lower ones only. Modules that were split off one another, to stay small
# enough to hold in the head, keep their floor and have an order in it: the second number.
FLOORS = {
    "config": (0, 0),
    "memory": (0, 0),
    "cuda": (0, 1),
    "signals": (0, 0),
    "timeline": (1, 0),
    "limits": (1, 0),
    "models": (1, 0),
    "npz": (1, 0),
    "csc": (1, 1),
    "ogb_raw": (1, 2),
    "ogb_write": (1, 3),
    "official": (1, 4),
    "store": (1, 4),
    "convert": (2, 0),
    "sampler": (2, 0),
    "footprint": (2, 0),
    "forecast": (2, 1),
    "planner": (2, 2),
    "audit": (2, 2),
    "lookahead": (2, 1),
    "store_loader": (2, 2),
    "synth": (2, 1),
    "cures": (2, 2),
    "diagnosis": (2, 3),
    "run_dir": (2, 0),
    "jobs": (2, 4),
    "sandbox": (2, 4),
    "loaders": (3, 0),
    "checkpoint": (3, 0),
    "ranks": (3, 0),
    "plots": (3, 0),
    "report": (3, 0),
    "trainer": (4, 0),
    "train": (4, 1),
    "activations": (4, 2),
    "child": (4, 2),
    "launch": (4, 0),
    "doctor": (4, 0),
    "kernel": (4, 0),
    "engine": (4, 1),
    "__main__": (5, 0),
    "__init__": (5, 0),
}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))
TORCH = {
    *("models", "sampler", "lookahead", "store_loader", "loaders", "checkpoint", "ranks"),
    *("trainer", "train", "activations"),
}
WITHOUT_TORCH = sorted(set(MODULES) - TORCH - {"__main__", "__init__"})


def imported(module: str) -> set[str]:
    """The modules of this package that `module` imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            inside = node.module or ""
            if node.level == 0 and inside.split(".")[0] != "ogbnlib":
                continue
            inside = inside if node.level else inside.partition(".")[2]
            found |= {inside.split(".")[0]} if inside else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ogbnlib.")}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_lower_floors_only(module: str) -> None:
    assert module in FLOORS, f"{module} has no floor yet: give it one here and in the design"
    wrong = {name for name in imported(module) if name in FLOORS and FLOORS[name] >= FLOORS[module]}
    assert not wrong, f"{module} (floor {FLOORS[module]}) imports {sorted(wrong)}"


def test_environment_and_pyproject_name_the_same_requirements() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "environment.yml").read_text().partition("- pip:\n")[2].splitlines()
    assert [line.strip().removeprefix("- ") for line in lines if line.strip()] == project["dependencies"]


def test_environment_has_a_python_that_the_package_accepts() -> None:
    from packaging.specifiers import SpecifierSet

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    (line,) = [line for line in (ROOT / "environment.yml").read_text().splitlines() if "- python=" in line]
    assert SpecifierSet(wanted).contains(line.split("=")[1] + ".0")


def test_there_is_one_version() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == ogbnlib.__version__


def loads_torch(code: str) -> bool:
    code += "\nimport sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1] == "True"


def test_everything_that_plans_watches_and_explains_imports_without_torch() -> None:
    names = [f"ogbnlib.{name}" for name in WITHOUT_TORCH]
    assert not loads_torch("import ogbnlib, " + ", ".join(names))


def test_help_comes_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['ogbnlib', '--help']\nimport ogbnlib.__main__ as command\n"
        "try: command.main()\nexcept SystemExit: pass"
    )
    assert not loads_torch(code)


def test_the_public_names_are_found_where_they_are_said_to_be() -> None:
    for name in ogbnlib.__all__:
        assert getattr(ogbnlib, name) is not None
    assert set(ogbnlib.__all__) <= set(dir(ogbnlib))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ogbnlib.nothing


def test_no_public_name_turns_into_a_module_once_its_module_was_imported() -> None:
    # A notebook's first cell is run twice; the second time `ogbnlib.train` is a module, whatever it was the first time.
    modules = ", ".join(f"ogbnlib.{name}" for name in MODULES if name not in ("__main__", "__init__"))
    code = f"import types, {modules}\n"
    code += "print([n for n in ogbnlib.__all__ if isinstance(getattr(ogbnlib, n), types.ModuleType)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
