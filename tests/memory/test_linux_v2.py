"""Promises of limits, measurements and diagnoses under a real cgroup v2, in a machine of user-mode-linux."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import MB, force_windows, same, weights
from linux_machine import HOG, MAX_MAP_COUNT, SETTING, Machine

pytestmark = pytest.mark.slow
WATCH = "ogbnlib watch --memory-limit"

# What limit can be had, and where a command is under it.
TRY_LIMIT = """
import json, subprocess
from ogbnlib.memory.cgroup import effective_limit, find_cgroup
from ogbnlib.memory.limits import make_limit
group = find_cgroup()
limit, refused = make_limit(2**28)
inside = subprocess.run(limit.command(["cat", "/proc/self/cgroup"]), capture_output=True, text=True)
names = ("max", "swap.max", "oom.group")
paths = [limit.cgroup.path / f"memory.{name}" for name in names] if limit.cgroup else []
files = {path.name: path.read_text().strip() for path in paths if path.exists()}
limit.close()
print(json.dumps([limit.name, inside.stdout.strip(), str(group and group.path), *effective_limit(), files, refused]))
"""


def limit_of(machine: Machine, before: str, *, user: str = "") -> list[Any]:
    """Answers of `TRY_LIMIT` after the commands `before`."""
    done = machine.run(f"{before}\ncat >try.py <<'END'\n{TRY_LIMIT}\nEND\n{user} $python try.py")
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_a_worker_past_the_limit_ends_the_whole_run_and_is_named(linux_v2: Machine) -> None:
    code = "import os\nif os.fork(): os.wait()\nheld = []\nwhile True: held.append(bytearray(b'x' * 2**20))"
    result = linux_v2.result(f'{WATCH} "100 MB" --run-dir r -- $python -c "{code}"')
    assert (result["limit_by"], result["killed_by"]) == ("cgroup v2", "kernel")
    assert result["exit_code"] == 137
    # With memory.oom.group the kernel kills both processes, and counts the first one twice.
    assert result["oom_kills"] >= 2
    assert result["outer_limit"] is None
    assert 95 * MB < result["peak_bytes"] <= 100 * MB
    assert result["diagnosis"]["cause"] == "out of memory"
    assert "under a limit of 100 MB (cgroup v2)" in result["diagnosis"]["text"]


def test_a_lower_limit_around_the_run_is_the_one_that_is_blamed(linux_v2: Machine) -> None:
    result = linux_v2.result(
        "enter slice/session\necho 110M >/sys/fs/cgroup/slice/memory.max\n"
        f'{WATCH} "1 GB" --run-dir r -- $python -c {HOG}'
    )
    assert (result["exit_code"], result["killed_by"]) == (137, "kernel")
    assert result["outer_limit"]["cgroup"] == "/sys/fs/cgroup/slice"
    assert result["outer_limit"]["limit_bytes"] == result["memory_limit_bytes"] == 110 * MB
    assert "of the cgroup /sys/fs/cgroup/slice around it" in result["diagnosis"]["text"]


def test_a_run_slowed_down_by_memory_high_is_told_so(linux_v2: Machine) -> None:
    code = (
        "held = []\n"
        "times = lambda: int(open('/sys/fs/cgroup/high/memory.events').read().split()[3])\n"
        "while times() < 5: held.append(b'x' * 2**18)"
    )
    result = linux_v2.result(
        "enter high/session\necho 90M >/sys/fs/cgroup/high/memory.high\n"
        f'ogbnlib watch --run-dir r -- $python -c "{code}"'
    )
    assert result["exit_code"] == 0
    assert result["throttled"][0]["cgroup"] == "/sys/fs/cgroup/high"
    for words in ("slowed down", "memory.high", "90 MB"):
        assert words in result["diagnosis"]["text"]


def test_page_cache_and_shared_memory_are_parts_of_their_own(linux_v2: Machine) -> None:
    # A new file is charged to its reader, and stays open: the pages of a closed one are given back.
    file = linux_v2.folder / "file"
    file.write_bytes(bytes(40 * MB))
    code = (
        f"import time\nfile = open({str(file)!r}, 'rb')\nfile.read(40 * 2**20)\n"
        "held = bytearray(b'x' * 20 * 2**20)\n"
        "open('/dev/shm/x', 'wb').write(bytes(10 * 2**20))\ntime.sleep(1)"
    )
    result = linux_v2.result(f'{WATCH} "200 MB" --run-dir r -- $python -c "{code}"')
    peaks = result["sampled_peaks_bytes"]
    assert result["exit_code"] == 0
    assert 40 * MB <= peaks["cgroup_file_bytes"] < 60 * MB
    assert 10 * MB <= peaks["cgroup_shmem_bytes"] < 12 * MB
    assert result["peak_source"] == "kernel counter"
    assert peaks["held_bytes"] + 35 * MB < result["peak_bytes"] < 200 * MB


def test_limits_are_made_wherever_this_process_may_enter_them(linux_v2: Machine) -> None:
    login = limit_of(linux_v2, ":")
    assert login[0] == "cgroup v2"
    assert login[1].startswith("0::/user.slice/ogbnlib-")
    files = login[5]
    assert (files["memory.max"], files["memory.oom.group"]) == (str(2**28), "1")
    assert files.get("memory.swap.max", "0") == "0"  # the file is there where swap is counted
    root = limit_of(linux_v2, 'enter ""')
    assert root[0] == "cgroup v2"
    assert root[1].startswith("0::/ogbnlib-")
    assert root[4] == "the host's RAM"
    # not beside its own cgroup, if that has a limit
    for file in ("max", "high"):
        group = f"job-{file}"
        job = limit_of(linux_v2, f"enter {group}\necho 300M >/sys/fs/cgroup/{group}/memory.{file}")
        assert job[:2] == ["watchdog", f"0::/{group}"]
    # beside it, but below a limit around both
    deep = limit_of(linux_v2, "enter deep/step\necho 300M >/sys/fs/cgroup/deep/memory.max")
    assert deep[0] == "cgroup v2"
    assert deep[1].startswith("0::/deep/ogbnlib-")
    # counted above, where the controller is not passed on
    above = limit_of(linux_v2, "enter above\nmkdir $path/below\necho $$ >$path/below/cgroup.procs")
    assert above[2] == "/sys/fs/cgroup/above"


SYSTEMD_RUN = """
mkdir bin
cat >bin/systemd-run <<'END'
#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
END
chmod +x bin/systemd-run
export PATH=$PWD/bin:$PATH
"""


def test_a_scope_of_systemd_leaves_no_limit_around_this_process(linux_v2: Machine) -> None:
    before = f"{SYSTEMD_RUN}enter scoped\necho 400M >/sys/fs/cgroup/scoped/memory.max"
    answers = limit_of(linux_v2, before)
    assert answers[0] == "watchdog"
    assert "systemd-run: its scope would leave the limit of /sys/fs/cgroup/scoped" in answers[6]


def test_an_unprivileged_user_gets_a_delegated_cgroup(linux_v2: Machine) -> None:
    own = "enter own/session\nchown -R 1000 /sys/fs/cgroup/own"
    name, inside, *_ = limit_of(linux_v2, own, user="as_user")
    assert name == "cgroup v2"
    assert inside.startswith("0::/own/ogbnlib-")
    name, inside, *_ = limit_of(linux_v2, "enter none/session", user="as_user")
    assert (name, inside) == ("watchdog", "0::/none/session")
    # a folder of one's own, but no right to move processes below it
    half = "enter half/session\nchown 1000 $path/.. $path/../cgroup.subtree_control"
    name, inside, *_ = limit_of(linux_v2, half, user="as_user")
    assert (name, inside) == ("watchdog", "0::/half/session")


def test_a_container_sees_its_own_limit(linux_v2: Machine) -> None:
    inside = (
        "umount /sys/fs/cgroup; mount -t cgroup2 cgroup2 /sys/fs/cgroup; "
        'ogbnlib() { $python -m ogbnlib "$@"; }; $python -c "\n'
        "from ogbnlib.memory.cgroup import effective_limit\n"
        'print(*effective_limit())"; '
        'ogbnlib watch --run-dir r -- $python -c "$hog" >log 2>&1'
    )
    done = linux_v2.run(
        "enter kube/pod\necho 120M >$path/memory.max\n"
        f"export python hog={HOG}\n"
        f"unshare --cgroup --mount sh -c '{inside}'\ncat r/result.json"
    )
    limit, _, text = done.stdout.partition("\n")
    assert limit == f"{120 * MB} memory cgroup v2 /sys/fs/cgroup"
    result = json.loads(text)
    assert (result["exit_code"], result["killed_by"]) == (137, "kernel")
    assert result["outer_limit"]["limit_bytes"] == 120 * MB


def test_the_watchdog_a_limit_in_a_limit_and_a_daemon(linux_v2: Machine) -> None:
    inner = f'ogbnlib watch --memory-limit "60 MB" --run-dir r -- $python -c {HOG}'
    result = linux_v2.result(
        'export python\ncat >inner.sh <<"END"\nogbnlib() { $python -m ogbnlib "$@"; }\n'
        f'{inner}\nEND\nogbnlib watch --memory-limit "200 MB" --run-dir outer -- sh inner.sh\n'
        "grep -q '\"killed_by\": null' outer/result.json || cat outer/result.json"
    )
    assert (result["limit_by"], result["killed_by"]) == ("watchdog", "watchdog")
    assert result["exit_code"] == 137
    done = linux_v2.run(
        "ogbnlib watch --memory-limit '200 MB' --run-dir r -- "
        "sh -c 'setsid sleep 300 >/dev/null 2>&1 & echo $!; sleep 1' >log 2>&1\n"
        "ls -d /proc/$(head -n 1 r/output.log)/exe"
    )
    assert "No such file" in done.stdout


def test_in_the_scope_of_a_slurm_job_the_jobs_limit_is_named(linux_v2: Machine) -> None:
    result = linux_v2.result(
        "enter system.slice/slurmstepd.scope/job_7/step_0/user/task_0\nexport SLURM_JOB_ID=7\n"
        "job=/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7\n"
        "echo 110M >$job/step_0/memory.max\necho 110M >$job/memory.max\n"
        f"ogbnlib watch --run-dir r -- $python -c {HOG}"
    )
    assert (result["exit_code"], result["killed_by"], result["oom_kills"]) == (137, "kernel", 1)
    assert result["outer_limit"]["limit_bytes"] == 110 * MB
    assert re.search(r"/job_7(/step_0)?$", result["outer_limit"]["cgroup"])


def test_doctor_finds_cgroup_v2_and_dmesg_of_this_kernel_is_read(linux_v2: Machine) -> None:
    done = linux_v2.run(
        "ogbnlib doctor; dmesg | grep Killed | tail -n 1 >log; ogbnlib diagnose --text - <log"
    )
    assert re.search(r"^ok +limit by +cgroup v2$", done.stdout, re.MULTILINE)
    assert "for the limit of its cgroup" in done.stdout


TRAIN = """
share {store}
OGBNLIB_WINDOWS={windows} ogbnlib train --run-dir r --memory-limit "1500 MB" {options} >log 2>&1 &
until [ -s r/checkpoint.pt ]; do sleep 0.2; done
# The kernel takes back what it can, and then kills.
echo 100M >$(ls /sys/fs/cgroup/user.slice/ogbnlib-*/memory.max)
wait $!
echo "ended $?"
cp -r r {folder}/r
cat r/result.json
"""


def test_a_killed_training_goes_on_to_equal_weights(
    linux_v2: Machine, synth_dir: Path, tmp_path: Path
) -> None:
    if int(SETTING.read_text()) < MAX_MAP_COUNT:
        pytest.skip(f"a process of 400 MB needs `sysctl vm.max_map_count={MAX_MAP_COUNT}`")
    values = {"dataset": synth_dir, "loading": "store", "spool": "5MB", "device": "cpu"}
    values |= {"epochs": 4, "batch_size": 64, "hidden_channels": 8}
    options = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    where = {"store": synth_dir, "folder": linux_v2.folder, "windows": 3 * MB}
    script = TRAIN.format(**where, options=" ".join(options))
    ended, _, text = linux_v2.run(script).stdout.partition("\n")
    assert ended == "ended 137"
    result = json.loads(text)
    assert (result["limit_by"], result["killed_by"]) == ("cgroup v2", "kernel")
    assert result["oom_kills"] == 2  # one process, which is counted twice
    run_dir = linux_v2.folder / "r"
    events = (run_dir / "events.jsonl").read_text()
    assert re.search(r"from a spool of \d+ MB on disk", events)

    # It goes on here, faster, on one core: sums of two threads differ in the last digit.
    def train(folder: Path, *more: str) -> None:
        command = ["taskset", "-c", "0"] if shutil.which("taskset") else []
        command += [sys.executable, "-m", "ogbnlib", "train", "--run-dir", str(folder), *options]
        subprocess.run([*command, *more], check=True, capture_output=True)

    force_windows(3 * MB)
    train(run_dir, "--resume")
    train(tmp_path / "alone")
    assert (run_dir / "metrics.csv").read_text().count("\n") == 5
    assert same(weights(run_dir), weights(tmp_path / "alone"))
