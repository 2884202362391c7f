"""What `sandbox.run` starts: `python -m ogbnlib.training.child RUN_DIR [OPTION]...`.

With `--locked` the process that started it holds the folder's lock; `--resume` as for `run`; with `--ranks N` it starts
itself N times, by PyTorch's own launcher, and says what happened in the end. `--try` and the arguments of `try_model`
in place of all that try out a model of the user's own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def exit_code(work: Callable[[], object], say: Callable[[object], None] = print) -> int:
    """Do `work`; the exit code of `diagnosis.EXIT_CODES`, after the sentence that says why it was not done.

    Errors of other kinds than a user's mistake, the disk's, a stop, a full GPU or a worker's have a traceback.
    """
    from ..errors import clear_errors, no_exit
    from ..memory.signals import Stopped, ignore
    from ..memory.workers import WorkerDied
    from ..runs.diagnosis import exit_code_of

    try:
        with clear_errors(), no_exit():
            work()
    except Exception as error:
        code = exit_code_of(error)
        if isinstance(error, Stopped):
            if os.environ.get("RANK", "0") == "0":
                say(error)
        elif "RANK" in os.environ and "gloo/transport" in str(error):  # the connection to it is closed
            print(f"rank {os.environ['RANK']} ended, as another one did", file=sys.stderr)
            return 143  # as if its launcher had ended it already
        elif code == 1 and not isinstance(error, WorkerDied):
            traceback.print_exc()
        else:
            print(f"error: {error}", file=sys.stderr)
        return code
    finally:
        ignore()  # Python's end would have them end the process, whose work is done
    return 0


def main(arguments: list[str]) -> int:
    """Train in the folder that the parent has prepared; returns the exit code."""
    thresholds = gc.get_threshold()
    # The imports make about a million objects that live on. Looking through them after every 700 new ones took 0.5 s of
    # their 3 s; after every 50,000 they leave as little garbage behind.
    gc.set_threshold(50_000)
    from ..config import TrainConfig
    from ..errors import clear_errors
    from ..memory import cuda
    from ..memory.signals import StopRequest, die_with_parent, take_over
    from ..runs.folder import CONFIG_VARIABLE, Run, locked
    from .distributed import end_here, join
    from .train import train_prepared

    stop = StopRequest()
    take_over(stop)
    end_here()
    die_with_parent()
    gc.freeze()  # no collection can free what the imports left; walking it took 0.26 s of every release
    gc.set_threshold(*thresholds)
    folder = Path(arguments[0])

    def train() -> None:
        given = os.environ.get(CONFIG_VARIABLE)
        config = TrainConfig.create(json.loads(given)) if given else Run(folder).config
        cuda.prepare_allocator(config)
        lock = contextlib.nullcontext() if "--locked" in arguments else locked(folder)
        with lock, join(config.device, stop) as ranks, clear_errors(folder):
            how = os.environ.get("OGBNLIB_PROGRESS", "auto")
            train_prepared(config, folder, stop, ranks, resume="--resume" in arguments, how=how)

    return exit_code(train)


def try_model(num_features: str, num_classes: str, batch: str, file: str, run_dir: str | None = None) -> int:
    """Make the model of the config that the environment has, call it and measure a step; returns the exit code.

    Args:
        batch: JSON of the `BatchShape` to measure.
        file: Appears with the measurement, a JSON object of bytes, where the model is sound.
    """
    from ..config import TrainConfig
    from ..files import write_json
    from ..runs.folder import CONFIG_VARIABLE
    from .custom_model import make_model
    from .step import measure_step

    def work() -> None:
        config = TrainConfig.create(json.loads(os.environ[CONFIG_VARIABLE]))
        model = make_model(config, int(num_features), int(num_classes), None if run_dir is None else Path(run_dir))
        write_json(Path(file), measure_step(config, model, int(num_features), **json.loads(batch)))

    return exit_code(work)


def _pass_on() -> None:
    """Tell every rank of the first stop signal, those that are started later too."""
    from ..memory.reading import process_tree
    from ..memory.signals import STOP_SIGNALS

    number, told = signal.sigwait(STOP_SIGNALS), {os.getpid()}
    while True:
        for pid in process_tree(os.getpid()):
            if pid not in told:
                told.add(pid)
                os.kill(pid, number)
        time.sleep(0.1)


def launch(num_ranks: str, arguments: list[str]) -> int:
    """Launch the ranks and wait; the exit code is that of the one that ended first, 128 + N after signal N.

    `torchrun` by itself, with `--signals-to-handle`, dies of a SIGUSR1 in its first two seconds, before it has
    handlers; later it ends with 1 and 38 lines of traceback though its ranks have stopped at a checkpoint, as it does
    whatever a rank died of; and it trains on, unwatched, when its parent was killed (all seen with torch 2.13). This
    starts the ranks by the same code, keeps stop signals waiting until there are ranks and passes them on to all.
    """
    from ..memory.recorder import EventLog
    from ..memory.signals import PARENT_VARIABLE, STOP_SIGNALS, die_with_parent
    from ..runs.diagnosis import UNFINISHED

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # before torch starts threads; the ranks take over
    threading.Thread(target=_pass_on, name="signals", daemon=True).start()
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, which it announces
    logging.disable(logging.ERROR)  # its report of a failed rank says less than the lines below
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(["--standalone", f"--nproc-per-node={num_ranks}", "-m", "ogbnlib.training.child", *arguments])
    except ChildFailedError as error:
        first_s = min(failure.timestamp for failure in error.failures.values())
        # Whole seconds; what the launcher ends in consequence gets SIGTERM, and SIGKILL half a minute later.
        early = {rank: f for rank, f in error.failures.items() if f.timestamp <= first_s + 1}
        codes = {rank: f.exitcode for rank, f in early.items()}
        rank = min(codes, key=lambda rank: (codes[rank] in (-15, 143), codes[rank] >= 0, rank))
        failure = early[rank]
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        if set(codes.values()) == {143}:  # each of them lost the connection to a rank that did not fail
            print("error: a rank ended with exit code 0 in the middle of the training", file=sys.stderr, flush=True)
            return UNFINISHED
        if code == UNFINISHED:  # it was ended for another one, which it has named
            return code
        log = EventLog(arguments[0])
        log.mark("rank ended", rank=rank, pid=failure.pid, exit_code=code)
        log.close()
        if failure.exitcode < 0:
            print(
                f"rank {rank} (process {failure.pid}) was ended by {signal.Signals(-failure.exitcode).name}", flush=True
            )
        return code
    return 0


if __name__ == "__main__":
    from ..progress import steady_output

    given = sys.argv[1:]
    with steady_output():
        if "--ranks" in given:
            at = given.index("--ranks")
            sys.exit(launch(given[at + 1], given[:at] + given[at + 2 :]))
        code = try_model(*given[1:]) if given[0] == "--try" else main(given)
        from .distributed import end

        end(code)
