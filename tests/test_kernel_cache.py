"""Compiled kernels are those of the sources, wherever they can be stored, and nobody else's."""

import ast
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import NOBODY

import ogbnlib
from ogbnlib import kernel_cache

PACKAGE = Path(ogbnlib.__file__).parent
# A kernel of one file calls those of another.
DRAW = """
import numpy as np
from ogbnlib.graph.neighbors import batch_key
print(batch_key(np.uint64(1), 2, 3))
"""


@pytest.fixture
def copy() -> Iterator[Path]:
    """A folder that every user can read, with a copy of the package."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    shutil.copytree(PACKAGE, folder / "ogbnlib", ignore=shutil.ignore_patterns("__pycache__"))
    yield folder
    shutil.rmtree(folder)


def python(copy: Path, code: str, **more: Any) -> str:
    """Output and warnings of `code` with the copy of the package, which stores its kernels there."""
    env = {**os.environ, "PYTHONPATH": str(copy), "NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": ""}
    env |= {"HOME": str(copy)} | more.pop("env", {})
    argv = [*more.pop("prefix", []), sys.executable, "-c", code]
    done = subprocess.run(argv, env=env, cwd=copy, capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_kernel_is_compiled_again_after_a_change_of_its_callee(copy: Path) -> None:
    before = python(copy, DRAW)
    assert python(copy, DRAW) == before
    callee = copy / "ogbnlib" / "splitmix64.py"
    text = callee.read_text()
    callee.write_text(text.replace("return x ^ (x >> uint64(31))", "return x ^ (x >> uint64(30))"))
    assert callee.read_text() != text
    after = python(copy, DRAW)
    assert after != before
    assert after == python(copy, DRAW, env={"NUMBA_CACHE_DIR": str(copy / "empty")})


def test_all_sources_of_kernels_decide_the_folder() -> None:
    sources = kernel_cache.sources()
    assert {"neighbors.py", "window.py", "kernels.py", "fused_sage.py"} <= {p.name for p in sources}
    for path in sources:
        nodes = ast.parse(path.read_text()).body
        origins = {}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.level:
                module = (node.module or "").replace(".", "/")
                origin = path.parents[node.level - 1] / f"{module}.py"
                origins |= {name.asname or name.name: origin for name in node.names}
        kernels = [node for node in nodes if isinstance(node, ast.FunctionDef) and is_kernel(node)]
        assert kernels
        for statement in (line for kernel in kernels for line in kernel.body):  # no annotations
            names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            assert {origins[name] for name in names & origins.keys()} <= {*sources}, path
    everywhere = [path.name for path in PACKAGE.rglob("*.py") if "njit(" in path.read_text()]
    assert everywhere == ["kernels.py"]  # so nobody declares one in another way


def is_kernel(function: ast.FunctionDef) -> bool:
    marks = map(ast.unparse, function.decorator_list)
    return any(mark.startswith(("kernel", "intrinsic")) for mark in marks)


WHERE = "from ogbnlib import kernel_cache\nprint(kernel_cache.folder())"


@pytest.fixture
def nobody(copy: Path) -> dict[str, Any]:
    """Arguments for `python` to run as a user who can write in one folder alone."""
    if os.geteuid() or subprocess.run([*NOBODY, "true"], capture_output=True).returncode:
        pytest.skip("needs root and setpriv to become another user")
    (copy / "shared").mkdir()
    (copy / "shared").chmod(0o1777)
    return {"env": {"NUMBA_CACHE_DIR": str(copy / "shared")}, "prefix": NOBODY}


def test_kernels_in_a_folder_of_many_users_are_ones_own(copy: Path, nobody: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d+\n", python(copy, DRAW, **nobody))
    own = copy / "shared" / "ogbnlib-kernels-65534"
    assert (own.stat().st_uid, own.stat().st_mode & 0o777) == (65534, 0o700)
    assert list(own.rglob("*.nbc"))


@pytest.mark.parametrize("planted", ["of another user", "open to others", "link", "folder"])
def test_no_kernel_is_loaded_from_a_folder_of_others(
    copy: Path, nobody: dict[str, Any], planted: str
) -> None:
    own, target = copy / "shared" / "ogbnlib-kernels-65534", copy / "target"
    target.mkdir()
    for folder in (own, target) if planted != "link" else (target,):
        folder.mkdir(exist_ok=True)
        os.chown(folder, 0 if planted == "of another user" else 65534, -1)
        folder.chmod(0o777 if planted == "open to others" else 0o700)
    if planted == "link":
        own.symlink_to(target)
    if planted == "folder":
        (copy / "shared").chmod(0o777)  # without the sticky bit
    *warning, drawn = python(copy, DRAW, **nobody).splitlines()[::-1]
    assert drawn.isdigit()
    (line,) = [line for line in warning if "compiled kernels can't be stored" in line]
    assert str(copy / "shared") in line
    assert "set NUMBA_CACHE_DIR" in line
    assert not list(target.iterdir())


def test_without_room_for_kernels_a_warning_is_printed(copy: Path) -> None:
    code = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))\n"
    output = python(copy, code + DRAW)
    assert output.count("can't be stored") == 1
    assert os.strerror(errno.EFBIG) in output
    assert re.match(r"\d+\n", output)


def test_a_named_folder_is_used(copy: Path) -> None:
    assert Path(python(copy, WHERE).strip()).parents[1] == copy / ".cache"
    named = python(copy, WHERE, env={"NUMBA_CACHE_DIR": "~/named"})
    assert Path(named.strip()).parents[1] == copy / "named"
