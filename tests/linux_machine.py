"""A Linux with cgroup v2, booted as an ordinary process: Debian's user-mode-linux, whose root folder is this one.

This machine's own kernel may have cgroup v1, or a test may not be root. In there a test is root of a kernel of its own,
one core at a fifth of the speed, without a network. Files on this machine's disk are written by the user of the test,
so scripts work in a folder in memory.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAM = "linux.uml"
TIED = ("setpriv", "--pdeathsig", "KILL")  # a machine must not outlive these tests
MEMORY = "2500M"
# Pages in this kernel that do not lie side by side are a mapping each outside. Above the default of 65,530, 250 MB, it
# kills the process that asks for more.
MAX_MAP_COUNT = 2**20
SETTING = Path("/proc/sys/vm/max_map_count")

INIT = """\
#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/shm
for folder in /run /tmp /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs $folder; done
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup
mkdir -p {folder}
mount -t hostfs none {folder} -o {folder}
stty raw -echo
cd /
exec 2>&1
# Python may lie in the home of root, into which no other user may look.
if [ -d /root/ ]; then mount -t tmpfs -o mode=755 tmpfs /root; fi
for part in {python}; do
    case $part in /root/*|/tmp/*) mkdir -p $part && mount -t hostfs none $part -o $part ;; esac
done
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/init.scope
echo $$ >/sys/fs/cgroup/init.scope/cgroup.procs
mkdir /sys/fs/cgroup/user.slice
echo +memory >/sys/fs/cgroup/user.slice/cgroup.subtree_control
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run LC_ALL=C.UTF-8
export PYTHONDONTWRITEBYTECODE=1
echo "ready"
while read -r number; do
    # by another shell, so that this one goes on in its own cgroup
    sh -c '. {folder}/begin.sh; . "$0"' {folder}/$number.sh >{folder}/$number.out 2>&1 </dev/null
    echo "ended $number $?"
done
echo o >/proc/sysrq-trigger
sleep 60
"""

# Scripts begin in a cgroup as that of a login, and in a folder of their own.
BEGIN = """\
number=$(basename "$0" .sh)
scope=/sys/fs/cgroup/user.slice/session-$number.scope
mkdir $scope
echo $$ >$scope/cgroup.procs
mkdir -m 777 /run/$number
cd /run/$number
python={python}
ogbnlib() {{ $python -m ogbnlib "$@"; }}
# The rest of the script works in the cgroup "$1", made with the memory controller where it is missing.
enter() {{
    path=/sys/fs/cgroup
    for part in $(echo "$1" | tr / ' '); do
        echo +memory >$path/cgroup.subtree_control
        path=$path/$part
        mkdir -p $path
    done
    echo $$ >$path/cgroup.procs
}}
# The same folder of the machine outside, where one in memory hides it.
share() {{ mkdir -p "$1" && mount -t hostfs none "$1" -o "$1"; }}
as_user() {{ setpriv --reuid=1000 --regid=1000 --clear-groups "$@"; }}
"""


def unavailable() -> str | None:
    """Why no such machine can be had here, or None."""
    if shutil.which(PROGRAM) is None:
        return f"no {PROGRAM} (Debian: apt-get install user-mode-linux)"
    return None


class Machine:
    """A booted machine, which runs one script after another."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.scripts = 0
        python = " ".join({sys.prefix, sys.base_prefix, str(Path(__file__).parents[1])})
        (folder / "begin.sh").write_text(BEGIN.format(python=sys.executable))
        init = folder / "init.sh"
        init.write_text(INIT.format(folder=folder, python=python))
        init.chmod(0o755)
        options = [f"mem={MEMORY}", "rootfstype=hostfs", "rootflags=/", "rw", f"init={init}"]
        console = ["con=null", "con0=fd:0,fd:1", "quiet", "loglevel=1"]
        with open(folder / "console", "wb") as output:
            self.process = subprocess.Popen(
                [*TIED, PROGRAM, *options, *console, f"uml_dir={folder}/uml"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_for("ready", 120.0)

    def _console(self) -> str:
        return (self.folder / "console").read_text(errors="replace")

    def _wait_for(self, line: str, timeout_s: float) -> str:
        """The rest of a line that begins like this one."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            for text in self._console().splitlines():
                if text.startswith(line):
                    return text.removeprefix(line)
            time.sleep(0.05)
        raise AssertionError(f"the machine did not say {line!r}: {self._console()[-4000:]}")

    def run(self, script: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Run a script of sh as root; its output has standard error, too. `BEGIN` has its
        functions."""
        self.scripts += 1
        name = self.folder / str(self.scripts)
        name.with_suffix(".sh").write_text(script)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{self.scripts}\n".encode())
        self.process.stdin.flush()
        code = int(self._wait_for(f"ended {self.scripts} ", timeout_s))
        output = name.with_suffix(".out").read_text(errors="replace")
        return subprocess.CompletedProcess(script, code, output)

    def stop(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def machine() -> Iterator[Machine]:
    """A machine for the length of a `with`. `unavailable()` says whether one can be had."""
    before = SETTING.read_text()
    with tempfile.TemporaryDirectory(prefix="uml-") as folder:
        if int(before) < MAX_MAP_COUNT and os.access(SETTING, os.W_OK):
            SETTING.write_text(str(MAX_MAP_COUNT))
        booted = None
        try:
            booted = Machine(Path(folder))
            yield booted
        finally:
            if booted:
                booted.stop()
            with contextlib.suppress(OSError):
                SETTING.write_text(before)
