"""Eight programs, structured as those of PyG and OGB, run over a store with few changed lines.

The changed lines of each are between "ogbnlib: begin" and "ogbnlib: end".
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ogbnlib.sources.synth import synthesize_store

FOLDER = Path(__file__).parent
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != Path(__file__).stem)


@pytest.fixture(scope="module")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated store of 11,000 nodes, in float16 as most stores are."""
    path = tmp_path_factory.mktemp("data") / "store"
    size = {"scale": 0.0001, "num_features": 32, "num_classes": 8}
    return synthesize_store(path, **size, undirected=True, progress=False).path


def test_there_are_eight_programs_with_few_changed_lines() -> None:
    assert len(PROGRAMS) == 8
    for name in PROGRAMS:
        text = (FOLDER / f"{name}.py").read_text()
        (changed,) = re.findall(r"# ogbnlib: begin\n(.*?)\n *# ogbnlib: end\n", text, re.DOTALL)
        assert 4 <= len(changed.splitlines()) <= 8, name


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_ported_program_runs_and_its_loss_falls(name: str, small_store: Path) -> None:
    if "lightning" in name:
        pytest.importorskip("lightning")
    printed = _output(FOLDER / f"{name}.py", small_store)
    losses = [float(loss) for loss in re.findall(r"Loss: ([\d.]+)", printed)]
    assert len(losses) >= 3, printed
    assert losses[-1] < losses[0], losses


def _output(program: Path, store: Path) -> str:
    """What a program prints; one that hangs prints the stacks of all its processes' threads."""
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how["env"] = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    how["start_new_session"] = True  # so that the signal below reaches the ranks, too
    process = subprocess.Popen([sys.executable, str(program), str(store)], **how)
    try:
        printed, errors = process.communicate(timeout=300)  # 10 to 40 s beside other tests
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        printed, errors = process.communicate()
        pytest.fail(f"{program.name} did not end in 300 s\n{printed}\n{errors}")
    assert process.returncode == 0, errors
    return printed
