"""Ranks: the processes of one training, connected by `torch.distributed` as torchrun sets it up.

The ranks take the batches of one global order in turn, and a step covers `accumulate` batches of
every rank. W ranks therefore take the same steps on the same batches as one rank with W times the
`accumulate`. Gradients travel over NCCL between GPUs; everything else uses gloo.
"""

import contextlib
import datetime
import functools
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError, RankHung, explained
from ..launcher import launch, resolve_device
from ..memory.signals import Stopped, StopRequest
from ..progress import seconds

_TIMEOUT = datetime.timedelta(hours=12)  # another rank may propagate the features
# A training rank counts as hung if it shows no sign of life for ten minutes plus the time of one
# pass over the store on a slow disk. After a stop signal it counts as hung after one minute,
# because the time limit is near.
_PATIENCE_S = 600.0
_SLOW_DISK_BYTES_PER_S = 50e6
_STOPPING_S = 60.0
_BEAT_S = 1.0  # time between two signs of life, and between two checks of the other ranks
_MESSAGE_BYTES = 8192  # of an error's text that are sent to the other ranks; the rest is cut off


class Ranks:
    """This process among the ranks; by default it is the only rank, and no method has an effect."""

    def __init__(
        self,
        rank: int = 0,
        num_ranks: int = 1,
        local_rank: int = 0,
        stop: StopRequest | None = None,
    ):
        self.rank = rank
        self.num_ranks = num_ranks
        self.local_rank = local_rank
        self._stop = stop or StopRequest()
        self.first = rank == 0  # the rank that writes and prints
        self._patience_s: float | None = None  # None: wait for ever
        self._last_beat_s = 0.0
        self._last_sign: object = None  # see `beat`
        if num_ranks > 1:
            # torchrun's key-value store, for which torch has no public name
            self._store = dist.distributed_c10d._get_default_store()
            # named in the error of another rank that waits for this one in vain
            self._store.set(
                f"ogbnlib/process/{rank}", f"process {os.getpid()} on {socket.gethostname()}"
            )

    def beat(self, sign: object) -> None:
        """Show the other ranks a sign of life if `sign` has changed, at most once a second."""
        if (
            self.num_ranks > 1
            and sign != self._last_sign
            and time.monotonic() - self._last_beat_s >= _BEAT_S
        ):
            self._last_beat_s = time.monotonic()
            self._last_sign = sign
            self._store.add(f"ogbnlib/beats/{self.rank}", 1)

    def expect_beats(self, num_bytes: int) -> None:
        """Start to report ranks that hang, allowing for the time to read `num_bytes`."""
        self._patience_s = _PATIENCE_S + num_bytes / _SLOW_DISK_BYTES_PER_S

    def _take_part(self, collective: Callable[..., dist.Work], tensor: Tensor) -> Tensor:
        if self.num_ranks > 1:
            if tensor.is_cuda:
                # nothing interrupts a waiting NCCL kernel, so start it when all ranks are ready
                self.highest(0)
            work = collective(tensor, async_op=True)
            if not tensor.is_cuda:
                self._wait(work)
            work.wait()
        return tensor

    def _wait(self, work: dist.Work) -> None:
        """Wait for a collective operation; raise `RankHung` if another rank shows no sign of life.

        It waits in short sleeps, because gloo's own wait blocks signals.
        """
        begun_s = looked_s = time.monotonic()
        # rank -> its count of signs of life, and the time since which the count is unchanged
        seen: dict[int, tuple[int, float]] = {}
        while not work.is_completed():
            now_s = time.monotonic()
            # Sleep an eighth of the wait so far: the end of a fast collective is noticed at once,
            # and a slow one takes no processor time.
            time.sleep(min(0.1, (now_s - begun_s) / 8))
            if self._patience_s is None or now_s - looked_s < _BEAT_S:
                continue
            looked_s = now_s
            self.beat(now_s)
            patience_s = self._patience_s
            if self._stop.number:
                patience_s = min(patience_s, _STOPPING_S)
            for rank in range(self.num_ranks):
                count = self._store.add(f"ogbnlib/beats/{rank}", 0)
                previous, since_s = seen.setdefault(rank, (count, now_s))
                if count != previous:
                    seen[rank] = count, now_s
                elif rank != self.rank and now_s - since_s >= patience_s:
                    process = self._store.get(f"ogbnlib/process/{rank}").decode()
                    raise RankHung(
                        f"rank {rank} ({process}) has shown no sign of life for "
                        f"{seconds(now_s - since_s)} while rank {self.rank} waited for it; go on "
                        "from the last checkpoint (--resume), and if it hangs again, look at it "
                        "with `py-spy dump --pid`"
                    )

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        return self._take_part(dist.all_reduce, tensor)

    def highest(self, *numbers: int) -> list[int]:
        """Return the maximum over all ranks of each number, for decisions that all ranks must
        share."""
        if self.num_ranks == 1:
            return list(numbers)
        highest = functools.partial(dist.all_reduce, op=dist.ReduceOp.MAX)
        return self._take_part(highest, torch.tensor(numbers)).tolist()

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's values of the tensors to all ranks, in place."""
        if self.num_ranks == 1:
            return
        shared = [tensor.detach() for tensor in tensors if tensor.numel()]
        if not shared:
            return
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in shared])
        self._take_part(functools.partial(dist.broadcast, src=0), flat)
        parts = torch.split(flat, [tensor.nbytes for tensor in shared])
        for tensor, part in zip(shared, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum each parameter's gradient over the ranks, in place; it stays None if no rank has
        one."""
        if self.num_ranks == 1:
            return
        # `DistributedDataParallel` needs a forward pass of every rank in every step: a rank without
        # a batch would have to invent one, whose numbers would enter BatchNorm's buffers.
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        counts = self.sum(torch.tensor([int(parameter.grad is not None) for parameter in trained]))
        used = list(itertools.compress(trained, counts.tolist()))
        for dtype in dict.fromkeys(parameter.dtype for parameter in used):
            group = [parameter for parameter in used if parameter.dtype == dtype]
            gradients = [
                torch.zeros_like(value) if value.grad is None else value.grad for value in group
            ]
            flat = self.sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            parts = torch.split(flat, [value.numel() for value in group])
            for parameter, part in zip(group, parts, strict=True):
                parameter.grad = part.view_as(parameter)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Wait for all ranks at the block's end, and raise an `InputError` or `Stopped` of any rank
        on all ranks."""
        mine: BaseException | None = None
        try:
            yield
        except (InputError, OSError, Stopped) as error:
            mine = explained(error)
            if isinstance(mine, OSError):
                raise
        # The lowest rank with an error sends its text to the others.
        first = self.num_ranks - self.highest(0 if mine is None else self.num_ranks - self.rank)[0]
        if first < self.num_ranks:
            buffer = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
            if first == self.rank:
                kind = "stopped" if isinstance(mine, Stopped) else ""
                text = f"{kind}\n{mine}".encode()[: len(buffer)]
                buffer[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
            text = bytes(self.sum(buffer).tolist()).rstrip(b"\0")
            kind, _, message = text.decode(errors="ignore").partition("\n")
            if mine is not None:
                raise mine
            if kind:
                raise Stopped(message)
            raise InputError(f"{message} (rank {first})")


_ends_here = False  # see `end_here`


@contextlib.contextmanager
def join(device: str, stop: StopRequest) -> Iterator[Ranks]:
    """Connect to the other ranks, as the launcher's environment describes them; without a launcher
    this process is the only rank."""
    here = launch()
    if here.num_ranks == 1:
        yield Ranks()
        return
    backend = "gloo"
    if resolve_device(device).type == "cuda":
        num_gpus = torch.cuda.device_count()
        if here.local_rank >= num_gpus:
            raise InputError(
                f"ranks: expected a GPU for each of the {here.num_local_ranks} ranks of this node, "
                f"found {num_gpus}; start fewer, or use device=cpu"
            )
        torch.cuda.set_device(here.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    owned = not dist.is_initialized()
    if owned:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    stopped: Stopped | None = None
    try:
        yield Ranks(here.rank, here.num_ranks, here.local_rank, stop)
    except Stopped as error:
        # All ranks raise `Stopped`, so all reach the cleanup below. Any other error skips it,
        # because other ranks may be waiting for this one: they notice when this process ends.
        stopped = error
    # gloo's threads need Python's lock to drop the tensors of the last collective. Destroying the
    # process group waits for these threads while it holds the lock (pytorch/pytorch#56297): one
    # stop of three blocked for ever. A process that ends anyway skips this step. Any other process
    # sleeps first, which releases the lock.
    if owned and not _ends_here:
        time.sleep(0.2)
        dist.destroy_process_group()
    if stopped is not None:
        raise stopped


def end_here() -> None:
    """Declare that this process serves one training and will end through `end`."""
    global _ends_here
    _ends_here = True


def end(code: int) -> NoReturn:
    """End this process at once: Python's normal exit would wait for workers, a model's threads and
    gloo; see `join`."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
