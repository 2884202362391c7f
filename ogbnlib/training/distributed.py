"""Ranks: the processes of one training, connected by `torch.distributed` as torchrun sets it up.

The ranks take the batches of one global order in turn, and a step covers `accumulate` batches of
every rank. W ranks therefore take the same steps on the same batches as one rank with W times the
`accumulate`. Gradients travel over NCCL between GPUs; everything else uses gloo.
"""

import atexit
import contextlib
import datetime
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError, explained
from ..launcher import launch, resolve_device
from ..memory.signals import Stopped

_TIMEOUT = datetime.timedelta(hours=12)  # before training: another rank may propagate the features
# In training a wait fails after ten minutes plus the time of one pass over the store on a slow disk,
# in which another rank may read the windows of its next batch.
_PATIENCE_S = 600.0
_SLOW_DISK_BYTES_PER_S = 50e6


class Ranks:
    """This process among the ranks; by default it is the only rank, and no method has an effect."""

    def __init__(self, rank: int = 0, num_ranks: int = 1):
        self.rank = rank
        self.num_ranks = num_ranks
        self.first = rank == 0  # the rank that writes and prints
        self._group: dist.ProcessGroup | None = None  # of tensors on the CPU; None: the default

    def limit_waits(self, num_bytes: int) -> None:
        """Let later waits for a rank fail after ten minutes and the time to read `num_bytes`."""
        if self.num_ranks > 1:
            patience = datetime.timedelta(seconds=_PATIENCE_S + num_bytes / _SLOW_DISK_BYTES_PER_S)
            self._group = dist.new_group(backend="gloo", timeout=patience)

    def _run(self, collective: Callable[..., object], tensor: Tensor) -> Tensor:  # in place
        if tensor.is_cuda and self.num_ranks > 1:
            # a waiting NCCL kernel has no limit of its own, so start it when all ranks are ready
            self.highest(0)
            collective(tensor)
        elif self.num_ranks > 1:
            _await_gloo()
            _in_gloo.append(tensor.detach())  # the same values, in a tensor of its own
            collective(_in_gloo[0], group=self._group)
        return tensor

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place, and return the tensor."""
        return self._run(dist.all_reduce, tensor)

    def highest(self, *numbers: int) -> list[int]:
        """Return the maximum over all ranks of each number, for decisions that all ranks share."""
        highest = functools.partial(dist.all_reduce, op=dist.ReduceOp.MAX)
        return self._run(highest, torch.tensor(numbers)).tolist()

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's values of the tensors to all ranks, in place."""
        shared = [tensor.detach() for tensor in tensors if tensor.numel()]
        if self.num_ranks == 1 or not shared:
            return
        # one broadcast for tensors of all dtypes: their bytes, one after another
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in shared])
        self._run(functools.partial(dist.broadcast, src=0), flat)
        parts = torch.split(flat, [tensor.nbytes for tensor in shared])
        for tensor, part in zip(shared, parts, strict=True):
            # `clone`, because `view` as a wider dtype needs bytes at a multiple of its size
            tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum each parameter's gradient over the ranks, in place; None if no rank has one."""
        if self.num_ranks == 1:
            return
        # `DistributedDataParallel` needs a forward pass of every rank in every step: a rank without
        # a batch would have to invent one, whose numbers would enter BatchNorm's buffers.
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        counts = self.sum(torch.tensor([int(parameter.grad is not None) for parameter in trained]))
        used = list(itertools.compress(trained, counts.tolist()))  # with a gradient on any rank
        for dtype in dict.fromkeys(parameter.dtype for parameter in used):  # a sum for each
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
        """End together: raise an `InputError` or `Stopped` of any rank on all ranks."""
        own_error: BaseException | None = None
        try:
            yield
        except (InputError, OSError, Stopped) as error:
            own_error = explained(error)  # an `InputError` for a full disk, a missing file, ...
            if isinstance(own_error, OSError):  # any other ends this process, like a bug
                raise
        error_class = "" if own_error is None else type(own_error).__name__
        texts = self._gather(f"{error_class}:{own_error}")
        if own_error is not None:
            raise own_error
        for rank, text in enumerate(texts):
            name, _, message = text.partition(":")  # of the error's class; empty without an error
            if name == "Stopped":
                raise Stopped(message)
            if name:
                raise InputError(f"{message} (rank {rank})")

    def _gather(self, text: str) -> list[str]:  # of all ranks
        encoded = text.encode(errors="backslashreplace")  # a path may be invalid text
        [length] = self.highest(len(encoded))
        rows = torch.zeros(self.num_ranks, length, dtype=torch.uint8)  # each rank fills its own
        rows[self.rank, : len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        return [bytes(row).rstrip(b"\0").decode() for row in self.sum(rows).numpy()]


_in_gloo: list[Tensor] = []  # the tensor of the last collective, to which nothing else refers


def _await_gloo() -> None:
    """Wait until gloo's thread has dropped the tensor of the last collective."""
    # The thread enters Python for it. A DataLoader worker forked at this moment waits for ever
    # (python/cpython#112275): one of 500 did.
    until_s = time.monotonic() + 1.0  # another version of torch may keep a reference
    while _in_gloo and time.monotonic() < until_s:
        # one reference of C++, to the tensor; two of Python, by the list and by the argument here
        if _in_gloo[0]._use_count() == 1 and sys.getrefcount(_in_gloo[0]) == 2:  # type: ignore[attr-defined]
            break
        time.sleep(0)
    _in_gloo.clear()


os.register_at_fork(before=_await_gloo)


@contextlib.contextmanager
def join(device: str) -> Iterator[Ranks]:
    """Connect to the other ranks, as the launcher's environment describes them."""
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
    if not dist.is_initialized():  # else an earlier training of this process has connected them
        dist.init_process_group(backend, timeout=_TIMEOUT)
        atexit.register(_leave)
    try:
        yield Ranks(here.rank, here.num_ranks)
    finally:
        # Destroying the process group waits for gloo's threads with Python's lock taken
        # (pytorch/pytorch#56297).
        _await_gloo()


def _leave() -> None:
    # Otherwise gloo's threads, which enter Python (see `_run`), would live while Python ends.
    # `end` skips this function, as it skips all of atexit.
    if dist.is_initialized():
        dist.destroy_process_group()


def end(code: int) -> NoReturn:
    """End this process now: a normal exit would wait for workers, a model's threads and gloo."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
