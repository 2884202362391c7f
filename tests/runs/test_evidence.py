"""Promises of `evidence`: the same text has the same cause whether it is pasted, the last words of a
run, or the log of a Slurm job."""

import re
import sys
from pathlib import Path

import pytest
from conftest import write_run

from ogbnlib.errors import InputError
from ogbnlib.runs.diagnosis import explain_code, explain_text
from ogbnlib.runs.evidence import find, last_words
from ogbnlib.runs.folder import Run, diagnose
from ogbnlib.runs.sandbox import watch

KILLED = "SIGKILL, cause unknown"
OOM = "out of memory"
RAISED = 'Traceback (most recent call last):\n  File "train.py", line 88, in <module>\n    '
ROOT_CAUSE = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : {other} (pid: 1)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-25_18:38:01
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 41893)
  error_file: <N/A>
============================================================
"""
CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.00 GiB "
    "of which 1.00 GiB is free. Of the allocated memory 13.00 GiB is allocated by PyTorch, and 0.10 GiB is reserved "
    "by PyTorch but unallocated."
)
WORKER = "RuntimeError: DataLoader worker (pid {}) is killed by signal: {}."
LEFT = "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly\n"
RESET = "ConnectionResetError: [Errno 104] Connection reset by peer\n"
CHAIN = "\n\nThe above exception was the direct cause of the following exception:\n\n"
DMESG = (
    "[12.3] {}: Killed process 4242 (python) total-vm:9000000kB, anon-rss:2097152kB, file-rss:0kB"
)
PICKLE = (
    "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options.\n"
    "\t(1) In PyTorch 2.6, we changed the default value of the `weights_only` argument.\n"
    "Check the documentation of torch.load to learn more about types accepted by default.\n"
)
# text -> cause, words of the diagnosis
TEXTS = {
    "a step of Slurm": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=5512087.0. Some of the step",
        OOM,
        ["--mem"],
    ),
    "a task of srun": ("srun: error: node6156: task 0: Out Of Memory", OOM, ["--mem"]),
    "an old Slurm": (
        "slurmstepd: error: Job 5 exceeded memory limit (4200000 > 4194304), being killed",
        OOM,
        ["--mem"],
    ),
    "page cache": (
        "slurmstepd: error: Exceeded job memory limit at some point.",
        "memory limit met, cause unknown",
        ["page cache", "sacct"],
    ),
    "dmesg, machine": (
        DMESG.format("Out of memory"),
        OOM,
        ["4242 (python)", "2.00 GB", "whole machine"],
    ),
    "dmesg, cgroup": (
        DMESG.format("Memory cgroup out of memory"),
        OOM,
        ["4242 (python)", "2.00 GB", "cgroup"],
    ),
    "Kubernetes": ("Reason:       OOMKilled\nExit Code:    137", OOM, ["container"]),
    "torch on the CPU": (
        "RuntimeError: [enforce fail at CPUAllocator.cpp:71] . DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 64597662208 bytes. Error code 12 (Cannot allocate memory)",
        OOM,
        ["60.16 GB", "Linux refused"],
    ),
    "numpy": (
        RAISED
        + "x\nnumpy._core._exceptions._ArrayMemoryError: Unable to allocate 51.7 TiB for an array",
        OOM,
        ["52940.80 GB", "Linux refused"],
    ),
    "C++": (
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what()\nAborted",
        OOM,
        ["Linux refused"],
    ),
    "errno 12": ("OSError: [Errno 12] Cannot allocate memory", OOM, ["Linux refused"]),
    "torch on the GPU": (CUDA, "out of GPU memory: size", ["2.00 GB asked for", "batch_size"]),
    "CUDA, plain": (
        "RuntimeError: CUDA error: out of memory\n"
        "CUDA kernel errors might be asynchronously reported",
        "out of GPU memory",
        ["nvidia-smi"],
    ),
    "cuBLAS": (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
        "out of GPU memory",
        ["nvidia-smi"],
    ),
    "a worker": (
        RAISED + "x\n" + WORKER.format(75890, "Killed"),
        KILLED,
        ["DataLoader worker 75890", "dmesg"],
    ),
    "a worker, chained": (
        RAISED + "x\n" + WORKER.format(7, "Killed") + CHAIN + RAISED + "x\n" + LEFT,
        KILLED,
        ["worker 7"],
    ),
    "a worker's bus error": (WORKER.format(7, "Bus error"), "error", ["SIGBUS", "shm-size"]),
    "a worker, reset": (
        RAISED.replace("train.py", "torch/utils/data/dataloader.py") + "x\n" + RESET,
        "worker died, cause unknown",
        ["DataLoader worker", "num_workers=0"],
    ),
    "a worker, unknown": (LEFT, "worker died, cause unknown", ["num_workers=0"]),
    "descriptors": ("RuntimeError: received 0 items of ancdata", "error", ["ulimit -n"]),
    "shared memory": (
        "RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode",
        "error",
        ["/dev/shm"],
    ),
    "a rank": (ROOT_CAUSE.format(code=-9, other=-15), KILLED, ["Rank 1 was ended by SIGKILL"]),
    "a rank, and its peer": (ROOT_CAUSE.format(code=-9, other=1), KILLED, ["Rank 1 "]),
    "a rank's exception": (
        "[rank1]: "
        + (RAISED + "x\n" + CUDA).replace("\n", "\n[rank1]: ")
        + "\n"
        + ROOT_CAUSE.format(code=1, other=-15),
        "out of GPU memory: size",
        ["Rank 1", "2.00 GB"],
    ),
    "torchrun's line": (
        "E1122 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 12105) of binary: /x",
        KILLED,
        ["Rank 0"],
    ),
    "spawn": (
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal "
        "SIGKILL",
        KILLED,
        ["rocess 1"],
    ),
    "subprocess": (
        "subprocess.CalledProcessError: Command '['a']' died with <Signals.SIGKILL: 9>.",
        KILLED,
        ["SIGKILL"],
    ),
    "bash": (
        "/spool/slurm_script: line 9: 12345 Killed                  python train.py",
        KILLED,
        ["SIGKILL"],
    ),
    "a terminal": ("Epoch 3\nKilled\n", KILLED, ["SIGKILL"]),
    "Slurm's time limit": (
        "slurmstepd: error: *** JOB 1 ON n0 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
        "time limit",
        ["--time"],
    ),
    "systemd's status": ("   Active: failed (Result: oom-kill) since Mon", OOM, ["service"]),
    "dmesg, the first line": (
        "Nov 20 10:01:02 box kernel: python3 invoked oom-killer: "
        "gfp_mask=0x1100cca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=0",
        OOM,
        ["machine"],
    ),
    "dmesg, the reaper": (
        "oom_reaper: reaped process 31337 (python3), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
        OOM,
        ["31337 (python3)"],
    ),
    "srun, labelled": ("0: srun: error: gpu01: task 0: Out Of Memory", OOM, ["--mem"]),
    "bash, in the background": (
        "[1]+  Killed                  python train.py",
        KILLED,
        ["SIGKILL"],
    ),
    "NCCL": (
        "[rank1]:[E1122 10:00:00.123456789 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n",
        "lost another rank, cause unknown",
        ["logs of all ranks"],
    ),
    "gloo": (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection "
        "closed by peer [10.0.0.2]:4242",
        "lost another rank, cause unknown",
        ["logs of all ranks"],
    ),
    "a mapping of torch": (
        "RuntimeError: unable to mmap 1024 bytes from file </torch_12_34>: Cannot allocate "
        "memory (12)",
        OOM,
        ["Linux refused"],
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_the_same_cause_pasted_and_as_the_last_words_of_a_run(
    tmp_path: Path, name: str
) -> None:
    text, cause, words = TEXTS[name]
    pasted = explain_text(text)
    assert pasted.cause == cause, pasted.text
    for word in words:
        assert word in pasted.text
    assert pasted.text.endswith(f"Next: {pasted.remedy}.")
    noise = "Epoch 1\r 45%|####    | 45/100 [00:01<00:01, 30it/s]\r\n"
    line = last_words(noise + text)
    assert "\n" not in line
    assert find(line) is not None, line
    run = write_run(tmp_path, exit_code=1, last_output=line)
    assert diagnose(run).cause == cause
    assert line.rstrip(".") in diagnose(run).text


# Pasted tables of Slurm -> cause, words
TABLES = {
    "sacct": (
        "JobID           JobName  Partition   State      ExitCode   ReqMem     MaxRSS    Elapsed\n"
        "------------ ---------- ---------- ---------- -------- ---------- ---------- ----------\n"
        "1234567           train        gpu OUT_OF_ME+    0:125       64G              00:19:32\n"
        "1234567.bat+      batch            OUT_OF_ME+    0:125            64421028K   00:19:32\n",
        OOM, ["--mem"]),
    "sacct, a step alone": (
        "JobID|State|ExitCode|ReqMem\n7|FAILED|1:0|64G\n7.0|OUT_OF_MEMORY|0:125|\n", OOM, ["--mem"]),
    "sacct, a code": ("JobID|State|ExitCode\n7|FAILED|9:0\n", "error", ["diagnose --job 7"]),
    "sacct, a day": ("JobID|State|ExitCode\n6|COMPLETED|0:0\n7|TIMEOUT|0:0\n8|COMPLETED|0:0\n", "time limit",
                     ["--time"]),
    "sacct, another runs": ("JobID|State|ExitCode\n50|CANCELLED|9:0\n51|RUNNING|0:0\n", "cancelled", []),
    "sacct, a row": ("1234567  train  gpu  OUT_OF_ME+  0:125  64G", OOM, ["--mem"]),
    "a state": ("OUT_OF_MEMORY\n", OOM, ["--mem"]),
    "a code": (" 137\n", KILLED, ["SIGKILL"]),
    "scontrol": ("JobId=77 JobName=x\n   JobState=PENDING Reason=JobHeldUser\n   RunTime=00:00:00 TimeLimit=01:00:00\n",
                 "pending", ["scontrol show job"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_pasted_table_of_slurm_is_read(name: str) -> None:
    text, cause, words = TABLES[name]
    found = explain_text(text)
    assert found.cause == cause, found.text
    for word in words:
        assert word in found.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello world", "no message in it is known"),
        (RAISED + "x\nKeyError: 'x'", "KeyError: 'x'"),
        # caught, and another exception ended the program
        (f"{CUDA}\nretrying\n{RAISED}x\nValueError: boom", "ValueError: boom"),
        (
            "You are using `torch.load` with `weights_only=False`, flip it to `weights_only=True`",
            "",
        ),
        ('"OOMKilled": false, "ExitCode": 1', ""),
        ("Epoch 137: test error 130 of 200", ""),
        ("terminated by EOF", ""),
        ("restarting kernel density estimate", ""),
        ("x.py: line 12: 345 killed neurons", ""),
        ("[1] Aborted runs: 0", ""),
        ("Terminated (early stopping)", ""),
        ("exit 0: 137 nodes", ""),
    ],
)
def test_what_is_not_known_is_said_with_the_page_of_the_guide(text: str, words: str) -> None:
    found = explain_text(text)
    assert found.cause == "unknown"
    assert words in found.text
    assert "notebooks/guide/troubleshooting.md" in found.text
    with pytest.raises(InputError, match="got nothing"):
        explain_text("\n")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 4.15 GiB. GPU 0 has a total capacity of 23.69 GiB of "
        "which 3.84 GiB is free. Process 7 has 19.83 GiB memory in use. Of the allocated memory 15.80 "
        "GiB is allocated by PyTorch, and 3.56 GiB is reserved by PyTorch but unallocated.",
        "CUDA out of memory. Tried to allocate 4.15 GiB (GPU 0; 23.69 GiB total capacity; 15.80 GiB "
        "already allocated; 3.84 GiB free; 19.36 GiB reserved in total by PyTorch)",
    ],
)
def test_the_sentence_on_fragmentation_names_all_that_it_adds_up(text: str) -> None:
    assert (
        "With 3.56 GB reserved but unallocated and 3.84 GB free there was enough"
        in explain_text(text).text
    )


CODES = {
    **dict.fromkeys(("-9", "9:0", "0:9", "137:0", "137", "247", "SIGKILL", "sigkill", "KILL"), (KILLED, 137)),
    **dict.fromkeys(("-15", "15:0", "0:15", "143:0", "241", "SIGTERM"), ("SIGTERM", 143)),
    **dict.fromkeys(("-7", "0:7", "SIGBUS"), ("error", 135)),
    **dict.fromkeys(("-6", "0:6", "0:134", "134", "250", "SIGABRT"), ("error", 134)),
    **dict.fromkeys(("124", "124:0"), ("time limit", 124)),
    **dict.fromkeys(("1", "1:0"), ("error", 1)),
    "0:0": ("finished", 0),
    **dict.fromkeys(("0:125", "OUT_OF_MEMORY", "OUT_OF_ME+", "oom"), (OOM, None)),
    **dict.fromkeys(("TIMEOUT", "TO"), ("time limit", None)),
    **dict.fromkeys(("CANCELLED by 1000", "CANCELLED+"), ("cancelled", None)),
    "NODE_FAIL": ("node failure", None),
    "FAILED": ("error", None),
    "COMPLETED": ("finished", None),
}  # fmt: skip


@pytest.mark.parametrize("code", CODES)
def test_a_code_is_understood_in_every_form_in_which_it_is_written(code: str) -> None:
    found = explain_code(code)
    assert (found.cause, found.exit_code) == CODES[code]
    assert " ." not in str(found)
    assert "= " not in str(found)
    assert "no fixed meaning" not in found.text
    assert not re.search("{|}", found.text)


@pytest.mark.parametrize("code", ["256", "-65", "x", "", "1:2:3", "SIGNOTHING", "999:0"])
def test_what_is_no_code_is_refused(code: str) -> None:
    with pytest.raises(InputError, match="--exit-code: expected 0 to 255, -N"):
        explain_code(code)


OUTPUTS = {  # output, exit code -> last words
    "a bar, then an exception": (
        f"\r 45%|##   | 45/100 [00:01<00:01]{RAISED}x\nValueError: boom\n", "ValueError: boom"),
    "ruled lines": ("it failed\n=========\n---------\n*** ***\n", "it failed"),
    "a message of several lines": (
        RAISED + "x\nValueError: shapes differ\n  expected 3\nfound 4\nsee the manual\n", "ValueError: shapes differ"),
    "a colon": (
        RAISED + "x\nRuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s): \"a\"\n",
        'RuntimeError: Error(s) in loading state_dict for Net: Missing key(s): "a"'),
    "a last state": ("checking ...\rno license\n", "no license"),
    "colors": ("\x1b[31mit failed\x1b[0m\n", "it failed"),
    "a command's own error": ("x\nerror: no such file\nbye\n", "error: no such file"),
    "nothing": ("\n\n", ""),
    "loguru": (
        'Traceback (most recent call last):\n\n> File "x.py", line 12, in f\n    f()\n    └ <f>\n\nValueError: boom\n',
        "ValueError: boom"),
    "a box": ("╭─ Error ─────╮\n│ No such option: --lrr   │\n╰─────────────╯\n", "No such option: --lrr"),
}  # fmt: skip


def test_last_words_carry_no_control_characters() -> None:
    words = last_words("\x1b]0;title\x07it \x9b31mfailed\x08\x1b[2J\n")
    assert words == "it 31mfailed"
    assert find("\x1b[31mKilled\x1b[0m\n") is not None


@pytest.mark.parametrize("name", OUTPUTS)
def test_last_words_are_those_of_the_program(name: str) -> None:
    output, words = OUTPUTS[name]
    assert last_words(output) == words


def test_a_killed_child_of_a_script_is_named_with_what_helps_after_a_kill(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        f"print({WORKER.format(31, 'Killed')!r})\n"
        "sys.exit(1)\n"
    )
    done = watch([sys.executable, str(script)], run_dir=tmp_path / "run", echo=False)
    found = Run.open(done.run_dir).diagnosis
    assert (found.cause, found.exit_code) == (KILLED, 1)
    assert "DataLoader worker 31 was ended by SIGKILL" in found.text
    assert "dmesg" in found.remedy
