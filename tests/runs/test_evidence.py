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
    "PBS": ("=>> PBS: job killed: mem 68157440kb exceeded limit 67108864kb", OOM, ["ask for more"]),
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
        ["60.16 GB", "not of the GPU"],
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
    "zsh": ("zsh: segmentation fault  python train.py", "error", ["SIGSEGV"]),
    "a kernel": (
        "nbclient.exceptions.DeadKernelError: Kernel died",
        "kernel died, cause unknown",
        ["papermill"],
    ),
    "weights only": (RAISED + "x\n" + PICKLE, "error", ["weights_only=False", "trust"]),
    "faulthandler": (
        "Fatal Python error: Segmentation fault\n\nThread 0x7f:",
        "error",
        ["SIGSEGV"],
    ),
    "Colab": ("Your session crashed after using all available RAM.", OOM, ["session"]),
    "threads": ("RuntimeError: can't start new thread", "error", ["ulimit -u"]),
    "VS Code": (
        "The Kernel crashed while executing code",
        "kernel died, cause unknown",
        ["papermill"],
    ),
    "a full disk": (
        "OSError: [Errno 28] No space left on device: 'runs/a/output.log'",
        "disk full",
        ["free some space"],
    ),
    "Slurm's time limit": (
        "slurmstepd: error: *** JOB 1 ON n0 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
        "time limit",
        ["--time"],
    ),
    "earlyoom": (
        "earlyoom[612]: mem avail:   312 of 15893 MiB ( 1.97%), swap free:    0 of 2047 MiB ( "
        "0.00%)\n"
        "earlyoom[612]: low memory! at or below SIGTERM limits: mem 10.00%, swap 10.00%\n"
        'earlyoom[612]: sending SIGTERM to process 4242 uid 1000 "python": badness 812, VmRSS '
        "9120 MiB",
        OOM,
        ["process 4242", "ran short"],
    ),
    "systemd-oomd's unit": (
        "systemd[1500]: vte-spawn-abc.scope: systemd-oomd killed 23 process(es) in this unit.",
        OOM,
        ["service"],
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
    "Ray, memory": (
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
        "Memory on the node (IP: 10.0.0.2, ID: abc) where the task (task ID: x, name=train) "
        "was running was 58.4GB / 61.1GB (0.955), which exceeds the memory usage threshold of "
        "0.95. Ray killed this worker (ID: deadbeef) because it was the most recently "
        "scheduled task",
        OOM,
        ["machine"],
    ),
    "Ray, a worker": (
        "ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.\n"
        "\tclass_name: Trainer\n"
        "\tactor_id: 1\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
        "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of "
        "file. There are some potential root causes. (1) The process is killed by SIGKILL by "
        "OOM killer due to high memory usage. (2) ray stop --force is called. (3) The worker "
        "is crashed unexpectedly due to SIGSEGV or other unexpected errors.",
        "worker died, cause unknown",
        ["memory_limit"],
    ),
    "Dask": (
        "distributed.nanny - WARNING - Worker tcp://127.0.0.1:1 exceeded 95% memory budget. "
        "Restarting...",
        OOM,
        ["machine"],
    ),
    "Kubernetes, the node": (
        "The node was low on resource: memory. Threshold quantity: 100Mi, available: 53Mi. "
        "Container train was using 12345Ki, request is 0, has larger consumption of memory.",
        OOM,
        ["container"],
    ),
    "Kubernetes, the disk": (
        "Status: Failed\n"
        "Reason: Evicted\n"
        "Message: The node was low on resource: ephemeral-storage.",
        "disk full",
        ["free some space"],
    ),
    "ECS": (
        "Exit code 137; Reason: OutOfMemory: Container killed due to memory usage",
        OOM,
        ["container"],
    ),
    "Kaggle": (
        "Your notebook tried to allocate more memory than is available. It has restarted.",
        OOM,
        ["session"],
    ),
    "YARN": (
        "ExecutorLostFailure (executor 3 exited caused by one of the running tasks) Reason: "
        "Container killed by YARN for exceeding memory limits. 10.4 GB of 10.4 GB physical "
        "memory used. Consider boosting spark.yarn.executor.memoryOverhead.",
        OOM,
        ["container"],
    ),
    "Java": (
        "py4j.protocol.Py4JJavaError: An error occurred while calling o57.collectToPython.\n"
        ": java.lang.OutOfMemoryError: Java heap space\n"
        "\tat java.util.Arrays.copyOf",
        OOM,
        ["-Xmx"],
    ),
    "SGE": (
        'job 123 exceeds job hard limit "h_vmem" of queue "all.q@n01" (8.2G > limit:8.0G) - '
        "sending SIGKILL",
        OOM,
        ["ask for more"],
    ),
    "SGE, time": (
        "job 123 exceeded hard wallclock time - initiate terminate method",
        "time limit",
        ["batch system"],
    ),
    "PBS, pmem": ("=>> PBS: job killed: pmem 5000000kb exceeded limit", OOM, ["ask for more"]),
    "PBS, resources": (
        "Job 123.server exceeded resource mem (4200000kb > 4194304kb)",
        OOM,
        ["ask for more"],
    ),
    "HTCondor": (
        "Job was held.\n"
        "\tJob has gone over memory limit of 2048 megabytes. Peak usage: 2050 megabytes.",
        OOM,
        ["ask for more"],
    ),
    "LSF, its owner": (
        "TERM_OWNER: job killed by owner.\nExited with exit code 130.",
        "cancelled",
        ["owner"],
    ),
    "srun, labelled": ("0: srun: error: gpu01: task 0: Out Of Memory", OOM, ["--mem"]),
    "mpirun": (
        "--------------------------------------------------------------------------\n"
        "mpirun noticed that process rank 3 with PID 12345 on node gpu07 exited on signal 9 "
        "(Killed).\n"
        "--------------------------------------------------------------------------",
        KILLED,
        ["SIGKILL"],
    ),
    "mpirun, broken line": (
        "--------------------------------------------------------------------------\n"
        "prterun noticed that process rank 1 with PID 2231 on node n01 exited on\n"
        "signal 9 (Killed).\n"
        "--------------------------------------------------------------------------",
        KILLED,
        ["SIGKILL"],
    ),
    "MPICH": (
        "===================================================================================\n"
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
        "=   PID 21441 RUNNING AT node1\n"
        "=   EXIT CODE: 9\n"
        "=   CLEANING UP REMAINING PROCESSES\n"
        "=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES\n"
        "===================================================================================\n"
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
        "This typically refers to a problem with your application.",
        KILLED,
        ["SIGKILL"],
    ),
    "Intel MPI": (
        "=   RANK 2 PID 21441 RUNNING AT node1\n=   KILLED BY SIGNAL: 9 (Killed)",
        KILLED,
        ["SIGKILL"],
    ),
    "gunicorn": (
        "[2024-01-01 10:00:00 +0000] [7] [ERROR] Worker (pid:83) was sent SIGKILL! Perhaps out "
        "of memory?",
        KILLED,
        ["SIGKILL"],
    ),
    "LSF, a signal": (
        "Exited by signal 9. The CPU time used is 12.3 seconds.",
        KILLED,
        ["SIGKILL"],
    ),
    "GNU time": (
        'Command terminated by signal 9\n\tCommand being timed: "python train.py"',
        KILLED,
        ["SIGKILL"],
    ),
    "timeout": ("timeout: sending signal TERM to command 'python'", "time limit", ["124"]),
    "fish": (
        "fish: Job 1, 'python train.py' terminated by signal SIGSEGV (Address boundary error)",
        "error",
        ["SIGSEGV"],
    ),
    "zsh, in the background": ("[1]  + 12345 killed     python train.py", KILLED, ["SIGKILL"]),
    "bash, in the background": (
        "[1]+  Killed                  python train.py",
        KILLED,
        ["SIGKILL"],
    ),
    "make": ("make: *** [Makefile:12: train] Killed", KILLED, ["SIGKILL"]),
    "make, a code": ("make: *** [Makefile:3: train] Error 137", KILLED, ["SIGKILL"]),
    "systemd": ("Main process exited, code=killed, status=9/KILL", KILLED, ["SIGKILL"]),
    "supervisor": ("INFO exited: train (terminated by SIGKILL; not expected)", KILLED, ["SIGKILL"]),
    "torchrun, SIGTERM": (
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 123 got signal: 15",
        "SIGTERM",
        ["SIGTERM"],
    ),
    "DeepSpeed": (
        "[launch.py:315:sigkill_handler] Killing subprocess 12345\n"
        "[launch.py:321:sigkill_handler] ['python', 'train.py'] exits with return code = -9",
        KILLED,
        ["SIGKILL"],
    ),
    "docker build": (
        "The command '/bin/sh -c pip install .' returned a non-zero code: 137",
        KILLED,
        ["SIGKILL"],
    ),
    "docker ps": (
        'a1b2c3   train   "python train.py"   2 hours ago   Exited (137) 2 minutes ago         '
        "    trainer",
        KILLED,
        ["SIGKILL"],
    ),
    "docker inspect": (
        '"State": {"Status": "exited", "OOMKilled": false, "ExitCode": 137}',
        KILLED,
        ["SIGKILL"],
    ),
    "Vertex": (
        "The replica workerpool0-0 exited with a non-zero status of 137(SIGKILL).",
        KILLED,
        ["SIGKILL"],
    ),
    "Nextflow": ("Process `TRAIN` terminated with an error exit status (137)", KILLED, ["SIGKILL"]),
    "Chinese": (
        "/tmp/x.sh: 第 3 行\uff1a 12345 已杀死               python train.py",
        KILLED,
        ["SIGKILL"],
    ),
    "German": ("Speicherzugriffsfehler (Speicherabzug geschrieben)", "error", ["SIGSEGV"]),
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
    "Rust": (
        "memory allocation of 34359738368 bytes failed\nAborted (core dumped)",
        OOM,
        ["32.00 GB", "Linux refused"],
    ),
    "R": ("Error: cannot allocate vector of size 3.0 Gb", OOM, ["3.00 GB"]),
    "JAX": (
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying "
        "to allocate 17179869184 bytes.",
        "out of GPU memory",
        ["nvidia-smi"],
    ),
    "TensorFlow": (
        "tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating "
        "tensor with shape[1024,1024] and type float on "
        "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
        "out of GPU memory",
        ["nvidia-smi"],
    ),
    "TensorFlow on the CPU": (
        "ResourceExhaustedError: OOM when allocating tensor with shape[1024,1024] and type "
        "float on /job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu",
        OOM,
        ["Linux refused"],
    ),
    "a GPU that failed": (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
        "GPU failure",
        ["--exclude"],
    ),
    "an illegal access": (
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "error",
        ["CUDA_LAUNCH_BLOCKING"],
    ),
    "Jupyter's log": (
        "[I 2024-01-01 10:00:00.000 ServerApp] AsyncIOLoopKernelRestarter: restarting kernel "
        "(1/5), new random ports",
        "kernel died, cause unknown",
        ["papermill"],
    ),
    "a mapping of torch": (
        "RuntimeError: unable to mmap 1024 bytes from file </torch_12_34>: Cannot allocate "
        "memory (12)",
        OOM,
        ["Linux refused"],
    ),
    "Lightning": (
        "Child process with PID 7 terminated with code -9. Forcefully terminating all",
        KILLED,
        ["SIGKILL"],
    ),
    "sbatch": (
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        "never started",
        ["Requested node configuration"],
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
        OOM, ["Job 1234567", "64G", "61.44 GB"]),
    "sacct, a step alone": (
        "JobID|State|ExitCode|ReqMem\n7|FAILED|1:0|64G\n7.0|OUT_OF_MEMORY|0:125|\n", OOM, ["Job 7", "64G"]),
    "a mail": ("Slurm Job_id=12 Name=train Ended, Run time 01:00:01, TIMEOUT, ExitCode 0", "time limit", ["Job 12"]),
    "sacct, more cells": ("JobID|State|ExitCode\n7|TIMEOUT|0:0|\n7.0|FAILED|9:0|\n", "time limit", ["Job 7"]),
    "sacct, a code": ("JobID|State|ExitCode\n7|FAILED|9:0\n", KILLED, ["SIGKILL", "diagnose --job 7"]),
    "sacct, a day": ("JobID|State|ExitCode\n6|COMPLETED|0:0\n7|TIMEOUT|0:0\n8|COMPLETED|0:0\n", "time limit",
                     ["Job 7"]),
    "sacct, the rest of an array waits": (
        "JobID|State|ExitCode\n50_1|COMPLETED|0:0\n50_2|OUT_OF_MEMORY|0:125\n50_[4-8]|PENDING|0:0\n",
        OOM, ["Job 50_2"]),
    "sacct, another runs": ("JobID|State|ExitCode\n50|FAILED|9:0\n51|RUNNING|0:0\n", KILLED, ["Job 50"]),
    "sacct, requeued": ("JobID|State|ExitCode\n50|PREEMPTED|0:0\n50|RUNNING|0:0\n", "running", ["Job 50"]),
    "seff": ("Job ID: 12\nState: OUT_OF_MEMORY (exit code 0)\nMemory Utilized: 63.98 GB\n", OOM, ["63.98 GB", "--mem"]),
    "seff, time": ("Job ID: 12\nState: TIMEOUT (exit code 0)\n", "time limit", ["--time"]),
    "seff, a part": ("State: OUT_OF_MEMORY (exit code 0)\nMemory Utilized: 3 GB\n", OOM, ["3.00 GB"]),
    "sacct, a row": ("1234567  train  gpu  OUT_OF_ME+  0:125  64G", OOM, ["Job 1234567"]),
    "a state": ("OUT_OF_MEMORY\n", OOM, ["--mem"]),
    "a code": (" 137\n", KILLED, ["SIGKILL"]),
    "squeue": ("             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)\n"
               '              1234       gpu    train      bob PD       0:00      1 '
               '(DependencyNeverSatisfied)\n',
               "never starts", ["scancel 1234"]),
    "scontrol": ("JobId=77 JobName=x\n   JobState=PENDING Reason=JobHeldUser\n   RunTime=00:00:00 TimeLimit=01:00:00\n",
                 "held", ["scontrol release 77"]),
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
        "- Tried to allocate 4.15 GiB\n- 3.84 GiB is free\n- 3.56 GiB reserved but unallocated",
        "Tried to allocate 4.15 GiB, 3.84 GiB free, 3.56 GiB reserved but unallocated",
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
    "an open bar": ("loading\n\r 10%|#  | 1/10\r 45%|###  | 45/100 [00:01<00:01]", "loading"),
    "a closed bar": ("loading\n\r100%|###| 10/10 [00:01<00:00, 9.9it/s]\n", "loading"),
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
    "a bar of one state": ("loading\nEpoch 0:  45%|####5     | 45/100 [00:01<00:01, 30.12it/s, v_num=3]\n", "loading"),
    "Keras's bar": ("loading\n45/100 [=========>....................] - ETA: 12s - loss: 0.3\n", "loading"),
    "rich's bar": ("loading\nTraining ━━━━━━━━━━━━━━━╸━━━━━━━━  45% 0:00:12\n", "loading"),
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
