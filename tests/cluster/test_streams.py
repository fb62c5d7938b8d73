"""Terminals, shells and ports of jobs on a real cluster, from a real terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pytest

from controlplane.client import BlockingClient, Client, JobSpec
from controlplane.client.attachments import Attachment
from schemas.errors import UnavailableError, UnknownJobError
from schemas.transport.keys import write_keys
from schemas.transport.stream_ends import LOST_S
from tests.support.cluster import LIMIT_S, Cluster, kill, looked, running, training_job

pytestmark = pytest.mark.slow  # a cluster of its own

PROMPT = "ready> "
BASH = ("bash", "--norc", "--noprofile")
VARIABLES = {"TERM": "dumb", "PS1": PROMPT, "LANG": "C.UTF-8"}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("o"), agents=1, slots=4, policy="fifo") as made:
        yield made


@pytest.fixture
def cluster(house: Cluster) -> Iterator[Cluster]:
    house.up()
    yield house
    house.clear()


class Typist:
    """A person at a terminal, with `ones` running in it."""

    def __init__(self, cluster: Cluster, folder: Path, *words: str, prompt: bool = True) -> None:
        self.process = pexpect.spawn(
            sys.executable, ["-P", "-m", "controlplane.cli.main", *words],
            cwd=str(folder), encoding="utf-8", timeout=LIMIT_S, dimensions=(33, 101),
            env={**os.environ, **VARIABLES, "ONES_HOME": str(cluster.home)},
        )  # fmt: skip
        self.process.delaybeforesend = None
        if prompt:
            self.see(re.escape(PROMPT))

    def see(self, pattern: str) -> str:
        """Wait for a text, and return it."""
        self.process.expect(pattern)
        return str(self.process.after)

    def type(self, line: str, answer: str = "") -> str:
        """Type a line, and return the answer when it is there, with the next prompt."""
        self.process.sendline(line)
        found = self.see(f"\n{answer}") if answer else ""
        return found.strip()

    def end(self) -> int | None:
        """Wait for the end of the command, and return its exit code."""
        self.process.expect(pexpect.EOF)
        self.process.close()
        return self.process.exitstatus if self.process.signalstatus is None else None


@pytest.fixture
def begin(cluster: Cluster, tmp_path: Path) -> Iterator[Any]:
    made: list[Typist] = []

    def begun(*words: str, prompt: bool = True) -> Typist:
        made.append(Typist(cluster, tmp_path, *words, prompt=prompt))
        return made[-1]

    yield begun
    for one in made:
        one.process.close(force=True)


def on_terminal(*options: str) -> tuple[str, ...]:
    return ("run", "--pty", "--env", f"PS1={PROMPT}", *options, "--", *BASH)


def job_of(cluster: Cluster) -> str:
    (job,) = cluster.ones("ps", "-o", "quiet").out.split()
    return job


def test_a_shell_has_the_size_the_keys_and_the_exit_code_of_a_local_one(begin: Any) -> None:
    typist = begin(*on_terminal())

    assert typist.type("echo a$((20+22)); tty | cut -c1-8; stty size", "a42\r\n/dev/pts\r\n33 101")
    typist.process.setwinsize(40, 90)
    assert typist.type("sleep 0.5; stty size", "40 90")
    typist.type("sleep 1000 # long")
    typist.see("long")
    typist.type("", "")
    typist.process.sendintr()
    assert typist.type("echo code $?", "code 130")
    typist.type("exit 7")

    assert typist.end() == 7


def test_a_program_that_prints_much_and_ends_loses_no_byte(begin: Any) -> None:
    program = "i=0; while [ $i -lt 60000 ]; do echo line $i; i=$((i+1)); done"
    typist = begin("run", "--pty", "--", "sh", "-c", program, prompt=False)

    said = []
    with contextlib.suppress(pexpect.EOF):
        while True:
            said.append(typist.process.read_nonblocking(1 << 16, LIMIT_S))
    typist.process.close()

    assert typist.process.exitstatus == 0
    assert re.findall(r"line (\d+)", "".join(said)) == [str(i) for i in range(60000)]


def test_a_terminal_is_left_and_attached_again(begin: Any, cluster: Cluster) -> None:
    typist = begin(*on_terminal())
    typist.type("before=kept; echo there", "there")
    typist.see(re.escape(PROMPT))
    typist.process.send("\r~.")
    typist.see("detached from")
    assert typist.end() == 0
    job = job_of(cluster)

    again = begin("attach", job)
    assert again.type("echo $before", "kept")
    other = begin("attach", job)
    other.type("echo from $((1+1))", "from 2")
    again.see("from 2")
    again.type("exit 3")

    assert (again.end(), other.end()) == (3, 3)


def test_a_shell_lives_through_restarts_of_agent_and_controller(
    begin: Any, cluster: Cluster
) -> None:
    typist = begin(*on_terminal())
    typist.type("kept=yes; echo one", "one")

    (agent,) = cluster.up()["agents"]
    kill(agent)
    typist.process.send("echo tw")
    cluster.up()
    assert typist.type("o $kept", "two yes")

    kill(cluster.up()["controller"])
    typist.process.send("echo thr")
    cluster.up()
    assert typist.type("ee $kept", "three yes")
    typist.type("exit 4")

    assert typist.end() == 4


def test_a_killed_client_leaves_the_job_and_restores_its_terminal_on_term(
    begin: Any, cluster: Cluster
) -> None:
    typist = begin(*on_terminal())
    typist.type("kept=yes; echo one", "one")
    os.kill(typist.process.pid, signal.SIGKILL)
    job = job_of(cluster)

    again = begin("attach", job)
    assert again.type("echo $kept", "yes")
    assert not again.process.getecho()  # raw: the other end echoes
    os.kill(again.process.pid, signal.SIGTERM)
    looked(again.process.getecho)
    assert cluster.show(job)["state"] == "running"


def test_a_cancelled_job_ends_a_shell_that_ignores_term(begin: Any, cluster: Cluster) -> None:
    typist = begin(*on_terminal())
    typist.type("trap '' TERM; sleep 1000 &")
    job = job_of(cluster)

    assert cluster.ones("cancel", job).code == 0

    assert typist.end() == 130
    cluster.until(job, lambda shown: not shown["workers"])
    assert not _processes("sleep 1000")


def _processes(line: str) -> list[int]:
    return [
        one.pid
        for one in psutil.process_iter(["cmdline"])
        if " ".join(one.info["cmdline"] or ()) == line
    ]


def test_a_shell_beside_an_elastic_worker_has_its_folder_and_variables(
    begin: Any, cluster: Cluster
) -> None:
    job = training_job(cluster)
    typist = begin("shell", job, "--", "env", f"PS1={PROMPT}", *BASH)

    assert typist.type("echo $ONES_JOB $ONES_RANK $OMP_NUM_THREADS; ls", f"{job} 0 1\r\n.*train.py")
    assert typist.type("command -v python", str(Path(sys.executable).parent))
    typist.type("exit 5")
    assert typist.end() == 5

    other = begin("shell", job, "--", "env", f"PS1={PROMPT}", *BASH)
    other.type("echo pid $$")
    pid = int(other.see(r"\npid \d+").split()[1])
    assert cluster.ones("cancel", job).code == 0
    assert other.end() == 125
    looked(lambda: not psutil.pid_exists(pid))


def test_a_command_beside_a_job_reads_standard_input(cluster: Cluster) -> None:
    job = training_job(cluster)

    done = cluster.ones("shell", job, "--", "sh", "-c", "echo got $(cat | wc -l); exit 6")

    assert (done.code, "got 0" in done.out) == (6, True), done.err


SERVES = """
import http.server, pathlib, sys
pathlib.Path("page.txt").write_text("page of the job " * 40_000)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_port_of_the_job_is_forwarded_and_a_foreign_one_is_refused(
    begin: Any, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "serves.py").write_text(SERVES)
    port, local, other = _free_port(), _free_port(), _free_port()
    run = ("run", "--detach", "--", "python", "serves.py", str(port))
    job = cluster.ones(*run, cwd=tmp_path).out.strip()
    cluster.until(job, lambda shown: shown["state"] == "running")
    looked(lambda: _listens(port))

    forwarding = begin("forward", job, f"{port}:{local}", prompt=False)
    forwarding.see("until Ctrl-C")
    for _ in range(3):
        with urllib.request.urlopen(f"http://127.0.0.1:{local}/page.txt", timeout=LIMIT_S) as page:
            assert page.read() == b"page of the job " * 40_000
    forwarding.process.sendintr()
    assert forwarding.end() == 0

    foreign = cluster.up()["controller"]
    taken = next(
        one.laddr.port
        for one in psutil.Process(foreign).net_connections()
        if one.status == "LISTEN"
    )
    refused = begin("forward", job, f"{taken}:{other}", prompt=False)
    refused.see("until Ctrl-C")
    with pytest.raises(OSError, match=r"closed|reset|refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{other}/", timeout=LIMIT_S)
    refused.see(f"port {taken} is not one at which {job} listens")
    refused.process.sendintr()
    assert refused.end() == 0


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_node_that_is_gone_ends_the_attachment_with_a_sentence(
    begin: Any, cluster: Cluster
) -> None:
    typist = begin(*on_terminal())
    job = job_of(cluster)
    (agent,) = cluster.up()["agents"]
    kill(agent)

    typist.see(r"the node did not reply for 2\d s")
    assert typist.end() == 125

    cluster.up()
    again = begin("attach", job)
    again.type("exit 2")
    assert again.end() == 2


def person(cluster: Cluster, folder: Path, name: str) -> Path:
    """Return the folder of a client of another user."""
    keys = write_keys(folder / "keys", name)
    with BlockingClient(cluster.home) as admin:
        admin.add_key(keys.public.decode(), name, "user")
    shutil.copy(cluster.home / "keys" / "server.key", folder / "keys")
    text = (cluster.home / "client.toml").read_text()
    (folder / "client.toml").write_text(f'{text}key = "keys/{name}.key_secret"\n')
    return folder


def test_a_hundred_idle_streams_of_four_users_stay_and_more_of_one_are_refused(
    cluster: Cluster, tmp_path: Path
) -> None:
    names = ("ann", "bob", "cat", "dan")
    homes = [person(cluster, tmp_path / name, name) for name in names]
    spec = JobSpec(name="cat", kind="interactive", command=("cat",), workdir=str(tmp_path / "w"))
    (tmp_path / "w").mkdir()
    jobs = []
    for home in homes:
        with BlockingClient(home) as client:
            jobs.append(client.submit(spec))
    for job in jobs:
        cluster.until(job, lambda shown: shown["state"] == "running")

    async def idle() -> list[bytes]:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Client(home)) for home in homes]
            owned = list(zip(clients, jobs, strict=True))

            async def attached(client: Client, job: str) -> Attachment:
                return await stack.enter_async_context(client.attach(job))

            with pytest.raises(UnknownJobError):
                await attached(clients[0], jobs[1])
            streams = [await attached(*one) for one in owned for _ in range(25)]
            streams += [await attached(*owned[0]) for _ in range(7)]
            with pytest.raises(UnavailableError, match="32 of your streams are open, the limit"):
                await attached(*owned[0])
            await asyncio.sleep(LOST_S + 2.0)
            for at in range(0, 100, 25):
                await streams[at].write(b"hello\r")
            heard = []
            for stream in streams:
                said = b""
                while not said.endswith(b"hello\r\nhello\r\n"):
                    said += await stream.read()
                heard.append(said)
            return heard

    assert len(asyncio.run(idle())) == 107
