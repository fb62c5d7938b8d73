"""The units: well-formed anywhere, and under a real systemd where that can be booted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.box import Box
from tests.support.cluster import TOY, toml

UNITS = sorted((Path(__file__).parents[2] / "bin" / "systemd").glob("*.service"))
LIMIT_S = 120.0


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_has_nothing_to_say_about_the_units() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", *UNITS], capture_output=True, text=True, check=False
    )

    assert [unit.name for unit in UNITS] == ["ones-agent.service", "ones-controller.service"]
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


CONTROLLER = """
state = "/var/lib/ones"
"""
AGENT = """
node = "node-1"
devices = "cpu"
slots = 2
run = "/run/ones-agent"
work = "/var/lib/ones-agent/work"
checkpoints = "/var/lib/ones-agent/checkpoints"
"""
HERE = """
[Service]
WatchdogSec=10
Environment=LD_LIBRARY_PATH=/opt/ones/python/lib
"""
AUTHORISED = """
[[key]]
public = "{admin}"
name = "alice"
role = "admin"

[[key]]
public = "{node}"
name = "node-1"
role = "node"
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A host on which the README's steps were taken."""
    if os.geteuid() != 0 or not shutil.which("systemd-nspawn"):
        pytest.skip("needs root and systemd-nspawn")
    with Box(tmp_path_factory.mktemp("box"), f"ones-{os.getpid()}") as booted:
        booted.run("useradd", "--system", "--home-dir", "/var/lib/ones", "ones")
        install = ("install", "-d", "-o", "ones", "-g", "ones", "-m", "0700")
        booted.run(*install, "/etc/ones", "/etc/ones/keys")
        make = "import sys, zmq.auth; zmq.auth.create_certificates('/etc/ones/keys', sys.argv[1])"
        keys = {}
        for name in ("server", "admin", "node-1"):
            booted.run("/opt/ones/.venv/bin/python", "-c", make, name)
            text = (booted.root / f"etc/ones/keys/{name}.key").read_text()
            keys[name] = text.partition('public-key = "')[2].partition('"')[0]
        authorised = AUTHORISED.format(admin=keys["admin"], node=keys["node-1"])
        booted.write("/etc/ones/keys/authorised.toml", authorised)
        booted.write("/etc/ones/controller.toml", CONTROLLER)
        booted.write("/etc/ones/agent.toml", AGENT)
        booted.write("/etc/ones/client.toml", 'endpoint = "tcp://127.0.0.1:7702"\n')
        booted.run("chown", "-R", "ones:ones", "/etc/ones")
        booted.run("sh", "-c", "chmod 600 /etc/ones/keys/*")
        for unit in UNITS:
            booted.write(f"/etc/systemd/system/{unit.name}", unit.read_text())
            booted.write(f"/etc/systemd/system/{unit.name}.d/here.conf", HERE)
        booted.run("systemctl", "daemon-reload")
        booted.run("systemctl", "enable", "--now", "ones-controller", "ones-agent")
        yield booted


def ones(box: Box, *arguments: str, check: bool = True) -> str:
    home = ("env", "ONES_HOME=/etc/ones", "/opt/ones/.venv/bin/ones")
    return box.run(*home, *arguments, check=check).stdout


def submitted(box: Box, pause_s: float) -> str:
    box.write("/root/job/train.py", TOY)
    env = {"PAUSE_S": str(pause_s), "OMP_NUM_THREADS": "1"}
    table = {"name": "toy", "script": "train.py", "batch_size": 20, "env": env}
    box.write("/root/job/job.toml", toml(table))
    return ones(box, "submit", "/root/job/job.toml").strip()


def until(box: Box, job: str, text: str) -> str:
    """What `ones show` says of a job once it has `text`; a controller may be away meanwhile."""
    deadline = time.monotonic() + LIMIT_S
    while text not in (shown := ones(box, "show", job, check=False)):
        assert time.monotonic() < deadline, shown + box.journal("ones-agent")
    return shown


def main_pid(box: Box, unit: str) -> str:
    return box.run("systemctl", "show", "-P", "MainPID", unit).stdout.strip()


@pytest.mark.root
def test_the_services_run_and_train_as_the_readme_says(box: Box) -> None:
    job = submitted(box, 0)

    assert ones(box, "wait", job, "--timeout", str(LIMIT_S)).startswith(f"{job} succeeded")
    assert box.run("systemctl", "is-active", "ones-controller", "ones-agent").stdout == (
        "active\nactive\n"
    )
    assert '"event": "controller ready"' in box.journal("ones-controller")


@pytest.mark.root
def test_the_search_runs_within_the_bounds_of_its_unit(box: Box) -> None:
    submitted(box, 0.0)

    deadline = time.monotonic() + LIMIT_S
    while True:
        search = json.loads(ones(box, "top", "-o", "json"))["search"]
        if search["running"] and search["decision_ms"]:
            break
        assert time.monotonic() < deadline, search
    assert (search["policy"], search["restarts"]) == ("ones", 0)
    fetched = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())"
    page = box.run("/opt/ones/.venv/bin/python", "-c", fetched, "http://127.0.0.1:9464/metrics")
    assert "ones_search_up 1.0" in page.stdout


@pytest.mark.root
def test_workers_survive_a_stop_of_the_agent(box: Box) -> None:
    job = submitted(box, 0.05)
    until(box, job, "running")

    box.run("systemctl", "stop", "ones-agent")
    state = box.run("systemctl", "is-active", "ones-agent", check=False).stdout
    workers = box.run("pgrep", "-f", "elastic.worker.zygote").stdout.split()
    box.run("systemctl", "start", "ones-agent")

    assert state == "inactive\n"
    assert len(workers) == 2  # the zygote, and the worker that it forked
    assert ones(box, "wait", job, "--timeout", str(LIMIT_S)).startswith(f"{job} succeeded")
    assert "paused" not in ones(box, "show", job)


@pytest.mark.root
def test_a_controller_that_is_killed_or_hangs_is_started_again(box: Box) -> None:
    job = submitted(box, 0.1)
    until(box, job, "running")
    first = main_pid(box, "ones-controller")

    box.run("kill", "-9", first)
    deadline = time.monotonic() + LIMIT_S
    while (second := main_pid(box, "ones-controller")) in {first, "0"}:
        assert time.monotonic() < deadline
    until(box, job, "running")
    box.run("kill", "-STOP", second)
    while main_pid(box, "ones-controller") in {second, "0"}:
        assert time.monotonic() < deadline, box.journal("ones-controller")

    assert ones(box, "wait", job, "--timeout", str(LIMIT_S)).startswith(f"{job} succeeded")
    assert "paused" not in ones(box, "show", job)
