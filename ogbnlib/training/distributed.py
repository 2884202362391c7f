"""The processes that train together, one rank each: `torch.distributed` as torchrun sets it up.

Batches of the one global order are dealt out in turn, and a step covers one of every rank (times `accumulate`), so W
ranks make the steps that one makes with W times the `accumulate`, on the same batches with the same neighbors. What is
asked here of all ranks goes over gloo; gradients go over gloo on the CPU and over NCCL between GPUs.

Gradients are summed and buffers shared here, not by `DistributedDataParallel`: it needs a forward pass of every rank in
every step, and a rank that has no batch left would have to invent one, whose numbers go into BatchNorm's buffers.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError, RankHung
from ..launcher import check_address, launch
from ..memory.cuda import resolve_device
from ..memory.reading import read_pss, read_rss
from ..memory.recorder import EventLog
from ..memory.signals import Stopped, StopRequest
from ..progress import seconds

T = TypeVar("T")
_TIMEOUT = datetime.timedelta(hours=12)  # of a rank that waits while another one downloads and converts the data set
# In training a rank hangs that shows no sign of life for ten minutes, and for the time that a pass over the store takes
# on a slow disk; for a minute once the run has been told to stop, as the time limit is near.
_PATIENCE_S, _SLOW_DISK_BYTES_PER_S, _STOPPING_S = 600.0, 50e6, 60.0
_BEAT_S = 1.0


class _Pulse:
    """Signs of life of the ranks, counted in the store through which they met.

    Attributes:
        patience_s: How long a rank may show none while another one waits for it; None lets it.
    """

    def __init__(self, rank: int, num_ranks: int, stop: StopRequest):
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._rank, self._num_ranks, self._stop = rank, num_ranks, stop
        self._store.set(f"ogbnlib/process/{rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self.patience_s: float | None = None
        self._beaten_s, self._sign = 0.0, object()

    def beat(self, sign: object) -> None:
        """Show that this rank goes on, where `sign` is another one than before; at most once a second."""
        if sign != self._sign and time.monotonic() - self._beaten_s >= _BEAT_S:
            self._beaten_s, self._sign = time.monotonic(), sign
            self._store.add(f"ogbnlib/beats/{self._rank}", 1)

    def wait(self, work: Any) -> None:
        """Wait for a collective so that signals are handled meanwhile, which a wait of gloo's own would keep back.

        Raises:
            RankHung: where another rank shows no sign of life.
        """
        begun_s = looked_s = time.monotonic()
        seen: dict[int, tuple[int, float]] = {}
        while not work.is_completed():
            now_s = time.monotonic()
            time.sleep(min(0.1, (now_s - begun_s) / 8))
            if self.patience_s is not None and now_s - looked_s >= _BEAT_S:
                looked_s = now_s
                self.beat(now_s)
                self._look(seen, now_s, min(self.patience_s, _STOPPING_S) if self._stop.number else self.patience_s)

    def _look(self, seen: dict[int, tuple[int, float]], now_s: float, patience_s: float) -> None:
        for rank in range(self._num_ranks):
            count = self._store.add(f"ogbnlib/beats/{rank}", 0)
            before, since_s = seen.setdefault(rank, (count, now_s))
            if count != before:
                seen[rank] = count, now_s
            elif rank != self._rank and now_s - since_s >= patience_s:
                process = self._store.get(f"ogbnlib/process/{rank}").decode()
                raise RankHung(
                    f"rank {rank} ({process}) has shown no sign of life for {seconds(now_s - since_s)} while rank "
                    f"{self._rank} waited for it: it hangs, perhaps in the model's own code; go on from the last "
                    "checkpoint (--resume), and where it hangs again look at it with `py-spy dump --pid`"
                )


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; alone by default, and every method is then without effect."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    pulse: _Pulse | None = None

    @property
    def first(self) -> bool:
        """Rank 0: the one that writes, prints and scores."""
        return self.rank == 0

    def beat(self, sign: object) -> None:
        """Show the other ranks that this one goes on, where `sign` is another one than before."""
        if self.pulse is not None:
            self.pulse.beat(sign)

    def expect_beats(self, num_bytes: int) -> None:
        """From here on a rank hangs that shows no sign of life for longer than it takes to read so many bytes."""
        if self.pulse is not None:
            self.pulse.patience_s = _PATIENCE_S + num_bytes / _SLOW_DISK_BYTES_PER_S

    def _take_part(self, collective: Callable[..., Any], tensor: Tensor, **how: Any) -> Tensor:
        if self.pulse is not None:
            if tensor.is_cuda:
                self.highest(0)  # nothing interrupts a kernel of NCCL's that waits: begin it when all ranks are here
            work = collective(tensor, async_op=True, **how)
            if not tensor.is_cuda:
                self.pulse.wait(work)
            work.wait()
        return tensor

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return self._take_part(dist.all_reduce, tensor)

    def highest(self, *numbers: int) -> list[int]:
        """The largest that any rank gave, number by number; what all ranks must decide alike hangs on it."""
        highest: list[int] = self._take_part(dist.all_reduce, torch.tensor(numbers), op=dist.ReduceOp.MAX).tolist()
        return highest

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks the first one's values of some tensors, in place."""
        shared = [tensor.detach() for tensor in tensors if tensor.numel()]
        if self.num_ranks == 1 or not shared:
            return
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in shared])
        self._take_part(dist.broadcast, flat, src=0)
        parts = torch.split(flat, [tensor.nbytes for tensor in shared])
        for tensor, part in zip(shared, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum each parameter's gradient over the ranks, in place; it stays None where no rank has one."""
        if self.num_ranks == 1:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        counts = self.sum(torch.tensor([int(parameter.grad is not None) for parameter in trained]))
        used = [parameter for parameter, count in zip(trained, counts.tolist(), strict=True) if count]
        for dtype in dict.fromkeys(parameter.dtype for parameter in used):
            group = [parameter for parameter in used if parameter.dtype == dtype]
            own = [torch.zeros_like(value) if value.grad is None else value.grad for value in group]
            flat = self.sum(torch.cat([gradient.reshape(-1) for gradient in own]))
            for parameter, part in zip(group, torch.split(flat, [value.numel() for value in group]), strict=True):
                parameter.grad = part.view_as(parameter)

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
        # The lowest rank with an error tells the others of it.
        first = self.num_ranks - self.highest(0 if mine is None else self.num_ranks - self.rank)[0]
        if first < self.num_ranks:
            words = torch.zeros(8192, dtype=torch.uint8)
            if first == self.rank:
                said = f"{'stopped' if isinstance(mine, Stopped) else ''}\n{mine}".encode()[: len(words)]
                words[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
            stopped, _, message = bytes(self.sum(words).tolist()).rstrip(b"\0").decode(errors="ignore").partition("\n")
            raise mine or (Stopped(message) if stopped else InputError(f"{message} (rank {first})"))

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


@contextlib.contextmanager
def join(device: str, stop: StopRequest) -> Iterator[Ranks]:
    """Meet the other ranks, as the launcher's environment names them; alone without one.

    Args:
        stop: Tells that this process has been asked to stop.

    Raises:
        InputError: when a GPU is wanted and this node has fewer of them than ranks, and as `launch`.
    """
    if (here := launch()) is None:
        yield Ranks()
        return
    rank, num_ranks, local_rank = here.rank, here.num_ranks, here.local_rank
    backend = "gloo"
    if resolve_device(device).type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"ranks: expected a GPU for each of the {here.num_local_ranks} ranks of this node, found "
                f"{torch.cuda.device_count()}; start fewer, or use device=cpu"
            )
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    owned = not dist.is_initialized()
    if owned:
        check_address()
        dist.init_process_group(backend, timeout=_TIMEOUT)
    try:
        yield Ranks(rank, num_ranks, local_rank, _Pulse(rank, num_ranks, stop))
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
    """End this process past Python's own end, which would end gloo's threads, see `_leave`, and wait for workers and
    for the threads of a user's model.
    """
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
