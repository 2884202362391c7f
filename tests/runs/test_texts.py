"""Promises of `texts` and `codes`: the same text has the same cause whether it is pasted, the last
words of a run, or the log of a Slurm job; a code is understood in every form."""

import re
from pathlib import Path
from typing import get_args

import pytest
from conftest import MB, write_run

from ogbnlib.errors import GB, InputError
from ogbnlib.memory.growth import Growth
from ogbnlib.runs import codes, render, texts
from ogbnlib.runs.cause import Cause, Facts
from ogbnlib.runs.diagnosis import explain_code, explain_text
from ogbnlib.runs.folder import Run
from ogbnlib.runs.render import Diagnosis
from ogbnlib.runs.texts import find, last_words

KILLED = "SIGKILL, cause unknown"
OOM = "out of memory"
GPU = "out of GPU memory"
WORKER_DIED = "worker died, cause unknown"
RANK_LOST = "lost another rank, cause unknown"
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
OF_LABELLED = "[rank1]: " + (RAISED + "x\n" + CUDA).replace("\n", "\n[rank1]: ") + "\n"
NCCL = (
    "[rank1]:[E1122 10:00:00.123456789 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 "
    "milliseconds before timing out.\nterminate called after throwing an instance of 'c10::DistBackendError'\n"
)
TIME_LIMIT = (
    "slurmstepd: error: *** JOB 1 ON n0 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"
)
# text -> cause, sign, process
TEXTS = {
    "sacct": ("1234567  train  gpu  OUT_OF_ME+  0:125  64G", OOM, "OUT_OF_MEMORY", ""),
    "a step of Slurm": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=5512087.0. Some of the step", OOM, "OUT_OF_MEMORY", ""),
    "a task of srun": ("srun: error: node6156: task 0: Out Of Memory", OOM, "OUT_OF_MEMORY", ""),
    "an old Slurm": ("slurmstepd: error: Job 5 exceeded memory limit (4200000 > 4194304), being killed", OOM,
                     "OUT_OF_MEMORY", ""),
    "page cache": ("slurmstepd: error: Exceeded job memory limit at some point.", "memory limit met, cause unknown",
                   "limit met", ""),
    "Slurm's time limit": (TIME_LIMIT, "time limit", "TIMEOUT", ""),
    "dmesg, machine": (DMESG.format("Out of memory"), OOM, "kernel kill", "process 4242 (python)"),
    "dmesg, cgroup": (DMESG.format("Memory cgroup out of memory"), OOM, "kernel kill in a cgroup",
                      "process 4242 (python)"),
    "dmesg, the first line": (
        "Nov 20 10:01:02 box kernel: python3 invoked oom-killer: gfp_mask=0x1100cca(GFP_HIGHUSER_MOVABLE), order=0",
        OOM, "memory of a group", ""),
    "Kubernetes": ("Reason:       OOMKilled\nExit Code:    137", OOM, "memory of a group", ""),
    "torch on the CPU": (
        "RuntimeError: [enforce fail at CPUAllocator.cpp:71] . DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 64597662208 bytes. Error code 12 (Cannot allocate memory)", OOM, "allocation refused", ""),
    "numpy": (RAISED + "x\nnumpy._core._exceptions._ArrayMemoryError: Unable to allocate 51.7 TiB for an array", OOM,
              "allocation refused", ""),
    "C++": ("terminate called after throwing an instance of 'std::bad_alloc'\n  what()\nAborted", OOM,
            "allocation refused", ""),
    "torch on the GPU": (CUDA, GPU, "76", ""),
    "cuBLAS": ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", GPU,
               "76", ""),
    "a worker": (RAISED + "x\n" + WORKER.format(75890, "Killed"), KILLED, "137", "DataLoader worker 75890"),
    "a worker, chained": (
        RAISED + "x\n" + WORKER.format(7, "Killed") + CHAIN + RAISED + "x\n" + LEFT, KILLED, "137",
        "DataLoader worker 7"),
    "a worker's bus error": (WORKER.format(7, "Bus error"), "error", "135", "DataLoader worker 7"),
    "a worker, unknown": (LEFT, WORKER_DIED, "worker gone", "7"),
    "descriptors": ("RuntimeError: received 0 items of ancdata", "error", "file descriptors", ""),
    "shared memory": ("RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode", "error",
                      "shared memory", ""),
    "a label": ("IndexError: Target 172 is out of bounds.", "error", "label out of range", ""),
    "a rank": (ROOT_CAUSE.format(code=-9, other=-15), KILLED, "137", "rank 1"),
    "a rank's exception": (
        OF_LABELLED + ROOT_CAUSE.format(code=1, other=-15), GPU, "76", "rank 1"),
    "torchrun's line": ("E1122 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 12105) of binary: /x", KILLED,
                        "137", "rank 0"),
    "spawn": (
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL", KILLED, "137",
        "process 1"),
    "subprocess": ("subprocess.CalledProcessError: Command '['a']' died with <Signals.SIGKILL: 9>.", KILLED, "137", ""),
    "bash": ("/spool/slurm_script: line 9: 12345 Killed                  python train.py", KILLED, "137", ""),
    "a terminal": ("Epoch 3\nKilled\n", KILLED, "137", ""),
    "NCCL": (NCCL, RANK_LOST, "rank gone", ""),
    "gloo": ("RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4242", RANK_LOST,
             "rank gone", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_one_cause_pasted_and_as_last_words(tmp_path: Path, name: str) -> None:
    text, *expected = TEXTS[name]
    pasted = explain_text(text)
    assert [pasted.cause, pasted.facts.sign, pasted.facts.who] == expected
    assert pasted.actions
    noise = "Epoch 1\r 45%|####    | 45/100 [00:01<00:01, 30it/s]\r\n"
    line = last_words(noise + text)
    assert "\n" not in line
    run = Run.open(write_run(tmp_path, exit_code=1, last_output=line)).diagnosis
    assert (run.cause, run.facts.last_output) == (pasted.cause, line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("hello world", ""),
        (RAISED + "x\nKeyError: 'x'", "KeyError: 'x'"),
        # caught, and another exception ended the program
        (f"{CUDA}\nretrying\n{RAISED}x\nValueError: boom", "ValueError: boom"),
        ("You are using `torch.load` with `weights_only=False`, flip it to `True`", ""),
        ('"OOMKilled": false, "ExitCode": 1', ""),
        ("Epoch 137: test error 130 of 200", ""),
        ("terminated by EOF", ""),
        ("restarting kernel density estimate", ""),
        ("x.py: line 12: 345 killed neurons", ""),
        ("Terminated (early stopping)", ""),
        ("exit 0: 137 nodes", ""),
    ],
)
def test_an_unknown_text_leads_to_the_guide(text: str, line: str) -> None:
    found = explain_text(text)
    assert (found.cause, found.facts.line, found.actions[0].id) == ("unknown", line, "read guide")
    with pytest.raises(InputError, match="got nothing"):
        explain_text("\n")


CODES = {
    **dict.fromkeys(("-9", "9:0", "0:9", "137:0", "137", "SIGKILL"), (KILLED, 137)),
    **dict.fromkeys(("-15", "15:0", "0:15", "143:0", "SIGTERM"), ("SIGTERM", 143)),
    **dict.fromkeys(("-6", "0:6", "0:134", "134", "SIGABRT"), ("error", 134)),
    **dict.fromkeys(("124", "124:0"), ("time limit", 124)),
    **dict.fromkeys(("1", "1:0"), ("error", 1)),
    "0:0": ("finished", 0),
    "0:125": (OOM, None),
}  # fmt: skip


@pytest.mark.parametrize("code", CODES)
def test_a_code_is_understood_in_every_form(code: str) -> None:
    found = explain_code(code)
    assert (found.cause, found.exit_code) == CODES[code]
    assert "no fixed meaning" not in found.text


@pytest.mark.parametrize("code", ["256", "-65", "x", "", "1:2:3", "SIGNOTHING", "999:0"])
def test_what_is_no_code_is_refused(code: str) -> None:
    with pytest.raises(InputError, match="--exit-code: "):
        explain_code(code)


CLUES = [*texts._SYSTEM, *texts._EXCEPTIONS, *texts._LAUNCHERS]
KNOWN_ENDS = [
    *map(codes.of_code, [*codes._CODES, "131", "99"]),
    *(codes.of_state(state, {}) for state in codes.STATES),
    *(explain_text(text) for text, *_ in TEXTS.values()),
]


def test_every_cause_sign_and_action_has_words() -> None:
    assert len(CLUES) <= 20
    assert {*codes.TEXTS} <= {clue.sign for clue in CLUES}
    rest = {"growth": Growth("climbs", 10.0 * MB, 9, 5 * MB, 95 * MB), "stalled_s": 29.0}
    known = {"duration_s": 3.0, "phase": "x", "memory_limit_bytes": GB, "limit_by": "cgroup v2"}
    known["parts"] = {"a": MB}
    for end in KNOWN_ENDS:
        assert end.cause in get_args(Cause)
        assert {action.id for action in end.actions} <= {*render._ACTIONS}
        shown = Facts(**{**vars(end.facts), **known, **rest})
        for facts in (end.facts, shown):
            text = Diagnosis(end.cause, facts, end.actions).text
            sentences = re.sub(r"Evidence: .*?\. Next", "Next", text)
            assert not re.search(r"[{}\[\]]|None| \.", re.sub("'.*?'", "x", sentences)), text


OUTPUTS = {  # output, exit code -> last words
    "a bar, then an exception": (
        f"\r 45%|##   | 45/100 [00:01<00:01]{RAISED}x\nValueError: boom\n", "ValueError: boom"),
    "ruled lines": ("it failed\n=========\n---------\n*** ***\n", "it failed"),
    "a message of several lines": (
        RAISED + "x\nValueError: shapes differ\n  expected 3\nfound 4\nsee the manual\n", "ValueError: shapes differ"),
    "control characters": ("\x1b]0;title\x07it \x9b31mfailed\x08\x1b[2J\n", "it 31mfailed"),
    "a command's own error": ("x\nerror: no such file\nbye\n", "error: no such file"),
    "nothing": ("\n\n", ""),
    "loguru": (
        'Traceback (most recent call last):\n\n> File "x.py", line 12, in f\n    f()\n    └ <f>\n\nValueError: boom\n',
        "ValueError: boom"),
    "a box": ("╭─ Error ─────╮\n│ No such option: --lrr   │\n╰─────────────╯\n", "No such option: --lrr"),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
def test_last_words_are_those_of_the_program(name: str) -> None:
    output, words = OUTPUTS[name]
    assert last_words(output) == words
    assert find("\x1b[31mKilled\x1b[0m\n") is not None
