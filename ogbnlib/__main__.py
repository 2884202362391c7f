"""The command line: one thin function per command. `python -m ogbnlib COMMAND --help` says more."""

from __future__ import annotations

import signal

if __name__ == "__main__":  # the imports below take a second, in which Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .config import TrainConfig
from .errors import InputError, clear_errors, format_bytes
from .files import home
from .progress import steady_output
from .values import parse_assignments, read_parameters

_ANSWERS = ("plan", "verify", "status", "diagnose", "doctor")  # commands whose output is all that they do
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A YAML file of parameters and memory_limit; what else is given wins.")
]


def _print(value: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(value, indent=2) if as_json else text)


def _given(config: Path | None, set_: list[str] | None, memory_limit: str | None) -> tuple[dict[str, Any], str | None]:
    """The parameters that --config and --set give, and the memory limit."""
    values = read_parameters(config) if config else {}
    in_file = values.pop("memory_limit", None)
    return {**values, **parse_assignments(set_ or [])}, in_file if memory_limit is None else memory_limit


def _facts(dataset: Any, kind: str, as_json: bool) -> None:
    """What a data set or store is, after it was made."""
    names = ("num_nodes", "num_edges", "num_features", "num_classes")
    facts = {"path": str(dataset.path), "format": kind, **{name: getattr(dataset, name) for name in names}}
    text = f"{dataset.path}: {dataset.num_nodes:,} nodes, {dataset.num_edges:,} edges, {kind}"
    if kind == "store":
        facts |= {"bytes": dataset.nbytes, "undirected": dataset.undirected}
        text += f" of {format_bytes(dataset.nbytes)}"
    _print(facts, text, as_json)


@app.command()
def synth(
    directory: Annotated[Path, typer.Argument(help="The new data set's folder.")],
    scale: Annotated[float, typer.Option(help="1.0 is the size of ogbn-papers100M, 0.01 has 1.1M nodes.")] = 0.01,
    format: Annotated[str, typer.Option(help="store: ready to train from; raw: OGB's own layout.")] = "store",
    seed: Annotated[int, typer.Option(help="The same seed gives the same files.")] = 0,
    undirected: Annotated[bool, typer.Option("--undirected", help="Store only: add reverse edges.")] = False,
    as_json: Json = False,
) -> None:
    """Write a synthetic data set like ogbn-papers100M, in memory bounded by a chunk."""
    from .sources.synth import synthesize, synthesize_store

    progress = not as_json
    if format == "store":
        store = synthesize_store(directory, scale=scale, seed=seed, undirected=undirected, progress=progress)
        return _facts(store, "store", as_json)
    if format != "raw":
        raise InputError(f"--format: expected raw or store, got {format!r}")
    if undirected:
        raise InputError("--undirected: expected with --format store only, got --format raw")
    _facts(synthesize(directory, scale=scale, seed=seed, progress=progress), "OGB raw layout", as_json)


@app.command()
def download(
    name: Annotated[str, typer.Argument(help="An official name such as ogbn-arxiv.")],
    data_dir: Annotated[Path, typer.Option(help="Where official data sets are kept.")] = Path("dataset"),
    as_json: Json = False,
) -> None:
    """Fetch an official data set, without a question; interrupted, it goes on where it stopped."""
    from .sources.official import fetch

    folder = fetch(name, data_dir, say=lambda text: typer.echo(text, err=True), progress=not as_json)
    _print({"name": name, "path": str(folder)}, f"{folder}: {name}; {name} is its name as a data set", as_json)


_ROLE = "instead of the one in the folder: .npy, .csv, .csv.gz or .parquet."


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="OGB's binary layout, an official name, or a folder of edges, features, labels, ...")
    ],
    store_dir: Annotated[Path, typer.Argument(help="The new store's folder.")],
    edges: Annotated[Path | None, typer.Option(help=f"A file of edges {_ROLE}")] = None,
    features: Annotated[Path | None, typer.Option(help=f"A file of features {_ROLE} Or made: ones, degree.")] = None,
    labels: Annotated[Path | None, typer.Option(help=f"A file of labels {_ROLE}")] = None,
    train: Annotated[Path | None, typer.Option(help=f"Node ids or a mask {_ROLE}")] = None,
    valid: Annotated[Path | None, typer.Option("--valid", "--val", help=f"Node ids or a mask {_ROLE}")] = None,
    test: Annotated[Path | None, typer.Option(help=f"Node ids or a mask {_ROLE}")] = None,
    splits: Annotated[Path | None, typer.Option(help="Columns node_id and split, instead of these three.")] = None,
    nodes: Annotated[Path | None, typer.Option(help=f"The name of each row of the features, {_ROLE}")] = None,
    edge_columns: Annotated[str | None, typer.Option(help='Such as "citing,cited"; else source,target.')] = None,
    label_columns: Annotated[str | None, typer.Option(help='Such as "paper_id,topic"; else node_id,label.')] = None,
    id_column: Annotated[str | None, typer.Option(help="Of node ids, in other files than edges; else node_id.")] = None,
    num_classes: Annotated[int | None, typer.Option(help="Else the largest label plus one.")] = None,
    relabel: Annotated[bool, typer.Option("--relabel", help="Ids are names: text, or numbers with gaps.")] = False,
    data_dir: Annotated[Path, typer.Option(help="Where official data sets are looked for.")] = Path("dataset"),
    undirected: Annotated[bool, typer.Option("--undirected", help="Add reverse edges, drop duplicates.")] = False,
    feature_dtype: Annotated[str | None, typer.Option(help="float16 halves the store; else as the data are.")] = None,
    memory_limit: Annotated[str | None, typer.Option(help='Such as "4 GB"; obeyed, page cache included.')] = None,
    as_json: Json = False,
) -> None:
    """Turn a data set into a store on disk, in bounded memory.

    Files of one's own are named after what they hold, such as edges.csv.gz, or given one by one.
    """
    from .sources.convert import convert as make_store
    from .sources.convert import open_source
    from .sources.tables import ROLES

    files = (edges, features, labels, train, valid, test, splits, nodes)
    options: dict[str, Any] = {
        **dict(zip(ROLES, files, strict=True)),
        "id_column": id_column,
        "num_classes": num_classes,
    }
    options |= {"relabel": relabel or None}
    for name, columns in (("edge_columns", edge_columns), ("label_columns", label_columns)):
        options[name] = None if columns is None else columns.split(",")
    opened, origin = open_source(source, data_dir, **{k: value for k, value in options.items() if value is not None})
    store = make_store(
        opened,
        store_dir,
        origin=origin,
        undirected=undirected,
        feature_dtype=feature_dtype,  # type: ignore[arg-type]  # checked there
        memory_limit=memory_limit,
        progress=not as_json,
    )
    _facts(store, "store", as_json)


@app.command()
def propagate(
    store_dir: Annotated[Path, typer.Argument(help="The store's folder.")],
    target: Annotated[Path, typer.Argument(help="The folder of the new store, of propagated features.")],
    hops: Annotated[int, typer.Option(help="How often; the features of each hop are kept.")] = 2,
    norm: Annotated[str, typer.Option(help="row (mean), sym (as in GCN) or none (sum).")] = "sym",
    self_loops: Annotated[bool, typer.Option("--self-loops", help="Each node is its own neighbor too, once.")] = False,
    nodes: Annotated[str, typer.Option(help="Whose rows are kept: labelled, or all.")] = "labelled",
    feature_dtype: Annotated[str | None, typer.Option(help="float16 or float32; else as the store has them.")] = None,
    memory_limit: Annotated[str | None, typer.Option(help='Such as "4 GB"; more of it makes fewer passes.')] = None,
    as_json: Json = False,
) -> None:
    """Propagate a store's features over its whole graph, once, in bounded memory.

    SGC, SIGN and SAGN learn from the result without the graph. Killed, it goes on where it was when called again.
    """
    from .graph.store import open_store
    from .propagation.hops import propagate as propagate_store

    how: dict[str, Any] = {"hops": hops, "norm": norm, "self_loops": self_loops, "nodes": nodes}
    how |= {"feature_dtype": feature_dtype, "memory_limit": memory_limit}
    progress = not as_json
    made = propagate_store(
        open_store(store_dir), target, **how, progress=progress, say=lambda text: typer.echo(text, err=True)
    )
    _facts(made, "store", as_json)


@app.command()
def verify(
    store_dir: Annotated[Path, typer.Argument(help="The store's folder.")],
    as_json: Json = False,
) -> None:
    """Read a store whole and check it: checksums, offsets, ids, features. Exits with 1 if anything is wrong."""
    from .graph.writer import verify_store

    problems = verify_store(store_dir, progress=not as_json)
    _print({"path": str(store_dir), "problems": problems}, "\n".join(problems) or f"{store_dir}: sound", as_json)
    raise typer.Exit(1 if problems else 0)


@app.command()
def plan(
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, once per parameter.")] = None,
    config: ConfigFile = None,
    memory_limit: Annotated[str | None, typer.Option(help='Such as "128 GB"; without it there is no verdict.')] = None,
    parameters: Annotated[bool, typer.Option("--parameters", help="What each parameter means instead.")] = False,
    ladder: Annotated[bool, typer.Option("--ladder", help="What to run from 512 GB down to 4 GB instead.")] = False,
    as_json: Json = False,
) -> None:
    """Predict a run's memory, phase by phase, before anything is loaded: does it fit, and what would.

    The data set is ogbn-papers100M unless --set dataset=... names another. Exits with 1 for WILL NOT FIT.
    """
    if parameters:
        from .config import parameters as known

        return _print(known(), "\n".join(f"{name}\n    {text}" for name, text in known().items()), as_json)
    from .forecast import planner

    given, memory_limit = _given(config, set_, memory_limit)
    values: dict[str, Any] = {"dataset": "ogbn-papers100M", **given}
    planned = TrainConfig.create(values)
    if ladder:
        if memory_limit is not None:
            raise InputError("--memory-limit: expected without --ladder, which goes through all of them")
        table = planner.ladder(**values)
        return _print({"rungs": table.reset_index().to_dict("records")}, table.to_string(), as_json)
    advice = planner.plan(planned, memory_limit)
    took_s = advice.forecast.run_s
    evaluations = sum(map(planned.num_evaluations, ("train", "valid", "test")))
    whole = f"{planned.epochs} epochs, {evaluations} evaluations and loading: about {took_s / 3600:.2f} h on 2 cores"
    _print({**advice.to_dict(), "run_s": round(took_s, 1)}, f"{advice}\n{whole}, without a GPU", as_json)
    raise typer.Exit(1 if advice.verdict == planner.WILL_NOT_FIT else 0)


@app.command()
def train(
    run_dir: Annotated[Path, typer.Option("--run-dir", help="The run's folder: new, or the one to resume.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, once per parameter.")] = None,
    config_file: ConfigFile = None,
    memory_limit: Annotated[str | None, typer.Option(help='Such as "4 GB"; without it nothing is limited.')] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint, or start.")] = False,
    limit_by: Annotated[str, typer.Option(help="auto, cgroup v2, cgroup v1, systemd-run or watchdog.")] = "auto",
    ranks: Annotated[int, typer.Option(help="Processes that train together, under the one limit.")] = 1,
    as_json: Json = False,
) -> None:
    """Train in a child process, under a memory limit if one is given; exits with the child's code.

    Started by torchrun it trains in this process, as the rank that torchrun says it is.
    """
    from .runs.folder import CONFIG, Run
    from .runs.sandbox import run

    values, memory_limit = _given(config_file, set_, memory_limit)
    run_dir = home(run_dir)
    if resume and (run_dir / CONFIG).is_file():
        values = {**Run(run_dir).config.model_dump(), **values}
    elif resume and "dataset" not in values:
        raise InputError(
            f"{run_dir}: expected a run to resume ({CONFIG}), or --set dataset=... to start one, found none"
        )
    config = TrainConfig.create(values)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if memory_limit is not None or ranks != 1:
            option = "--ranks" if memory_limit is None else "--memory-limit"
            raise InputError(
                f"{option}: expected without a launcher, which has started the ranks itself: "
                "let Slurm limit them, or leave torchrun out and use --ranks with --memory-limit"
            )
        _train_as_rank(config, run_dir, resume, as_json)
    more: dict[str, Any] = {"run_dir": run_dir, "resume": resume, "limit_by": limit_by, "num_ranks": ranks}
    with _interruptible(), contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        done = run(config, memory_limit, echo=not as_json, **more)
    _print(done.result, f"{done.diagnosis}\nEverything about it is in {run_dir}", as_json)
    raise typer.Exit(done.exit_code or 0)


def _train_as_rank(config: TrainConfig, run_dir: Path, resume: bool, as_json: bool) -> NoReturn:
    from .memory.signals import die_with_parent
    from .runs.folder import Run
    from .training.child import exit_code
    from .training.distributed import end, end_here
    from .training.train import train as train_here

    die_with_parent()
    end_here()
    quiet = config.replace(progress="none") if as_json else config
    code = exit_code(lambda: train_here(quiet, run_dir, resume=resume), (lambda said: None) if as_json else print)
    if os.environ["RANK"] == "0" and code != 2:
        ended = Run(run_dir)
        _print(ended.result, f"{ended.diagnosis}\nEverything about it is in {run_dir}", as_json)
    end(code)


@app.command()
def predict(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run of train.")],
    out: Annotated[Path, typer.Option(help="The .npy file to write.")],
    nodes: Annotated[str, typer.Option(help="labelled, all, or a .npy file of node ids.")] = "labelled",
    sampled: Annotated[bool, typer.Option("--sampled", help="Neighbors as in the run's evaluations, not all.")] = False,
    scores: Annotated[bool, typer.Option("--scores", help="The scores of all classes, not the best class.")] = False,
    memory_limit: Annotated[str | None, typer.Option(help='Such as "8 GB"; more of it makes fewer passes.')] = None,
    as_json: Json = False,
) -> None:
    """Write the predictions of a run's model: exact, every neighbor counted, or sampled; in bounded memory."""
    from .inference import predict_nodes

    path = predict_nodes(
        run_dir, out, nodes=nodes, sampled=sampled, scores=scores, memory_limit=memory_limit,
        progress=not as_json, say=lambda text: typer.echo(text, err=True),
    )  # fmt: skip
    _print({"path": str(path)}, str(path), as_json)


@app.command(context_settings={"allow_interspersed_args": False})
def watch(
    command: Annotated[list[str] | None, typer.Argument(help="Any command, after --.")] = None,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="A new folder; by default runs/SCRIPT.")] = None,
    memory_limit: Annotated[str | None, typer.Option(help='Such as "128 GB"; without it nothing is limited.')] = None,
    limit_by: Annotated[str, typer.Option(help="auto, cgroup v2, cgroup v1, systemd-run or watchdog.")] = "auto",
    pid: Annotated[int | None, typer.Option("--pid", help="A process that runs already: recorded to its end.")] = None,
    as_json: Json = False,
) -> None:
    """Run any command recorded, and under a memory limit if one is given; exits with the command's code.

    python -m ogbnlib watch --memory-limit "128 GB" -- python my_train.py --lr 1e-3

    Its output goes on to standard output, what is said about it to standard error. In a Python script,
    `with ogbnlib.phase("build loaders"):` names moments, and `ogbnlib.mark("epoch")` the ends of epochs.
    """
    from .runs.sandbox import watch as watch_command

    if (pid is None) == (not command):
        raise InputError(f"watch: expected either a command after -- or --pid, got {'both' if command else 'neither'}")
    target = pid if pid is not None else command or []
    with _interruptible():
        done = watch_command(target, memory_limit, run_dir=run_dir, limit_by=limit_by, echo=not as_json)
    if as_json:
        typer.echo(json.dumps(done.result, indent=2))
    else:
        typer.echo(f"{done.diagnosis}\nEverything about it is in {done.run_dir}", err=True)
    raise typer.Exit(done.exit_code or 0)


@app.command()
def status(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    follow: Annotated[bool, typer.Option("--follow", help="Show it until the run ends.")] = False,
    as_json: Json = False,
) -> None:
    """Say how a run stands: at work, in which phase since when, holding what of its limit; or how it ended."""
    from .runs.folder import Run

    run = Run.open(run_dir).follow() if follow else Run.open(run_dir)
    _print(run.status, f"{run_dir}: {run.diagnosis}", as_json)


@app.command()
def diagnose(
    run_dir: Annotated[Path | None, typer.Argument(help="The folder of a run.")] = None,
    job: Annotated[str | None, typer.Option("--job", help="A Slurm job instead: 123, or 123_4 of an array.")] = None,
    exit_code: Annotated[str | None, typer.Option(help="An exit code instead: 137, or Slurm's 0:125.")] = None,
    text: Annotated[str | None, typer.Option(help="torch's CUDA out of memory message instead; - reads it.")] = None,
    as_json: Json = False,
) -> None:
    """Say what ended a run or a Slurm job, in which phase, at which part sizes, and what to do next."""
    given = {"RUN_DIR": run_dir, "--job": job, "--exit-code": exit_code, "--text": text}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise InputError(f"diagnose: expected one of {', '.join(given)}, got {' and '.join(names) or 'none'}")
    found = _diagnosis(run_dir, job, exit_code, text)
    _print(found.to_dict(), found.text, as_json)


def _diagnosis(run_dir: Path | None, job: str | None, exit_code: str | None, text: str | None) -> Any:
    from .runs import diagnosis, folder, slurm

    if job is not None:
        return slurm.diagnose_job(job)
    if exit_code is not None:
        return diagnosis.explain_code(exit_code)
    if text is not None:
        return diagnosis.explain_cuda_message(sys.stdin.read() if text == "-" else text)
    assert run_dir is not None
    return folder.Run.open(run_dir).diagnosis


@app.command()
def doctor(
    root: Annotated[Path, typer.Option(help="Where official data sets are looked for.")] = Path("dataset"),
    as_json: Json = False,
) -> None:
    """Check the installation and the machine; one mending command per failure. Exits with 1 if anything failed."""
    from .runs.doctor import examine

    checks = examine(root)
    lines = []
    for check in checks:
        lines.append(f"{'ok  ' if check.ok else 'FAIL'} {check.name:<14} {check.found}")
        if not check.ok:
            lines.append(f"     {'':<14} mend: {check.mend}")
    _print({"checks": [vars(check) for check in checks], "ok": all(c.ok for c in checks)}, "\n".join(lines), as_json)
    raise typer.Exit(0 if all(check.ok for check in checks) else 1)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """An interruption says how to go on, and ends the command with 130."""
    try:
        yield
    except KeyboardInterrupt as stop:
        typer.echo(f"{stop}", err=True)
        raise typer.Exit(130) from None


def main() -> int:
    """Run the command line; a user's mistake, or what the disk refuses, is one sentence on stderr and exit code 2.

    Output that can't be written any more ends nothing; a command that has done nothing but answer ends with 2 then.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # one of the three was closed: no file of ours must get its number
    os.close(descriptor)
    code: Any = 0
    with steady_output() as refusal:
        try:
            with clear_errors():
                app(standalone_mode=True)
        except InputError as error:
            typer.echo(f"error: {error}", err=True)
            code = 2
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        if (refused := refusal()) and not isinstance(refused, BrokenPipeError):
            typer.echo(f"error: standard output: {refused.strerror}; what comes after that is not shown", err=True)
            code = code or (2 if {*sys.argv[1:2]} & {*_ANSWERS} else 0)
    return int(code or 0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
