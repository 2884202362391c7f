"""Limits by the user's own systemd, in user-mode-linux; scripts are a user's, in a login."""

import re

import pytest
from conftest import MB
from linux_machine import HOG, Machine

pytestmark = pytest.mark.slow

APP_SLICE = "/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/app.slice"
SCOPE = "systemd-run --user --scope --quiet -p"


def test_doctor_names_systemd_as_the_limit(linux_systemd: Machine) -> None:
    done = linux_systemd.run("id -u\nsystemctl --user is-system-running\nogbnlib doctor")
    assert done.stdout.startswith("1000\nrunning\n")
    assert re.search(r"^ok +limit by +systemd-run$", done.stdout, re.MULTILINE)


def test_a_run_is_killed_by_the_kernel_for_its_scopes_limit(linux_systemd: Machine) -> None:
    # above 250 MB user-mode-linux needs another setting of the machine outside
    run = f'ogbnlib watch --memory-limit "200 MB" --run-dir r -- $python -c {HOG}'
    result = linux_systemd.result(run)
    assert (result["limit_by"], result["killed_by"]) == ("systemd-run", "kernel")
    assert (result["exit_code"], result["oom_kills"]) == (137, 1)
    assert result["outer_limit"] is None
    assert 190 * MB < result["peak_bytes"] <= 200 * MB
    assert "under a limit of 200 MB (systemd-run)" in result["diagnosis"]["text"]


@pytest.mark.parametrize("limit", ["", '--memory-limit "60 MB"'], ids=["recorded", "limited"])
def test_a_run_never_leaves_the_limit_of_its_own_scope(linux_systemd: Machine, limit: str) -> None:
    result = linux_systemd.result(
        f"export python\n{SCOPE} MemoryMax=140M $python -m ogbnlib watch {limit} --run-dir r"
        f" -- $python -c {HOG}"
    )
    assert result["exit_code"] == 137
    if limit:
        assert (result["limit_by"], result["killed_by"]) == ("watchdog", "watchdog")
    else:
        assert result["killed_by"] == "kernel"
        assert result["outer_limit"]["limit_bytes"] == 140 * MB
