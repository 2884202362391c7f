"""Ranks: the processes of one training, connected by `torch.distributed` as torchrun sets it up.

The batches of one global order are dealt out in turn, and a step covers one batch of every rank (times `accumulate`).
W ranks therefore take the same steps as one rank with W times the `accumulate`, on the same batches. Gradients travel
over NCCL between GPUs; everything else uses gloo.

Gradients are summed here, not by `DistributedDataParallel`, which needs a forward pass of every rank in every step: a
rank without a batch would have to invent one, whose numbers would enter BatchNorm's buffers.
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
_TIMEOUT = datetime.timedelta(hours=12)  # another rank may download and convert the data set
# A training rank hangs if it shows no sign of life for ten minutes plus one pass over the store on a slow disk; for one
# minute after a stop signal, when the time limit is near.
_PATIENCE_S, _SLOW_DISK_BYTES_PER_S, _STOPPING_S = 600.0, 50e6, 60.0
_BEAT_S = 1.0


class _Pulse:
    """Signs of life of the ranks, counted in torch's key-value store.

    Attributes:
        patience_s: Longest time without a sign of life while another rank waits; None waits for ever.
    """

    def __init__(self, rank: int, num_ranks: int, stop: StopRequest):
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._rank, self._num_ranks, self._stop = rank, num_ranks, stop
        self._store.set(f"ogbnlib/process/{rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self.patience_s: float | None = None
        self._beaten_s, self._sign = 0.0, object()

    def beat(self, sign: object) -> None:
        """Count a sign of life if `sign` has changed, at most once a second."""
        if sign != self._sign and time.monotonic() - self._beaten_s >= _BEAT_S:
            self._beaten_s, self._sign = time.monotonic(), sign
            self._store.add(f"ogbnlib/beats/{self._rank}", 1)

    def wait(self, work: Any) -> None:
        """Wait for a collective, in short sleeps because gloo's own wait blocks signals; watch the other ranks."""
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
                    f"{self._rank} waited for it; go on from the last checkpoint (--resume), and if it hangs again, "
                    "look at it with `py-spy dump --pid`"
                )


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks; alone by default, and then no method has an effect."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    pulse: _Pulse | None = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes, prints and scores."""
        return self.rank == 0

    def beat(self, sign: object) -> None:
        """Show the other ranks a sign of life if `sign` has changed."""
        if self.pulse is not None:
            self.pulse.beat(sign)

    def expect_beats(self, num_bytes: int) -> None:
        """Start to report ranks that hang, allowing for the time to read `num_bytes`."""
        if self.pulse is not None:
            self.pulse.patience_s = _PATIENCE_S + num_bytes / _SLOW_DISK_BYTES_PER_S

    def _take_part(self, collective: Callable[..., Any], tensor: Tensor, **how: Any) -> Tensor:
        if self.pulse is not None:
            if tensor.is_cuda:
                self.highest(0)  # nothing interrupts a waiting NCCL kernel, so start it when all ranks are ready
            work = collective(tensor, async_op=True, **how)
            if not tensor.is_cuda:
                self.pulse.wait(work)
            work.wait()
        return tensor

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        return self._take_part(dist.all_reduce, tensor)

    def highest(self, *numbers: int) -> list[int]:
        """Return the maximum over all ranks of each number, for decisions that all ranks must share."""
        highest: list[int] = self._take_part(dist.all_reduce, torch.tensor(numbers), op=dist.ReduceOp.MAX).tolist()
        return highest

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's values of the tensors to all ranks, in place."""
        shared = [tensor.detach() for tensor in tensors if tensor.numel()]
        if self.num_ranks == 1 or not shared:
            return
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in shared])
        self._take_part(dist.broadcast, flat, src=0)
        parts = torch.split(flat, [tensor.nbytes for tensor in shared])
        for tensor, part in zip(shared, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum each parameter's gradient over the ranks, in place; it stays None if no rank has one."""
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
        """Return when all ranks have called this; an error that a rank raises in `together` ends the wait."""
        with self.together():
            pass

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise an `InputError` or `Stopped` of any rank inside the block on all ranks at its end."""
        mine: InputError | Stopped | None = None
        try:
            yield
        except (InputError, Stopped) as error:
            mine = error
        # The lowest rank with an error sends its text to the others.
        first = self.num_ranks - self.highest(0 if mine is None else self.num_ranks - self.rank)[0]
        if first < self.num_ranks:
            buffer = torch.zeros(8192, dtype=torch.uint8)
            if first == self.rank:
                text = f"{'stopped' if isinstance(mine, Stopped) else ''}\n{mine}".encode()[: len(buffer)]
                buffer[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
            stopped, _, message = bytes(self.sum(buffer).tolist()).rstrip(b"\0").decode(errors="ignore").partition("\n")
            raise mine or (Stopped(message) if stopped else InputError(f"{message} (rank {first})"))

    def in_turn(self, function: Callable[[], T]) -> T:
        """Call `function` on the first rank of each node, then on the others, which find the converted data."""
        result: list[T] = []
        for turn in (True, False) if self.num_ranks > 1 else (True,):
            with self.together():
                if turn == (self.local_rank == 0):
                    result.append(function())
        return result[0]

    def note_memory(self, log: EventLog) -> None:
        """Mark each rank's anonymous bytes and its PSS (shared pages divided among their users)."""
        if self.num_ranks == 1:
            return
        table = torch.zeros(self.num_ranks, 2, dtype=torch.int64)
        pid = [os.getpid()]
        table[self.rank] = torch.tensor([read_rss(pid)[0] or 0, read_pss(pid)[0] or 0])
        for rank, (anon, pss) in enumerate(self.sum(table).tolist()):
            log.mark("note", rank=rank, rss_anon_bytes=anon, pss_bytes=pss)


@contextlib.contextmanager
def join(device: str, stop: StopRequest) -> Iterator[Ranks]:
    """Connect to the other ranks of the launcher's environment; without a launcher this process is alone.

    Raises:
        InputError: if the node has fewer GPUs than ranks, or a variable of the launcher is missing or wrong.
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
    except Stopped:  # on all ranks
        _leave(owned)
        raise
    _leave(owned)  # not after another error: the other ranks may wait for this one and notice its end


_ends_here = False


def end_here() -> None:
    """Declare that this process serves one training and will end through `end`."""
    global _ends_here
    _ends_here = True


def end(code: int) -> NoReturn:
    """End this process at once: Python's own end would wait for workers, a model's threads and gloo, see `_leave`."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave(owned: bool) -> None:
    # gloo's threads need Python's lock to drop the tensors of the last collective, but its end waits for them with the
    # lock held (pytorch/pytorch#56297): one stop of three blocked for ever. A process that ends anyway skips that; any
    # other one sleeps first, which releases the lock.
    if owned and not _ends_here:
        time.sleep(0.2)
        dist.destroy_process_group()
