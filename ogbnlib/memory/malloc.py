"""Settings of malloc and torch for the memory of a training process."""

from collections.abc import Mapping

from .cgroup import read_whole

# For the trainer alone; another command runs as it is. glibc's malloc keeps much freed memory
# (mallopt(3)). Steps below are written as num_neighbors x batch_size x hidden_channels.
MALLOC = {
    # Two arenas for all threads, not eight per core, let a run finish with 40 MB less memory.
    "MALLOC_ARENA_MAX": "2",
    # Blocks from 4 MiB on come from mmap and go back to the kernel at once, where the default
    # threshold grows to 32 MiB. This saves 75 MB at the peak of [15, 10, 5] x 1024.
    "MALLOC_MMAP_THRESHOLD_": str(2**22),
    # Free memory at the heap's end goes back above this size. Setting the threshold above would fix
    # this one at 128 KiB. Then every step of [3, 2] x 128 would ask for the same pages again, 15 %
    # of its time. malloc itself would choose 8 MiB, twice the threshold above.
    "MALLOC_TRIM_THRESHOLD_": str(2**23),
}
# With this variable torch asks for huge pages (2 MB) for its large tensors, which the kernel
# otherwise maps 4 KB at a time. Ten epochs each in turn, two Zen 4 cores: 3.26 instead of 2.57
# batches/s of [15, 10, 5] x 1024 x 256, 1.04 times as fast for [15, 10], 1.02 for [3, 2] x 128 x 16,
# with the same losses and the same peak (1026 and 1028 MB). With huge pages the
# threshold of 4 MiB costs 4 % of a step and saves 33 MB, against 32 MiB 6 % and 78 MB.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def trainer_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for a trainer's malloc and torch, unless `environ` has them."""
    values = dict(MALLOC)
    # The kernel's setting is in brackets, such as "always [madvise] never". A kernel without huge
    # pages has no such file.
    setting = read_whole("/sys/kernel/mm/transparent_hugepage/enabled") or b"[never]"
    if b"[never]" not in setting:
        values[HUGE_PAGES] = "1"
    return {name: value for name, value in values.items() if name not in environ}
