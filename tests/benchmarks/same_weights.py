"""Does a change keep every loss and every weight, bit for bit? `python
tests/benchmarks/same_weights.py COMMIT`.

Checks out COMMIT beside, trains each configuration with it and with the working tree on one
generated data set, and prints both sides. A difference that is meant is explained where the change
is described; exits with 1 on any.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = {
    "epochs": 2,
    "num_neighbors": [5, 3],
    "hidden_channels": 8,
    "batch_size": 64,
    "device": "cpu",
    "dropout": 0.1,
}
CONFIGS = [
    {"loading": "eager", "model": "sage"},
    {"loading": "lazy", "model": "sage", "train_eval": "every_epoch"},
    {"loading": "shared", "model": "sage"},
    {"loading": "store", "model": "sage"},
    {"loading": "eager", "model": "gcn"},
    {"loading": "shared", "model": "gat"},
    {"loading": "store", "model": "gcn", "lookahead": 2 * 2**20},
    {"loading": "eager", "model": "sage", "undirected": True},
    {"loading": "shared", "model": "gat", "undirected": True},
    {"loading": "store", "model": "sage", "undirected": True, "lookahead": 4 * 2**20},
    {"loading": "shared", "model": "sage", "accumulate": 3},
    {"loading": "lazy", "model": "sage", "precision": "bf16", "num_workers": 2},
    {"loading": "propagated", "model": "sign", "hops": 2},
    {"loading": "propagated", "model": "sagn", "hops": 2, "undirected": True},
]

# An earlier tree may have a parameter for the windows' memory.
CHILD = """
import hashlib, json, os, sys
from ogbnlib.config import TrainConfig
from ogbnlib.training.train import train
for line in sys.stdin:
    values = json.loads(line)
    if "lookahead" not in TrainConfig.model_fields:
        os.environ["OGBNLIB_WINDOWS"] = str(values.pop("lookahead", "auto"))
    result = train(TrainConfig.create(**values))
    weights = b"".join(t.numpy().tobytes() for t in result.model.state_dict().values())
    names = ("epoch", "loss", "train", "valid", "test")
    rows = [[row[name] for name in names] for row in result.history]
    print("RESULT", json.dumps([rows, hashlib.sha256(weights).hexdigest()]), flush=True)
"""


def python(tree: Path, *arguments: str, lines: str = "") -> list[str]:
    """The lines that Python prints with the package of `tree`."""
    env = {"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin"}
    argv = [sys.executable, *arguments]
    done = subprocess.run(
        argv, input=lines, stdout=subprocess.PIPE, text=True, cwd=tree, env=env, check=True
    )
    return done.stdout.splitlines()


def trained(tree: Path, configs: list[dict[str, object]]) -> list[object]:
    lines = "".join(json.dumps(config) + "\n" for config in configs)
    printed = python(tree, "-c", CHILD, lines=lines)
    return [json.loads(line[7:]) for line in printed if line.startswith("RESULT ")]


def synthesized(tree: Path, folder: Path) -> str:
    options = ["--scale", "0.001", "--format", "raw"]
    python(tree, "-m", "ogbnlib", "synth", str(folder), *options)
    return str(folder)


def converted(tree: Path, raw: str, folder: Path, *options: str) -> str:
    options = ("--feature-dtype", "float32", *options)
    python(tree, "-m", "ogbnlib", "convert", raw, str(folder), *options)
    return str(folder)


def config_of(changes: dict[str, object], stores: dict[bool, str]) -> dict[str, object]:
    values = {**BASE, **changes, "dataset": stores[bool(changes.get("undirected"))]}
    if changes["loading"] == "propagated":
        del values["num_neighbors"]
    return values


def main(commit: str) -> int:
    with tempfile.TemporaryDirectory() as name:
        beside = Path(name)
        old = beside / "old"
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", str(old), commit], cwd=ROOT, check=True
        )
        try:
            raw = synthesized(old, beside / "raw")
            stores = {
                False: converted(old, raw, beside / "directed"),
                True: converted(old, raw, beside / "undirected", "--undirected"),
            }
            configs = [config_of(changes, stores) for changes in CONFIGS]
            before, after = trained(old, configs), trained(ROOT, configs)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=ROOT, check=True)
    for config, one, two in zip(CONFIGS, before, after, strict=True):
        words = " ".join(f"{key}={value}" for key, value in config.items())
        other = "" if one == two else f"\n       {two}"
        print(f"{'OTHER' if other else 'same':<6} {words}\n       {one}{other}")
    same = sum(one == two for one, two in zip(before, after, strict=True))
    print(
        f"{same} of {len(CONFIGS)} configurations: losses, accuracies and weights equal {commit}'s bit for bit"
    )
    return 0 if same == len(CONFIGS) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
