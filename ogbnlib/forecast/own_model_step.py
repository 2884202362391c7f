"""The step of the user's own model, measured on a small random batch in another process."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from .. import kernel_cache
from ..config import TrainConfig
from ..environment import CONFIG_VARIABLE, STEP_VARIABLE
from ..errors import InputError
from ..graph.store import GraphSize
from .batches import BatchShape
from .memory_parts import expected_batch, hop_size
from .step_memory import Trial, activation_bytes, trial_key, trials

_TRIAL_EDGES = 2**14  # in the random batch, whose step takes a fraction of a second


def try_model(config: TrainConfig, size: GraphSize, run_dir: Path | None = None) -> dict[str, str]:
    """Measure a step of the user's model in another process, for all later forecasts.

    Returns the environment variable that hands the measurement to a trainer. `run_dir` has the
    model's code where a run is resumed. Raises InputError with that process's message, when the
    model can't be found, created or trained.
    """
    size = hop_size(size, config)
    widths = size.num_features, size.num_classes
    batch = _small_batch(config, size)
    key = trial_key(config, *widths)
    measured = _measure(config, size, batch, run_dir)
    trials.pop(key, None)  # else the formulas below are scaled by it
    multiples = {}
    for name in ("training", "evaluation"):
        formula = activation_bytes(config, batch, *widths, training=name == "training")
        multiples[name] = measured[f"{name}_bytes"] / max(1, formula)
    trials[key] = Trial(measured["state_bytes"], **multiples)
    return {STEP_VARIABLE: json.dumps({"key": key, "trial": asdict(trials[key])})}


def _small_batch(config: TrainConfig, size: GraphSize) -> BatchShape:
    """A batch in the proportions of the run's, of at most `_TRIAL_EDGES` nodes and edges."""
    if config.policy.uses_hops:
        return BatchShape((_TRIAL_EDGES,), ())
    batch = expected_batch(size, config.undirected, config.batch_size, config.num_neighbors)
    scale = min(1.0, _TRIAL_EDGES / max(1, batch.num_nodes, batch.num_edges))
    return BatchShape(_scaled(batch.hop_nodes, scale), _scaled(batch.hop_edges, scale))


def _scaled(counts: tuple[int, ...], scale: float) -> tuple[int, ...]:
    return tuple(max(2, round(scale * count)) for count in counts)


def _measure(
    config: TrainConfig, size: GraphSize, batch: BatchShape, run_dir: Path | None
) -> dict[str, int]:
    """Bytes of a step: "state_bytes", "training_bytes" and "evaluation_bytes"."""
    kernel_cache.folder()  # its place, for the child, whose TMPDIR is another
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "step.json")
        log = Path(folder, "stderr")
        argv = [sys.executable, "-m", "ogbnlib.training.child", "--try"]
        argv += [
            str(size.num_features),
            str(size.num_classes),
            json.dumps(asdict(batch)),
            str(file),
        ]
        if run_dir is not None:
            argv.append(str(run_dir))
        env = {**os.environ, CONFIG_VARIABLE: config.model_dump_json(), "TMPDIR": folder}
        # Files, not pipes: a process that the model has started may hold a pipe open for ever.
        with open(log, "w") as stderr:
            quiet = subprocess.DEVNULL
            done = subprocess.run(argv, env=env, stdin=quiet, stdout=quiet, stderr=stderr)
        if done.returncode == 0 and file.is_file():
            measured: dict[str, int] = json.loads(file.read_bytes())
            return measured
        raise InputError(
            _why_trial_failed(config.model, done.returncode, log.read_text(errors="replace"))
        )


def _why_trial_failed(model: str, code: int, log: str) -> str:
    """The message of the process that was to measure a step, or its end."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if code > 0 and errors:
        return errors[-1]
    reason = f"its code ended the process with exit code {code}, where it was expected to return"
    if code > 0 and lines:
        reason = lines[-1]
    return f"{model}: trying it out failed: {reason}"
