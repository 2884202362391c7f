"""The child process of `sandbox.run`: `python -m ogbnlib.training.child RUN_DIR [OPTION]...`.

The parent holds the folder's lock. `--resume`: as for `run`. `--ranks N`: start N ranks, processes
that train together. `--try ARGUMENTS` in place of RUN_DIR and all options: call `try_model`.
"""

import contextlib
import functools
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..environment import CONFIG_VARIABLE, PARENT_VARIABLE
from ..errors import clear_errors, naming
from ..files import write_json
from ..memory.signals import STOP_SIGNALS, Stopped, StopRequest, die_with_parent, take_over
from ..runs.codes import UNFINISHED, exit_code_of

# Exit code of a rank that lost another one: as if the launcher had terminated it (SIGTERM).
_LOST_RANK = 143


def exit_code(work: Callable[[], object], say: Callable[[object], None] = print) -> int:
    """Call `work` and return the process's exit code; print expected errors and refused
    allocations as one sentence, other errors with a traceback."""
    from ..runs.diagnosis import sentence_of

    try:
        with clear_errors():
            work()
    except (Exception, Stopped, SystemExit) as error:  # SystemExit: by a model's code
        sentence = sentence_of(error)
        if isinstance(error, Stopped):
            if os.environ.get("RANK", "0") == "0":
                say(error)
        elif "RANK" in os.environ and "gloo/transport" in str(error):
            # Another rank has closed its connection, or hangs.
            print(f"rank {os.environ['RANK']} lost another one: {error}", file=sys.stderr)
            return _LOST_RANK
        elif sentence:
            print(f"error: {sentence}", file=sys.stderr)
        else:
            traceback.print_exc()
        return exit_code_of(error)
    finally:
        take_over(signal.SIG_IGN)  # a late signal must not change the exit code
    return 0


def main(arguments: list[str]) -> int:
    """Train in the folder that the parent has prepared; return the exit code."""
    # SIGKILL: inside native code no handler of Python runs, and the trainer would stay.
    die_with_parent(signal.SIGKILL)
    thresholds = gc.get_threshold()
    # The imports create a million lasting objects. Garbage collection after every 700 of them took
    # 0.5 of 3 s.
    gc.set_threshold(50_000)
    from ..config import TrainConfig
    from ..runs.folder import Run
    from .distributed import join
    from .gpu import prepare_allocator
    from .train import train_prepared

    stop = StopRequest()
    take_over(stop)  # unblocks stop signals: the parent blocked them before this process began
    gc.freeze()  # walking the imports' objects took 0.26 s in each release of memory
    gc.set_threshold(*thresholds)
    folder = Path(arguments[0])

    def train() -> None:
        # under `run` the config with changed values; without it, as under torchrun, the folder's
        changed = os.environ.get(CONFIG_VARIABLE)
        config = TrainConfig.create(json.loads(changed)) if changed else Run(folder).config
        prepare_allocator(config)
        with naming(folder), join(config.device) as ranks:
            train_prepared(
                config,
                folder,
                stop,
                ranks,
                resume="--resume" in arguments,
                display="relayed",
            )

    return exit_code(train)


def try_model(num_features: str, num_classes: str, shapes: str, file: str, run_dir: str) -> int:
    """Create a model, measure its steps, and write the result to `file`.

    The config is in the environment variable `CONFIG_VARIABLE`. `shapes` is a list of
    `BatchShape`s as JSON; `run_dir` is the run to resume, with its model's code, or "".
    """
    from ..config import TrainConfig
    from .custom_model import make_model
    from .learner import measure_step

    def work() -> None:
        config = TrainConfig.create(json.loads(os.environ[CONFIG_VARIABLE]))
        widths = int(num_features), int(num_classes)  # columns of x, and of the scores
        make = functools.partial(make_model, config, *widths, Path(run_dir) if run_dir else None)
        measured = measure_step(config, make, widths[0], json.loads(shapes))
        write_json(Path(file), measured)

    return exit_code(work)


def launch(num_ranks: str, arguments: list[str]) -> int:
    """Launch the ranks and wait for them; return the exit code of the first rank to fail, 128 + N
    after signal N."""
    # This runs torchrun's code but handles signals itself. With torch 2.13 `torchrun
    # --signals-to-handle` died of a SIGUSR1 in its first two seconds, always ended with exit code
    # 1, and outlived a killed parent.
    from ..memory.tree import process_tree

    def pass_on() -> None:  # sends the first stop signal to all ranks, also to those started later
        number = signal.sigwait(STOP_SIGNALS)
        done = {os.getpid()}  # processes that have the signal, or must not get it
        while True:
            for pid in {*process_tree(os.getpid())} - done:
                done.add(pid)
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, number)
            time.sleep(0.1)

    # blocked before torch starts threads; the ranks unblock and handle these signals themselves
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=pass_on, name="signals", daemon=True).start()
    die_with_parent(signal.SIGKILL)
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for the ranks' own `die_with_parent`
    # torchrun's own default, set here so that torchrun does not print a notice about it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable(logging.ERROR)  # the lines below replace torchrun's report of a failed rank
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    options = ["--standalone", f"--nproc-per-node={num_ranks}"]
    try:
        torchrun([*options, "-m", "ogbnlib.training.child", *arguments])
    except ChildFailedError as error:
        return _first_end(error.failures, arguments[0])
    return 0


def _first_end(failures: Mapping[int, Any], run_dir: str) -> int:
    """Return the exit code of the first rank that failed, and record which rank it was.

    `failures` has torch's `ProcessFailure` of each rank, whose `exitcode` is -N after signal N and
    whose `timestamp` is in whole seconds.
    """
    from ..memory.recorder import EventLog

    first_s = min(failure.timestamp for failure in failures.values())
    # After the first failure the launcher sends the other ranks SIGTERM, and SIGKILL 30 s later.
    early = {rank: f.exitcode for rank, f in failures.items() if f.timestamp <= first_s + 1}
    # Ranks that only follow another one's end come last; a signal comes before an exit code.
    follows = (-signal.SIGTERM, _LOST_RANK)
    rank = min(early, key=lambda rank: (early[rank] in follows, early[rank] >= 0, rank))
    # All were terminated or lost another rank, and none is left that failed by itself. Without a
    # lost rank, somebody else has sent SIGTERM.
    if early[rank] in follows and _LOST_RANK in early.values():
        print(
            "error: a rank hangs, which `py-spy dump --pid` shows, or ended with exit code 0",
            file=sys.stderr,
            flush=True,
        )
        return UNFINISHED
    code = early[rank] if early[rank] >= 0 else 128 - early[rank]
    log = EventLog(run_dir)
    log.mark("rank ended", rank=rank, pid=failures[rank].pid, exit_code=code)
    log.close()
    return code


if __name__ == "__main__":
    from ..display import steady_output

    options = sys.argv[1:]
    with steady_output():
        if "--ranks" in options:
            at = options.index("--ranks")
            sys.exit(launch(options[at + 1], options[:at] + options[at + 2 :]))
        code = try_model(*options[1:]) if options[0] == "--try" else main(options)
        from .distributed import end

        end(code)  # at once: a normal exit would wait for workers and gloo
