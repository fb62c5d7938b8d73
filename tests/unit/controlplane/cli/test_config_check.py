"""`ones config check`: every problem at once, each with its field and remedy."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.cli import admin
from controlplane.cli.local import ROLES, _free_ports
from controlplane.cli.output import Common
from schemas.errors import SettingsError
from schemas.transport.keys import load_keys, load_public, write_keys


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the keys of a cluster."""
    for name in ("server", "node-1"):
        write_keys(tmp_path / "keys", name)
    authorised = tmp_path / "keys" / "authorised.toml"
    authorised.touch(mode=0o600)
    return tmp_path


def test_a_job_file_is_refused_with_the_command_that_checks_it(home: Path) -> None:
    file = home / "job.toml"
    file.write_text('name = "a"\nscript = "train.py"\nslots = [1, 4]\nworkdir = "."\n')

    with pytest.raises(SettingsError) as error:
        admin.check_settings(file)

    assert str(error.value) == (
        f"{file} is a job file, not a daemon's settings; `ones submit {file} --dry-run` checks it"
    )


def controller(home: Path, text: str = "", **ports: int) -> Path:
    chosen = {**dict(zip(ROLES, _free_ports(len(ROLES)), strict=True)), **ports}
    listen = "\n".join(f"{role} = {port}" for role, port in chosen.items())
    file = home / "controller.toml"
    file.write_text(f'state = "state"\n{text}\n[listen]\n{listen}\n')
    return file


def agent(home: Path, text: str = "") -> Path:
    file = home / "agent.toml"
    file.write_text(f'node = "node-1"\ndevices = "cpu"\n{text}\n')
    return file


def checked(file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = admin.check_settings(file)
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(f"{file}: ") for line in lines)
    return code, [line.removeprefix(f"{file}: ") for line in lines]


def test_valid_files(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(controller(home), capsys) == (0, ["valid settings of a controller"])
    assert checked(agent(home), capsys) == (0, ["valid settings of an agent"])
    assert sorted(path.name for path in home.iterdir()) == ["agent.toml", "controller.toml", "keys"]


def test_all_problems_of_a_controllers_file_are_named_at_once(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "keys/server.key_secret").chmod(0o644)
    (home / "keys/authorised.toml").write_text("[[key]]\nname = 'ann'\n")
    (home / "file").touch()
    text = """
    stat = "x"
    pid_file = "file/pid"
    policy = { name = "fif" }
    silence = { suspect_s = 40.0 }
    store = { log_bytes_per_job = -1, snapshot_bytes = "many" }
    """
    taken = _free_ports(1)[0]

    code, lines = checked(controller(home, text, agents=taken, feed=taken), capsys)

    keys, secret = home / "keys", home / "keys/server.key_secret"
    assert code == 2
    assert [line for line in lines if "choose one of" not in line] == [
        "unknown key stat; did you mean state?",
        "store.log_bytes_per_job: Expected `int` >= 0; write log_bytes_per_job = 1073741824",
        "store.snapshot_bytes: Expected `int`, got `str`; write snapshot_bytes = 536870912",
        "silence.lost_s: 30.0 is not above silence.suspect_s (40.0); raise it",
        f"keys.server: {secret} is accessible to other users (mode 644); chmod 600 {secret}",
        f'keys.authorised: {keys}/authorised.toml: key[0].public: is missing; write public = "40 characters"',
        f"pid_file: {home}/file is not a folder; choose another folder",
        f"listen.feed: port {taken} is also used by listen.agents; use different ports",
    ]
    assert [line[:46] for line in lines if "choose one of" in line] == [
        "policy: unknown policy 'fif'; did you mean fif"
    ]


@pytest.mark.parametrize(
    ("lease", "said"),
    [
        ("etcd://127.0.0.1:1", "etcd: All connection attempts failed; check its servers"),
        ("lease", ""),
        ("keys/server.key/lease", "{home}/keys/server.key is not a folder; choose another folder"),
        ("zk://h", "unknown scheme zk://; use postgresql://, etcd://, etcds:// or a path"),
        ("etcd://h:99999x", "Invalid port: '99999x'; write etcd://[USER:PASSWORD@]HOST:PORT"),
        ("etcd://root:p@h?cacert=ca.crt", "etcd:// takes no certificates; write etcds://"),
    ],
)
def test_the_store_of_the_lease_is_tried(
    lease: str, said: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standby = f'[standby]\nlease = "{lease}"\nhosts = ["127.0.0.1"]\n'

    code, lines = checked(controller(home, standby), capsys)

    said = said.format(home=home)
    assert lines == [f"standby.lease: {said}" if said else "valid settings of a controller"]
    assert (code, (home / "lease.lock").exists()) == (2 if said else 0, False)


def test_all_problems_of_an_agents_file_are_named_at_once(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "file").touch()
    text = """
    slot = 2
    slots = 0
    cores = "2"
    key = "keys/node-2.key_secret"
    address = "192.0.2.1"
    work = "file/work"
    python = "no-such-python"
    kill_grace_s = -1.0
    [controller]
    agents = 70000
    """

    code, lines = checked(agent(home, text), capsys)

    cannot = os.strerror(errno.EADDRNOTAVAIL)
    assert code == 2
    assert lines == [
        "unknown key slot; did you mean slots?",
        "controller.agents: Expected `int` <= 65535; write agents = 7701",
        "cores: Expected `int`, got `str`; write cores = 1",
        "kill_grace_s: Expected `float` >= 0.0; write kill_grace_s = 10.0",
        "devices: slots: the node offers none; set slots to 1 or more",
        f"key: {home}/keys/node-2.key_secret: No such file or directory; check the path",
        f"address: 192.0.2.1 is not an address of this host ({cannot}); give an address of this host",
        f"work: {home}/file is not a folder; choose another folder",
        "python: program 'no-such-python' not found; give an interpreter of this host, or leave it out",
    ]


LISTENING = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print(flush=True); s.accept()"


@pytest.fixture
def listening(home: Path) -> Iterator[tuple[int, int]]:
    """A process with the settings file among its arguments, and its port."""
    port = _free_ports(1)[0]
    command = [sys.executable, "-c", LISTENING, str(port), str(home / "controller.toml")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield port, process.pid
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_port_of_the_controller_itself_counts_as_free(
    home: Path, listening: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    port, _ = listening
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        file = controller(home, events=port, feed=taken)

        code, lines = checked(file, capsys)

    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"listen.feed: port {taken} is in use by ")
    assert lines[0].endswith(f"(pid {os.getpid()}); choose another port, or stop that process")


def test_programs_get_the_problems_as_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = agent(home)
    file.write_text('devices = "cpu"\n')  # no node: the keys name an agent

    assert admin.check_settings(file, common=Common(output="json")) == 2
    assert json.loads(capsys.readouterr().out) == {
        "file": str(file), "kind": "agent",
        "problems": [{"field": "node", "problem": f"{file}: node: is missing",
                      "remedy": 'write node = "node-1"'}],
    }  # fmt: skip


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_rotation_that_was_interrupted_is_finished_by_the_same_command(
    home: Path, *, interrupted: bool
) -> None:
    file, keys = home / "controller.toml", home / "keys"
    file.touch()
    old = load_keys(keys / "server.key_secret")
    admin.rotate_key(of=file)
    new = load_keys(keys / "server-next.key_secret")
    if interrupted:  # after the public key
        (keys / "server.key").replace(keys / "server-old.key")
        (keys / "server-next.key").replace(keys / "server.key")

    admin.rotate_key(of=file, finish=True)

    kept = load_keys(keys / "server-old.key_secret"), load_public(keys / "server-old.key")
    now = load_keys(keys / "server.key_secret"), load_public(keys / "server.key")
    assert (kept, now) == ((old, old.public), (new, new.public))
    assert list(keys.glob("server-next*")) == []
