"""Runs each piece of work (a line of JSON) in a forked child with a fault armed by the shim."""

import ctypes
import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from ogbnlib.__main__ import main
from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.memory.signals import Stopped
from ogbnlib.training.train import train

sys.path.insert(0, str(Path(__file__).parents[1]))
from warm_up import warm_up


def do(work: str, arguments: dict[str, Any]) -> int:
    if work == "command":
        sys.argv = ["ogbnlib", *arguments["argv"]]
        return main()
    config, run_dir = TrainConfig.create(arguments["config"]), Path(arguments["run_dir"])
    try:
        train(config, run_dir, resume=(run_dir / "config.json").exists())
    except (InputError, Stopped) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def forked(job: dict[str, Any]) -> int:
    """The exit code of one piece of work, 128 + N after signal N."""
    if pid := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return status if status >= 0 else 128 - status
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        if job["nth"]:
            folder, counter = job["folder"].encode(), job["counter"].encode()
            ctypes.CDLL(None).fault_arm(folder, ctypes.c_long(job["nth"]), job["how"], counter)
        code = do(job["work"], job["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    warm_up()
    gc.collect()
    gc.freeze()  # else each release of memory in a child walks what the imports left, 0.3 s
    for line in sys.stdin:
        print(json.dumps({"code": forked(json.loads(line))}), flush=True)
