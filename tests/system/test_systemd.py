"""The units: well-formed anywhere, and under a real systemd where that can be booted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.cgroups import MEMORY, find
from tests.support.cluster import TOY, toml
from tests.system.box import Box

UNITS = sorted((Path(__file__).parents[2] / "controlplane" / "cli" / "samples").glob("ones-*.*"))
LIMIT_S = 120.0


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_verifies_the_units_without_warnings() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", *UNITS], capture_output=True, text=True, check=False
    )

    assert [unit.name for unit in UNITS] == [
        "ones-agent.service", "ones-backup.service", "ones-backup.timer", "ones-controller.service",
        "ones-jobs.service", "ones-web.service",
    ]  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
@pytest.mark.parametrize(("unit", "drop_in", "most"), [
    ("ones-controller.service", "", 25),
    ("ones-agent.service", "", 35),
    ("ones-agent.service", "one-user.conf", 35),
    ("ones-agent.service", "agent-credentials.conf", 35),
    ("ones-controller.service", "controller-credentials.conf", 25),
    ("ones-backup.service", "", 25),
    ("ones-web.service", "", 25),
    ("ones-backup.service", "controller-credentials.conf", 25),
])  # fmt: skip
def test_the_exposure_of_each_unit_is_low(
    tmp_path: Path, unit: str, drop_in: str, most: int
) -> None:
    text = (UNITS[0].parent / unit).read_text()
    text += (UNITS[0].parent / drop_in).read_text() if drop_in else ""
    (tmp_path / unit).write_text(text)

    words = ("systemd-analyze", "security", "--offline=yes", f"--threshold={most}")
    done = subprocess.run([*words, tmp_path / unit], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout.splitlines()[-1]


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
[jobs]
run_as = "job"
"""
HERE = """
[Service]
WatchdogSec=5
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
            if unit.name in {"ones-agent.service", "ones-controller.service"}:
                booted.write(f"/etc/systemd/system/{unit.name}.d/here.conf", HERE)
        booted.run("systemctl", "daemon-reload")
        booted.run("systemctl", "enable", "--now", "ones-controller", "ones-agent")
        yield booted


def ones(box: Box, *arguments: str, check: bool = True) -> str:
    home = ("env", "ONES_HOME=/etc/ones", "/opt/ones/.venv/bin/ones")
    return box.run(*home, *arguments, check=check).stdout


def submitted(box: Box, pause_s: float, **fields: Any) -> str:
    write_job(box, pause_s, **fields)
    return ones(box, "submit", "/root/job/job.toml").strip()


def write_job(box: Box, pause_s: float, *, folder: str = "/root/job", **fields: Any) -> None:
    box.write(f"{folder}/train.py", TOY)
    env = {"PAUSE_S": str(pause_s), "OMP_NUM_THREADS": "1"}
    table = {"name": "toy", "script": "train.py", "batch_size": 20, "env": env, **fields}
    box.write(f"{folder}/job.toml", toml(table))


def until(box: Box, job: str, text: str) -> str:
    """What `ones show` says of a job once it has `text`; a controller may be away meanwhile."""
    deadline = time.monotonic() + LIMIT_S
    while text not in (shown := ones(box, "show", job, check=False)):
        assert time.monotonic() < deadline, shown + box.journal("ones-agent")
    return shown


def shown(box: Box, unit: str, name: str) -> str:
    """A property of a unit."""
    return box.run("systemctl", "show", "-P", name, unit).stdout.strip()


def until_said(box: Box, unit: str, text: str) -> str:
    """The journal of a unit once it has `text`."""
    deadline = time.monotonic() + LIMIT_S
    while text not in (said := box.journal(unit)):
        assert time.monotonic() < deadline, said[-3000:]
    return said


def main_pid(box: Box, unit: str) -> str:
    return box.run("systemctl", "show", "-P", "MainPID", unit).stdout.strip()


@pytest.mark.root
def test_the_services_train_a_job_after_the_steps_of_the_readme(box: Box) -> None:
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
    workers = box.run("pgrep", "-f", f"^ones: zygote|/{job} rank 0").stdout.split()
    box.run("systemctl", "start", "ones-agent")

    assert state == "inactive\n"
    assert len(workers) == 2  # the zygote, and the worker that it forked
    assert ones(box, "wait", job, "--timeout", str(LIMIT_S)).startswith(f"{job} succeeded")
    assert "paused" not in ones(box, "show", job)


@pytest.mark.root
def test_a_killed_or_hanging_controller_is_restarted(box: Box) -> None:
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


@pytest.mark.root
def test_a_reload_applies_settings_without_a_restart(box: Box) -> None:
    pids = [main_pid(box, unit) for unit in ("ones-controller", "ones-agent")]
    box.write("/etc/ones/controller.toml", CONTROLLER + "[silence]\nlost_s = 31.0\n")
    box.write("/etc/ones/agent.toml", "kill_grace_s = 9.0\n" + AGENT)

    box.run("systemctl", "reload", "ones-controller", "ones-agent")

    said = until_said(box, "ones-controller", '"settings reloaded"')
    assert '"changed": ["silence.lost_s"], "refused": []' in said
    assert '"changed": ["kill_grace_s"]' in until_said(box, "ones-agent", '"settings reloaded"')
    assert [main_pid(box, unit) for unit in ("ones-controller", "ones-agent")] == pids


@pytest.mark.root
def test_an_upgrade_disturbs_no_step_of_a_running_job(box: Box) -> None:
    job = submitted(box, 0.4, record_samples=True)
    until(box, job, "running")
    workers = json.loads(ones(box, "show", job, "-o", "json"))["workers"]
    version = "/opt/ones/schemas/__init__.py"
    old = (box.root / version[1:]).read_text()
    box.write(version, old.replace('__version__ = "', '__version__ = "9.'))

    done = box.run("/opt/ones/bin/upgrade").stdout

    assert done.splitlines()[-2:] == ["ones-controller restarted", "ones-agent restarted"]
    deadline = time.monotonic() + LIMIT_S
    while True:
        node = json.loads(ones(box, "node", "list", "-o", "json", check=False) or "[{}]")[0]
        if (node.get("state"), str(node.get("release"))[:2]) == ("up", "9."):
            break
        assert time.monotonic() < deadline, node
    assert json.loads(ones(box, "show", job, "-o", "json"))["workers"] == workers
    assert ones(box, "wait", job, "--timeout", str(LIMIT_S)).startswith(f"{job} succeeded")
    lines = ones(box, "logs", job, "--no-prefix").splitlines()
    steps = [line for line in lines if not line.startswith("[ones]")]
    assert steps == [f"epoch {step // 20} step {step + 1}" for step in range(80)] + ["done"]
    taken: dict[int, list[int]] = {}
    for line in ones(box, "samples", job, "-o", "jsonl").splitlines():
        record = json.loads(line)
        taken.setdefault(record["epoch"], []).extend(record["ids"])
    whole = list(range(400))
    assert {epoch: sorted(ids) for epoch, ids in taken.items()} == {
        1: whole, 2: whole, 3: whole, 4: whole,
    }  # fmt: skip


@pytest.mark.root
def test_the_backup_unit_writes_a_file_that_restores_into_an_empty_folder(box: Box) -> None:
    box.run("systemctl", "start", "ones-backup")

    (file,) = box.run("sh", "-c", "ls /var/lib/ones-backups/ones-*.tar").stdout.split()
    told = ones(box, "admin", "restore", file, "--of", "/root/restored", check=False)
    assert told == ""  # the settings name /var/lib/ones, which is in use
    names = box.run("tar", "tf", file).stdout.split()
    assert {"settings/controller.toml", "settings/keys/server.key_secret", "journal.sqlite"} < set(
        names
    )


@pytest.mark.root
def test_an_upgrade_with_invalid_settings_restarts_no_unit(box: Box) -> None:
    pids = [main_pid(box, unit) for unit in ("ones-controller", "ones-agent")]
    box.write("/etc/ones/agent.toml", "slot = 3\n" + AGENT)

    done = box.run("/opt/ones/bin/upgrade", check=False)
    box.write("/etc/ones/agent.toml", AGENT)

    assert done.returncode == 2
    assert "/etc/ones/agent.toml: unknown key slot; did you mean slots?" in done.stdout
    assert [main_pid(box, unit) for unit in ("ones-controller", "ones-agent")] == pids


MOST = 1 << 30
LIMITS = f"memory_bytes = {MOST}\npids = 500\n"
GROUPS = "/sys/fs/cgroup/memory/system.slice/ones-jobs.service"
needs_memory = pytest.mark.skipif(
    MEMORY not in {name for tree in find() if not tree.unified for name in tree.controllers},
    reason="needs control groups of version 1 that bound memory",
)


@pytest.mark.root
@needs_memory
def test_memory_of_a_job_is_bounded_below_a_unit_that_outlives_the_agent(box: Box) -> None:
    box.write("/etc/ones/agent.toml", AGENT + LIMITS)
    box.run("systemctl", "restart", "ones-agent")
    trains = submitted(box, 0.3, stop={"epochs": 500})
    until(box, trains, "running")
    box.write("/root/greedy/train.py", "taken = bytearray(3 << 30)")
    box.write(
        "/root/greedy/job.toml",
        toml({"name": "greedy", "script": "train.py", "batch_size": 1, "retries": 0}),
    )
    greedy = ones(box, "submit", "/root/greedy/job.toml").strip()

    assert "rank 0 was killed: the job's processes on the node exceeded 1 GiB" in until(
        box, greedy, "failed"
    )
    box.run("systemctl", "restart", "ones-agent")
    look = f"cat {GROUPS}/ones-run-*/job-{trains}/memory.limit_in_bytes"
    assert box.run("sh", "-c", look).stdout == f"{MOST}\n"
    until(box, trains, "running")
    ones(box, "cancel", trains)
    pid = main_pid(box, "ones-agent")
    for group in ("memory", "memory/system.slice", "pids"):
        folder = f"/sys/fs/cgroup/{group}/another"
        made = box.run("nsenter", "-t", pid, "-m", "mkdir", folder, check=False)
        assert "Read-only file system" in made.stderr
    box.write("/etc/ones/agent.toml", AGENT)
    box.run("systemctl", "restart", "ones-agent")


@pytest.mark.root
@pytest.mark.parametrize(("unit", "most"), [("ones-controller", "25"), ("ones-agent", "35")])
def test_the_exposure_of_each_running_unit_is_low(box: Box, unit: str, most: str) -> None:
    done = box.run("systemd-analyze", "security", f"--threshold={most}", unit, check=False)

    assert done.returncode == 0, done.stdout.splitlines()[-1]


@pytest.mark.root
def test_only_root_can_read_or_change_keys_in_credentials(box: Box) -> None:
    secrets = {"controller": "server", "agent": "node-1"}
    for part, key in secrets.items():
        box.run("chown", "root:root", f"/etc/ones/keys/{key}.key_secret")
        text = (UNITS[0].parent / f"{part}-credentials.conf").read_text()
        box.write(f"/etc/systemd/system/ones-{part}.service.d/credentials.conf", text)
    box.run("systemctl", "daemon-reload")

    box.run("systemctl", "restart", "ones-controller", "ones-agent")

    job = submitted(box, 0)
    assert ones(box, "wait", job, "--timeout", str(LIMIT_S)).startswith(f"{job} succeeded")
    for part, key in secrets.items():
        inside = ("nsenter", "-t", main_pid(box, f"ones-{part}"), "-m")
        for path in (f"/etc/ones/keys/{key}.key_secret", f"/run/credentials/ones-{part}.service/x"):
            assert "Read-only file system" in box.run(*inside, "touch", path, check=False).stderr
        box.run("rm", f"/etc/systemd/system/ones-{part}.service.d/credentials.conf")
        box.run("chown", "ones:ones", f"/etc/ones/keys/{key}.key_secret")
    box.run("systemctl", "daemon-reload")
    box.run("systemctl", "restart", "ones-controller", "ones-agent")


FULL = """
[Service]
StandardError=append:/var/lib/ones/stderr.log
"""


@pytest.mark.root
def test_a_full_disk_of_stderr_causes_no_restart(box: Box) -> None:
    unit = "ones-controller"
    box.run("systemctl", "stop", unit)
    options = "size=48m,mode=0700,uid=ones,gid=ones"
    box.run("cp", "-a", "/var/lib/ones", "/root/kept")
    box.run("mount", "-t", "tmpfs", "-o", options, "tmpfs", "/var/lib/ones")
    box.run("cp", "-a", "/root/kept/.", "/var/lib/ones")
    box.write(f"/etc/systemd/system/{unit}.service.d/full.conf", FULL)
    box.run("systemctl", "daemon-reload")
    box.run("systemctl", "start", unit)
    pid, restarts = main_pid(box, unit), shown(box, unit, "NRestarts")

    box.run("sh", "-c", "cat /dev/zero > /var/lib/ones/filler", check=False)
    write_job(box, 0)
    home = ("env", "ONES_HOME=/etc/ones", "/opt/ones/.venv/bin/ones")
    refused = box.run(*home, "submit", "/root/job/job.toml", check=False)
    fed = int(shown(box, unit, "WatchdogTimestampMonotonic"))
    deadline = time.monotonic() + LIMIT_S
    while int(shown(box, unit, "WatchdogTimestampMonotonic")) < fed + 2 * 5_000_000:
        assert time.monotonic() < deadline, "systemd's watchdog is not fed"

    assert refused.returncode != 0
    assert "No space left" in refused.stderr or "disk is full" in refused.stderr, refused.stderr
    assert (main_pid(box, unit), shown(box, unit, "NRestarts")) == (pid, restarts)
    box.run("rm", "/var/lib/ones/filler")
    while (accepted := box.run(*home, "submit", "/root/job/job.toml", check=False)).returncode:
        assert time.monotonic() < deadline, accepted.stderr  # it is tried again every half second
    job = accepted.stdout.strip()
    assert ones(box, "wait", job, "--timeout", str(LIMIT_S)).startswith(f"{job} succeeded")
    assert (main_pid(box, unit), shown(box, unit, "NRestarts")) == (pid, restarts)


SPEAK = """
import sys
from schemas.codec import encode
from schemas.transport.sockets import ThreadDealer
from schemas.wire.worker import Reported, WorkerHello
dealer = ThreadDealer("ipc:///run/ones-agent/sockets/agent.sock")
dealer.poll(5.0)
who = {"job": sys.argv[1], "version": 1, "rank": 0}
for message in (WorkerHello(pid=1, **who), Reported(count=1, **who)):
    assert dealer.send(encode(message))
dealer.poll(0.2)
"""


def with_account(box: Box, user: str) -> str:
    """An account, with a client's folder and a job; gives its public key."""
    home = f"/home/{user}"
    box.run("useradd", "-m", user)
    make = "import sys, zmq.auth; zmq.auth.create_certificates(sys.argv[1], 'me')"
    for folder in ("ones", "job"):
        box.run("mkdir", f"{home}/{folder}")
    box.run("/opt/ones/.venv/bin/python", "-c", make, f"{home}/ones")
    box.run("cp", "/etc/ones/keys/server.key", f"{home}/ones/server.key")
    client = 'endpoint = "tcp://127.0.0.1:7702"\nserver_key = "server.key"\nkey = "me.key_secret"\n'
    box.write(f"{home}/ones/client.toml", client)
    held = {"HOLD": "/srv/go", "OMP_NUM_THREADS": "1"}
    write_job(box, 0, folder=f"{home}/job", name=user, env=held)
    box.run("chmod", "600", f"{home}/ones/me.key_secret")
    box.run("chmod", "700", home)
    box.run("chown", "-R", f"{user}:{user}", home)
    text = (box.root / f"home/{user}/ones/me.key").read_text()
    return text.partition('public-key = "')[2].partition('"')[0]


def by(box: Box, user: str, *command: str) -> subprocess.CompletedProcess[str]:
    """What a user does."""
    return box.run("runuser", "-u", user, "--", *command, check=False)


def ones_by(box: Box, user: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    home = ("env", f"ONES_HOME=/home/{user}/ones", "/opt/ones/.venv/bin/ones")
    return by(box, user, *home, *arguments)


@pytest.mark.root
def test_two_users_of_a_host_are_isolated(box: Box) -> None:
    keys = {user: with_account(box, user) for user in ("ann", "bob")}
    known = (box.root / "etc/ones/keys/authorised.toml").read_text()
    rows = (f'[[key]]\npublic = "{keys[name]}"\nname = "{name}"\nrole = "user"\n' for name in keys)
    box.write("/etc/ones/keys/authorised.toml", known + "\n" + "\n".join(rows))
    accounts = '[jobs]\nrun_as = "submitter"\n[jobs.users]\nann = "ann"\nbob = "bob"\n'
    box.write("/etc/ones/agent.toml", AGENT.partition("[jobs]")[0] + accounts)
    box.write("/etc/ones/controller.toml", CONTROLLER + '[policy]\nname = "fifo"\n')
    box.run("systemctl", "restart", "ones-controller", "ones-agent")

    jobs = {user: submitted_by(box, user) for user in keys}

    for user, other in (("ann", "bob"), ("bob", "ann")):
        mine, theirs = jobs[user], jobs[other]
        folders = (f"/var/lib/ones-agent/{area}" for area in ("work", "checkpoints"))
        own = [f"/run/ones-agent/workers/{theirs}.v1.r0/own", *(f"{f}/{theirs}" for f in folders)]
        assert [box.run("stat", "-c", "%U %a", path).stdout for path in own] == [
            f"{other} 700\n"
        ] * 3
        secrets = (
            "/etc/ones/keys/server.key_secret", "/etc/ones/keys/node-1.key_secret",
            f"/home/{other}/ones/me.key_secret", f"{own[0]}/log", f"{own[0]}/assignment",
            f"/run/ones-agent/workers/{theirs}.v1.r0/assignment", f"{own[1]}/train.py",
        )  # fmt: skip
        for path in secrets:
            assert box.run("test", "-e", path, check=False).returncode == 0, path
            assert "Permission denied" in by(box, user, "cat", path).stderr
        for path in (*own, "/run/ones-agent", "/run/ones-agent/workers", "/var/lib/ones-agent"):
            assert "Permission denied" in by(box, user, "ls", path).stderr
            assert "Permission denied" in by(box, user, "touch", f"{path}/reports").stderr
        pid = json.loads(ones(box, "show", theirs, "-o", "json"))["workers"][0]["pid"]
        assert by(box, user, "kill", "-9", str(pid)).returncode != 0
        assert ones_by(box, user, "cancel", theirs).returncode != 0
        assert ones_by(box, user, "logs", theirs).returncode != 0
        by(
            box, user, "env", "PYTHONPATH=/opt/ones", "/opt/ones/.venv/bin/python", "-c", SPEAK,
            theirs,
        )  # fmt: skip
        refused = f'"why": "wrong token", "worker": "{theirs}.v1.r0"'
        until_said(box, "ones-agent", refused)
        assert by(box, user, "test", "-r", f"/var/lib/ones-agent/work/{mine}").returncode == 0
    box.run("touch", "/srv/go")
    for user, job in jobs.items():
        ended = ones_by(box, user, "wait", job, "--timeout", str(LIMIT_S)).stdout
        assert ended.startswith(f"{job} succeeded")
        assert ones_by(box, user, "logs", job, "--no-prefix").stdout.splitlines()[-1] == "done"


def submitted_by(box: Box, user: str) -> str:
    """A job that trains."""
    done = ones_by(box, user, "submit", f"/home/{user}/job/job.toml")
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    until(box, job, "running")
    return job
