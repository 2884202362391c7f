"""The command line: one thin function per command. See also `python -m ogbnlib COMMAND --help`."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from . import data_commands as option
from .config import TrainConfig
from .data_commands import app, read_options, say, show
from .display import steady_output
from .errors import InputError, clear_errors, naming
from .files import home
from .memory.limits import check_addresses
from .memory.record import RunPaths
from .memory.signals import STOP_SIGNALS, Stopped, die_with_parent, end_in_order, handled
from .runs.codes import exit_code_of
from .runs.diagnosis import sentence_of
from .runs.folder import Run

_COMPUTE = ("plan", "train", "predict", "synth", "convert", "doctor")  # with torch or numba
_ANSWERS = ("plan", "verify", "status", "diagnose", "doctor")  # commands that only print


@app.command()
def plan(
    set_: option.Assignments = None,
    config: option.ConfigFile = None,
    memory_limit: option.MemoryLimit = None,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Print what to run from 512 GB down to 4 GB.")
    ] = False,
    as_json: option.Json = False,
) -> None:
    """Forecast a run's memory by phase, before anything is loaded, and name a config that fits.

    The data set is ogbn-papers100M unless --set dataset=... names another, or --set num_nodes=30M,
    num_edges, num_features and num_train give sizes. Exits with 1 for WILL NOT FIT.
    """
    from .forecast import fitting, planner
    from .forecast.machine import probe
    from .sources.resolve import size_of
    from .sources.sizes import take_sizes

    assignments, memory_limit = read_options(config, set_, memory_limit)
    size = take_sizes(assignments)  # removes num_nodes etc. from them; None without any
    values: dict[str, Any] = {"dataset": "ogbn-papers100M", **assignments}
    planned = TrainConfig.create(values)
    if ladder:
        if size is not None or memory_limit:
            raise InputError(
                "--ladder: expected neither --memory-limit nor sizes of a graph: it shows all limits "
                "for a data set"
            )
        table = planner.ladder(**values)
        return show({"rungs": table.reset_index().to_dict("records")}, table.to_string(), as_json)
    if size is None:
        size = size_of(planned.dataset)
    machine = probe(size)
    advice = planner.plan(planned, memory_limit, size=size, machine=machine)
    run_s = advice.forecast.run_s
    evaluations = sum(map(advice.forecast.config.num_evaluations, ("train", "valid", "test")))
    text = (
        f"{advice}\n{planned.epochs} epochs, {evaluations} evaluations and loading: "
        f"about {run_s / 3600:.2f} h by our trainer here ({machine}; no GPU)"
    )
    show({**advice.to_dict(), "run_s": round(run_s, 1)}, text, as_json)
    raise typer.Exit(1 if advice.verdict == fitting.WILL_NOT_FIT else 0)


@app.command()
def train(
    run_dir: Annotated[
        Path, typer.Option("--run-dir", help="The run's folder: new, or the one to resume.")
    ],
    set_: option.Assignments = None,
    config: option.ConfigFile = None,
    memory_limit: option.MemoryLimit = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint, or start.")
    ] = False,
    limit_by: option.LimitBy = "auto",
    ranks: Annotated[
        int, typer.Option(help="Processes that train together, under the one limit.")
    ] = 1,
    as_json: option.Json = False,
) -> None:
    """Train in a child process, optionally under a memory limit; exits with the child's code.

    Under torchrun it trains in this process, as one rank.
    """
    from .runs.sandbox import run

    values, memory_limit = read_options(config, set_, memory_limit)
    run_dir = home(run_dir)  # no shell expands `--run-dir=~/a`
    if resume and RunPaths(run_dir).config.is_file():
        values = {**Run(run_dir).config.model_dump(), **values}
    elif resume and "dataset" not in values:
        raise InputError(
            f"{run_dir}: expected a run to resume (config.json), or --set dataset=... to start one"
        )
    planned = TrainConfig.create(values)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if memory_limit is not None or ranks != 1:
            raise InputError(
                "--memory-limit, --ranks: expected without a launcher such as torchrun"
            )
        _train_as_rank(planned, run_dir, resume, as_json)
    # with --json standard output gets the JSON object alone
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        done = _run_to_its_end(
            run,
            planned,
            memory_limit,
            echo=not as_json,
            run_dir=run_dir,
            resume=resume,
            limit_by=limit_by,
            num_ranks=ranks,
        )
    _show_end(done, as_json)
    raise typer.Exit(done.exit_code or 0)


def _train_as_rank(config: TrainConfig, run_dir: Path, resume: bool, as_json: bool) -> NoReturn:
    from .training.child import exit_code
    from .training.distributed import end
    from .training.train import train as train_here

    die_with_parent()  # the parent is the launcher
    code = exit_code(lambda: train_here(config, run_dir, resume=resume, progress=not as_json), say)
    if os.environ["RANK"] == "0" and code != 2:  # bad input is explained already
        _show_end(Run(run_dir), as_json)
    end(code)  # at once: a normal exit would wait for workers and gloo


def _show_end(run: Run, as_json: bool, *, err: bool = False) -> None:
    show(run.result, f"{run.diagnosis}\nEverything about it is in {run.run_dir}", as_json, err=err)


@app.command()
def predict(
    run_dir: option.RunDir,
    out: Annotated[Path, typer.Option(help="The .csv, .parquet or .npy file to write.")],
    nodes: Annotated[
        str, typer.Option(help="labelled, all, or a file of node names.")
    ] = "labelled",
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Sample neighbors as the run's evaluations do.")
    ] = False,
    scores: Annotated[
        bool, typer.Option("--scores", help="Write the scores of all classes.")
    ] = False,
    memory_limit: option.MemoryLimit = None,
    as_json: option.Json = False,
) -> None:
    """Write a run's predictions in bounded memory: exact with all neighbors, or sampled."""
    from .inference.predictions import predict as predict_classes

    path = predict_classes(
        run_dir,
        out,
        nodes=nodes,
        sampled=sampled,
        scores=scores,
        memory_limit=memory_limit,
        progress=not as_json,
        say=say,
    )
    show({"path": str(path)}, str(path), as_json)


@app.command(context_settings={"allow_interspersed_args": False})
def watch(
    command: Annotated[list[str], typer.Argument(help="Any command, after --.")],
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="A new folder; by default runs/SCRIPT.")
    ] = None,
    memory_limit: option.MemoryLimit = None,
    limit_by: option.LimitBy = "auto",
    as_json: option.Json = False,
) -> None:
    """Record any command, optionally under a memory limit; exits with the command's code.

    python -m ogbnlib watch --memory-limit "128 GB" -- python my_train.py --lr 1e-3

    In a Python script, `with ogbnlib.phase("build loaders"):` names a phase of the run, and
    `ogbnlib.mark("epoch")` marks the end of an epoch.
    """
    from .runs.sandbox import watch as watch_command

    done = _run_to_its_end(
        watch_command, command, memory_limit, run_dir=run_dir, limit_by=limit_by, echo=not as_json
    )
    _show_end(done, as_json, err=True)
    raise typer.Exit(done.exit_code or 0)


@app.command()
def status(run_dir: option.RunDir, as_json: option.Json = False) -> None:
    """Print a run's state: its phase, time and memory while it works, or the cause of its end."""
    run = Run.open(run_dir)
    show(run.status, f"{run_dir}: {run.diagnosis}", as_json)


@app.command()
def diagnose(
    run_dir: Annotated[Path | None, typer.Argument(help="The folder of a run.")] = None,
    job: Annotated[
        str | None, typer.Option("--job", help="A Slurm job instead: 123, or 123_4 of an array.")
    ] = None,
    exit_code: Annotated[
        str | None, typer.Option(help="An exit code instead: 137, -9, SIGKILL, or Slurm's 0:125.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="A message, the end of a log or of dmesg instead; - reads it."),
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Explain the end of a run or Slurm job: cause, phase, memory by part, and what to do next."""
    from .runs import diagnosis, slurm

    options = {"RUN_DIR": run_dir, "--job": job, "--exit-code": exit_code, "--text": text}
    names = [name for name, value in options.items() if value is not None]
    if len(names) != 1:
        raise InputError(
            f"diagnose: expected one of {', '.join(options)}, got {' and '.join(names) or 'none'}"
        )
    if job is not None:
        cause: Any = slurm.diagnose_job(job)
    elif exit_code is not None:
        cause = diagnosis.explain_code(exit_code)
    elif text is not None:
        cause = diagnosis.explain_text(sys.stdin.read() if text == "-" else text)
    else:
        cause = Run.open(run_dir or "").diagnosis
    show(cause.to_dict(), f"{cause}", as_json)


@app.command()
def notebooks(
    directory: Annotated[Path, typer.Argument(help="The new working folder.")],
    as_json: option.Json = False,
) -> None:
    """Write a working folder: the notebooks without outputs, their guide and the job scripts."""
    from .notebook.course import write_course

    write_course(directory)
    show(
        {"path": str(directory)},
        f"next, in {directory}: papermill notebooks/00_quickstart.ipynb out.ipynb",
        as_json,
    )


@app.command()
def doctor(as_json: option.Json = False) -> None:
    """Check installation and machine, with a fix for each failure; exits with 1 if any failed."""
    from .doctor import examine

    checks = examine()
    failed = any(check.fix for check in checks)
    facts = {"checks": [vars(check) for check in checks], "ok": not failed}
    show(facts, "\n".join(map(str, checks)), as_json)
    raise typer.Exit(int(failed))


def _run_to_its_end(start: Callable[..., Run], *arguments: object, **options: object) -> Run:
    """Return a run after its end, even if a signal stopped it; Ctrl-C exits with code 130."""
    try:
        return start(*arguments, **options)
    except Stopped as stopped:
        return stopped.run
    except KeyboardInterrupt as stop:
        say(str(stop) or "interrupted")
        raise typer.Exit(130) from None


def main(arguments: list[str] | None = None) -> int:
    """Run a command line, by default this process's; return its exit code: 2 after bad input or a
    full disk. These and a refused allocation (1) print one sentence in place of a traceback."""
    code: int | str | None = 0
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    with steady_output() as output, handled(end_in_order, numbers):
        try:
            with clear_errors():
                with naming("working folder"):
                    # raises if the folder is deleted: torch's MKL would end the process in it
                    folder = os.getcwd()
                if {*(arguments or sys.argv[1:])[:1]} & {*_COMPUTE}:
                    check_addresses()
                # As `python -m` does, for a model in a module of the working folder.
                if not sys.flags.safe_path and folder not in sys.path:
                    sys.path.append(folder)
                app(arguments)
        except Exception as error:
            sentence = sentence_of(error)
            if not sentence:
                raise
            say(f"error: {sentence}")
            code = exit_code_of(error)
        except SystemExit as end:
            code = end.code
            if isinstance(code, signal.Signals):
                signal.alarm(0)  # set by `end_in_order`
                say(f"ended by {code.name}")
                code += 128
            if isinstance(code, str):  # sys.exit(text) in the code of a model
                say(code)
                code = 1
        sys.stdout.flush()
        # When standard output can't be written, a command goes on; only one that does nothing but
        # print then exits with 2.
        refused = getattr(output, "error", None)
        if refused and not isinstance(refused, BrokenPipeError):  # a pipe's reader has enough
            say(f"error: standard output: {refused.strerror}; the rest is not shown")
            only_prints = {*(arguments or sys.argv[1:])[:1]} & {*_ANSWERS}
            code = code or (2 if only_prints else 0)
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main())
