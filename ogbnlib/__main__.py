"""The command line: one thin function per command. `python -m ogbnlib COMMAND --help` says more."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .config import InputError, TrainConfig, parse_assignments

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def _print(value: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(value, indent=2) if as_json else text)


@app.command()
def synth(
    directory: Annotated[Path, typer.Argument(help="The new data set's folder.")],
    scale: Annotated[float, typer.Option(help="1.0 is the size of ogbn-papers100M, 0.01 has 1.1M nodes.")] = 0.01,
    format: Annotated[str, typer.Option(help="raw: OGB's own layout.")] = "raw",
    seed: Annotated[int, typer.Option(help="The same seed gives the same files.")] = 0,
    as_json: Json = False,
) -> None:
    """Write a synthetic data set like ogbn-papers100M, in memory bounded by a chunk."""
    from .synth import synthesize

    if format != "raw":
        raise InputError(f"--format: expected raw, got {format!r}")
    dataset = synthesize(directory, scale=scale, seed=seed, progress=not as_json and sys.stderr.isatty())
    facts = {
        "path": str(directory),
        "num_nodes": dataset.num_nodes,
        "num_edges": dataset.num_edges,
        "num_features": dataset.num_features,
        "num_classes": dataset.num_classes,
    }
    _print(facts, f"{directory}: {dataset.num_nodes:,} nodes, {dataset.num_edges:,} edges, OGB raw layout", as_json)


@app.command()
def train(
    run_dir: Annotated[Path, typer.Option("--run-dir", help="The run's folder: new, or the one to resume.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, once per parameter.")] = None,
    memory_limit: Annotated[str | None, typer.Option(help='Such as "4 GB"; without it nothing is limited.')] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    engine: Annotated[str, typer.Option(help="auto, cgroup v2, cgroup v1, systemd-run or watchdog.")] = "auto",
    as_json: Json = False,
) -> None:
    """Train in a child process, under a memory limit if one is given; exits with the child's code."""
    from . import sandbox

    values: dict[str, Any] = dict(parse_assignments(set_ or []))
    if resume:
        if not (run_dir / sandbox.CONFIG).is_file():
            raise InputError(
                f"{run_dir}: expected a run to resume (config.json), found none; start it without --resume"
            )
        values = {**TrainConfig.load(run_dir / sandbox.CONFIG).model_dump(), **values}
    config = TrainConfig.create(values)
    result = sandbox.run(config, memory_limit, run_dir=run_dir, resume=resume, engine=engine, echo=not as_json)
    _print(result.result, f"{result.diagnosis}\nEverything about it is in {run_dir}", as_json)
    raise typer.Exit(result.exit_code)


@app.command()
def diagnose(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    as_json: Json = False,
) -> None:
    """Say what ended a run, in which phase, at which part sizes, and what to do next."""
    from .diagnosis import diagnose as read

    found = read(run_dir)
    _print(found.to_dict(), found.text, as_json)


@app.command()
def doctor(
    root: Annotated[Path, typer.Option(help="Where official data sets are looked for.")] = Path("dataset"),
    as_json: Json = False,
) -> None:
    """Check the installation and the machine; one mending command per failure. Exits with 1 if anything failed."""
    from .doctor import examine

    checks = examine(root)
    lines = []
    for check in checks:
        lines.append(f"{'ok  ' if check.ok else 'FAIL'} {check.name:<14} {check.found}")
        if not check.ok:
            lines.append(f"     {'':<14} mend: {check.mend}")
    _print({"checks": [vars(check) for check in checks], "ok": all(c.ok for c in checks)}, "\n".join(lines), as_json)
    raise typer.Exit(0 if all(check.ok for check in checks) else 1)


def main() -> int:
    """Run the command line; a user's mistake is one sentence on stderr and exit code 2."""
    try:
        app(standalone_mode=True)
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
