"""Errors of a client: an absent controller is distinguished from a slow one, similar names are suggested."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from controlplane.cli import main
from controlplane.client import Client, connection
from controlplane.client.connection import ClusterConnection
from schemas.errors import UnknownJobError, UnreachableError, suggestion
from schemas.transport.keys import write_keys
from schemas.wire.client import Jobs, JobSummary, ListJobs
from tests.support.schemas_examples import EXAMPLES


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """A port of this host that nobody listens at yet."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


@pytest.fixture
def home(tmp_path: Path, port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a cluster at that port."""
    monkeypatch.delenv("ONES_TIMEOUT_S", raising=False)
    for name in ("server", "admin"):
        write_keys(tmp_path / "keys", name)
    (tmp_path / "client.toml").write_text(f'endpoint = "tcp://127.0.0.1:{port.getsockname()[1]}"\n')
    return tmp_path


async def refusal(home: Path, timeout: float | None = None) -> str:  # noqa: ASYNC109
    async with Client(home, timeout) as client:
        with pytest.raises(UnreachableError) as caught:
            await client.jobs()
    return str(caught.value)


@pytest.mark.slow
async def test_a_port_without_a_process_is_reported_before_the_timeout(
    home: Path, port: socket.socket
) -> None:
    async with asyncio.timeout(connection.TIMEOUT_S / 2):
        said = await refusal(home)

    assert said == (
        f"no controller replies at tcp://127.0.0.1:{port.getsockname()[1]}; "
        "check that the controller runs and that its port is reachable from this host"
    )


async def test_the_command_that_starts_a_local_cluster_is_named(home: Path) -> None:
    (home / "controller.toml").touch()

    assert (await refusal(home)).endswith(f"; `ones local up --dir {home}` starts it")


@pytest.mark.parametrize("listens", [True, False])
async def test_a_slow_controller_or_a_stated_timeout_is_awaited_in_full(
    home: Path, port: socket.socket, monkeypatch: pytest.MonkeyPatch, *, listens: bool
) -> None:
    monkeypatch.setattr(connection, "TIMEOUT_S", 0.6)
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 0.6)
    if listens:
        port.listen()
    loop = asyncio.get_running_loop()

    began = loop.time()
    said = await refusal(home, None if listens else 0.6)

    assert said == "the controller does not reply; check that the cluster is running"
    assert loop.time() - began >= 0.6


A_JOB = next(one for one in EXAMPLES.values() if isinstance(one, JobSummary))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("digts-1", "did you mean digits-1? look"), ("digits", "did you mean digits-12? look"),
        ("a", "did you mean a-1? look"), ("nobody-1", "look"),
    ],
)  # fmt: skip
def test_a_hint_names_the_most_similar_name_with_the_highest_number(name: str, hint: str) -> None:
    assert suggestion(name, ["digits-1", "a-1", "digits-2", "digits-12"], "look") == hint


def test_only_the_last_of_many_names_are_compared() -> None:
    names = ["digits-1", *(f"other-{number}" for number in range(1000))]

    assert suggestion("digts-1", names, "look") == "look"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client of a cluster with more ended jobs than a page holds."""

    async def ask(_: object, request: Any, _wait_s: float, _bulk: object) -> Jobs:
        if isinstance(request, ListJobs) and not request.cursor:
            name = "ended-1" if request.ended else "digits-1"
            return Jobs(jobs=(msgspec.structs.replace(A_JOB, job=name),), next="more")
        raise UnknownJobError(getattr(request, "job", ""))

    monkeypatch.setattr(ClusterConnection, "_ask", ask)
    client = Client.__new__(Client)
    client._calls = cast("Any", "open")
    return client


async def test_names_for_a_suggestion_take_two_pages_and_programs_get_none(client: Client) -> None:
    assert await client.some_job_names() == ["ended-1", "digits-1"]
    with pytest.raises(UnknownJobError) as error:
        await client.job("digist-1")

    assert str(error.value) == "no job 'digist-1'; `ones ps --all` lists every job"


def test_the_command_line_suggests_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    homes: list[str] = []

    async def names(home: str) -> list[str]:
        homes.append(home)
        return ["digits-1"]

    def command(**_: object) -> None:
        raise UnknownJobError("digist-1")

    monkeypatch.setattr(main, "_job_names", names)
    monkeypatch.setattr(main, "build", lambda: command)
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    monkeypatch.setattr(main.gc, "set_threshold", lambda _: None)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["ones", "show", "digist-1", "--home=/srv/c"])

    with pytest.raises(SystemExit):
        main.main()

    assert (homes, capsys.readouterr().err) == (
        ["/srv/c"],
        "ones: no job 'digist-1'; did you mean digits-1? `ones ps --all` lists every job\n",
    )
