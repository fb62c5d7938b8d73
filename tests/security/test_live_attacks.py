"""Attacks on a running cluster, all at once, while another user's job trains without a loss.

The agents are root and give each job a uid of its own, as docs/security.md recommends.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cluster import (
    Cluster,
    assert_nothing_lost,
    further,
    looked,
    running,
    training_job,
)
from tests.support.commands import ones
from tests.support.file_trees import let_pass, opened

pytestmark = [pytest.mark.slow, pytest.mark.root]
SECRET = "the-secret-of-ada"  # noqa: S105
LEFT = "left-by-bob"
ENDED = {"succeeded", "failed", "cancelled", "rejected"}

ZYGOTE = """
import os, socket, struct, threading, msgpack

def send(peer, message):
    data = msgpack.packb(message)
    peer.sendall(struct.pack(">I", len(data)) + data)

def serve(peer, pid):
    send(peer, {"type": "zygote.ready.1", "pid": os.getpid(), "python": "", "torch": ""})
    held = b""
    while data := peer.recv(65536):
        held += data
        while len(held) >= 4 and len(held) >= 4 + (size := struct.unpack(">I", held[:4])[0]):
            message, held = msgpack.unpackb(held[4 : 4 + size]), held[4 + size :]
            if message["type"] == "zygote.fork.1":
                send(peer, {"type": "zygote.held.1", "folder": message["folder"], "pid": pid})

def listen(path, pid):
    if os.path.lexists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0], pid), daemon=True).start()
"""
INTERPRETER = """#!{python} -P
import sys
{zygote}
listen(sys.argv[sys.argv.index("--socket") + 1], {pid})
"""
USURPER = """
import os, signal, threading, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic import ScalingAgent
{zygote}
agent = ScalingAgent.from_env()
zygote = os.getppid()
title = open(f"/proc/{{zygote}}/cmdline").read().replace("\\0", " ").split()
path = next(word for word in title if word.endswith(".sock"))
os.kill(zygote, signal.SIGKILL)
time.sleep(0.3)
threading.Thread(target=listen, args=(path, {pid}), daemon=True).start()
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
model, optimizer, loader = agent.load(
    lambda: nn.Linear(8, 1), lambda p: torch.optim.SGD(p, lr=0.01), data, batch_size=12)
for epoch in agent.epochs(1000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        time.sleep(0.05)
    print("usurper epoch", epoch)
"""
SPY = """
import ctypes, glob, os, subprocess, sys
for path in sorted(glob.glob("{home}/**", recursive=True)):
    try:
        print("READ", path, open(path, "rb").read(20))
    except OSError:
        pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        text = open(f"/proc/{{pid}}/environ", "rb").read()
        if os.stat(f"/proc/{{pid}}").st_uid != os.getuid():
            print("ENVIRON", pid)
    except OSError:
        pass
print("VARIABLES", sorted(os.environ))
for folder in ("/tmp", "/var/tmp", "/dev/shm"):
    os.makedirs(f"{{folder}}/{left}/inner", exist_ok=True)
    open(f"{{folder}}/{left}/inner/file", "w").write("x")
ctypes.CDLL(None).shmget(0x0B0B, 4096, 0o1600)
child = subprocess.run(
    [sys.executable, "-c", "from elastic import ScalingAgent; ScalingAgent.from_env()"],
    capture_output=True, text=True)
print("CHILD", child.stderr.strip().splitlines()[-1])
"""


@dataclass
class Site:
    """A cluster with the users ada, who is its admin, and bob."""

    cluster: Cluster
    bob: Path

    def submit(self, script: str, **fields: Any) -> str:
        path = self.cluster.write(script, **fields)
        done = ones("submit", str(path), "-o", "json", ONES_HOME=str(self.bob))
        assert done.code == 0, done.err
        return done.json["job"]

    def pids(self) -> dict[str, int]:
        run = self.cluster.home / "run"
        return {path.stem: int(path.read_text()) for path in sorted(run.glob("*.pid"))}

    def log(self, name: str) -> str:
        return (self.cluster.home / "logs" / f"{name}.log").read_text()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    let_pass(tmp_path)
    with running(tmp_path / "c", slots=2, agents=2) as cluster, ExitStack() as daemons:
        cluster.down()
        for folder in ("run", "state/work", "state/checkpoints"):
            let_pass(cluster.home / folder)
        for number in (1, 2):
            with (cluster.home / f"agent-{number}.toml").open("a") as file:
                file.write('[jobs]\nrun_as = "job"\n')
        for name, module, before in (
            ("controller", "controlplane.service", []),
            ("agent-1", "nodeagent", opened(tmp_path / "1")),
            ("agent-2", "nodeagent", opened(tmp_path / "2")),
        ):
            log = daemons.enter_context((cluster.home / "logs" / f"{name}.log").open("ab"))
            command = [*before, sys.executable, "-P", "-m", module]
            process = subprocess.Popen(
                [*command, "--config", str(cluster.home / f"{name}.toml")],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
                env={**os.environ, "TOKEN_OF_THE_OPERATOR": SECRET},
            )  # fmt: skip
            daemons.callback(process.wait, 60.0)
            daemons.callback(process.terminate)
        looked(lambda: states_of_nodes(cluster), lambda found: found == ["up", "up"], cluster.said)
        bob = tmp_path / "bob"
        done = cluster.ones("key", "add", "bob", "--role", "user", "--out", str(bob))
        assert done.code == 0, done.err
        yield Site(cluster, bob)


def states_of_nodes(cluster: Cluster) -> list[str]:
    done = cluster.ones("node", "list", "-o", "json")
    return [node["state"] for node in done.json] if done.code == 0 else []


def interpreter(folder: Path, pid: int) -> str:
    path = folder / f"python-{pid}"
    path.write_text(INTERPRETER.format(python=sys.executable, zygote=ZYGOTE, pid=pid))
    path.chmod(0o755)
    return str(path)


def ports_of(pid: int) -> list[int]:
    found = psutil.Process(pid).net_connections("tcp")
    return sorted({one.laddr.port for one in found if one.status == psutil.CONN_LISTEN})


def idle_connections(ports: list[int], count: int, stack: ExitStack) -> None:
    for number in range(count):
        with suppress(OSError):
            stack.enter_context(
                socket.create_connection(("127.0.0.1", ports[number % len(ports)]), timeout=5.0)
            )


def test_another_users_job_trains_through_all_attacks_at_once(site: Site, tmp_path: Path) -> None:
    cluster, before = site.cluster, site.pids()
    victim = training_job(cluster, env={"OMP_NUM_THREADS": "1", "TOKEN": SECRET})
    one = {"batch_size": 12, "slots": [1, 1]}
    with ExitStack() as stack:
        limit = psutil.Process(before["controller"]).num_fds() + 300
        hard = resource.prlimit(before["controller"], resource.RLIMIT_NOFILE)[1]
        resource.prlimit(before["controller"], resource.RLIMIT_NOFILE, (limit, hard))
        for pid in before.values():
            idle_connections(ports_of(pid), 400, stack)
        hostile = [
            site.submit("", **one, python=interpreter(tmp_path, pid), retries=1)
            for pid in (0, 1, before["agent-1"])
        ]
        spy = site.submit(SPY.format(home=cluster.home, left=LEFT), **one)
        usurper = site.submit(
            USURPER.format(zygote=ZYGOTE, pid=0), batch_size=12, max_batch_size=48, slots=[1, 2],
            slots_wanted=1, stop={"epochs": 1000},
        )  # fmt: skip
        ended = {job: cluster.until(job, lambda s: s["state"] in ENDED) for job in [*hostile, spy]}
        cluster.until(usurper, lambda shown: shown["epoch"] >= 1)
        ones("resize", usurper, "--slots", "2", ONES_HOME=str(site.bob))
        audit = "message of a zygote"
        looked(lambda: [name for name in ("agent-1", "agent-2") if audit in site.log(name)])
        cluster.ones("cancel", usurper)
        shown = further(cluster, victim)

    output = cluster.output(spy)
    child = next(line for line in output if line.startswith("CHILD"))
    variables = next(line for line in output if line.startswith("VARIABLES"))
    assert {job: shown["state"] for job, shown in ended.items()} == {
        **dict.fromkeys(hostile, "failed"), spy: "succeeded",
    }  # fmt: skip
    assert all("zygote" in ended[job]["reason"] for job in hostile)
    assert [line for line in output if line.startswith(("READ", "ENVIRON"))] == []
    assert "was started by the script of worker process" in child
    assert not re.search(r"TOKEN|PYTEST|SHLVL", variables)
    left = [Path(folder) / LEFT for folder in ("/tmp", "/var/tmp", "/dev/shm")]  # noqa: S108
    looked(lambda: not any(path.exists() for path in left), why=lambda: left)
    assert str(0x0B0B) not in Path("/proc/sysvipc/shm").read_text().split()
    assert (site.pids(), len(shown["versions"])) == (before, 1)
    assert all(psutil.pid_exists(pid) for pid in before.values())
    assert_nothing_lost(cluster, victim)
