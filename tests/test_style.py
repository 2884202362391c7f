"""ruff and mypy are part of the tests, so that one command checks everything."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


MYPY = pytest.param("mypy", marks=pytest.mark.slow)


@pytest.mark.parametrize("command", ["ruff check", "ruff format --check", MYPY])
def test_the_code_passes(command: str) -> None:
    argv = [sys.executable, "-m", *command.split()]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
