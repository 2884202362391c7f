"""The processes that train together, one rank each: `torch.distributed` as torchrun sets it up.

Batches of the one global order are dealt out in turn, and a step covers one of every rank (times `accumulate`), so W
ranks make the steps that one makes with W times the `accumulate`, on the same batches with the same neighbors. What is
asked here of all ranks goes over gloo; gradients go over gloo on the CPU and over NCCL between GPUs.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import InputError
from ..memory.cuda import resolve_device
from ..memory.reading import read_pss, read_rss
from ..memory.recorder import EventLog
from ..memory.signals import Stopped

T = TypeVar("T")
_TIMEOUT = datetime.timedelta(hours=12)  # of a rank that waits while another one downloads and converts the data set


def launched() -> bool:
    """Whether a launcher such as torchrun has started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; alone by default, and every method is then without effect."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Rank 0: the one that writes, prints and scores."""
        return self.rank == 0

    def parallel(self, model: nn.Module, device: torch.device) -> nn.Module:
        """`model` itself, or a `DistributedDataParallel` around it that averages gradients over the ranks."""
        if self.num_ranks == 1:
            return model
        device_ids = [torch.cuda.current_device()] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.num_ranks > 1:
            dist.all_reduce(tensor)
        return tensor

    def highest(self, *numbers: int) -> list[int]:
        """The largest that any rank gave, number by number; what all ranks must decide alike hangs on it."""
        if self.num_ranks == 1:
            return list(numbers)
        tensor = torch.tensor(numbers)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def wait(self) -> None:
        """Return when all ranks have come here; an `InputError` that any of them raises in `together` ends the wait."""
        with self.together():
            pass

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """An `InputError` or `Stopped` that any rank raises inside is raised by all of them at the end."""
        mine: InputError | Stopped | None = None
        try:
            yield
        except (InputError, Stopped) as error:
            mine = error
        if self.num_ranks > 1:
            said: list[tuple[bool, str] | None] = [None] * self.num_ranks
            dist.all_gather_object(said, None if mine is None else (isinstance(mine, Stopped), str(mine)))
            for rank, word in enumerate(said):
                if word is not None and mine is None:
                    stopped, message = word
                    raise Stopped(message) if stopped else InputError(f"{message} (rank {rank})")
        if mine is not None:
            raise mine

    def in_turn(self, function: Callable[[], T]) -> T:
        """`function()` of the first rank of each node, then of the others, which find what it has converted."""
        result: list[T] = []
        for turn in (True, False) if self.num_ranks > 1 else (True,):
            with self.together():
                if turn == (self.local_rank == 0):
                    result.append(function())
        return result[0]

    def note_memory(self, log: EventLog) -> None:
        """Mark each rank's anonymous bytes, and its bytes with shared pages divided among their users (PSS)."""
        if self.num_ranks == 1:
            return
        table = torch.zeros(self.num_ranks, 2, dtype=torch.int64)
        pid = [os.getpid()]
        table[self.rank] = torch.tensor([read_rss(pid)[0] or 0, read_pss(pid)[0] or 0])
        for rank, (anon, pss) in enumerate(self.sum(table).tolist()):
            log.mark("note", rank=rank, rss_anon_bytes=anon, pss_bytes=pss)


def unsynchronized(model: nn.Module) -> AbstractContextManager[Any]:
    """Backward passes inside keep their gradients to this rank."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


@contextlib.contextmanager
def join(device: str) -> Iterator[Ranks]:
    """Meet the other ranks, as the launcher's environment names them; alone without one.

    Raises:
        InputError: when a GPU is wanted and this node has fewer of them than ranks.
    """
    if not launched():
        yield Ranks()
        return
    rank, num_ranks, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    backend = "gloo"
    if resolve_device(device).type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"ranks: expected a GPU for each of the {os.environ.get('LOCAL_WORLD_SIZE')} ranks of this node, found "
                f"{torch.cuda.device_count()}; start fewer, or use device=cpu"
            )
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    owned = not dist.is_initialized()
    if owned:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    try:
        yield Ranks(rank, num_ranks, local_rank)
    except Stopped:  # all of them have
        _leave(owned)
        raise
    _leave(owned)  # not after another error: the others may still wait for this rank, and its end tells them


_ends_here = False


def end_here() -> None:
    """Say that this process lives for one training alone and will end through `end`."""
    global _ends_here
    _ends_here = True


def end(code: int) -> NoReturn:
    """End this process past Python's own end, which would end gloo's threads, see `_leave`, and wait for workers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave(owned: bool) -> None:
    # gloo's threads need Python's lock to drop the tensors of the last collective, and its end waits for them with that
    # lock held (pytorch/pytorch#56297): seen to block for ever in one stop of three. A process that has nothing else to
    # do leaves that end out; another one lends them the lock by sleeping first.
    if owned and not _ends_here:
        time.sleep(0.2)
        dist.destroy_process_group()
