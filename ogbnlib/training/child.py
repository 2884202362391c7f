"""`python -m ogbnlib.training.child RUN_DIR [--resume]`: what `sandbox.run` starts, and `launch` once for each rank."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Train in the folder that the parent has prepared and locked; returns the exit code of `diagnosis.EXIT_CODES`."""
    thresholds = gc.get_threshold()
    # The imports make about a million objects that live on. Looking through them after every 700 new ones took 0.5 s of
    # their 3 s; after every 50,000 they leave as little garbage behind.
    gc.set_threshold(50_000)
    import torch

    from ..config import TrainConfig
    from ..errors import InputError
    from ..memory import cuda
    from ..memory.signals import Stopped, StopRequest, die_with_parent, ignore, take_over
    from ..runs.diagnosis import STOPPED
    from ..runs.folder import CONFIG, locked
    from .distributed import end_here, join
    from .train import train_prepared

    stop = StopRequest()
    take_over(stop)
    end_here()
    die_with_parent()
    gc.freeze()  # no collection can free what the imports left; walking it took 0.26 s of every release
    gc.set_threshold(*thresholds)
    folder = Path(arguments[0])
    try:
        config = TrainConfig.load(folder / CONFIG)
        cuda.prepare_allocator(config)
        with (
            contextlib.nullcontext() if "OGBNLIB_PARENT" in os.environ else locked(folder),
            join(config.device) as ranks,
        ):
            how = os.environ.get("OGBNLIB_PROGRESS", "lines")
            train_prepared(config, folder, stop, ranks, resume="--resume" in arguments, how=how)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            print(stopped, flush=True)
        return STOPPED
    except torch.OutOfMemoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return cuda.OUT_OF_CUDA_MEMORY
    finally:
        ignore()  # Python's end would have them end the process, whose work is done
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    from .distributed import end

    end(code)
