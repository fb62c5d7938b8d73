"""The Debian package on a host of its own: installed, configured, upgraded, removed and purged."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import TOY, toml
from tests.system.box import ROOT, Box

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("systemd-nspawn", "dpkg-deb", "git"))),
        reason="needs root, systemd-nspawn, dpkg-deb and git",
    ),
]
JOBS = "/opt/train"  # an interpreter with the training library only, as a job file names it
PROGRAMS = "/opt/ones/.venv/bin"
AUTHORISED = '[[key]]\npublic = "{}"\nname = "{}"\nrole = "{}"\n'
LIBRARY = f"[Service]\nEnvironment=LD_LIBRARY_PATH={JOBS}/python/lib\n"  # of the box's own Python


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The package, and its second revision."""
    folder = tmp_path_factory.mktemp("packages")
    done = subprocess.run(
        [ROOT / "bin" / "deb", folder],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COMPRESSION": "none"},
    )
    if "No module named" in done.stderr or "ensurepip" in done.stdout:
        pytest.skip("needs the package python3-venv")
    assert done.returncode == 0, done.stderr
    first = Path(done.stdout.splitlines()[-1])
    parts = folder / "parts"
    subprocess.run(["dpkg-deb", "-R", first, parts], check=True)
    control = parts / "DEBIAN" / "control"
    control.write_text(control.read_text().replace("-1\n", "-2\n"))
    second = folder / first.name.replace("-1_", "-2_")
    subprocess.run(["dpkg-deb", "-Znone", "--build", parts, second], check=True)
    shutil.rmtree(parts)
    return [first, second]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, packages: list[Path]) -> Iterator[Box]:
    with Box(tmp_path_factory.mktemp("box"), f"ones-deb-{os.getpid()}", JOBS) as booted:
        for package in packages:
            shutil.copy(package, booted.root / "srv")
        yield booted


def dpkg(box: Box, *arguments: str) -> str:
    return box.run("dpkg", *arguments).stdout


def active(box: Box) -> list[str]:
    units = ("ones-controller", "ones-agent", "ones-jobs", "ones-backup.timer", "ones-web")
    return box.run("systemctl", "is-active", *units, check=False).stdout.split()


def configure(box: Box) -> None:
    """The steps of docs/operations/install.md on one host."""
    rows = []
    for name, role in (("server", ""), ("alice", "admin"), ("node-1", "node")):
        make = "import sys, zmq.auth; zmq.auth.create_certificates('/etc/ones/keys', sys.argv[1])"
        box.run(f"{PROGRAMS}/python", "-c", make, name)
        text = (box.root / f"etc/ones/keys/{name}.key").read_text()
        public = text.partition('public-key = "')[2].partition('"')[0]
        rows += [AUTHORISED.format(public, name, role)] if role else []
    box.write("/etc/ones/keys/authorised.toml", "\n".join(rows))
    changes = {
        "controller": {"10.0.0.1": "127.0.0.1"},
        "agent": {
            "10.0.0.11": "127.0.0.1", "10.0.0.1": "127.0.0.1", 'devices = "auto"': 'devices = "cpu"',
            "/shared/ones": "/var/lib/ones-agent",
            '# python = "/opt/jobs/bin/python"': f'python = "{JOBS}/.venv/bin/python"',
        },
        "client": {"10.0.0.1": "127.0.0.1"},
    }  # fmt: skip
    for name, replaced in changes.items():
        text = (box.root / f"etc/ones/samples/{name}.toml").read_text()
        for before, after in replaced.items():
            assert before in text
            text = text.replace(before, after)
        box.write(f"/etc/ones/{name}.toml", text)
    box.run("chown", "-R", "ones:ones", "/etc/ones/keys")
    box.run("sh", "-c", "chmod 600 /etc/ones/keys/*")
    box.write("/etc/systemd/system/ones-agent.service.d/here.conf", LIBRARY)
    box.run("systemctl", "daemon-reload")


def train(box: Box) -> None:
    box.write("/root/job/train.py", TOY)
    fields = {"name": "toy", "script": "train.py", "batch_size": 20}
    box.write("/root/job/job.toml", toml(fields))
    home = ("env", "ONES_HOME=/etc/ones", "ones")
    box.run(*home, "submit", "/root/job/job.toml", "--wait")  # fails unless the job succeeds


def main_pids(box: Box) -> list[str]:
    units = ("ones-controller", "ones-agent")
    return [box.run("systemctl", "show", "-P", "MainPID", one).stdout.strip() for one in units]


def test_a_package_lives_through_its_whole_life(box: Box, packages: list[Path]) -> None:
    first, second = (f"/srv/{package.name}" for package in packages)

    # Installed: nothing runs before it is configured.
    dpkg(box, "-i", first)
    assert active(box) == ["inactive"] * 5
    assert box.run("ones", "--version", "--home", "/root").stdout.startswith("0.")
    assert box.run("stat", "-c", "%U %a", "/etc/ones").stdout == "ones 700\n"
    assert (box.root / "opt/ones/README.md").exists()

    # Configured: the daemons train a job in an interpreter of its own.
    configure(box)
    box.run("systemctl", "enable", "--now", "ones-controller", "ones-agent")
    train(box)
    box.run("systemctl", "start", "ones-backup")
    files = ("--controller", "/etc/ones/controller.toml", "--agent", "/etc/ones/agent.toml")
    checked = ("env", "ONES_HOME=/etc/ones", LIBRARY.split("=", 1)[1].strip(), "ones", "doctor")
    box.run(*checked, *files)

    # Upgraded: settings stay, and the daemons restart when they are told to.
    box.write("/etc/ones/samples/agent.toml", "# changed\n")
    before = main_pids(box)
    said = dpkg(box, "-i", second)
    assert "ones-controller still runs the former release" in said
    assert main_pids(box) == before
    box.run("/opt/ones/bin/upgrade")
    assert not set(main_pids(box)) & set(before)
    assert (box.root / "etc/ones/samples/agent.toml").read_text() == "# changed\n"
    train(box)

    # Removed: settings and state stay, no process does.
    dpkg(box, "-r", "ones")
    assert active(box) == ["inactive"] * 5
    assert box.run("pgrep", "-f", "^ones", check=False).stdout == ""
    assert (box.root / "etc/ones/agent.toml").exists()
    assert (box.root / "var/lib/ones/journal.sqlite").exists()
    assert not (box.root / "opt/ones").exists()

    # Purged: only backups stay.
    dpkg(box, "-P", "ones")
    left = [
        path
        for path in ("etc/ones", "var/lib/ones", "var/lib/ones-agent")
        if (box.root / path).exists()
    ]
    assert left == []
    assert list((box.root / "var/lib/ones-backups").glob("*.tar"))
