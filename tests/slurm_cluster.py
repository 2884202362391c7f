"""A real Slurm cluster of one machine in a temporary folder: own munge key and socket, own ports, own state.

Nothing of a Slurm that this machine may already run is read or touched. Jobs really are held to their --mem by a memory
cgroup, which is why root is needed. There is no accounting (no slurmdbd): `sacct` says so, as on many small clusters.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
ENDED = ["COMPLETED", "FAILED", "OUT_OF_MEMORY", "TIMEOUT"]
ENDED += ["CANCELLED", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"]

SLURM_CONF = """\
ClusterName=test{port}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SchedulerType=sched/backfill
# A requeued job waits for 2 minutes on a cluster in use, so that its node can settle; the test's node is settled.
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# The tests' jobs mostly wait for imports: more CPUs than there are let them share the machine.
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
MinJobAge=600
SwitchType=switch/none
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE DefMemPerNode=1000 State=UP
"""

CGROUP_CONF = """\
CgroupPlugin={plugin}
CgroupAutomount=no
ConstrainRAMSpace=yes
ConstrainSwapSpace=yes
AllowedSwapSpace=0
"""


def unavailable() -> str | None:
    """Why no cluster can be had here, or None."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"Slurm is not installed: no {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "a Slurm cluster that holds jobs to their memory needs root"
    from ogbnlib.memory.cgroup import find_cgroup

    if find_cgroup() is None:
        return "no memory cgroup is mounted, so Slurm can't hold a job to its memory"
    return None


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """A running cluster. `env` is the environment in which sbatch, squeue and scontrol talk to it."""

    def __init__(self, folder: Path, num_nodes: int = 2):
        self.folder = folder
        self.processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        host = socket.gethostname().split(".")[0]
        port, *slurmd_ports = free_ports(1 + num_nodes)
        names = [f"n{i}" for i in range(num_nodes)]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={slurmd_port} CPUs=4 RealMemory=6000"
            for name, slurmd_port in zip(names, slurmd_ports, strict=True)
        )
        self.nodes = names
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(
            SLURM_CONF.format(folder=folder, host=host, port=port, nodes=nodes)
        )
        from ogbnlib.memory.cgroup import find_cgroup

        memory_cgroup = find_cgroup()
        assert memory_cgroup is not None
        plugin = "cgroup/v1" if memory_cgroup.version == 1 else "autodetect"
        (folder / "cgroup.conf").write_text(CGROUP_CONF.format(plugin=plugin))
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        own = "SLURM", "SBATCH", "OGBNLIB"
        keep = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        self.env = {**keep, "SLURM_CONF": str(folder / "slurm.conf")}

    def _start(self, name: str, *argv: str) -> None:
        log = open(self.folder / f"{name}.out", "ab")  # noqa: SIM115  # the daemon's, for its lifetime
        with log:
            process = subprocess.Popen(
                argv, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip
        self.processes.append((name, process))

    def start(self) -> None:
        """Start the daemons and wait until every node takes jobs."""
        folder = self.folder
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={folder / 'munge'}.{name}" for option, name in names.items()]
        options.append(f"--log-file={folder / 'munged.log'}")
        # --force: the folder lies below /tmp, which everyone may write to; this one only its owner may.
        self._start("munged", "munged", "--foreground", "--force", *options)
        self._wait((folder / "munge.socket").exists, "munged")
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in self.nodes:
            self._start(f"slurmd-{node}", "slurmd", "-D", "-N", node)

        def ready() -> bool:
            done = self.call("sinfo", "--noheader", "-N", "-o", "%t", check=False)
            return done.stdout.split() == ["idle"] * len(self.nodes)

        self._wait(ready, "every node to be idle")

    def _wait(self, condition: object, what: str, timeout_s: float = 30.0) -> None:
        assert callable(condition)
        deadline = time.monotonic() + timeout_s
        while not condition():
            gone = [name for name, process in self.processes if process.poll() is not None]
            if gone or time.monotonic() > deadline:
                raise RuntimeError(
                    f"Slurm did not start: waited for {what}; ended: {gone}\n{self.logs()}"
                )
            time.sleep(0.05)

    def logs(self) -> str:
        """The ends of the daemons' logs, for a failed test."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(
            f"== {file.name}\n{file.read_text(errors='replace')[-800:]}" for file in files
        )

    def call(
        self, *argv: str, cwd: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        how: Any = {"capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run(argv, env=self.env, cwd=cwd, **how)
        text = f"{argv}: {done.stdout}{done.stderr}"
        assert not check or done.returncode == 0, f"{text}\n{self.logs()}"
        return done

    def sbatch(self, *argv: str, cwd: Path) -> str:
        """Submit; returns the job's id."""
        return self.call("sbatch", "--parsable", *argv, cwd=cwd).stdout.strip().partition(";")[0]

    def jobs(self, job_id: str) -> list[dict[str, str]]:
        """What scontrol shows of a job, one dictionary for each task of an array."""
        text = self.call("scontrol", "--oneliner", "show", "job", job_id).stdout
        lines = [line for line in text.splitlines() if line.startswith("JobId=")]
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]

    def wait(self, job_id: str, timeout_s: float = 240.0) -> list[dict[str, str]]:
        """Wait until a job and every task of it has ended; returns what scontrol shows of them."""
        deadline = time.monotonic() + timeout_s
        while True:
            jobs = self.jobs(job_id)
            if all(job["JobState"] in ENDED for job in jobs):
                return jobs
            if time.monotonic() > deadline:
                outputs = [Path(job["StdOut"]) for job in jobs]
                texts = "\n".join(path.read_text()[-4000:] for path in outputs if path.exists())
                raise AssertionError(
                    f"job {job_id} did not end within {timeout_s:.0f} s: {jobs}\n{texts}"
                )
            time.sleep(0.1)

    def stop(self) -> None:
        """Cancel what runs, end the daemons in order, and free the cgroups they made."""
        if any(process.poll() is None for name, process in self.processes if name == "slurmctld"):
            self.call("scancel", "--full", "--signal=KILL", "--user=root", check=False)
            self.call("scancel", "--user=root", check=False)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                if not self.call("squeue", "--noheader", check=False).stdout.strip():
                    break
                time.sleep(0.1)
        for _, process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # cgroup v1: slurmd leaves its folders; no process is in them any more
        for node in self.nodes:
            for top in Path("/sys/fs/cgroup").glob(f"*/slurm_{node}"):
                for folder in sorted([*top.rglob("*/"), top], key=lambda path: -len(path.parts)):
                    with contextlib.suppress(OSError):
                        folder.rmdir()


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster for the length of a `with`. `unavailable()` says whether one can be had."""
    # a socket's path has 107 characters
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        started = Cluster(Path(folder))
        try:
            started.start()
            yield started
        finally:
            started.stop()
