"""What `sandbox.run` starts, and `launch` once for each rank: `python -m ogbnlib.training.child RUN_DIR [OPTION]...`.

With `--locked` the process that started it holds the folder's lock; `--resume` as for `run`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def exit_code(work: Callable[[], object], say: Callable[[object], None] = print) -> int:
    """Do `work`; the exit code of `diagnosis.EXIT_CODES`, after the sentence that says why it was not done.

    Errors of other kinds than a user's mistake, the disk's, a stop, a full GPU or a worker's have a traceback.
    """
    from ..errors import clear_errors
    from ..memory.signals import Stopped, ignore
    from ..memory.workers import WorkerDied
    from ..runs.diagnosis import exit_code_of
    from .distributed import launched

    try:
        with clear_errors():
            work()
    except Exception as error:
        code = exit_code_of(error)
        if isinstance(error, Stopped):
            if os.environ.get("RANK", "0") == "0":
                say(error)
        elif launched() and "gloo/transport" in str(error):  # the connection to it is closed
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
        with lock, join(config.device) as ranks, clear_errors(folder):
            how = os.environ.get("OGBNLIB_PROGRESS", "lines")
            train_prepared(config, folder, stop, ranks, resume="--resume" in arguments, how=how)

    return exit_code(train)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    from .distributed import end

    end(code)
