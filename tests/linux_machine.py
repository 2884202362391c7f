"""A Linux with cgroup v2, booted as an ordinary process: Debian's user-mode-linux, whose root folder is this one.

This machine's own kernel may have cgroup v1, or a test may not be root. In there a test is root of a kernel of its own,
one core at a fifth of the speed, without a network. Files on this machine's disk are written by the user of the test,
so scripts work in a folder in memory.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = "linux.uml"
HOG = "\"held = []\nwhile True: held.append(bytearray(b'x' * 2**20))\""
TIED = ("setpriv", "--pdeathsig", "KILL")  # a machine must not outlive these tests
MEMORY = "2500M"

BOOT = """\
#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/shm
for folder in /run /tmp /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs $folder; done
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup
mkdir -p {folder}
mount -t hostfs none {folder} -o {folder}
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
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run
. {folder}/serve.sh
"""

SERVE = """\
stty raw -echo
echo "ready"
while read -r number; do
    # by another shell, so that this one goes on in its own cgroup
    {shell} '. {folder}/begin.sh; . "$0"' {folder}/$number.sh >{folder}/$number.out 2>&1 </dev/null
    echo "ended $number $?"
done
echo o >/proc/sysrq-trigger
sleep 60
"""

OWN = """\
export LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
number=$(basename "$0" .sh)
python={executable}
ogbnlib() {{ $python -m ogbnlib "$@"; }}
"""

# Scripts begin in a cgroup as that of a login, and in a folder of their own.
BEGIN = """\
scope=/sys/fs/cgroup/user.slice/session-$number.scope
mkdir $scope
echo $$ >$scope/cgroup.procs
mkdir -m 777 /run/$number
cd /run/$number
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
as_user() {{ setpriv --reuid=1000 --regid=1000 --clear-groups "$@"; }}
"""


# Debian with systemd, 250 MB. `systemd-run --user` needs the user's own manager, and that one a D-Bus.
DEBIAN = "bookworm"
PACKAGES = "systemd,systemd-sysv,dbus,dbus-user-session,libpam-systemd,python3"
FOLDER_VARIABLE = "OGBNLIB_SYSTEMD"  # where that system lies, or is made

# The files of that system are only read: it runs from a folder in memory, into which /usr is mounted.
BOOT_SYSTEMD = """\
#!/bin/sh
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /mnt
cd /mnt
mkdir -m 755 usr proc sys dev run var home root
mkdir -m 1777 tmp
cp -a /bin /sbin /lib /lib64 /etc .
cp -a /var/lib var/lib 2>/dev/null
mount --bind /usr usr
mkdir -p var/lib/systemd/linger home/me
echo me:x:1000:1000::/home/me:/bin/sh >>etc/passwd
echo me:x:1000: >>etc/group
echo 'me:*:19000:0:99999:7:::' >>etc/shadow
chown 1000:1000 home/me
touch var/lib/systemd/linger/me
echo 0123456789abcdef0123456789abcdef >etc/machine-id
for part in {folder} {python}; do mkdir -p ./$part && mount -t hostfs none ./$part -o $part; done
cat >etc/systemd/system/tests.service <<'END'
[Unit]
After=user@1000.service dbus.service systemd-logind.service
Wants=user@1000.service
[Service]
ExecStart=/bin/sh {folder}/serve.sh
StandardInput=tty-force
StandardOutput=tty
TTYPath=/dev/tty0
END
mkdir -p etc/systemd/system/multi-user.target.wants
ln -s ../tests.service etc/systemd/system/multi-user.target.wants/
for unit in console-getty getty@tty1 systemd-timesyncd; do ln -s /dev/null etc/systemd/system/$unit.service; done
exec switch_root /mnt /lib/systemd/systemd --show-status=0
"""

# Scripts are run as that user, in the scope of a login.
BEGIN_AS_USER = """\
mkdir $number
cd $number
"""


def unavailable() -> str | None:
    """Why no such machine can be had here, or None."""
    if shutil.which(PROGRAM) is None:
        return f"no {PROGRAM} (Debian: apt-get install user-mode-linux)"
    return None


def systemd_unavailable() -> str | None:
    """Why no machine with systemd is to be had here, or None."""
    if not os.environ.get(FOLDER_VARIABLE):
        return (
            f"{FOLDER_VARIABLE}=FOLDER has mmdebstrap make a Debian of 250 MB there, and boots it"
        )
    if reason := unavailable():
        return reason
    if shutil.which("mmdebstrap") is None:
        return "no mmdebstrap (Debian: apt-get install mmdebstrap)"
    return None


def make_debian() -> Path:
    """The Debian in the folder that `FOLDER_VARIABLE` names, made where there is none; RuntimeError
    where it can't be, as without a network."""
    folder = Path(os.environ[FOLDER_VARIABLE]).resolve() / DEBIAN
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f"{DEBIAN}.{os.getpid()}")
    options = ["--variant=minbase", f"--include={PACKAGES}"]
    try:
        done = subprocess.run(
            ["mmdebstrap", *options, DEBIAN, str(beside)], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"mmdebstrap: {done.stderr[-500:]}")
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


class Machine:
    """A booted machine, which runs one script after another."""

    def __init__(self, folder: Path, debian: Path | None = None):
        """`debian` is the folder of a system with systemd, else this machine's own one is used."""
        self.folder = folder
        self.scripts = 0
        folder.chmod(0o755)  # scripts may be another user's
        # a Python of the system is that of the machine's own /usr
        parts = {sys.prefix, sys.base_prefix, str(Path(__file__).parents[1])} - {"/usr"}
        names = {"folder": folder, "python": " ".join(sorted(parts)), "executable": sys.executable}
        shell = "sh -c" if debian is None else "su -l me -c"
        begin = OWN + (BEGIN if debian is None else BEGIN_AS_USER)
        boot = BOOT if debian is None else BOOT_SYSTEMD
        for name, text in (("begin", begin), ("boot", boot), ("serve", SERVE)):
            script = folder / f"{name}.sh"
            script.write_text(text.format(shell=shell, **names))
            script.chmod(0o755)
        root = "/"
        init = str(folder / "boot.sh")
        if debian:
            root = str(debian)
            init = f"/{folder.name}.sh"
            shutil.copy(folder / "boot.sh", f"{debian}{init}")
        options = [f"mem={MEMORY}", "rootfstype=hostfs", f"rootflags={root}", "rw", f"init={init}"]
        console = ["con=null", "con0=fd:0,fd:1", "quiet", "loglevel=1"]
        with open(folder / "console", "wb") as output:
            self.process = subprocess.Popen(
                [*TIED, PROGRAM, *options, *console, f"uml_dir={folder}/uml"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_for("ready", 120.0)
        finally:
            if debian:
                Path(f"{debian}{init}").unlink()

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

    def result(self, script: str) -> dict[str, Any]:
        """result.json of the run that a script makes in its folder `r`."""
        output = self.run(f"{{\n{script}\n}} >log 2>&1\ncat r/result.json || cat log").stdout
        content: dict[str, Any] = json.loads(output)
        return content

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
def machine(debian: Path | None = None) -> Iterator[Machine]:
    """A machine for the length of a `with`. `unavailable()` says whether one can be had, with a
    Debian of `make_debian` `systemd_unavailable()`."""
    # Processes in it must stay below 250 MB: pages that do not lie side by side are a mapping each
    # outside, of which vm.max_map_count allows 65,530.
    with tempfile.TemporaryDirectory(prefix="uml-") as folder:
        booted = Machine(Path(folder), debian)
        try:
            yield booted
        finally:
            booted.stop()
