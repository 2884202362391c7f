"""The child of `sandbox.run` with several ranks: PyTorch's own launcher, with an ending that says what happened.

`torchrun` by itself, with `--signals-to-handle`, dies of a SIGUSR1 in its first two seconds, before it has handlers;
later it ends with 1 and 38 lines of traceback though its ranks have stopped at a checkpoint, as it does whatever a rank
died of; and it trains on, unwatched, when its parent was killed (all seen with torch 2.13).

`python -m ogbnlib.training.launch NUM_RANKS RUN_DIR` starts the ranks by the same code, keeps stop signals waiting
until there are ranks and passes them on to all, names the rank that ended first, and ends with its code.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

from ..memory.reading import process_tree
from ..memory.recorder import EventLog
from ..memory.signals import PARENT_VARIABLE, STOP_SIGNALS, die_with_parent


def _pass_on() -> None:
    """Tell every rank of the first stop signal, those that are started later too."""
    number, told = signal.sigwait(STOP_SIGNALS), {os.getpid()}
    while True:
        for pid in process_tree(os.getpid()):
            if pid not in told:
                told.add(pid)
                os.kill(pid, number)
        time.sleep(0.1)


def main(arguments: list[str]) -> int:
    """Launch and wait; the exit code is that of the rank that ended first, 128 + N after signal N."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # before torch starts threads; the ranks take over
    threading.Thread(target=_pass_on, name="signals", daemon=True).start()
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, which it announces
    logging.disable(logging.ERROR)  # its report of a failed rank says less than the lines below
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    num_ranks, folder, *rest = arguments
    try:
        torchrun(["--standalone", f"--nproc-per-node={num_ranks}", "-m", "ogbnlib.training.child", folder, *rest])
    except ChildFailedError as error:
        first_s = min(failure.timestamp for failure in error.failures.values())
        # Whole seconds; what the launcher ends in consequence gets SIGTERM, and SIGKILL half a minute later.
        early = {rank: f for rank, f in error.failures.items() if f.timestamp <= first_s + 1}
        codes = {rank: f.exitcode for rank, f in early.items()}
        rank = min(codes, key=lambda rank: (codes[rank] in (-15, 143), codes[rank] >= 0, rank))
        failure = early[rank]
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        log = EventLog(folder)
        log.mark("rank ended", rank=rank, pid=failure.pid, exit_code=code)
        log.close()
        if failure.exitcode < 0:
            print(
                f"rank {rank} (process {failure.pid}) was ended by {signal.Signals(-failure.exitcode).name}", flush=True
            )
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
