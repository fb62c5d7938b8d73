"""Two controllers with one lease: what was acknowledged survives, and training goes on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

from controlplane.client import BlockingClient
from controlplane.client.connection import RequestChannel
from controlplane.client.job_file import load_job
from controlplane.service.standby.lease import Record
from schemas.codec import TO_STANDBY
from schemas.errors import OnesError, UnavailableError, UnreachableError
from schemas.ids import Term
from schemas.transport.keys import load_keys, load_public
from schemas.transport.sockets import Link
from schemas.wire import standby as wire
from tests.support.cluster import assert_nothing_lost, child_of, further, resize, training_job
from tests.support.commands import ones
from tests.support.lease_servers import etcd, postgresql
from tests.support.standbys import HOSTS, Standbys, standbys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
A, B = HOSTS
ROOT: Final = Path(__file__).parents[2]
CACHES: Final = shutil.ignore_patterns("__pycache__")
SHORT = 'print("done")\n'


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Standbys]:
    with standbys(tmp_path, str(tmp_path / "lease")) as made:
        yield made


class Submitter(threading.Thread):
    """User who submits short programs all the time, and remembers what was accepted."""

    def __init__(self, pair: Standbys, folder: Path) -> None:
        super().__init__(daemon=True)
        self.accepted: dict[str, str] = {}  # job by key
        self.stop = threading.Event()
        self._pair = pair
        folder.mkdir()
        self._file = folder / "job.toml"
        self._file.write_text('name = "short"\nkind = "command"\ncommand = ["true"]\nslots = 1\n')

    def run(self) -> None:
        spec = load_job(self._file)
        with BlockingClient(self._pair.cluster.home, timeout=30.0) as client:
            for number in itertools.count():
                key = f"key-{number}"
                while not self.stop.is_set() and key not in self.accepted:
                    with contextlib.suppress(OnesError):
                        self.accepted[key] = client.submit(spec, key=key)
                if self.stop.wait(0.1):
                    return


def workers(pair: Standbys, job: str) -> list[int]:
    return [worker["pid"] for worker in pair.cluster.show(job)["workers"]]


def test_a_killed_controller_loses_nothing_that_it_acknowledged(
    pair: Standbys, tmp_path: Path
) -> None:
    job = training_job(pair.cluster)
    before = workers(pair, job)
    user = Submitter(pair, tmp_path / "short")
    user.start()
    for killed, other in ((A, B), (B, A)):
        pair.until(lambda: len(user.accepted) > 2)
        term = pair.term()
        pair.kill(killed)
        pair.until(lambda term=term: pair.term() > term, "takeover")
        further(pair.cluster, job)
        pair.start(killed)
        pair.until_complete()
        assert pair.record().holder == other
    user.stop.set()
    user.join()

    assert workers(pair, job) == before
    with pair.client() as client:
        found = {client.job(name).summary.name for name in user.accepted.values()}
    assert found == {"short"}
    assert len(set(user.accepted.values())) == len(user.accepted)
    assert_nothing_lost(pair.cluster, job)


def test_a_standby_that_lacks_inputs_does_not_take_over(pair: Standbys) -> None:
    pair.kill(B)
    pair.until(lambda: pair.record().complete == (A,), "alone")
    job = training_job(pair.cluster)
    pair.kill(A)
    pair.start(B)
    pair.until_said(B, f"only {A} has all acknowledged inputs")

    refused = pair.ones_on(B, "admin", "standby", "promote")
    pair.start(A)
    pair.until_complete()

    assert (refused.code, f"{B} lacks inputs that {A} acknowledged" in refused.err) == (2, True)
    assert pair.record() == Record(holder=A, term=Term(2), complete=HOSTS)
    further(pair.cluster, job)


def test_a_controller_that_was_frozen_becomes_a_standby(pair: Standbys) -> None:
    job = training_job(pair.cluster)
    relay = psutil.Process(child_of(pair.processes[A].pid, "ones: relay"))
    pair.kill(A, signal.SIGSTOP)
    pair.until(lambda: pair.record().holder == B, "takeover")
    assert relay.status() == psutil.STATUS_ZOMBIE, "it would accept output that is lost with it"
    further(pair.cluster, job)
    pair.kill(A, signal.SIGCONT)
    pair.until_complete()

    pair.until_said(A, "lease lost")
    assert pair.record() == Record(holder=B, term=Term(2), complete=HOSTS)
    assert pair.processes[A].poll() is None
    resize(pair.cluster, job, 2)
    assert_nothing_lost(pair.cluster, job)


def test_an_admin_moves_the_lease_to_the_standby(pair: Standbys) -> None:
    job = training_job(pair.cluster)
    before = workers(pair, job)

    done = pair.ones_on(B, "admin", "standby", "promote", "-o", "json")
    assert done.code == 0, done.err
    pair.until(lambda: pair.record().holder == B, "takeover")
    pair.until_complete()

    shown = pair.ones_on(A, "admin", "standby", "status", "-o", "json").json
    assert shown == {
        "cluster": "ones", "active": B, "holder": B, "term": 2, "complete": [A, B],
        "incomplete": [],
    }  # fmt: skip
    further(pair.cluster, job)
    assert workers(pair, job) == before


def test_a_standby_of_another_release_takes_over(pair: Standbys, tmp_path: Path) -> None:
    build = tmp_path / "build"
    for package in ("controlplane", "schemas"):
        shutil.copytree(ROOT / package, build / package, ignore=CACHES)
    with (build / "schemas" / "errors.py").open("a", encoding="utf-8") as file:
        file.write("# another release\n")
    pair.kill(B)
    pair.variables[B] = {"PYTHONPATH": str(build)}
    pair.until(lambda: pair.record().complete == (A,), "alone")
    job = training_job(pair.cluster)

    pair.start(B)
    pair.until_complete()
    assert pair.ones_on(B, "admin", "standby", "promote").code == 0
    pair.until(lambda: pair.term() == 3, "takeover")  # term 2 ended with the former code
    pair.until_complete()  # the other one follows the new release

    further(pair.cluster, job)
    assert_nothing_lost(pair.cluster, job)


def test_keys_secrets_and_working_directories_follow(pair: Standbys, tmp_path: Path) -> None:
    added = pair.cluster.ones("key", "add", "eve", "--role", "user", "--out", str(tmp_path / "eve"))
    assert added.code == 0, added.err
    assert pair.cluster.ones("key", "revoke", "eve").code == 0
    first = training_job(pair.cluster, slots=4)  # leaves no slot
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "my.env").write_text("TOKEN=hidden\n")
    (folder / "my.env").chmod(0o600)
    (folder / "data.txt").write_text("of the folder\n")
    (folder / "job.toml").write_text(
        'name = "late"\nkind = "command"\ncommand = ["sh", "-c", "echo $TOKEN; cat data.txt"]\nslots = 1\n'
        'secret_env = "my.env"\n'
    )
    job = pair.cluster.ones("submit", str(folder / "job.toml"), "-o", "quiet")
    assert job.code == 0, job.err
    pair.kill(A)
    pair.until(lambda: pair.term() == 2, "takeover")

    assert pair.cluster.ones("cancel", first).code == 0
    pair.cluster.until(job.out.strip(), lambda shown: shown["state"] == "succeeded")
    assert pair.cluster.output(job.out.strip()) == ["hidden", "of the folder"]
    refused = ones("ps", limit_s=60, ONES_HOME=str(tmp_path / "eve"), ONES_TIMEOUT_S="5")
    assert refused.code != 0


def test_a_standby_needs_the_key_of_the_server(pair: Standbys) -> None:
    home = pair.cluster.home
    port = tomllib.loads((pair.folder / A / "controller.toml").read_text())["standby"]["port"]

    async def pull() -> object:
        link = Link(load_keys(home / "keys" / "admin.key_secret"))
        try:
            server = load_public(home / "keys" / "server.key")
            socket = link.connect("DEALER", f"tcp://{A}:{port}", server)
            channel = RequestChannel(socket, TO_STANDBY)
            request = wire.PullFile(path="keys.json", offset=0)
            return await channel.call(request, 1.0, 3.0)
        finally:
            link.close()

    with pytest.raises(UnreachableError):
        asyncio.run(pull())
    pair.until_said(A, "not a controller")


@pytest.mark.parametrize("serve", [postgresql, etcd])
def test_commits_go_on_without_the_store_of_the_lease(serve: object, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    with serve(folder) as server, standbys(tmp_path / "c", server.url) as pair:  # type: ignore[operator]
        job = training_job(pair.cluster)
        server.kill()
        pair.until_said(A, "lease cannot be renewed")
        resize(pair.cluster, job, 2)  # its input is durable on both hosts
        pair.kill(A)
        with pytest.raises(OnesError):
            pair.term()
        server.start()
        pair.until(lambda: pair.term() == 2, "takeover")

        further(pair.cluster, job)
        assert_nothing_lost(pair.cluster, job)


def test_nothing_is_accepted_without_the_standby_and_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    with postgresql(folder) as server, standbys(tmp_path / "c", server.url) as pair:
        job = training_job(pair.cluster)
        server.kill()
        pair.until_said(A, "lease cannot be renewed")
        pair.kill(B)
        with BlockingClient(pair.cluster.home, timeout=60.0) as client:
            pair.until(lambda: client.cluster().stalled, "stalled")
            with pytest.raises(UnavailableError, match="PostgreSQL"):
                client.pause(job)
            server.start()
            pair.until(lambda: not client.cluster().stalled, "goes on")
            client.pause(job)
        assert pair.record().complete == (A,)
